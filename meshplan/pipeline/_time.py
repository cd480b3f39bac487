"""When every slot of a schedule runs, by the event loop of `meshplan.simulate`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshplan.pipeline._picture import Span, draw
from meshplan.pipeline._seconds import StageSeconds
from meshplan.pipeline._slots import Place, Schedule, Slot, needs
from meshplan.simulate import Resource, TaskList, Timeline, simulate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedSchedule:
    """A schedule and its timeline; slot `place` of a stage is task `ids[stage][place]`. Times in seconds."""

    schedule: Schedule
    timeline: Timeline
    ids: tuple[tuple[int, ...], ...]

    @property
    def makespan_seconds(self) -> float:
        """When the last slot ends."""
        return self.timeline.makespan_seconds

    @property
    def bubble(self) -> float:
        """The fraction of all stages' time, from 0 seconds to the makespan, in which they compute nothing."""
        whole = self.makespan_seconds * self.schedule.stages
        return sum(self.idle_seconds) / whole if whole else 0.0

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """For each stage the seconds in which it computes nothing."""
        stages = range(self.schedule.stages)
        return tuple(self.makespan_seconds - self.timeline.compute_seconds(stage) for stage in stages)

    @property
    def peak_activation_bytes(self) -> tuple[int, ...]:
        """For each stage the most activation bytes held at once."""
        return tuple(self.timeline.peak_bytes(stage) for stage in range(self.schedule.stages))

    def spans(self, stage: int) -> Iterator[Span]:
        """(slot, start, end in seconds) of every slot of the stage, in order."""
        for slot, task in zip(self.schedule.slots[stage], self.ids[stage], strict=True):
            yield slot, float(self.timeline.start[task]), float(self.timeline.end[task])

    def picture(self, width: int = 100) -> tuple[str, ...]:
        """The timeline in at most `width` columns of text: a line for each stage, and two of legend below."""
        rows = [list(self.spans(stage)) for stage in range(self.schedule.stages)]
        return draw(rows, self.makespan_seconds, width)


def time_schedule(schedule: Schedule, seconds: StageSeconds) -> TimedSchedule:
    """Run the schedule: every stage in the order of its slots, sends beside the compute.

    A send occupies the link between its two stages, each way for itself; one of 0 seconds is left out. Raises
    ProblemError where the slots wait for each other in a circle, or the figures are not of this many stages.
    """
    n = schedule.stages
    places: list[Place] = [(stage, slot) for stage, row in enumerate(schedule.slots) for slot in row]
    numbers = {place: number for number, place in enumerate(places)}
    links: dict[tuple[int, int], int] = {}
    tasks, sends = TaskList(), []
    waits = (each for row in needs(schedule) for each in row)
    again = schedule.recomputed
    for (stage, slot), earlier_places in zip(places, waits, strict=True):
        after = []
        for other, earlier in earlier_places:
            took = seconds.of("send" if earlier.kind == "forward" else "send_back", other, n) if other != stage else 0.0
            if not took:
                after.append(numbers[other, earlier])
                continue
            after.append(len(places) + len(sends))
            link = links.setdefault((other, stage), n + len(links))
            sends.append((took, link, numbers[other, earlier], other, stage, earlier))
        allocates, frees = _bytes(schedule, seconds, stage, slot, again=(stage, slot.chunk) in again)
        tasks.add(
            "compute", seconds=seconds.slot(schedule, slot.kind, stage), uses=(stage,), after=after, device=stage,
            allocates=allocates, frees=frees, name=f"{slot}, stage {stage}",
        )
    for took, link, after_id, stage, peer, slot in sends:
        tasks.add(
            "send", seconds=took, uses=(link,), after=[after_id], device=stage, peer=peer,
            name=f"send after {slot}, stage {stage} to {peer}",
        )
    resources = [Resource(name="compute", kind="compute", device=k, in_order=True) for k in range(n)]
    resources += [Resource(name=f"link {a} to {b}", kind="link", device=a) for a, b in links]
    ids = tuple(tuple(numbers[stage, slot] for slot in row) for stage, row in enumerate(schedule.slots))
    return TimedSchedule(schedule=schedule, timeline=simulate(tasks.build(), resources), ids=ids)


def _bytes(schedule: Schedule, seconds: StageSeconds, stage: int, slot: Slot, *, again: bool) -> tuple[int, int]:
    """(bytes allocated at the start, bytes freed at the end) of a slot."""
    if slot.kind == "update":
        return 0, 0
    kept = int(seconds.of("activation_bytes", stage, schedule.stages))
    stored = min(kept, int(seconds.of("input_bytes", stage, schedule.stages))) if again else kept
    allocates = {"forward": stored, "recompute": kept - stored}.get(slot.kind, 0)
    return allocates, kept if slot.kind == schedule.last_use else 0
