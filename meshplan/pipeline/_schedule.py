"""`schedule`: the table of slots of a schedule by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshplan.core import ArgumentError, nearest
from meshplan.pipeline._arrival import arrival_orders
from meshplan.pipeline._orders import (
    circular,
    gpipe,
    interleaved,
    interleaved_warm_up,
    merak,
    one_forward_one_backward,
    zero_bubble_h1,
)
from meshplan.pipeline._seconds import StageSeconds
from meshplan.pipeline._slots import RECOMPUTES, Recompute, Schedule, Slot

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "circular", "merak", "axonn", "async-1f1b", "stale")
ASYNCHRONOUS = ("async-1f1b", "stale")
CHUNKED = ("interleaved", "circular")
ALIKE = StageSeconds(forward=1, backward=2)


def schedule(
    name: str, stages: int, micro_batches: int, *, chunks: int = 1, mini_batches: int | None = None,
    switch_at: int | None = None, recompute: Recompute | None = None, last_recomputes: bool | None = None,
    seconds: StageSeconds | None = None,
) -> Schedule:
    """The slots of every stage, in order.

    `micro_batches`: of one mini-batch. `chunks`: parts of the model on each stage, for "interleaved" and
    "circular". `mini_batches`: how many are laid out, for "async-1f1b" (no flush between them) and "stale"
    (no flush before mini-batch `switch_at`, one after each from there on; 1912.12675); by default enough for
    every stage's lag to be seen. `recompute`: a second forward before each backward, "late" (when the gradient is
    there) or "early" (while it is on its way), by default "none", and "early" for "merak"; `last_recomputes`: on
    the last part of the model, too, by default False for "merak" alone. `seconds`: by which "axonn" finds what
    arrives first, by default a backward twice a forward and equal stages. Raises ArgumentError for what cannot be.
    """
    _check_arguments(name, stages, micro_batches, chunks, mini_batches, switch_at, recompute)
    lasts = name != "merak" if last_recomputes is None else last_recomputes
    again = ("early" if name == "merak" else "none") if recompute is None else recompute
    lag = -(-(stages - 1) // micro_batches)
    minis = 1 if name not in ASYNCHRONOUS else mini_batches or (switch_at or 0) + lag + 2
    switch = minis if switch_at is None else switch_at
    table = Schedule(
        name=name, stages=stages, micro_batches=micro_batches, chunks=chunks, mini_batches=minis, slots=(),
        in_flight_bounds=tuple(_bound(name, stages, k, micro_batches, chunks, minis) for k in range(stages)),
        splits_backward=name == "zb-h1", waits_for_gradient=again == "late",
        synchronous_from=switch if name in ASYNCHRONOUS else 0,
    )
    rows = _rows(table, again, lasts, seconds or ALIKE)
    if again != "none":
        rows = [_with_second_forwards(table, row, k, lasts) for k, row in enumerate(rows)]
    return replace(table, slots=tuple(tuple(_with_updates(table, row)) for row in rows))


def _rows(table: Schedule, again: Recompute, lasts: bool, seconds: StageSeconds) -> list[list[Slot]]:
    name, n, micros = table.name, table.stages, range(table.total_micro_batches)
    if name == "axonn":
        return arrival_orders(table, seconds, again != "none", lasts)
    if name in CHUNKED:
        chunked = interleaved if name == "interleaved" else circular
        return [chunked(n, k, micros, table.chunks) for k in range(n)]
    if name in ASYNCHRONOUS:
        return [_asynchronous(table, k, micros) for k in range(n)]
    simple = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "merak": merak, "zb-h1": zero_bubble_h1}[name]
    return [simple(n, k, micros) for k in range(n)]


def _asynchronous(table: Schedule, stage: int, micros: Sequence[int]) -> list[Slot]:
    """1F1B over many mini-batches as over one; from `synchronous_from` on one mini-batch after the other."""
    first = table.synchronous_from * table.micro_batches
    found = one_forward_one_backward(table.stages, stage, micros[:first]) if first else []
    for start in range(first, len(micros), table.micro_batches):
        found += one_forward_one_backward(table.stages, stage, micros[start : start + table.micro_batches])
    return found


def _with_second_forwards(table: Schedule, row: list[Slot], stage: int, lasts: bool) -> list[Slot]:
    found = []
    for slot in row:
        last = stage == table.stages - 1 and slot.chunk == table.chunks - 1
        if slot.kind == "backward" and (lasts or not last):
            found.append(Slot("recompute", slot.micro_batch, slot.chunk))
        found.append(slot)
    return found


def _with_updates(table: Schedule, row: list[Slot]) -> list[Slot]:
    """An update as soon as the last backward of a mini-batch is done."""
    left = [table.micro_batches * table.chunks] * table.mini_batches
    found = []
    for slot in row:
        found.append(slot)
        if slot.kind == table.last_use:
            mini = table.mini_batch(slot)
            left[mini] -= 1
            if not left[mini]:
                found.append(Slot("update", (mini + 1) * table.micro_batches - 1, -1))
    return found


def _bound(name: str, stages: int, stage: int, micro_batches: int, chunks: int, minis: int) -> int:
    """The most (micro-batch, chunk) pairs that the stage may have in flight."""
    rest = stages - stage
    known = {
        "1f1b": rest, "async-1f1b": rest, "stale": rest, "zb-h1": stages, "axonn": stages,
        "merak": rest + (stage == stages - 2), "interleaved": interleaved_warm_up(stages, stage, chunks) + 1,
    }
    everything = micro_batches * chunks * minis
    return min(everything, known.get(name, everything))


def _check_arguments(
    name: str, stages: int, micro_batches: int, chunks: int, mini_batches: int | None, switch_at: int | None,
    recompute: Recompute | None,
) -> None:
    if name not in SCHEDULES:
        raise ArgumentError(f"schedule '{name}' is unknown. {nearest(str(name), SCHEDULES)}")
    counts = {"stages": stages, "micro_batches": micro_batches, "chunks": chunks, "mini_batches": mini_batches}
    for what, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ArgumentError(f"schedule '{name}' with {what}={count!r} cannot be; give a whole number from 1 on.")
    if name in CHUNKED and chunks < 2 and name == "interleaved":
        raise ArgumentError("schedule 'interleaved' has 1 chunk a stage; give chunks=2 or more, or take '1f1b'.")
    if name not in CHUNKED and chunks > 1:
        raise ArgumentError(
            f"schedule '{name}' with chunks={chunks} cannot be: its stages hold one part of the model each; "
            f"take one of {', '.join(CHUNKED)}."
        )
    if name == "interleaved" and micro_batches % stages:
        down = micro_batches // stages * stages
        near = " or ".join(str(count) for count in (down, down + stages) if count)
        raise ArgumentError(
            f"schedule 'interleaved' runs micro-batches in groups of {stages}, one for each stage, and "
            f"{micro_batches} micro-batches do not divide into such; give {near}."
        )
    if recompute is not None and recompute not in RECOMPUTES:
        raise ArgumentError(f"schedule '{name}': recompute={recompute!r} is none. {nearest(recompute, RECOMPUTES)}")
    if name not in ASYNCHRONOUS and (mini_batches or 1) != 1:
        raise ArgumentError(
            f"schedule '{name}' ends with each mini-batch, and mini_batches={mini_batches} was given; "
            f"leave it out, or take one of {', '.join(ASYNCHRONOUS)}."
        )
    _check_switch(name, mini_batches, switch_at)


def _check_switch(name: str, mini_batches: int | None, switch_at: int | None) -> None:
    if name == "stale" and switch_at is None:
        raise ArgumentError("schedule 'stale' goes over to synchronous at some mini-batch; give switch_at=.")
    if name != "stale" and switch_at is not None:
        raise ArgumentError(f"schedule '{name}' never switches, and switch_at={switch_at} was given; take 'stale'.")
    if switch_at is not None and not 0 <= switch_at <= (mini_batches or switch_at):
        raise ArgumentError(
            f"schedule 'stale' of {mini_batches} mini-batches cannot switch at mini-batch {switch_at}; "
            f"give 0 to {mini_batches}."
        )
