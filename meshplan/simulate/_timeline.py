"""When every task ran, and what follows from it: busy and exposed time, the critical path, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshplan.simulate._intervals import seconds, uncovered, union
from meshplan.simulate._task import Floats, Ints, Resource, TaskKind, Tasks

COMMUNICATION: tuple[TaskKind, ...] = ("collective", "send", "receive", "host")
WaitedFor = Literal["start", "dependence", "resource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalStep:
    """A task on the critical path and what held it until the one before had ended.

    "start": nothing did, it began at 0 seconds; "dependence": it comes after that task;
    "resource": that task held, or gave way on, a resource that it needs.
    """

    task: int
    waited_for: WaitedFor
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """What `simulate` found; all times in seconds from the start of the step.

    `ready`: when the last task that it comes after had ended, `start` and `end`: when it ran,
    `cause`: the task whose end let it start (-1: none, at 0 seconds), so that
    `start[i] == end[cause[i]]`. `alone_seconds`: what each takes where nothing shares its links.
    Timelines are equal where every time of every task is, bit by bit.
    """

    tasks: Tasks
    resources: tuple[Resource, ...]
    sharing: str
    alone_seconds: Floats
    start: Floats
    end: Floats
    ready: Floats
    cause: Ints

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        fields = ("alone_seconds", "start", "end", "ready", "cause")
        return self.resources == other.resources and all(
            np.array_equal(getattr(self, field), getattr(other, field)) for field in fields
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def makespan_seconds(self) -> float:
        """When the last task ends."""
        return float(self.end.max()) if len(self.end) else 0.0

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that have tasks or resources, rising."""
        own = {resource.device for resource in self.resources} | set(np.unique(self.tasks.device).tolist())
        return tuple(sorted(own - {-1}))

    # ------------------------------------------------------------------------------------------ resources

    def busy(self, resource: int) -> Floats:
        """[k, 2] start and end of the stretches in which the resource serves some task, rising."""
        users = self.tasks.user[self.tasks.uses == resource]
        return union(self.start[users], self.end[users])

    def utilisation(self, resource: int) -> float:
        """The fraction of the makespan in which the resource serves some task."""
        whole = self.makespan_seconds
        return seconds(self.busy(resource)) / whole if whole else 0.0

    # ------------------------------------------------------------------------------------ communication

    def running(self, device: int, kinds: Sequence[TaskKind]) -> Floats:
        """[k, 2] stretches in which the device runs some task of these kinds.

        A task runs on its own device and on those whose resources it occupies.
        """
        which = self.tasks.of_kind(*kinds) & self.tasks.on_device(device, self.resources)
        return union(self.start[which], self.end[which])

    def compute_seconds(self, device: int = 0) -> float:
        """How long the device computes."""
        return seconds(self.running(device, ("compute",)))

    def communication_seconds(self, device: int = 0, kinds: Sequence[TaskKind] = COMMUNICATION) -> float:
        """How long some communication of the device runs."""
        return seconds(self.running(device, kinds))

    def exposed_seconds(self, device: int = 0, kinds: Sequence[TaskKind] = COMMUNICATION) -> float:
        """How long some communication of the device runs and no compute does."""
        return float(np.sum(uncovered(self.running(device, kinds), self.running(device, ("compute",)))))

    def hidden_seconds(self, device: int = 0, kinds: Sequence[TaskKind] = COMMUNICATION) -> float:
        """How long communication and compute of the device run at once."""
        return self.communication_seconds(device, kinds) - self.exposed_seconds(device, kinds)

    def idle_seconds(self, device: int = 0) -> float:
        """How long the device neither computes nor communicates, up to the makespan."""
        return self.makespan_seconds - seconds(self.running(device, ("compute", *COMMUNICATION)))

    def exposed_by_task(self, device: int = 0) -> Floats:
        """For each communication of the device the seconds of it without compute there; 0 for all others.

        Communications that run at once each count the whole time.
        """
        which = self.tasks.of_kind(*COMMUNICATION) & self.tasks.on_device(device, self.resources)
        found = np.zeros(len(self.start))
        spans = np.column_stack([self.start[which], self.end[which]])
        found[which] = uncovered(spans, self.running(device, ("compute",)))
        return found

    # ------------------------------------------------------------------------------------ critical path

    def critical_path(self) -> tuple[CriticalStep, ...]:
        """The chain of tasks that ends last, each starting when the one before ends, first task first.

        Of several tasks that end last, the first in task order.
        """
        if not len(self.end):
            return ()
        place, found = int(np.argmax(self.end)), []
        while place >= 0:
            before = int(self.cause[place])
            after = self.tasks.after[self.tasks.after_ptr[place] : self.tasks.after_ptr[place + 1]]
            why: WaitedFor = "start" if before < 0 else "dependence" if before in after else "resource"
            found.append(CriticalStep(
                task=place, waited_for=why, start_seconds=float(self.start[place]), end_seconds=float(self.end[place])
            ))
            place = before
        return tuple(found[::-1])

    # ------------------------------------------------------------------------------------------- memory

    def memory(self, device: int = 0) -> tuple[Floats, Ints]:
        """(times, bytes from each time on) on the device: 0 seconds, and whenever the bytes change after that.

        Where tasks meet, those that end free before those that start allocate.
        """
        times, change = self._changes(device)
        times, level = np.concatenate([[0.0], times]), np.concatenate([[0], np.cumsum(change)])
        last = np.concatenate([times[1:] != times[:-1], [True]])
        times, level = times[last], level[last]
        changed = np.concatenate([[True], level[1:] != level[:-1]])
        return times[changed], level[changed]

    def peak_bytes(self, device: int = 0) -> int:
        """The most bytes that the device holds at once."""
        return int(np.cumsum(self._changes(device)[1]).max(initial=0))

    def _changes(self, device: int) -> tuple[Floats, Ints]:
        """(times, changes in bytes) in the order they happen: at one time ends, starts, then ends of tasks of 0 s."""
        own = np.flatnonzero(self.tasks.device == device)
        start, end = self.start[own], self.end[own]
        times = np.concatenate([start, end])
        change = np.concatenate([self.tasks.allocates[own], -self.tasks.frees[own]])
        phase = np.concatenate([np.ones(len(own)), np.where(end > start, 0, 2)])
        order = np.lexsort((np.tile(own, 2), phase, times))
        order = order[change[order] != 0]
        return times[order], change[order]
