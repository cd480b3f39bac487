"""AxoNN's order: every stage runs what has arrived (Singh and Bhatele 2021, arXiv 2110.13005).

Stage 0 injects as many micro-batches as there are stages; each backward that returns there injects one more. The
last stage runs a backward right after its forward. A stage that is free takes what arrives first; where messages
have come in while it was busy, a gradient goes before activations. Taken strictly in the order of their arrival,
uniform stages would not reach (m + N - 1)(F + B): with N = 8, m = 32, F = 1 and B = 2 that is 117, and 126 was found.
"""

from __future__ import annotations

import heapq

from meshplan.pipeline._seconds import StageSeconds
from meshplan.pipeline._slots import Schedule, Slot


def arrival_orders(table: Schedule, seconds: StageSeconds, recomputes: bool, lasts: bool) -> list[list[Slot]]:
    """For each stage its forwards and backwards in the order in which they run, for the seconds given."""
    run = _Run(table, seconds, recomputes, lasts)
    for micro in range(min(table.stages, table.total_micro_batches)):
        run.arrive(0.0, 0, Slot("forward", micro))
    return run.go()


class _Run:
    """The message queues of all stages; `events` are (seconds, 0: a stage is free or 1: a message is there, ...)."""

    __slots__ = ("again", "busy", "events", "inbox", "injected", "rows", "seconds", "table")

    def __init__(self, table: Schedule, seconds: StageSeconds, recomputes: bool, lasts: bool) -> None:
        n = table.stages
        self.table, self.seconds = table, seconds
        self.again = [recomputes and (lasts or stage < n - 1) for stage in range(n)]
        self.busy = [False] * n
        self.inbox: list[list[tuple[bool, float, int]]] = [[] for _ in range(n)]
        self.events: list[tuple[float, int, int, bool, int]] = []
        self.rows: list[list[Slot]] = [[] for _ in range(n)]
        self.injected = min(n, table.total_micro_batches)

    def arrive(self, at: float, stage: int, slot: Slot) -> None:
        heapq.heappush(self.events, (at, 1, stage, slot.kind == "forward", slot.micro_batch))

    def go(self) -> list[list[Slot]]:
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, what, stage, forward, micro = heapq.heappop(self.events)
                if what:
                    heapq.heappush(self.inbox[stage], (forward, now, micro))
                else:
                    self.busy[stage] = False
                    self._pass_on(now, stage, forward, micro)
            for stage, inbox in enumerate(self.inbox):
                if inbox and not self.busy[stage]:
                    forward, _, micro = heapq.heappop(inbox)
                    self._begin(now, stage, forward, micro)
        return self.rows

    def _begin(self, now: float, stage: int, forward: bool, micro: int) -> None:
        last = stage == self.table.stages - 1
        slots = [Slot("forward", micro)] if forward else []
        if last or not forward:
            slots.append(Slot("backward", micro))
        took = sum(self.seconds.slot(self.table, slot.kind, stage) for slot in slots)
        if slots[-1].kind == "backward" and self.again[stage]:
            took += self.seconds.slot(self.table, "recompute", stage)
        self.rows[stage] += slots
        self.busy[stage] = True
        heapq.heappush(self.events, (now + took, 0, stage, forward and not last, micro))

    def _pass_on(self, now: float, stage: int, forward: bool, micro: int) -> None:
        n = self.table.stages
        if forward:
            self.arrive(now + self.seconds.of("send", stage, n), stage + 1, Slot("forward", micro))
        elif stage:
            self.arrive(now + self.seconds.of("send_back", stage, n), stage - 1, Slot("backward", micro))
        elif self.injected < self.table.total_micro_batches:
            self.arrive(now, 0, Slot("forward", self.injected))
            self.injected += 1
