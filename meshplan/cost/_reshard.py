"""How a value moves from one spec to another: its sums, then the cheapest path of slices, exchanges, permutes, gathers.

Each step is one that the partitioner carries out as a single collective when the specs before and after it are both
stated, so lower/ states every step's spec. Sums come first; what is left is a shortest path between specs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from meshplan.core import Axes, MeshShape, Spec
from meshplan.cost._shortest import searches

StepKind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute", "slice"]


Dims = tuple[Axes, ...]


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


def reshard_path(
    source: Spec, target: Spec, mesh: MeshShape, room: tuple[int, ...] | None = None
) -> tuple[Step, ...]:
    """The steps from `source` to `target`, both of one array; () where they are equal.

    `room[d]`: into how many shards, at most, dim d may be cut on the way (see `room_of`), by default any number.
    Only the dims that are split matter, and not their places: equal moves have equal paths (`canonical` is their
    common form).
    """
    if source == target:
        return ()
    order, small_source, small_target = canonical(source, target)
    small_room = tuple(room[d] if room else mesh.devices for d in order)
    steps = _path(small_source, small_target, mesh, small_room)
    return tuple(Step(s.kind, s.axes, s.fraction, _widened(s.after, order, len(source.dims))) for s in steps)


def room_of(shape: tuple[int, ...], mesh: MeshShape) -> tuple[int, ...]:
    """For every dim the largest number that divides both it and the number of devices."""
    return tuple(math.gcd(n, mesh.devices) for n in shape)


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


def _path(source: Spec, target: Spec, mesh: MeshShape, room: tuple[int, ...]) -> tuple[Step, ...]:
    """The steps between two specs in canonical form: sums first, a reduce-scatter where the target splits a dim by the
    axis, else all-reduce; then the cheapest moves."""
    steps: list[Step] = []
    dims = [list(d) for d in source.dims]
    pending = [a for a in source.unreduced if a not in target.unreduced]
    _scatter(dims, pending, target, mesh, steps)
    if pending:
        fraction = 1 / _shards(dims, mesh)
        steps.append(Step("all-reduce", tuple(pending), fraction, _spec(dims, target)))
    here = tuple(map(tuple, dims))
    if here != target.dims:
        steps += _moves(here, target, mesh, room)
    return tuple(steps)


def _moves(source: Dims, target: Spec, mesh: MeshShape, room: tuple[int, ...]) -> list[Step]:
    """The cheapest moves to the target; found once for all meshes, axes and dims that play the same parts."""
    moving = {a for dims in (source, target.dims) for d in dims for a in d}
    names = sorted((a for a in mesh.names if a in moving), key=mesh.size)
    number = {a: i for i, a in enumerate(names)}
    begin, end = (tuple(tuple(number[a] for a in d) for d in dims) for dims in (source, target.dims))
    order = sorted(range(len(begin)), key=lambda d: (begin[d], room[d]))
    search = searches(tuple(mesh.size(a) for a in names), tuple(begin[d] for d in order), tuple(room[d] for d in order))
    place = sorted(range(len(order)), key=order.__getitem__)
    return [
        Step(
            move.kind, tuple(names[a] for a in move.axes), move.fraction,
            Spec(tuple(tuple(names[a] for a in move.after[p]) for p in place), target.unreduced),
        )
        for move in search.path(tuple(end[d] for d in order))
    ]


def _spec(dims: list[list[str]], target: Spec) -> Spec:
    return Spec(tuple(map(tuple, dims)), target.unreduced)


def _shards(dims: list[list[str]] | Dims, mesh: MeshShape) -> int:
    return mesh.size([a for d in dims for a in d])


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


def laid_out_elements(shape: tuple[int, ...], before: Spec, after: Spec, mesh: MeshShape) -> int:
    """Elements that a device reads and writes to cut its piece along another dim than the first, or to join pieces so.

    What is sent is cut along the first dim of an array as it lies, and what arrives is joined along it.
    """
    have, want = before.local_shape(shape, mesh), after.local_shape(shape, mesh)
    total = 0
    for d, (a, b) in enumerate(zip(have, want, strict=True)):
        larger = have if a > b else want
        if a != b and math.prod(larger[:d]) > 1:
            total += 2 * math.prod(larger)
    return total
