"""Pins: what the user fixed, by patterns over argument paths and by shardings written in the program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshplan.core import MeshError, MeshShape, PinError, Spec, SpecError, check_entries, check_spec, nearest
from meshplan.hints import Pin, Resolved, Row, find, pin_of
from meshplan.program import Leaf, Op, Program
from meshplan.rules import Aval, Dims, fixed_specs, mesh_of
from meshplan.strategy import Choices, Graph, enumerate_choices, value_dims

Alternatives = tuple[Pin, ...]  # any one of them may hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An array at a node of the graph (its dims in the node's factors) and what it may be there."""

    dims: Dims
    aval: Aval
    pins: Alternatives


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Arrays (`count` of them, `where` names one) on which rows of a table collide; all of them have these `pins`."""

    resolved: Resolved
    rows: tuple[Row, ...]
    where: str
    count: int
    pins: Alternatives


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """All pins of a program: by argument leaf, by value, by result leaf; by operation those of its operands and of its
    results (`shard_map`). `notes` say how tables were read, `shared` where rows of one collide.

    `at[node]`: the places of the graph that they come to (`bind`).
    """

    arguments: Mapping[int, Alternatives] = field(default_factory=dict)
    values: Mapping[int, Alternatives] = field(default_factory=dict)
    results: Mapping[int, Alternatives] = field(default_factory=dict)
    operations: Mapping[int, tuple[Alternatives, Alternatives]] = field(default_factory=dict)
    at: Mapping[int, tuple[Place, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    shared: tuple[Shared, ...] = ()

    def __iter__(self) -> Iterator[Pin]:
        for found in (self.arguments, self.values, self.results):
            for pins in found.values():
                yield from pins
        for operands, results in self.operations.values():
            yield from (*operands, *results)

    def bind(self, graph: Graph) -> Pins:
        """With the nodes of the graph at which they hold."""
        program = graph.program
        at: dict[int, list[Place]] = {}

        def add(node: int, dims: Dims | None, aval: Aval, pins: Alternatives) -> None:
            if dims is not None:
                at.setdefault(node, []).append(Place(dims=dims, aval=aval, pins=pins))

        for i, pins in self.arguments.items():
            node = graph.node_of_arg[i]
            add(node, graph.nodes[node].arguments[i], program.args[i].aval, pins)
        for v, pins in self.values.items():
            if v in graph.owner:
                add(graph.owner[v], value_dims(graph, graph.owner[v], v), program.values[v].aval, pins)
        for o, (operands, results) in self.operations.items():
            op, node = program.ops[o], graph.node_of_op.get(o)
            group = graph.nodes[node].group if node is not None else None
            if node is None or group is None:
                continue
            for k, pin in enumerate(operands):
                if (o, k) in group.operands:
                    add(node, group.operands[o, k], op.view.operands[k], (pin,))
            for v, pin in zip(op.results, results, strict=True):
                add(node, group.results[v], program.values[v].aval, (pin,))
        for e in graph.edges:
            for j, pins in self.results.items():
                if graph.result_nodes.get(j) == e.target:
                    add(e.target, e.want, program.results[j].aval, pins)
        return replace(self, at={node: tuple(places) for node, places in at.items()})


def resolve_pins(pins: Mapping[str, Any], args: Sequence[Leaf]) -> dict[int, Spec]:
    """Spec of every pinned argument leaf. Two pins may meet on one leaf only if they agree."""
    return {i: pin.spec for i, pin in matched_pins(pins, args, [leaf.path for leaf in args]).items()}


def matched_pins(pins: Mapping[str, Any], leaves: Sequence[Leaf], paths: Sequence[str]) -> dict[int, Pin]:
    """The pin of every leaf that a pattern matches; patterns may meet on one leaf only if they agree."""
    found: dict[int, tuple[str, Pin]] = {}
    for pattern, wanted in pins.items():
        if wanted is None or isinstance(wanted, str):
            raise PinError(f"pin '{pattern}' is {wanted!r}; give a PartitionSpec, such as P('data') or P() for whole.")
        for i in find(pattern, paths):
            ndim = len(leaves[i].aval.shape)
            check_entries(tuple(wanted), ndim, f"pin '{pattern}' on '{paths[i]}'")
            pin = pin_of(wanted, ndim, f"pin on '{paths[i]}'")
            if i in found and found[i][1].dims != pin.dims:
                other, theirs = found[i]
                raise PinError(
                    f"pins '{other}' and '{pattern}' both match '{paths[i]}' but say {theirs} and {pin}. Keep one."
                )
            found[i] = (pattern, pin)
    return {i: pin for i, (_, pin) in found.items()}


def as_pins(pins: Pins | Mapping[int, Spec], program: Program) -> Pins:
    """Specs by argument leaf as pins, with those that the program states itself."""
    if isinstance(pins, Pins):
        return pins
    args = program.args
    given = {i: (pin_of(spec.dims, len(spec.dims), f"pin on '{args[i].path}'"),) for i, spec in pins.items()}
    return with_stated(Pins(arguments=given), program)


def with_stated(pins: Pins, program: Program) -> Pins:
    """The pins, and where they are silent what the step itself states.

    A moment that `tx.init` makes, from nothing or as a copy, lies as its pinned parameter does.
    """
    arguments, values, results = dict(pins.arguments), dict(pins.values), dict(pins.results)
    of_value = {leaf.value: i for i, leaf in enumerate(program.args)}
    for v, pin in program.pins.items():
        if v in of_value:
            arguments.setdefault(of_value[v], (pin,))
        else:
            values.setdefault(v, (replace(pin, any_order=True),))
    fresh = _made_anew(program) if program.results_follow else set()
    for j, followed in program.results_follow.items():
        leaf, theirs = program.results[j], arguments.get(followed.parameter, ())
        if leaf.pair < 0 and leaf.value in fresh and leaf.aval.size > 1 and theirs:
            alike = (tuple(p.dims[d] if d is not None else () for d in followed.dims) for p in theirs)
            where = f"'{leaf.path}' (as '{program.args[followed.parameter].path}')"
            results.setdefault(j, tuple(replace(p, dims=d, where=where) for p, d in zip(theirs, alike, strict=True)))
    operations = {op.index: fixed for op in program.ops if (fixed := _fixed(op)) is not None}
    return replace(pins, arguments=arguments, values=values, results=results, operations=operations)


def _fixed(op: Op) -> tuple[Alternatives, Alternatives] | None:
    """What a `shard_map` says of its operands and of its results; it holds over its own mesh alone."""
    fixed = fixed_specs(op.view)
    if fixed is None:
        return None
    mesh = mesh_of(op.view)
    split = {a for a in mesh.names if mesh.size(a) > 1}

    def pins(side: str, specs: Sequence[Sequence[Sequence[str]]]) -> Alternatives:
        return tuple(
            Pin(
                dims=tuple(tuple(a for a in axes if a in split) for axes in spec), mesh=mesh, exact=True,
                where=f"{side} {i} of the shard_map at {op.source or 'an unknown line'}",
            )
            for i, spec in enumerate(specs)
        )

    return pins("operand", fixed.operands), pins("result", fixed.results)


def stated_pins(pins: Pins) -> dict[str, str]:
    """What is fixed of values inside the step: where it is written -> the spec; several of one place one after another.
    """
    found: dict[str, dict[str, None]] = {}
    every = (*pins.values.values(), *((pin,) for sides in pins.operations.values() for side in sides for pin in side))
    for choices in every:
        found.setdefault(choices[0].where, {})[" or ".join(map(str, choices))] = None
    return {where: "; ".join(texts) for where, texts in found.items()}


def _made_anew(program: Program) -> set[int]:
    """Values that are made of literals, and arguments and copies of them: nothing was computed that has a spec."""
    literal: set[int] = set()
    copied = {leaf.value for leaf in program.args if leaf.value is not None}
    for op in program.ops:
        if all(v is None or v in literal for v in op.operands):
            literal.update(op.results)
        elif op.primitive in ("copy", "copy_p", "convert_element_type") and op.operands[0] in copied:
            copied.update(op.results)
    return literal | copied


# ------------------------------------------------------------------------------------------------ one mesh


def check_pins(pins: Pins, mesh: MeshShape) -> None:
    """Raise `SpecError` for a pin that the mesh cannot keep: unknown axis, indivisible dim, one axis on two dims."""
    for pin in pins:
        if pin.exact and pin.mesh != mesh:
            raise MeshError(
                f"{pin.where} is for mesh {pin.mesh}, the plan's is {mesh}; a shard_map runs over its own mesh alone. "
                f"Plan with mesh={pin.mesh.to_dict() if pin.mesh else {}}, or write it for {mesh}."
            )
    for places in pins.at.values():
        for place in places:
            possible(place, mesh)


def possible(place: Place, mesh: MeshShape) -> Alternatives:
    """Those of the alternatives that the mesh can keep; `SpecError` of the first where there is none."""
    refused, found = [], []
    for pin in place.pins:
        try:
            check_spec(pin.spec, place.aval.shape, place.aval.itemsize, mesh, pin.where)
            found.append(pin)
        except SpecError as error:
            refused.append(SpecError(f"{error}{pin.advice}"))
    if not found:
        raise refused[0]
    return tuple(found)


def pinned_meshes(pins: Pins, graph: Graph, meshes: Sequence[MeshShape]) -> list[MeshShape]:
    """The meshes over which every pin can be kept, each by itself.

    Raises `SpecError` where none is left: why the first cannot be split so, or which pin no strategy stores.
    """
    refused, found = [], []
    for mesh in meshes:
        try:
            check_pins(pins, mesh)
        except (SpecError, MeshError) as error:
            refused.append(error)
            continue
        lost = _not_stored(pins, graph, mesh)
        if lost is not None:
            refused.append(SpecError(_never_stored(graph, *lost, mesh)))
        else:
            found.append(mesh)
    if refused and not found:
        raise refused[0]
    return found


def _not_stored(pins: Pins, graph: Graph, mesh: MeshShape) -> tuple[int, Place] | None:
    """The first (node, place) whose pin no strategy of the node keeps."""
    known: dict[Any, bool] = {}
    for node, places in pins.at.items():
        about = graph.nodes[node]
        for place in places:
            key = (about.sizes, about.whole, place.dims, tuple(p.dims for p in place.pins), about.group is None)
            if about.group is not None or key not in known:
                known[key] = bool(kept_at((place,), enumerate_choices(about, mesh)).any())
            if not known[key]:
                return node, place
    return None


def _never_stored(graph: Graph, node: int, place: Place, mesh: MeshShape) -> str:
    about, pin = graph.nodes[node], place.pins[0]
    whole = [
        str(d) for d, factors in enumerate(place.dims) if pin.dims[d] and not about.whole.isdisjoint(factors)
    ]
    why = (
        f"dim {' and '.join(whole)} stays whole, as the dim that a scan runs over has to; split another dim"
        if whole
        else f"the axes of one dim go in the mesh's order ({', '.join(mesh.names)}) and a dim of one entry takes none"
    )
    return f"{pin.where} says {pin}, which no strategy stores: {why}."


def keep_pinned(node: int, choices: Choices, pins: Pins) -> np.ndarray:
    """Which strategies of the node keep all of its pins."""
    return kept_at(pins.at.get(node, ()), choices)


def kept_at(places: Sequence[Place], choices: Choices) -> np.ndarray:
    ok = np.ones(len(choices), bool)
    for place in places:
        specs, index = choices.specs(place.dims)
        ok &= np.array([any(agrees(s, pin, choices.mesh) for pin in place.pins) for s in specs], bool)[index]
    return ok


def agrees(spec: Spec, pin: Pin, mesh: MeshShape) -> bool:
    """Whether a spec is as pinned; axes of size 1 split nothing and are passed over."""
    for axes, wanted in zip(spec.dims, pin.dims, strict=True):
        if wanted is None:
            continue
        have = tuple(a for a in axes if mesh.size(a) > 1)
        want = tuple(a for a in wanted if a in mesh.names and mesh.size(a) > 1)
        if (set(have) != set(want)) if pin.any_order else (have != want):
            return False
    return True


def pin_marks(pins: Pins) -> dict[int, Any]:
    """Marks that keep nodes with different pins from being tied."""
    return {
        node: tuple((place.dims, tuple(str(pin) for pin in place.pins)) for place in places)
        for node, places in pins.at.items()
    }


# ---------------------------------------------------------------------------------------------- all meshes


def pin_axes(pins: Pins, known: Sequence[str]) -> dict[str, int | None]:
    """Axes that pins name, with their size where the user wrote for a mesh of his own, in the order of that mesh.

    `SpecError` for an axis of no such mesh that the search does not have either, `PinError` for two sizes of one.
    """
    named: dict[str, int | None] = {}
    said: dict[str, str] = {}
    for pin in sorted(pins, key=lambda p: p.mesh is None):
        order = pin.mesh.names if pin.mesh is not None else pin.axes
        for axis in (a for a in order if a in pin.axes):
            size = pin.mesh.size(axis) if pin.mesh is not None else None
            if size is None and axis not in known and axis not in named:
                raise SpecError(
                    f"{pin.where}: axis '{axis}' is unknown; the search names its axes {', '.join(known)}. "
                    f"{nearest(axis, known)} Or fix the mesh: mesh={{'{axis}': ...}}.{pin.advice}"
                )
            if size is not None and named.get(axis) not in (None, size):
                raise PinError(
                    f"{said[axis]} has axis '{axis}' of size {named[axis]}, {pin.where} of size {size}. Write them "
                    f"for one mesh, or fix it: mesh={{...}}."
                )
            said.setdefault(axis, pin.where)
            named[axis] = size if size is not None else named.get(axis)
    return named

