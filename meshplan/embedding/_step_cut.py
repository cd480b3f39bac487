"""A step without its tables: features in their place, gradients of features beside its results."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from meshplan.core import ArgumentError, _jax
from meshplan.embedding._step_flat import Flat, Line, flatten
from meshplan.embedding._step_tables import Found, Lookup, declared, lookup_of, row_lookups, row_updates, with_gradient
from meshplan.embedding._table import Collection, Table
from meshplan.program import Call, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCut:
    """`call`: the dense part, `step(*arguments, features) -> (*results, gradients)`.

    Tables, their optimizers' sums and the ids that are looked up are None among the arguments and results; `features`
    (the name of the argument) and the gradients are dicts by table, [samples, dim], or [samples, bag, dim] where the
    step does more with the rows of a bag than to sum them. `place`: the gradients' place among the results.
    `dropped`: paths of the arguments that are gone.
    """

    call: Call
    lookups: tuple[Lookup, ...]
    features: str
    place: int
    dropped: tuple[str, ...]

    @property
    def collection(self) -> Collection:
        return Collection(tables=tuple(x.table for x in self.lookups))

    @property
    def samples(self) -> int:
        return self.lookups[0].samples


def cut_step(call: Call, program: Program, tables: Mapping[str, Table] | Literal["find"]) -> StepCut:
    """The step of `program`, which is the trace of `call`, cut at the lookups of its tables.

    Raises ArgumentError where a table is not there, is of another shape, is looked up twice, is never updated, or is
    used otherwise than by lookups of rows and its own update.
    """
    if call.dynamic[1]:
        raise ArgumentError("tables: give the step's arguments by position; keyword arguments are not cut.")
    paths = [leaf.path for leaf in program.args]
    inputs = [v.aval for v in _jax.open_jaxpr(program.jaxpr)[0].invars]
    given = None if tables == "find" else declared(tables, paths, inputs)
    wanted = [i for i, a in enumerate(inputs) if len(a.shape) == 2 and a.dtype.kind in "fV"] if given is None else given
    flat = flatten(program.jaxpr, {tuple(inputs[i].shape) for i in wanted})
    looked = row_lookups(flat)
    if given is None:
        chosen = _usable(flat, program, [i for i in wanted if i in looked], looked)
        if not chosen:
            raise ArgumentError(
                "tables='find': the step has no matrix that is read by looking up rows alone and updated; name the "
                "tables: tables={'path of the argument': mp.embedding.Table(...)}."
            )
    else:
        chosen = _found(flat, program, given, looked, flat.readers())
    return _cut(call, program, flat, chosen)


def _found(
    flat: Flat, program: Program, tables: Mapping[int, Table | None], looked: Mapping[int, list[Line]],
    readers: Mapping[int, list[Line]],
) -> list[Found]:  # fmt: skip
    found: list[Found] = []
    for i, table in tables.items():
        path, lines = program.args[i].path, looked.get(i, [])
        name = table.name if table is not None else path
        if len(lines) != 1:
            at = ", ".join(_jax.source_line(line.eqn) for line in lines)
            raise ArgumentError(
                f"table {name!r}: the step looks up rows of argument {path!r} at {len(lines)} places ({at}); a table "
                "has one lookup: join the ids of several." if lines
                else f"table {name!r}: the step looks up no rows of argument {path!r} by ids [batch] or [batch, bag]; "
                "a table is read by table[ids] alone."
            )  # fmt: skip
        found.append(lookup_of(flat, lines[0], readers, table, path, i))
    samples = {f.lookup.samples for f in found}
    if len(samples) > 1:
        told = ", ".join(f"{f.lookup.table.name!r} {f.lookup.samples}" for f in found)
        raise ArgumentError(f"tables: their lookups have different numbers of bags ({told}); give one for each sample.")
    return _updated(flat, program, found)


def _usable(flat: Flat, program: Program, wanted: Sequence[int], looked: Mapping[int, list[Line]]) -> list[Found]:
    """Those that can be cut, each by itself, of the number of samples that most bytes of tables have."""
    found, readers = list[Found](), flat.readers()
    for i in wanted:
        try:
            found += _found(flat, program, {i: None}, looked, readers)
        except ArgumentError:
            continue
    nbytes: dict[int, int] = {}
    for f in found:
        nbytes[f.lookup.samples] = nbytes.get(f.lookup.samples, 0) + f.lookup.table.nbytes
    return [f for f in found if f.lookup.samples == max(nbytes, key=lambda n: nbytes[n])]


def _updated(flat: Flat, program: Program, found: list[Found]) -> list[Found]:
    """With their gradients. Raises ArgumentError where a table meets more than its update."""
    shapes = {(f.lookup.table.rows, f.lookup.table.dim) for f in found}
    updates = row_updates(flat, shapes)
    tags = _tags(flat, found, [line.outs[0] for line in updates])
    mine: list[list[Line]] = [[] for _ in found]
    for k, line in enumerate(updates):
        bit = 1 << (len(found) + k)
        for n in range(len(found)):
            if any(isinstance(o, int) and tags[o] & bit and tags[o] >> n & 1 for o in flat.outputs):
                mine[n].append(line)
    for f, lines in zip(found, mine, strict=True):
        if len(lines) != 1:
            _refuse(flat, program, found, tags)
            raise ArgumentError(
                f"table {f.lookup.table.name!r}: the step adds to rows of argument {f.lookup.path!r} by its gradient "
                f"at {len(lines)} places, not one; the planner places tables that a training step updates "
                "(mp.embedding.serve: those that are only read)."
            )
    found = [with_gradient(flat, f, lines[0]) for f, lines in zip(found, mine, strict=True)]
    tags = _tags(flat, found, [lines[0].outs[0] for lines in mine])
    _refuse(flat, program, found, tags, updates=len(found))
    return found


def _tags(flat: Flat, found: Sequence[Found], updates: Sequence[int]) -> list[int]:
    """Of every value the tables (bit n) and updates (bits behind) that it depends on otherwise than by a lookup."""
    tags = [0] * len(flat.avals)
    for n, f in enumerate(found):
        tags[flat.inputs[f.input]] = 1 << n
    for k, value in enumerate(updates):
        tags[value] = 1 << (len(found) + k)
    roots = {flat.inputs[f.input] for f in found}
    looked = {line.outs[0] for i, lines in row_lookups(flat).items() if i in roots for line in lines}
    for line in flat.lines:
        if line.outs and line.outs[0] in looked:
            continue
        tag = 0
        for a in line.reads:
            tag |= tags[a]
        for o in line.outs:
            tags[o] |= tag
    return tags


def _refuse(flat: Flat, program: Program, found: Sequence[Found], tags: Sequence[int], updates: int = 0) -> None:
    """Raises ArgumentError where a result that is no table or sum of one depends on a table itself, or on its gradient.

    `updates`: how many of the tables' gradients have a bit, behind those of the tables and in their order.
    """
    count = len(found)
    mask = (1 << (count + updates)) - 1
    for leaf, out in zip(program.results, flat.outputs, strict=True):
        tag = tags[out] & mask if isinstance(out, int) else 0
        if not tag:
            continue
        of = [f.lookup.table for n, f in enumerate(found) if (tag | tag >> count) >> n & 1]
        if len(of) == 1 and flat.shape(out)[:1] == (of[0].rows,):
            continue
        lines = (
            x for x in flat.lines
            if any(tags[a] & mask for a in x.reads) and any(tags[o] & mask for o in x.outs)
            and not any(flat.shape(o)[:1] == (of[0].rows,) for o in x.outs)
        )  # fmt: skip
        by = next((f", by '{x.name}' at {_jax.source_line(x.eqn)}" for x in lines), "")
        raise ArgumentError(
            f"table {of[0].name!r}: result {leaf.path!r} depends on the table otherwise than by its lookup{by} (a norm "
            "over all gradients, a product with the table). Keep "
            "that from the tables, or plan them as arrays: leave it out of tables=."
        )


def _cut(call: Call, program: Program, flat: Flat, found: list[Found]) -> StepCut:
    side = _tags(flat, found, [f.update for f in found])
    results = [j for j, o in enumerate(flat.outputs) if not (isinstance(o, int) and side[o])]
    wanted = [*(flat.outputs[j] for j in results), *(f.gradient for f in found)]
    lines, read = flat.needed(wanted, [f.feature for f in found])
    gone = _gone(flat, found, side, read)
    kept = [flat.inputs[i] for i in range(len(flat.inputs)) if i not in gone]
    by_name = {f.lookup.table.name: f for f in found}

    def dense(*given: Any) -> Any:
        *arguments, bags = given
        known = dict(zip(kept, jax.tree.leaves(arguments), strict=True))
        env = flat.run(lines, known | {f.feature: bags[name] for name, f in by_name.items()})
        grads = {name: env[f.gradient][:, 0] if f.first else env[f.gradient] for name, f in by_name.items()}
        out: list[Any] = [None] * len(flat.outputs)
        for j in results:
            value = flat.outputs[j]
            out[j] = env[value] if isinstance(value, int) else value.val
        whole = jax.tree.unflatten(program.out_tree, out)
        return (*whole, grads) if _is_plain_tuple(whole) else (whole, grads)

    whole = jax.tree.unflatten(program.out_tree, [None] * len(flat.outputs))
    names = call.argument_names()
    features = "features" if "features" not in names else "table_features"
    return StepCut(
        call=_dense_call(call, dense, gone, (*names, features), flat, by_name),
        lookups=tuple(f.lookup for f in found), features=features,
        place=len(whole) if _is_plain_tuple(whole) else 1,
        dropped=tuple(program.args[i].path for i in sorted(gone)),
    )  # fmt: skip


def _gone(flat: Flat, found: Sequence[Found], side: Sequence[int], read: set[int]) -> set[int]:
    """Arguments that the dense part has not: tables, what their updates alone read (sums of rows), ids looked up."""
    tables, rows = {flat.inputs[f.input] for f in found}, {f.lookup.table.rows for f in found}
    _, for_ids = flat.needed([f.ids for f in found], [])
    beside = {a for line in flat.lines if any(side[o] for o in line.outs) for a in line.reads}
    sums = {v for v in flat.inputs if v in beside and flat.shape(v) and flat.shape(v)[0] in rows}
    return {
        i for i, v in enumerate(flat.inputs) if v in tables or (v not in read and (v in for_ids or v in sums))
    }


def _dense_call(
    call: Call, dense: Any, gone: set[int], names: Sequence[str], flat: Flat, found: Mapping[str, Found]
) -> Call:
    kinds = inspect.Parameter.POSITIONAL_ONLY
    dense.__signature__ = inspect.Signature([inspect.Parameter(n.replace("/", "_"), kinds) for n in names])
    dense.__name__ = call.name or "step"
    leaves, tree = jax.tree.flatten(call.dynamic[0])
    shaped = jax.tree.unflatten(tree, [None if i in gone else x for i, x in enumerate(leaves)])
    bags = {
        n: jax.ShapeDtypeStruct(flat.shape(f.feature), flat.avals[f.feature].dtype) for n, f in found.items()
    }
    positions = [i for i in range(len(call.args)) if i not in call.static_argnums]
    donated = tuple(n for n, i in enumerate(positions) if i in call.donate_argnums)
    return Call(step=dense, args=(*shaped, bags), kwargs={}, name=call.name, donate_argnums=donated)


def _is_plain_tuple(x: Any) -> bool:
    return isinstance(x, tuple) and not hasattr(x, "_fields")
