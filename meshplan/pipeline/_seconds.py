"""How long the slots of a schedule take, and what their activations weigh, stage by stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from meshplan.core import ProblemError
from meshplan.pipeline._slots import Schedule, SlotKind

PerStage = float | Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Of one micro-batch through one chunk of a stage; a figure for all stages alike, or one for each.

    `forward`; `recompute`: the second forward (None: as the first); `backward`: the part towards the input,
    and `weight` the rest of it (a schedule that does not split the backward takes both at once); `update`: of the
    stage's weights, once per mini-batch. `send`: seconds of the activations from a stage to the next, and
    `send_back` of the gradient to the one before (None: as `send`); both run beside the compute, one at a time
    per link and direction. `activation_bytes` are kept from the forward to the last use, or, where there is a
    second forward, from that one on and `input_bytes` before it. Raises ProblemError for negative figures.
    """

    forward: PerStage
    backward: PerStage
    recompute: PerStage | None = None
    weight: PerStage = 0.0
    update: PerStage = 0.0
    send: PerStage = 0.0
    send_back: PerStage | None = None
    activation_bytes: int | Sequence[int] = 1
    input_bytes: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            figures = [] if value is None else [value] if isinstance(value, int | float) else list(value)
            for figure in figures:
                if not (math.isfinite(figure) and figure >= 0):
                    raise ProblemError(f"StageSeconds: {field.name} has {figure:g}; give figures of at least 0.")

    def of(self, name: str, stage: int, stages: int) -> float:
        """The figure of this name of one stage; raises ProblemError where another number of stages is given."""
        value = getattr(self, name)
        if value is None:
            return self.of({"recompute": "forward", "send_back": "send"}[name], stage, stages)
        if isinstance(value, int | float):
            return value
        if len(value) != stages:
            raise ProblemError(
                f"StageSeconds: {name} has {len(value)} figures and the schedule {stages} stages; "
                "give one figure for all, or one for each stage."
            )
        return value[stage]

    def slot(self, schedule: Schedule, kind: SlotKind, stage: int) -> float:
        """Seconds of a slot of this kind on this stage."""
        found = self.of(kind, stage, schedule.stages)
        if kind == "backward" and not schedule.splits_backward:
            found += self.of("weight", stage, schedule.stages)
        return found
