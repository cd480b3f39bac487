"""`check`: whether a schedule's table can run, holds what it says, and computes what training needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshplan.core import ProblemError
from meshplan.pipeline._lag import lag_bound, lags
from meshplan.pipeline._slots import Place, Schedule, Slot, needs


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCheck:
    """What `check` counted, for each stage: the activations in flight and the weights' lag, and their bounds.

    In flight are (micro-batch, chunk) pairs; a lag is a number of updates.
    """

    in_flight: tuple[int, ...]
    in_flight_bounds: tuple[int, ...]
    lags: tuple[int, ...]
    lag_bounds: tuple[int, ...]


def check(schedule: Schedule) -> ScheduleCheck:
    """Check every rule of a schedule and return its counts.

    Every stage runs each (chunk, micro-batch) forward once and backward once (and its weight part once, where
    backwards are split; a second forward for all micro-batches of a chunk or for none), and one update for each
    mini-batch, in order; nothing waits in a circle; no more activations are in flight than the schedule's bound;
    every forward of a synchronous mini-batch sees all updates before it, one of an asynchronous mini-batch of m
    micro-batches at stage k of N lacks at most ceil((N - 1 - k) / m). Raises ProblemError with the first rule that
    does not hold.
    """
    name = f"schedule '{schedule.name}'"
    if len(schedule.slots) != schedule.stages or len(schedule.in_flight_bounds) != schedule.stages:
        raise ProblemError(
            f"{name} of {schedule.stages} stages has {len(schedule.slots)} rows of slots and "
            f"{len(schedule.in_flight_bounds)} in-flight bounds; give one of each for every stage."
        )
    for stage in range(schedule.stages):
        _check_row(schedule, stage, f"{name}, stage {stage}")
    _check_acyclic(schedule, name)
    found = ScheduleCheck(
        in_flight=schedule.in_flight(), in_flight_bounds=schedule.in_flight_bounds, lags=lags(schedule),
        lag_bounds=tuple(_lag_bound(schedule, stage) for stage in range(schedule.stages)),
    )
    for stage in range(schedule.stages):
        if found.in_flight[stage] > found.in_flight_bounds[stage]:
            raise ProblemError(
                f"{name}, stage {stage}: {found.in_flight[stage]} forwards wait for their backward at once and the "
                f"bound is {found.in_flight_bounds[stage]}; run backwards earlier, or raise the bound."
            )
        _check_versions(schedule, stage, found.lag_bounds[stage], f"{name}, stage {stage}")
    return found


def _lag_bound(schedule: Schedule, stage: int) -> int:
    if not schedule.synchronous_from:
        return 0
    return lag_bound(schedule.stages, schedule.micro_batches, stage)


def _check_row(schedule: Schedule, stage: int, where: str) -> None:
    """Every slot there once, none that should not be."""
    row = schedule.slots[stage]
    counts = Counter(row)
    pairs = [(m, c) for m in range(schedule.total_micro_batches) for c in range(schedule.chunks)]
    kinds = ("forward", "backward", "weight") if schedule.splits_backward else ("forward", "backward")
    needed = {Slot(kind, m, c) for kind in kinds for m, c in pairs}
    second = {chunk for at, chunk in schedule.recomputed if at == stage}
    needed |= {Slot("recompute", m, c) for m, c in pairs if c in second}
    t = schedule.micro_batches
    updates = [Slot("update", (mini + 1) * t - 1, -1) for mini in range(schedule.mini_batches)]
    needed |= set(updates)
    for slot in row:
        if slot not in needed:
            raise ProblemError(f"{where}: the {slot} has no place in it; it has {len(pairs)} forwards.")
        if counts[slot] > 1:
            raise ProblemError(f"{where}: the {slot} is there {counts[slot]} times; give it once.")
    for slot in sorted(needed, key=lambda slot: (slot.micro_batch, slot.chunk, slot.kind)):
        if slot not in counts:
            raise ProblemError(f"{where}: the {slot} is missing; give it once.")
    if [slot for slot in row if slot.kind == "update"] != updates:
        raise ProblemError(f"{where}: the updates are not in the order of their mini-batches; put them in order.")


def _check_acyclic(schedule: Schedule, name: str) -> None:
    """Run every row as far as it goes; what is left waits in a circle."""
    waits = needs(schedule)
    done: set[Place] = set()
    at = [0] * schedule.stages
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(schedule.slots):
            while at[stage] < len(row) and done.issuperset(waits[stage][at[stage]]):
                done.add((stage, row[at[stage]]))
                at[stage] += 1
                moved = True
    stuck = [
        (stage, row[at[stage]], next(place for place in waits[stage][at[stage]] if place not in done))
        for stage, row in enumerate(schedule.slots) if at[stage] < len(row)
    ]
    if stuck:
        # A stage that waits for itself is the fault; without one, any in the circle.
        stage, slot, (other, needed) = min(stuck, key=lambda each: (each[0] != each[2][0], each[0]))
        raise ProblemError(
            f"{name} never ends: stage {stage} waits at the {slot} for the {needed} on stage {other}, which comes "
            "after it or waits in turn; put what it waits for earlier."
        )


def _check_versions(schedule: Schedule, stage: int, bound: int, where: str) -> None:
    """Forwards see every update that they must."""
    done = 0
    for slot in schedule.slots[stage]:
        done += slot.kind == "update"
        if slot.kind != "forward":
            continue
        mini = schedule.mini_batch(slot)
        allowed = bound if mini < schedule.synchronous_from else 0
        if mini - done > allowed:
            raise ProblemError(
                f"{where}: the {slot} of mini-batch {mini} lacks {mini - done} of the updates before it, and may lack "
                f"{allowed}; put the updates earlier."
            )
