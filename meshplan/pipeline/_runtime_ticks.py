"""A schedule laid out over ticks, for a program that all stages run in step.

In a tick a stage runs one slot of its row, or none; then every stage hands an activation to the next one and a
gradient to the one before. A forward may run in the tick after what it waits for. Second forwards are part of the
backward, which computes its part anew from what crossed into it, and so the last part has no forward of its own.
What arrives is put into a place of the stage's buffers and stays until it has been used for the last time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshplan.pipeline._slots import Place, Schedule, Slot, SlotKind, before

IDLE = 0
NOWHERE = -1
KINDS: tuple[SlotKind, ...] = ("forward", "backward", "weight")
COLUMNS = ("work", "micro_batch", "activation", "gradient", "keep_activation", "keep_gradient")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ticks:
    """`table` [ticks, stages, 6], int32, by `COLUMNS`.

    "work": 0 for none, else 1 + 3 part + (0 forward, 1 backward, 2 weight part); "micro_batch"; the places in the
    buffers from which it reads the activation and the gradient; the places where what arrives at the end of the tick
    is kept. -1 where there is none. `activations` and `gradients`: places that the buffers need; `held[stage]`: the
    most activations that the stage has in them at once.
    """

    schedule: Schedule
    table: NDArray[np.int32]
    activations: int
    gradients: int
    held: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.table)


def lay_out(schedule: Schedule) -> Ticks:
    """The ticks of a schedule that `check` accepts."""
    at = _ticks(schedule)
    table = np.full((1 + max(at.values()), schedule.stages, len(COLUMNS)), NOWHERE, np.int32)
    table[:, :, 0] = IDLE
    for (stage, slot), tick in at.items():
        part = slot.chunk * schedule.stages + stage
        table[tick, stage, :2] = 1 + len(KINDS) * part + KINDS.index(slot.kind), slot.micro_batch
    held, gradients = [], 0
    for stage in range(schedule.stages):
        held.append(_keep(table, stage, list(_lives(schedule, at, stage, "forward", -1)), "activation"))
        gradients = max(gradients, _keep(table, stage, list(_lives(schedule, at, stage, "backward", 1)), "gradient"))
    return Ticks(
        schedule=schedule, table=table, activations=max(held), gradients=gradients, held=tuple(held)
    )


def _is_silent(schedule: Schedule, place: Place) -> bool:
    """Whether the slot takes no tick: a second forward, an update, the last part's forward."""
    stage, slot = place
    last = slot.chunk == schedule.chunks - 1 and stage == schedule.stages - 1
    return slot.kind in ("recompute", "update") or (slot.kind == "forward" and last)


def _waits(schedule: Schedule, place: Place) -> list[Place]:
    """What the slot waits for, silent slots replaced by what they wait for."""
    found = []
    for each in before(schedule, *place):
        found += _waits(schedule, each) if _is_silent(schedule, each) else [each]
    return found


def _ticks(schedule: Schedule) -> dict[Place, int]:
    """The tick of every slot that takes one, each as early as may be."""
    rows = [
        [(stage, slot) for slot in row if not _is_silent(schedule, (stage, slot))]
        for stage, row in enumerate(schedule.slots)
    ]
    at: dict[Place, int] = {}
    nexts = [0] * schedule.stages
    tick = 0
    while any(done < len(row) for done, row in zip(nexts, rows, strict=True)):
        for stage, row in enumerate(rows):
            if nexts[stage] < len(row) and all(
                at.get(place, tick) < tick for place in _waits(schedule, row[nexts[stage]])
            ):
                at[row[nexts[stage]]] = tick
                nexts[stage] += 1
        tick += 1
    return at


def _lives(
    schedule: Schedule, at: dict[Place, int], stage: int, kind: SlotKind, step: int
) -> Iterator[tuple[int, list[int]]]:
    """Of all that arrives from slots of a kind: (the tick at whose end it arrives, the ticks in which it is used)."""
    stages, parts = schedule.stages, schedule.stages * schedule.chunks
    for chunk in range(schedule.chunks):
        source = chunk * stages + stage + step
        if not 0 <= source < parts:
            continue
        for micro in range(schedule.total_micro_batches):
            arrives = at[source % stages, Slot(kind, micro, source // stages)]
            uses = [at.get((stage, Slot(each, micro, chunk)), NOWHERE) for each in KINDS]
            wanted = uses if kind == "forward" else uses[1:]
            yield arrives, [tick for tick in wanted if tick != NOWHERE]


def _keep(table: NDArray[np.int32], stage: int, lives: list[tuple[int, list[int]]], what: str) -> int:
    """Give everything that arrives a place that is free from then to its last use; how many places it took."""
    free_from: list[int] = []
    for arrives, uses in sorted(lives):
        place = next((k for k, tick in enumerate(free_from) if tick <= arrives), len(free_from))
        free_from[place : place + 1] = [max(uses)]
        table[arrives, stage, COLUMNS.index(f"keep_{what}")] = place
        table[uses, stage, COLUMNS.index(what)] = place
    return len(free_from)
