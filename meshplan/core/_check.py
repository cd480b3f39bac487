"""Can this array be split like that? Said in words, before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshplan.core._errors import SpecError, nearest
from meshplan.core._spec import MeshShape, Spec
from meshplan.core._units import format_bytes


def check_entries(entries: Sequence[Any], ndim: int, what: str) -> None:
    """A spec must not be longer than the array's rank."""
    if len(entries) > ndim:
        raise SpecError(
            f"{what} has {ndim} dim{'s' if ndim != 1 else ''}, the spec {tuple(entries)!r} names {len(entries)}. "
            f"Give at most one entry per dim."
        )


def check_spec(spec: Spec, shape: Sequence[int], itemsize: int, mesh: MeshShape, what: str) -> None:
    """Raise `SpecError` where the spec names an unknown axis, one axis twice, or splits a dim that does not divide."""
    for axis in spec.axes:
        if axis not in mesh.names:
            raise SpecError(f"{what}: axis '{axis}' is not in the mesh ({mesh}). {nearest(axis, mesh.names)}")
    for axis in dict.fromkeys(spec.axes):
        places = [str(d) for d, axes in enumerate(spec.dims) for a in axes if a == axis]
        if len(places) > 1:
            raise SpecError(
                f"{what}: axis '{axis}' splits dims {' and '.join(places)} of {spec}. One axis can split one dim of an "
                f"array; drop it from one of them."
            )
    for d, (n, axes) in enumerate(zip(shape, spec.dims, strict=True)):
        parts = mesh.size(axes)
        if n % parts:
            raise SpecError(_indivisible(d, n, parts, axes, shape, itemsize, mesh, what))


def _indivisible(
    d: int, n: int, parts: int, axes: Sequence[str], shape: Sequence[int], itemsize: int, mesh: MeshShape, what: str
) -> str:
    nbytes = itemsize
    for size in shape:
        nbytes *= size
    pad = -(-n // parts) * parts
    others = [str(j) for j, m in enumerate(shape) if j != d and m % parts == 0 and m >= parts]
    prefixes = [axes[:k] for k in range(len(axes) - 1, 0, -1)]
    fewer = [f"{'+'.join(p)} ({mesh.size(p)})" for p in prefixes if n % mesh.size(p) == 0]
    choices = [f"pad dim {d} to {pad}"]
    if others:
        choices.append(f"split dim {' or '.join(others)} instead")
    if fewer:
        choices.append(f"split dim {d} over {fewer[0]} only")
    return (
        f"{what}: dim {d} has {n} entries, {n} is not divisible by {parts} ({'+'.join(axes)}). "
        f"Kept whole it takes {format_bytes(nbytes)} on every device, split {format_bytes(nbytes / parts)}. "
        f"Choices: {'; '.join(choices)}."
    )
