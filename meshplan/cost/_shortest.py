"""Shortest ways between specs of one array, with axes and dims as numbers (Dijkstra 1959).

A state says which axes split each dim, major to minor. The moves are those that every back end carries out as one
collective when both specs are stated (measured, emission/*.json): the minor axes of a dim are gathered or
exchanged to the end of another dim, the axes of a dim change their order, two axes of one size change places; to split
a dim further by an unused axis costs nothing. The cost is what a ring sends, as a part of the whole array.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import threading
from collections.abc import Iterator
from typing import Literal, NamedTuple

Axes = tuple[int, ...]
State = tuple[Axes, ...]
STEP = 2.0**-6  # what every collective costs beside its bytes: as much as this part of the array


class Move(NamedTuple):
    """`fraction`: the larger local buffer over the whole array's bytes."""

    kind: Literal["all-gather", "all-to-all", "collective-permute", "slice"]
    axes: Axes
    fraction: float
    cost: float
    after: State


class Search:
    """Ways from one state; goes on where it stopped when asked for a state that it has not reached."""

    def __init__(self, sizes: tuple[int, ...], source: State, room: tuple[int, ...]) -> None:
        self.sizes, self.source, self.room = sizes, source, room
        self.best: dict[State, float] = {source: 0.0}
        self.came: dict[State, tuple[State, Move]] = {}
        self.done: set[State] = set()
        self.queue: list[tuple[float, int, State]] = [(0.0, 0, source)]
        self.tickets = itertools.count(1)
        self.lock = threading.Lock()

    def path(self, target: State) -> list[Move]:
        """The moves to `target`, slices that follow each other as one; of equally short ways always the same."""
        with self.lock:
            while target not in self.done:
                self.settle()
        moves: list[Move] = []
        here = target
        while here != self.source:
            here, move = self.came[here]
            if moves and move.kind == moves[-1].kind == "slice":
                move = move._replace(axes=move.axes + moves[-1].axes, after=moves[-1].after)
                moves[-1] = move
            else:
                moves.append(move)
        return moves[::-1]

    def settle(self) -> None:
        """The next nearest state is final; from there on."""
        cost, _, here = heapq.heappop(self.queue)
        if here in self.done:
            return
        self.done.add(here)
        for move in self.moves(here):
            total = cost + move.cost
            if total < self.best.get(move.after, math.inf):
                self.best[move.after] = total
                self.came[move.after] = here, move
                heapq.heappush(self.queue, (total, next(self.tickets), move.after))

    def moves(self, here: State) -> Iterator[Move]:
        """All that can be done from here."""
        shards = [math.prod(self.sizes[a] for a in axes) for axes in here]
        share = 1 / math.prod(shards)
        place = {a: d for d, axes in enumerate(here) for a in axes}
        for a, size in enumerate(self.sizes):
            if a not in place:
                for d, axes in enumerate(here):
                    if self.room[d] % (shards[d] * size) == 0:
                        yield Move("slice", (a,), 0.0, 0.0, _with(here, d, (*axes, a)))
        for d, axes in enumerate(here):
            yield from self.minor_axes(here, d, shards, share)
            for order in itertools.permutations(axes):
                if order != axes:
                    yield Move("collective-permute", order, share, STEP + share, _with(here, d, order))
        yield from self.renamed(here, place, shards, share)

    def minor_axes(self, here: State, d: int, shards: list[int], share: float) -> Iterator[Move]:
        """The minor axes of dim d gathered, or exchanged to another dim."""
        axes, n = here[d], 1
        for width in range(1, len(axes) + 1):
            rest, tail = axes[:-width], axes[-width:]
            n *= self.sizes[tail[0]]
            sent = (n - 1) / n
            less = _with(here, d, rest)
            yield Move("all-gather", tail, share * n, STEP + share * n * sent, less)
            for j, others in enumerate(here):
                if j != d and self.room[j] % (shards[j] * n) == 0:
                    yield Move("all-to-all", tail, share, STEP + share * sent, _with(less, j, others + tail))

    def renamed(self, here: State, place: dict[int, int], shards: list[int], share: float) -> Iterator[Move]:
        """Axes of one size, in different dims or one of them unused, change places: devices swap their pieces."""
        for a, b in itertools.combinations(range(len(self.sizes)), 2):
            if self.sizes[a] == self.sizes[b] and place.get(a) != place.get(b):
                after = tuple(tuple(b if x == a else a if x == b else x for x in axes) for axes in here)
                yield Move("collective-permute", (a, b), share, STEP + share, after)


def _with(here: State, d: int, axes: Axes) -> State:
    return (*here[:d], axes, *here[d + 1 :])


@functools.lru_cache(maxsize=4096)
def searches(sizes: tuple[int, ...], source: State, room: tuple[int, ...]) -> Search:
    """The search from `source`, kept so that it serves many targets."""
    return Search(sizes, source, room)
