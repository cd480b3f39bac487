"""How many updates old the weights are that an asynchronous schedule computes with, stage by stage.

Update j of a stage goes after the last backward of mini-batch j. A synchronous schedule runs mini-batch j on weights
that j updates have gone into; the lag of a forward is how many of them are missing.
"""

from __future__ import annotations

import math

from meshplan.pipeline._slots import Schedule, Slot, SlotKind


def lag_bound(stages: int, micro_batches: int, stage: int) -> int:
    """ceil((N - 1 - k) / T): the lag of stage k of N with T micro-batches to an update, 1F1B without a flush.

    Before the first forward of mini-batch j, micro-batch j T, stage k has run j T - (N - 1 - k) backwards, and so
    floor of that over T updates.
    """
    return -(-(stages - 1 - stage) // micro_batches)


def xpipe_steps(stages: int, micro_batches: int, stage: int) -> tuple[int, int]:
    """(forward, backward) updates that XPipe predicts ahead (1911.04610, its formulas as printed).

    s_fwd = round((N + T - k/2 - 2) / T), s_bwd = round((T + floor(k/2) - 1) / T), halves rounded up, of stage k of N
    and T micro-batches to an update.
    """
    n, t, k = stages, micro_batches, stage
    return math.floor((n + t - k / 2 - 2) / t + 0.5), math.floor((t + k // 2 - 1) / t + 0.5)


def forward_lags(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """For each mini-batch the lag of its first forward, that of the micro-batch whose weights XPipe predicts."""
    return _first_lags(schedule, stage, "forward")


def backward_lags(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """For each mini-batch the lag of the backward of its first micro-batch, were it to read the weights anew."""
    return _first_lags(schedule, stage, "backward")


def _first_lags(schedule: Schedule, stage: int, kind: SlotKind) -> tuple[int, ...]:
    found: dict[int, int] = {}
    done = 0
    for slot in schedule.slots[stage]:
        done += slot.kind == "update"
        if slot.kind == kind:
            found.setdefault(schedule.mini_batch(slot), schedule.mini_batch(slot) - done)
    return tuple(found[mini] for mini in sorted(found))


def lags(schedule: Schedule) -> tuple[int, ...]:
    """For each stage the largest lag of any mini-batch, counted in the table; 0 where the schedule is synchronous."""
    return tuple(max(forward_lags(schedule, stage)) for stage in range(schedule.stages))


def weight_copies(schedule: Schedule) -> tuple[int, ...]:
    """For each stage the most versions of its weights alive at once where every backward reads what its forward read.

    That is PipeDream's stashing (1806.03377): the newest version, and every older one that some micro-batch in
    flight has been forward with.
    """
    found = []
    for row in schedule.slots:
        done, most = 0, 1
        read: dict[Slot, int] = {}
        for slot in row:
            if slot.kind == "forward":
                read[Slot(schedule.last_use, slot.micro_batch, slot.chunk)] = done
            done += slot.kind == "update"
            most = max(most, len({*read.values(), done}))
            read.pop(slot, None)
        found.append(most)
    return tuple(found)
