"""A pin: what the user fixed about one array, wherever it was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from meshplan.core import Axes, MeshShape, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """`dims[d]`: the axes that split dim d, outermost first; None where any may (`P.UNCONSTRAINED`).

    `where` says in errors and reports which words of the user's it is; `mesh` is the mesh that they were
    written for, where they name one. `any_order`: axes of one dim may go in the mesh's order instead.
    `advice` ends an error about it. `exact`: it holds over its own mesh alone.
    """

    dims: tuple[Axes | None, ...]
    where: str
    mesh: MeshShape | None = None
    any_order: bool = False
    advice: str = ""
    exact: bool = False

    @property
    def axes(self) -> Axes:
        """All axes that it names, in order of the dims."""
        return tuple(a for axes in self.dims for a in axes or ())

    @property
    def spec(self) -> Spec:
        """The spec with the free dims unsplit."""
        return Spec(tuple(axes or () for axes in self.dims))

    def __str__(self) -> str:
        return "(" + ", ".join("any" if a is None else "+".join(a) or "None" for a in self.dims) + ")"


def pin_of(spec: PartitionSpec | Sequence[Any], ndim: int, where: str, mesh: MeshShape | None = None) -> Pin:
    """From the entries of a `PartitionSpec`; dims beyond them are whole."""
    dims: list[Axes | None] = []
    for entry in tuple(spec)[:ndim]:
        if entry is PartitionSpec.UNCONSTRAINED:
            dims.append(None)
        else:
            dims.append(() if entry is None else (entry,) if isinstance(entry, str) else tuple(map(str, entry)))
    return Pin(dims=(*dims, *((),) * (ndim - len(dims))), where=where, mesh=mesh)


def pin_of_sharding(sharding: Any, ndim: int, where: str) -> Pin | None:
    """What a `NamedSharding` fixes; None for any other sharding, and for one over a mesh without axes.

    Axes of size 1 in its own mesh split nothing: they are left out.
    """
    if not isinstance(sharding, NamedSharding) or not sharding.mesh.shape:
        return None
    mesh = MeshShape.of(dict(sharding.mesh.shape))
    pin = pin_of(sharding.spec, ndim, where, mesh)
    dims = tuple(None if axes is None else tuple(a for a in axes if mesh.size(a) > 1) for axes in pin.dims)
    advice = " Name the axes of the mesh there, or plan with Options(follow_shardings=False)."
    return Pin(dims=dims, where=where, mesh=mesh, advice=advice)
