"""Tables that are arguments of a step: which leaves they are, and where the step looks them up and updates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from meshplan.core import ArgumentError, _jax
from meshplan.embedding._cost import Pricing
from meshplan.embedding._step_flat import Flat, Line
from meshplan.embedding._table import Table
from meshplan.hints import match, nearest_paths

_ADD = frozenset({"scatter-add", "scatter_add"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTables:
    """Which arguments of a step are embedding tables, for `mp.plan(step, ..., tables=StepTables(...))`.

    `leaves`: a Table for each path or pattern of argument leaves (as in pins), each of one leaf; or "find": every
    matrix that the step reads by looking up rows alone, with ids as the law says nothing of (uniform). The other fields
    are those of `mp.embedding.plan`; the dense part's seconds and bytes are added to `pricing` by the planner.
    """

    leaves: Mapping[str, Table] | Literal["find"] = "find"
    pricing: Pricing = field(default_factory=Pricing)
    near: bool = True
    sync_every: int = 1
    hot_rows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """One table of a step: the argument leaf `path`, looked up for `samples` bags at the line `source`.

    `pooled`: the step sums the rows of a bag and reads nothing else of them.
    """

    table: Table
    path: str
    samples: int
    pooled: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a lookup is in a flat step: number `input` among the arguments; values of the ids, the feature, its
    gradient and the table's (`update`). `first`: the feature's gradient is the same for all rows of a bag, and has one
    for each.
    """

    lookup: Lookup
    input: int
    ids: int
    feature: int
    gradient: int = -1
    update: int = -1
    first: bool = False


def declared(given: Mapping[str, Table], paths: Sequence[str], shapes: Sequence[Any]) -> dict[int, Table]:
    """Tables by the number of their argument leaf.

    Raises ArgumentError where a path is no leaf, or of another shape.
    """
    found: dict[int, Table] = {}
    for pattern, table in given.items():
        if not isinstance(table, Table):
            raise ArgumentError(f"tables: {pattern!r} is given a {type(table).__name__}; give an mp.embedding.Table.")
        at = [i for i, p in enumerate(paths) if match(pattern, p)]
        alike = [i for i in at if tuple(shapes[i].shape) == (table.rows, table.dim)]
        if not at:
            raise ArgumentError(f"tables: {pattern!r} matches no argument. {nearest_paths(pattern, paths)}")
        if len(alike) > 1:
            raise ArgumentError(
                f"tables: {pattern!r} matches {len(alike)} arguments, {paths[alike[0]]!r} and {paths[alike[1]]!r} "
                "among them; give one pattern for each table."
            )
        leaf = shapes[(alike or at)[0]]
        if not alike or np.dtype(leaf.dtype) != np.dtype(table.dtype):
            raise ArgumentError(
                f"tables: argument {paths[(alike or at)[0]]!r} is {leaf.dtype} {list(leaf.shape)}, table "
                f"{table.name!r} {table.dtype} {[table.rows, table.dim]}; give the table the argument's rows, dim "
                "and dtype."
            )
        if alike[0] in found:
            raise ArgumentError(f"tables: argument {paths[alike[0]]!r} is given two tables; give one.")
        found[alike[0]] = table
    names = [t.name for t in found.values()]
    twice = [n for n in names if names.count(n) > 1]
    if twice:
        raise ArgumentError(f"tables: two are named {twice[0]!r}; give each a name of its own.")
    return found


def row_lookups(flat: Flat) -> dict[int, list[Line]]:
    """Lines that read whole rows of a matrix among the inputs by ids [samples] or [samples, bag], by that input."""
    found: dict[int, list[Line]] = {}
    for line in flat.lines:
        value = flat.root(line.ins[0]) if line.name == "gather" else None
        if value in flat.inputs and _reads_rows(flat, line):
            found.setdefault(value, []).append(line)
    return found


def _reads_rows(flat: Flat, line: Line) -> bool:
    operand, ids, about = flat.shape(line.ins[0]), flat.shape(line.ins[1]), line.eqn.params["dimension_numbers"]
    out = flat.shape(line.outs[0])
    return (
        len(operand) == 2 and len(ids) in (2, 3) and isinstance(line.ins[1], int)
        and tuple(about.start_index_map) == (0,) and tuple(about.collapsed_slice_dims) == (0,)
        and tuple(line.eqn.params["slice_sizes"]) == (1, operand[1]) and tuple(about.offset_dims) == (len(out) - 1,)
    )  # fmt: skip


def lookup_of(
    flat: Flat, line: Line, readers: Mapping[int, list[Line]], table: Table | None, path: str, where: int
) -> Found:
    """What a line that reads rows of a table gives the dense part: sums of bags where the step takes just these.

    Raises ArgumentError where the bags are not those of the table.
    """
    samples, *more = flat.shape(line.ins[1])[:-1]
    bag, dim = more[0] if more else 1, flat.shape(line.outs[0])[-1]
    wanted = table is None or table.pooling != "none"
    feature, pooled = line.outs[0], not more
    uses = readers.get(line.outs[0], [])
    if more and wanted and len(uses) == 1 and _sums_bags(flat, uses[0], bag, (samples, dim)):
        feature, pooled = uses[0].outs[0], True
    if table is None:
        aval = flat.avals[where]
        table = Table(
            name=path, rows=aval.shape[0], dim=dim, pooling="sum" if pooled else "none", hotness=bag, length=bag,
            dtype=str(aval.dtype),
        )  # fmt: skip
    elif table.bag != bag:
        raise ArgumentError(
            f"table {table.name!r}: the step looks up {bag} ids a bag at {_jax.source_line(line.eqn)}, the table has "
            f"{table.bag}; give it length={bag}."
        )
    about = Lookup(table=table, path=path, samples=samples, pooled=pooled, source=_jax.source_line(line.eqn))
    return Found(lookup=about, input=where, ids=line.ins[1], feature=feature)


def _sums_bags(flat: Flat, line: Line, bag: int, result: tuple[int, int]) -> bool:
    if flat.shape(line.outs[0]) != result:
        return False
    if line.name == "reduce_sum":
        return tuple(line.eqn.params["axes"]) == (1,)
    return bag == 1 and line.name in ("squeeze", "reshape")


def row_updates(flat: Flat, shapes: set[tuple[int, ...]]) -> list[Line]:
    """Lines that add rows to zeros of the shape of a table: its gradient."""
    return [
        line for line in flat.lines
        if line.name in _ADD and flat.shape(line.outs[0]) in shapes and _zeros(flat, line.ins[0])
    ]


def _zeros(flat: Flat, atom: Any) -> bool:
    line = flat.made_by(atom)
    return line is not None and line.name == "broadcast_in_dim" and _is_zero(line.ins[0])


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, _jax.Literal) and not np.any(np.asarray(atom.val))


def with_gradient(flat: Flat, found: Found, update: Line) -> Found:
    """With the gradient of the feature, of which the update has one for each row of a bag."""
    rows, wanted = update.ins[2], flat.shape(found.feature)
    line, first = flat.made_by(rows), False
    if flat.shape(rows) != wanted:
        spread = line is not None and line.name == "broadcast_in_dim" and flat.shape(line.ins[0]) == wanted
        rows, first = (line.ins[0], False) if spread and line is not None else (rows, True)
    return replace(found, gradient=rows, update=update.outs[0], first=first)
