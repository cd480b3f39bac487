"""Samples per second of a schedule, and the seconds of its stages modelled on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshplan.core import ArgumentError, MeshShape
from meshplan.machine import Machine, collective_seconds
from meshplan.pipeline._seconds import PerStage, StageSeconds
from meshplan.pipeline._slots import Schedule
from meshplan.pipeline._time import TimedSchedule, time_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """`seconds` of one mini-batch and its update, `samples_per_second`, and the idle fraction of that time."""

    schedule: str
    seconds: float
    samples_per_second: float
    bubble: float


def throughput(schedule: Schedule, seconds: StageSeconds, *, samples_per_micro_batch: float = 1.0) -> Throughput:
    """What the schedule trains on in a second.

    A synchronous one takes its makespan for a mini-batch, "stale" the mean of all its mini-batches. One without any
    flush goes on for ever: what counts is its pace at the last stage, from the update in the middle of those laid
    out to the last. Raises ArgumentError where fewer than 4 mini-batches show no pace.
    """
    timed = time_schedule(schedule, seconds)
    minis = schedule.mini_batches
    each = timed.makespan_seconds / minis
    if 0 < schedule.synchronous_from >= minis:
        if minis < 4:
            raise ArgumentError(
                f"throughput(): {minis} mini-batches of schedule '{schedule.name}' show no steady pace; lay out "
                "mini_batches=4 or more."
            )
        each = _pace(timed)
    busy = sum(seconds.slot(schedule, slot.kind, stage) for stage, row in enumerate(schedule.slots) for slot in row)
    mean = busy / minis / schedule.stages
    samples = schedule.micro_batches * samples_per_micro_batch
    return Throughput(
        schedule=schedule.name, seconds=each, samples_per_second=samples / each if each else 0.0,
        bubble=1 - mean / each if each else 0.0,
    )


def _pace(timed: TimedSchedule) -> float:
    """Seconds from update to update on the last stage, which never waits for a drain."""
    ends = [end for slot, _, end in timed.spans(timed.schedule.stages - 1) if slot.kind == "update"]
    first = len(ends) // 2 - 1
    return (ends[-1] - ends[first]) / (len(ends) - 1 - first)


def stage_seconds(
    machine: Machine, mesh: MeshShape, *, forward_flops: PerStage, boundary_bytes: float, dtype: str = "bfloat16",
    axis: str = "stage", sum_axes: Sequence[str] = (), gradient_bytes: PerStage = 0, update_bytes: PerStage = 0,
    activation_bytes: int | Sequence[int] = 1, input_bytes: int | Sequence[int] = 0,
) -> StageSeconds:
    """The seconds of one micro-batch on each stage at the chip's peak and the links' full rate.

    All figures are of one device: `forward_flops` of a stage's forward (both parts of a backward take as many
    each), `boundary_bytes` over the links of `axis` to the next stage, `gradient_bytes` summed over `sum_axes`
    before an update that moves `update_bytes` through memory. Raises as `collective_seconds` for axes that the mesh
    has not.
    """
    stages = mesh.size(axis) if axis in mesh.names else 1
    rate = machine.chip.flops_for(dtype)
    forward = [flops / rate for flops in _each(forward_flops, stages)]
    update = [
        moved / machine.chip.memory_bytes_per_second
        + (collective_seconds(machine, mesh, "all-reduce", summed, tuple(sum_axes)) if sum_axes else 0.0)
        for moved, summed in zip(_each(update_bytes, stages), _each(gradient_bytes, stages), strict=True)
    ]
    return StageSeconds(
        forward=forward, backward=forward, weight=forward, update=update,
        send=collective_seconds(machine, mesh, "collective-permute", boundary_bytes, (axis,)),
        activation_bytes=activation_bytes, input_bytes=input_bytes,
    )


def _each(figure: PerStage, stages: int) -> list[float]:
    return [float(figure)] * stages if isinstance(figure, int | float) else [float(x) for x in figure]
