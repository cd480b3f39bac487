"""The order in which a device computes where collectives run beside it: a list schedule by critical paths.

Compilers that hide collectives put off what waits for one, and what no collective waits for (XLA's latency-hiding
scheduler). Here: each time the device is free, of the items whose operands are there, the one from which the longest
way leads to the end, collectives counted; the program's first of those that are equal. Source of the method: list
scheduling by upward rank (Topcuoglu et al. 2002, HEFT).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """A collective: it starts after the items `made` over `links`, and the items `uses` wait for it."""

    made: frozenset[int]
    uses: frozenset[int]
    seconds: float
    links: tuple[int, ...]


def list_scheduled(
    before: Sequence[frozenset[int]], seconds: Callable[[int], float], moving: Sequence[Moving],
    alone: frozenset[int] = frozenset(),
) -> list[int]:
    """Items 0 to n - 1 in the order in which they are computed.

    `before[i]`: items, all smaller, that i waits for. `alone`: items beside which nothing is moved. Collectives over
    the same links queue in the order in which they may start.
    """
    run = _Run(before, seconds, moving)
    while run.left:
        run.arrive()
        if not run.ready:
            run.now = run.moved[0][0]
            continue
        at = heapq.heappop(run.ready)[1]
        if at in alone:
            run.now = max((run.now, *run.free.values()))
        run.now += seconds(at)
        if at in alone:
            run.free = dict.fromkeys(run.free, run.now)
        run.finish(at)
    return run.order


class _Run:
    def __init__(
        self, before: Sequence[frozenset[int]], seconds: Callable[[int], float], moving: Sequence[Moving]
    ) -> None:
        self.moving, self.now, self.order = moving, 0.0, []
        self.left = len(before)
        self.after: list[list[int]] = [[] for _ in before]  # items that wait for an item
        self.starts: list[list[int]] = [[] for _ in before]  # collectives that wait for an item
        self.waits = [len(b) for b in before]
        self.parts = [len(m.made) for m in moving]
        for i, b in enumerate(before):
            for j in b:
                self.after[j].append(i)
        for c, m in enumerate(moving):
            for i in m.uses:
                self.waits[i] += 1
            for i in m.made:
                self.starts[i].append(c)
        self.free: dict[int, float] = {link: 0.0 for m in moving for link in m.links}
        self.moved: list[tuple[float, int]] = []
        for c, m in enumerate(moving):
            if not m.made:
                self.start(c)
        self.way = self.ways(seconds)
        self.ready = [(-self.way[i], i) for i, n in enumerate(self.waits) if not n]
        heapq.heapify(self.ready)

    def ways(self, seconds: Callable[[int], float]) -> list[float]:
        """Seconds of the longest way from the beginning of each item to the end of all."""
        way = [0.0] * len(self.waits)
        for i in reversed(range(len(way))):
            after = max((way[j] for j in self.after[i]), default=0.0)
            for c in self.starts[i]:
                m = self.moving[c]
                after = max(after, m.seconds + max((way[j] for j in m.uses), default=0.0))
            way[i] = seconds(i) + after
        return way

    def start(self, c: int) -> None:
        m = self.moving[c]
        ends = max((self.now, *(self.free[link] for link in m.links))) + m.seconds
        self.free.update(dict.fromkeys(m.links, ends))
        heapq.heappush(self.moved, (ends, c))

    def arrive(self) -> None:
        """What has been moved by now."""
        while self.moved and self.moved[0][0] <= self.now:
            for i in self.moving[heapq.heappop(self.moved)[1]].uses:
                self.release(i)

    def finish(self, at: int) -> None:
        self.order.append(at)
        self.left -= 1
        for i in self.after[at]:
            self.release(i)
        for c in self.starts[at]:
            self.parts[c] -= 1
            if not self.parts[c]:
                self.start(c)

    def release(self, i: int) -> None:
        self.waits[i] -= 1
        if not self.waits[i]:
            heapq.heappush(self.ready, (-self.way[i], i))
