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

    @property
    def reduces(self) -> bool:
        """Whether the step completes a sum."""
        return self.kind in ("all-reduce", "reduce-scatter")


def reshard_path(source: Spec, target: Spec, mesh: MeshShape) -> tuple[Step, ...]:
    """The steps from `source` to `target`, both of one array; () where they are equal.

    Only the dims that are split matter, and not their places: equal moves have equal paths
    (and `canonical` is their common form).
    """
    if source == target:
        return ()
    order, small_source, small_target = canonical(source, target)
    steps = _path(small_source, small_target, mesh)
    return tuple(Step(s.kind, s.axes, s.fraction, _widened(s.after, order, len(source.dims))) for s in steps)


def canonical(source: Spec, target: Spec) -> tuple[tuple[int, ...], Spec, Spec]:
    """(dims that are split in either spec in a fixed order, both specs of these dims alone)."""
    split = [d for d in range(len(source.dims)) if source.dims[d] or target.dims[d]]
    order = tuple(sorted(split, key=lambda d: (source.dims[d], target.dims[d])))
    return (
        order,
        Spec(tuple(source.dims[d] for d in order), source.unreduced),
        Spec(tuple(target.dims[d] for d in order), target.unreduced),
    )


def _widened(small: Spec, order: tuple[int, ...], ndim: int) -> Spec:
    dims: list[Axes] = [()] * ndim
    for d, axes in zip(order, small.dims, strict=True):
        dims[d] = axes
    return Spec(tuple(dims), small.unreduced)


def _path(source: Spec, target: Spec, mesh: MeshShape) -> tuple[Step, ...]:
    """The steps between two specs in canonical form.

    Sums first (reduce-scatter where the target splits a dim by the axis, else all-reduce), then
    slices, which cost nothing and make the rest smaller, exchanges, permutes, gathers last.
    """
    steps: list[Step] = []
    dims = [list(d) for d in source.dims]
    pending = [a for a in source.unreduced if a not in target.unreduced]
    _scatter(dims, pending, target, mesh, steps)
    if pending:
        fraction = 1 / _shards(dims, mesh)
        steps.append(Step("all-reduce", tuple(pending), fraction, _spec(dims, target)))
    while tuple(map(tuple, dims)) != target.dims:
        for move in (_slice, _exchange, _reorder, _exchange_early, _gather):
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


def _scatter(dims: list[list[str]], pending: list[str], target: Spec, mesh: MeshShape, steps: list[Step]) -> None:
    """Reduce-scatter what the target splits by pending axes, where XLA makes one of it (measured on
    GPU and TPU): onto a single dim, and onto a dim that is whole so far if other axes only reduce."""
    taken = [_takes(dims[j], target.dims[j], pending) for j in range(len(dims))]
    places = [j for j, axes in enumerate(taken) if axes]
    if len(places) != 1:
        return
    (j,) = places
    if len(taken[j]) < len(pending) and dims[j]:
        return
    before = 1 / _shards(dims, mesh)
    dims[j] += taken[j]
    pending[:] = [a for a in pending if a not in taken[j]]
    after = Spec(tuple(map(tuple, dims)), (*target.unreduced, *pending))
    steps.append(Step("reduce-scatter", tuple(taken[j]), before, after))


def _takes(have: list[str], want: Axes, pending: list[str]) -> list[str]:
    """Pending axes that continue `have` towards `want`."""
    if tuple(have) != want[: len(have)]:
        return []
    out: list[str] = []
    for axis in want[len(have) :]:
        if axis not in pending:
            break
        out.append(axis)
    return out


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
                if want[: len(have)] == have and want[len(have) : len(have) + width] == tuple(tail):
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


def _exchange_early(dims: list[list[str]], target: Spec, mesh: MeshShape, steps: list[Step]) -> bool:
    """Move the minor axes of one dim to the dim that wants them, though not next: a permute then brings the order.

    Only onto a dim that keeps all it has: P('x', 'y') -> P(None, ('x', 'y')) is exchange, permute; nothing is gathered.
    """
    for i in range(len(dims)):
        for j in range(len(dims)):
            if i == j or not set(dims[j]) <= set(target.dims[j]):
                continue
            width = 0
            while width < len(dims[i]) and dims[i][-1 - width] in target.dims[j]:
                width += 1
            if width:
                tail = dims[i][-width:]
                del dims[i][-width:]
                dims[j] += tail
                steps.append(Step("all-to-all", tuple(tail), 1 / _shards(dims, mesh), _spec(dims, target)))
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
