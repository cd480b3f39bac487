"""Pins: specs that the user fixed, by patterns over argument paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshplan.core import MeshShape, PinError, Spec, SpecError, check_entries, check_spec, nearest
from meshplan.hints import find
from meshplan.program import Leaf
from meshplan.strategy import Choices, Graph, Node, enumerate_choices


def resolve_pins(pins: Mapping[str, Any], args: Sequence[Leaf]) -> dict[int, Spec]:
    """Spec of every pinned argument leaf. Two pins may meet on one leaf only if they agree."""
    paths = [leaf.path for leaf in args]
    found: dict[int, tuple[str, Spec]] = {}
    for pattern, wanted in pins.items():
        if wanted is None or isinstance(wanted, str):
            raise PinError(f"pin '{pattern}' is {wanted!r}; give a PartitionSpec, such as P('data') or P() for whole.")
        for i in find(pattern, paths):
            check_entries(tuple(wanted), len(args[i].aval.shape), f"pin '{pattern}' on '{paths[i]}'")
            spec = Spec.of(wanted, len(args[i].aval.shape))
            if i in found and found[i][1] != spec:
                other, theirs = found[i]
                raise PinError(
                    f"pins '{other}' and '{pattern}' both match '{paths[i]}' but say {theirs} and {spec}. Keep one."
                )
            found[i] = (pattern, spec)
    return {i: spec for i, (_, spec) in found.items()}


def check_pins(pins: Mapping[int, Spec], args: Sequence[Leaf], mesh: MeshShape) -> None:
    """Raise `SpecError` for a pin that the mesh cannot keep: unknown axis, indivisible dim, one axis on two dims."""
    for i, spec in pins.items():
        aval = args[i].aval
        check_spec(spec, aval.shape, aval.itemsize, mesh, f"pin on '{args[i].path}'")


def pinned_meshes(pins: Mapping[int, Spec], graph: Graph, meshes: Sequence[MeshShape]) -> list[MeshShape]:
    """The meshes over which every pin can be kept, each by itself.

    Raises `SpecError` where none is left: why the first cannot be split so, or which pin no strategy stores.
    """
    args, refused, found = graph.program.args, [], []
    for mesh in meshes:
        try:
            check_pins(pins, args, mesh)
        except SpecError as error:
            refused.append(error)
            continue
        lost = [i for i, spec in pins.items() if not _can_store(graph, i, spec, mesh)]
        if lost:
            refused.append(SpecError(_never_stored(graph, lost[0], pins[lost[0]], mesh)))
        else:
            found.append(mesh)
    if refused and not found:
        raise refused[0]
    return found


def _can_store(graph: Graph, i: int, spec: Spec, mesh: MeshShape) -> bool:
    node = graph.node_of_arg[i]
    about = graph.nodes[node]
    return bool(keep_pinned(node, about, enumerate_choices(about, mesh), {i: spec}).any())


def _never_stored(graph: Graph, i: int, spec: Spec, mesh: MeshShape) -> str:
    about = graph.nodes[graph.node_of_arg[i]]
    whole = [
        str(d) for d, factors in enumerate(about.arguments[i]) if spec.dims[d] and not about.whole.isdisjoint(factors)
    ]
    why = (
        f"dim {' and '.join(whole)} stays whole, as the dim that a scan runs over has to; split another dim"
        if whole
        else f"the axes of one dim go in the mesh's order ({', '.join(mesh.names)}) and a dim of one entry takes none"
    )
    return f"pin on '{graph.program.args[i].path}' says {spec}, which no strategy stores: {why}."


def pin_axes(pins: Mapping[int, Spec], known: Sequence[str], args: Sequence[Leaf]) -> set[str]:
    """Axes that pins name; `SpecError` for one that no mesh of the search has."""
    named: set[str] = set()
    for i, spec in pins.items():
        for axis in spec.axes:
            if axis not in known:
                raise SpecError(
                    f"pin on '{args[i].path}': axis '{axis}' is unknown; the search names its axes "
                    f"{', '.join(known)}. {nearest(axis, known)} Or fix the mesh: mesh={{'{axis}': ...}}."
                )
            named.add(axis)
    return named


def keep_pinned(
    node: int, about: Node, choices: Choices, pins: Mapping[int, Spec]
) -> np.ndarray:
    """Which strategies store every pinned argument of the node as pinned."""
    ok = np.ones(len(choices), bool)
    for i, dims in about.arguments.items():
        if i in pins:
            specs, index = choices.specs(dims)
            ok &= np.array([s == pins[i] for s in specs])[index]
    return ok


def pin_marks(graph: Graph, pins: Mapping[int, Spec]) -> dict[int, Any]:
    """Marks that keep nodes with different pins from being tied."""
    marks: dict[int, Any] = {}
    for i, spec in pins.items():
        node = graph.node_of_arg[i]
        marks[node] = (*marks.get(node, ()), str(spec))
    return marks
