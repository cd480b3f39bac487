"""How a value moves from one spec to another: a path of slices, exchanges, gathers, reductions.

Each step is one that the partitioner carries out as a single collective when the specs
before and after it are both stated, so lower/ states every step's spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshplan.core import Axes, MeshShape, Spec

StepKind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute", "slice"]


@dataclass(frozen=True, slots=True)
class Step:
    """`fraction`: the larger local buffer of the step over the whole array's bytes. `after`: the spec it ends in."""

    kind: StepKind
    axes: Axes
    fraction: float
    after: Spec


def reshard_path(source: Spec, target: Spec, mesh: MeshShape) -> tuple[Step, ...]:
    """The steps from `source` to `target`, both of one array; () where they are equal.

    Sums first (reduce-scatter where the target splits a dim by the axis, else all-reduce), then
    slices, which cost nothing and make the rest smaller, exchanges, permutes, gathers last.
    """
    steps: list[Step] = []
    dims = [list(d) for d in source.dims]
    pending = [a for a in source.unreduced if a not in target.unreduced]
    _scatter(dims, pending, target, mesh, steps, source)
    if pending:
        fraction = 1 / _shards(dims, mesh)
        steps.append(Step("all-reduce", tuple(pending), fraction, _spec(dims, target)))
    while tuple(map(tuple, dims)) != target.dims:
        for move in (_slice, _exchange, _reorder, _gather):
            if move(dims, target, mesh, steps):
                break
    return tuple(steps)


def _spec(dims: list[list[str]], target: Spec) -> Spec:
    return Spec(tuple(map(tuple, dims)), target.unreduced)


def _shards(dims: list[list[str]], mesh: MeshShape) -> int:
    return mesh.size([a for d in dims for a in d])


def _wanted_next(dims: list[list[str]], target: Spec, j: int) -> str | None:
    """The axis that dim j must get next to come closer to the target, if its present axes are a prefix."""
    have, want = dims[j], target.dims[j]
    if len(have) < len(want) and tuple(have) == want[: len(have)]:
        return want[len(have)]
    return None


def _scatter(
    dims: list[list[str]], pending: list[str], target: Spec, mesh: MeshShape, steps: list[Step], source: Spec
) -> None:
    for j in range(len(dims)):
        taken: list[str] = []
        before = 1 / _shards(dims, mesh)
        while (axis := _wanted_next(dims, target, j)) in pending and axis is not None:
            dims[j].append(axis)
            pending.remove(axis)
            taken.append(axis)
        if taken:
            after = Spec(tuple(map(tuple, dims)), (*target.unreduced, *pending))
            steps.append(Step("reduce-scatter", tuple(taken), before, after))


def _slice(dims: list[list[str]], target: Spec, mesh: MeshShape, steps: list[Step]) -> bool:
    used = {a for d in dims for a in d}
    taken: list[str] = []
    for j in range(len(dims)):
        while (axis := _wanted_next(dims, target, j)) is not None and axis not in used:
            dims[j].append(axis)
            used.add(axis)
            taken.append(axis)
    if taken:
        steps.append(Step("slice", tuple(taken), 0.0, _spec(dims, target)))
    return bool(taken)


def _exchange(dims: list[list[str]], target: Spec, mesh: MeshShape, steps: list[Step]) -> bool:
    """Move the minor axes of one dim to another dim."""
    for i in range(len(dims)):
        for j in range(len(dims)):
            if i == j or not dims[i]:
                continue
            for width in range(len(dims[i]), 0, -1):
                tail = dims[i][-width:]
                have, want = tuple(dims[j]), target.dims[j]
                keeps = tuple(dims[i][:-width]) == target.dims[i][: len(dims[i]) - width]
                if keeps and want[: len(have)] == have and want[len(have) : len(have) + width] == tuple(tail):
                    fraction = 1 / _shards(dims, mesh)
                    del dims[i][-width:]
                    dims[j] += tail
                    steps.append(Step("all-to-all", tuple(tail), fraction, _spec(dims, target)))
                    return True
    return False


def _reorder(dims: list[list[str]], target: Spec, mesh: MeshShape, steps: list[Step]) -> bool:
    """Bring the axes of one dim into the order (those the target keeps, then the rest) by a permute.

    Axes that the target wants here and nobody uses are sliced off first, so that the rest
    can be gathered from smaller pieces: P('x') -> P('y') is slice, permute, gather.
    """
    used = {a for d in dims for a in d}
    elsewhere = {a for d in target.dims for a in d}
    for j in range(len(dims)):
        want = target.dims[j]
        fresh = [a for a in want if a not in used]
        kept = [a for a in want if a in dims[j] or a in fresh]
        rest = sorted((a for a in dims[j] if a not in want), key=elsewhere.__contains__)  # what moves on goes last
        if tuple(kept) != want[: len(kept)]:
            continue
        order = kept + rest
        if fresh:
            dims[j] += fresh
            steps.append(Step("slice", tuple(fresh), 0.0, _spec(dims, target)))
        if order != dims[j]:
            dims[j][:] = order
            steps.append(Step("collective-permute", tuple(order), 1 / _shards(dims, mesh), _spec(dims, target)))
            return True
        if fresh:
            return True
    return False


def _gather(dims: list[list[str]], target: Spec, mesh: MeshShape, steps: list[Step]) -> bool:
    """Drop the axes that one dim has too many: first of a dim none of whose surplus is wanted elsewhere."""
    elsewhere = {a for d in target.dims for a in d}
    surplus = [_surplus(dims, target, d) for d in range(len(dims))]
    order = sorted((d for d in range(len(dims)) if surplus[d]), key=lambda d: any(a in elsewhere for a in surplus[d]))
    d = order[0]
    del dims[d][-len(surplus[d]) :]
    steps.append(Step("all-gather", tuple(surplus[d]), 1 / _shards(dims, mesh), _spec(dims, target)))
    return True


def _surplus(dims: list[list[str]], target: Spec, d: int) -> list[str]:
    have, want = dims[d], target.dims[d]
    same = 0
    while same < min(len(have), len(want)) and have[same] == want[same]:
        same += 1
    return have[same:]
