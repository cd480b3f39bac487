"""What a user could write otherwise, where the program itself makes a move needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshplan.core import Axes, MeshShape, Spec, format_bytes
from meshplan.cost import describe
from meshplan.plan._data import OpPlan, Path
from meshplan.program import SLICE, Op, Program


def micro_batch_notes(
    program: Program, mesh: MeshShape, ops: tuple[OpPlan, ...], made: Mapping[int, Spec]
) -> list[str]:
    """A batch that is cut into micro-batches across its shards: which order of its rows needs no move.

    `reshape(n, ...)` gives a loop n pieces of rows that lie on few devices each; taking every n-th row gives
    it the same batch in another order, each piece spread over all devices. `made`: the spec of every value.
    """
    notes: dict[str, None] = {}
    for planned in ops:
        for k, path in planned.uses:
            value = program.ops[planned.index].operands[k]
            if value is None or value not in made or not path or not made[value].dims:
                continue
            lost = tuple(a for a in made[value].dims[0] if a not in path[-1].dims[0])
            for cut in _cuts(program, program.ops[planned.index]) if lost else ():
                notes |= dict.fromkeys(_offer(program, cut, mesh, lost, path[-1]))
    return list(notes)


def gathered_again_notes(
    program: Program, mesh: MeshShape, ops: tuple[OpPlan, ...], made: Mapping[int, Spec]
) -> list[str]:
    """Arguments that are gathered for the forward pass and again in rematerialised blocks: what keeping them takes.

    An operand of `jax.checkpoint` is kept for its backward pass, a move of it inside is made again there.
    """
    scopes: dict[int, dict[tuple[int, int], float]] = {}  # argument -> where it is gathered, the bytes it has there
    arguments = {leaf.value for leaf in program.args}
    for planned in ops:
        op = program.ops[planned.index]
        for k, path in planned.uses:
            v = op.operands[k]
            if v is None or v not in arguments or v not in made or not path:
                continue
            if path[-1].shards(mesh) < made[v].shards(mesh):
                nbytes = program.nbytes(v) / path[-1].shards(mesh)
                scopes.setdefault(v, {})[op.region, op.scope] = nbytes
    again = {v: where for v, where in scopes.items() if len(where) > 1 and any(scope for _, scope in where)}
    if not again:
        return []
    several = _several([leaf.path for leaf in program.args if leaf.value in again])
    more = sum(nbytes for where in again.values() for nbytes in list(where.values())[1:])
    kept = sum(max(where.values()) for where in again.values())
    return [
        f"gathered again for rematerialised blocks: {several}, {format_bytes(more)} a device in all. Gathered once "
        f"they take up to {format_bytes(kept)} a device from the forward pass on: to keep one, state it whole where it "
        "enters the block, jax.checkpoint(f)(jax.lax.with_sharding_constraint(w, ...), x)."
    ]


def kept_notes(program: Program, mesh: MeshShape, kept: Sequence[tuple[int, Path]]) -> list[str]:
    """Values that are gathered once, before the rematerialised blocks that read them: what that takes and saves."""
    if not kept:
        return []
    several = _several([describe(program, v) for v, _ in kept])
    nbytes = sum(program.nbytes(v) / path[-1].shards(mesh) for v, path in kept)
    return [
        f"gathered once and kept for rematerialised blocks: {several}, {format_bytes(nbytes)} a device from the "
        "forward pass on. Under a memory limit that leaves no room for them they are gathered again in the blocks."
    ]


def _several(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _cuts(program: Program, op: Op) -> Iterator[Op]:
    """Reshapes that the operation is, that its results reach or its operand comes from, the shape kept on the way."""
    todo, seen = [op], set[int]()
    while todo:
        at = todo.pop()
        if at.index in seen:  # two ways meet again, as in every residual block
            continue
        seen.add(at.index)
        if at.primitive == "reshape":
            yield at
        elif len(at.results) == 1 and at.view.results[0].shape in {a.shape for a in at.view.operands}:
            todo += [program.ops[use] for use, _ in program.consumers[at.results[0]] if use > at.index]
    while op.primitive == SLICE or (len(op.operands) == 1 and _keeps_shape(op)):
        made = program.values[op.operands[0]].op if op.operands[0] is not None else -1
        if made < 0:
            return
        op = program.ops[made]
        if op.primitive == "reshape":
            yield op


def _keeps_shape(op: Op) -> bool:
    return len(op.results) == 1 and op.view.results[0].shape == op.view.operands[0].shape


def _offer(program: Program, op: Op, mesh: MeshShape, lost: Axes, after: Spec) -> list[str]:
    """The note for one reshape, where it cuts the first dim into pieces that a loop takes one by one."""
    before, shape = op.view.operands[0].shape, op.view.results[0].shape
    parts = mesh.size(lost)
    if len(shape) != len(before) + 1 or shape[2:] != before[1:] or shape[1] % parts:
        return []
    if not any(_sliced(program, value) for value in op.results):
        return []
    over = ", ".join(f"{a} ({mesh.size(a)})" for a in lost)
    rest = "".join(f", {n}" for n in shape[2:])
    moved = format_bytes(program.nbytes(op.results[0]) / mesh.size(after.axes))
    return [
        f"reshape of {list(before)} to {list(shape)} at {op.source or 'an unknown line'}: dim 0 is split over "
        f"{over}, and each of the {shape[0]} micro-batches lies on some of its shards alone, so that every device "
        f"receives {moved}. reshape({shape[1]}, {shape[0]}{rest}).swapaxes(0, 1) is the same batch in another order, "
        "cut without a move."
    ]


def _sliced(program: Program, value: int) -> bool:
    """Whether a loop takes the value's pieces one by one, perhaps after operations that keep its shape."""
    todo, seen = [value], set[int]()
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        for use, _ in program.consumers[at]:
            op = program.ops[use]
            if op.primitive == SLICE:
                return True
            keeps = len(op.results) == 1 and op.view.results[0].shape == program.values[at].aval.shape
            if keeps and use > program.values[at].op:
                todo.append(op.results[0])
    return False
