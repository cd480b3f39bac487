"""What a schedule is: for every stage the order of its work, as a table of slots.

A model cut into `stages` x `chunks` parts runs part q = chunk * stages + stage on that stage. A slot is one piece of
work of one stage: the forward, the second forward, the backward or the weight part of the backward of one
micro-batch through one chunk, or the update after a mini-batch. A stage works through its slots in order; a slot
also waits for what `before` names, on other stages too. Seconds are no part of it (`meshplan.pipeline.time_schedule`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshplan.core import ProblemError, nearest

SlotKind = Literal["forward", "recompute", "backward", "weight", "update"]
SLOT_KINDS: tuple[SlotKind, ...] = ("forward", "recompute", "backward", "weight", "update")
Recompute = Literal["none", "late", "early"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "late", "early")


@dataclass(frozen=True, slots=True)
class Slot:
    """One piece of a stage's work.

    `micro_batch` counts from 0 through all mini-batches; of an update it is the last that goes into it, and `chunk`
    is -1: all of the stage's. "backward" is the whole backward, or its part towards the input where the schedule
    has "weight" slots for the rest. Raises ProblemError for a kind that is none.
    """

    kind: SlotKind
    micro_batch: int
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.kind not in SLOT_KINDS:
            raise ProblemError(f"a slot of kind '{self.kind}' cannot be. {nearest(str(self.kind), SLOT_KINDS)}")

    def __str__(self) -> str:
        chunk = f", chunk {self.chunk}" if self.chunk > 0 else ""
        return f"{self.kind} of micro-batch {self.micro_batch}{chunk}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The slots of every stage in order, `slots[stage][place]`; made by `schedule`, or by hand and put to `check`.

    `micro_batches` make up a mini-batch, `mini_batches` are laid out one after the other. `in_flight_bounds[stage]`:
    the most (micro-batch, chunk) pairs whose activations the stage may hold at once. `splits_backward`: weight
    slots exist. `waits_for_gradient`: a second forward starts only when the gradient is there.
    `synchronous_from`: the first mini-batch whose forward must see every update before it (0: always;
    `mini_batches`: never).
    """

    name: str
    stages: int
    micro_batches: int
    slots: tuple[tuple[Slot, ...], ...]
    in_flight_bounds: tuple[int, ...]
    chunks: int = 1
    mini_batches: int = 1
    splits_backward: bool = False
    waits_for_gradient: bool = False
    synchronous_from: int = 0

    @property
    def total_micro_batches(self) -> int:
        return self.micro_batches * self.mini_batches

    @property
    def last_use(self) -> SlotKind:
        """The kind of slot after which a micro-batch's activations are no longer needed."""
        return "weight" if self.splits_backward else "backward"

    def mini_batch(self, slot: Slot) -> int:
        """The mini-batch that the slot's micro-batch belongs to, from 0."""
        return slot.micro_batch // self.micro_batches

    def count(self, stage: int, kind: SlotKind) -> int:
        """How many slots of a kind the stage has."""
        return sum(slot.kind == kind for slot in self.slots[stage])

    @property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """(stage, chunk) of all parts that run a second forward."""
        return frozenset(
            (stage, slot.chunk) for stage, row in enumerate(self.slots) for slot in row if slot.kind == "recompute"
        )

    def in_flight(self) -> tuple[int, ...]:
        """For each stage the most (micro-batch, chunk) pairs between forward and last use, both included."""
        found = []
        for row in self.slots:
            held = most = 0
            for slot in row:
                held += slot.kind == "forward"
                most = max(most, held)
                held -= slot.kind == self.last_use
            found.append(most)
        return tuple(found)


Place = tuple[int, Slot]


def before(schedule: Schedule, stage: int, slot: Slot) -> list[Place]:
    """(stage, slot) of all that the slot waits for, beside the slots before it in its own row.

    With parts q = chunk * stages + stage, the first and last part having no neighbour beyond:
    forward q after forward q - 1; backward q after backward q + 1, the last after its own forward; a second forward
    after the first and, if it waits for the gradient, after backward q + 1; the weight part after the backward;
    an update after every backward of its mini-batch.
    """
    micro, chunk = slot.micro_batch, slot.chunk
    if slot.kind == "update":
        first = schedule.mini_batch(slot) * schedule.micro_batches
        return [
            (stage, Slot(schedule.last_use, m, c)) for c in range(schedule.chunks) for m in range(first, micro + 1)
        ]
    if slot.kind == "weight":
        return [(stage, Slot("backward", micro, chunk))]
    part = chunk * schedule.stages + stage
    if slot.kind == "forward":
        return [(_stage(schedule, part - 1), Slot("forward", micro, _chunk(schedule, part - 1)))] if part else []
    own = [(stage, Slot("forward", micro, chunk))]
    last = part == schedule.stages * schedule.chunks - 1
    if last or (slot.kind == "recompute" and not schedule.waits_for_gradient):
        return own
    return [*own, (_stage(schedule, part + 1), Slot("backward", micro, _chunk(schedule, part + 1)))]


def needs(schedule: Schedule) -> list[list[list[Place]]]:
    """For every stage and slot what `before` names, and before a backward its second forward where there is one."""
    again = schedule.recomputed
    return [
        [
            before(schedule, stage, slot) + (
                [(stage, Slot("recompute", slot.micro_batch, slot.chunk))]
                if slot.kind == "backward" and (stage, slot.chunk) in again else []
            )
            for slot in row
        ]
        for stage, row in enumerate(schedule.slots)
    ]


def _stage(schedule: Schedule, part: int) -> int:
    return part % schedule.stages


def _chunk(schedule: Schedule, part: int) -> int:
    return part // schedule.stages
