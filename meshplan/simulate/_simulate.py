"""The event loop: tasks start when what they come after has ended and their resources are free.

Queues. A task that is ready joins the queue of each of its resources; it starts when it is at
the head of all of them and all have room. Queues are in order of readiness, equal times in task
order, so the earliest waiting task is at the head everywhere and nothing waits for ever.

Sharing. With "fifo" a link serves as many tasks as its capacity, one after the other. With
"fair" links (to other devices and to the host) never queue: n tasks on a link of capacity c
each go on at min(1, c/n) of their speed, a task over several links at the least of them
(equal split at each link, nothing redistributed). Compute engines queue in both.

Times are only added and handed on, so that a task starts exactly when another ends and equal
inputs give equal bits. A fair link on which n tasks come and go costs n per coming and going.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from meshplan.core import ArgumentError, nearest
from meshplan.simulate._check import alone_seconds, refuse_cycle
from meshplan.simulate._task import RESOURCE_KINDS, Ints, Resource, ResourceKind, Tasks
from meshplan.simulate._timeline import Timeline

Sharing = Literal["fifo", "fair"]
SHARINGS: tuple[Sharing, ...] = ("fifo", "fair")


def simulate(tasks: Tasks, resources: Sequence[Resource], *, sharing: Sharing = "fifo") -> Timeline:
    """Run the tasks on the resources and return when each starts and ends, from 0 seconds.

    `sharing`: what transfers do that meet on a link, queue ("fifo") or share its rate ("fair").
    Raises ProblemError where a task uses a resource that is not there, where bytes move over
    one without a rate, and where tasks wait for each other; ArgumentError for another `sharing`.
    """
    if sharing not in SHARINGS:
        raise ArgumentError(f"simulate(): sharing={sharing!r} is none. {nearest(str(sharing), SHARINGS)}")
    resources = tuple(resources)
    alone = alone_seconds(tasks, resources)
    run = _Run(tasks, resources, alone.tolist(), sharing == "fair")
    run.go()
    if run.unfinished:
        refuse_cycle(tasks, run.waits, _predecessors(tasks, resources))
    return Timeline(
        tasks=tasks, resources=resources, sharing=sharing, alone_seconds=alone, start=np.array(run.start),
        end=np.array(run.end), ready=np.array(run.ready), cause=np.array(run.cause, dtype=np.int64),
    )


def unlimited(resources: Sequence[Resource], kinds: Sequence[ResourceKind] = RESOURCE_KINDS) -> tuple[Resource, ...]:
    """The same resources where those of `kinds` never make a task wait: a timeline without congestion.

    A resource that is in order keeps its order and capacity: the order is the program's.
    """
    return tuple(
        replace(resource, capacity=math.inf) if resource.kind in kinds and not resource.in_order else resource
        for resource in resources
    )


def _edges(tasks: Tasks, resources: Sequence[Resource]) -> tuple[Ints, Ints]:
    """(earlier, later) of every dependence, and of neighbours on a resource that is in order."""
    users = tasks.user
    earlier, later = [tasks.after], [np.repeat(np.arange(len(tasks)), np.diff(tasks.after_ptr))]
    for place, resource in enumerate(resources):
        if resource.in_order:
            stream = users[tasks.uses == place]
            earlier.append(stream[:-1])
            later.append(stream[1:])
    return np.concatenate(earlier), np.concatenate(later)


def _grouped(keys: Ints, values: Ints, count: int) -> list[list[int]]:
    """For each key the values that go with it, in their order."""
    ends = np.cumsum(np.bincount(keys, minlength=count)).tolist()
    flat = values[np.argsort(keys, kind="stable")].tolist()
    return [flat[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)] if count else []


def _predecessors(tasks: Tasks, resources: Sequence[Resource]) -> list[list[int]]:
    earlier, later = _edges(tasks, resources)
    return _grouped(later, earlier, len(tasks))


class _Run:
    """The state of one simulation, in plain lists: indexing an array costs ten times as much."""

    __slots__ = (
        "active", "alone", "capacity", "cause", "dirty", "due", "end", "events", "free", "left", "next_tasks", "now",
        "queued", "queues", "ready", "shared", "since", "speed", "start", "unfinished", "waits",
    )

    def __init__(self, tasks: Tasks, resources: Sequence[Resource], alone: list[float], fair: bool) -> None:
        count, capacities = len(tasks), np.array([resource.capacity for resource in resources])
        shares = np.array([fair and resource.kind != "compute" for resource in resources], dtype=bool)
        limited = np.isfinite(capacities)[tasks.uses] if len(tasks.uses) else np.zeros(0, dtype=bool)
        shared = shares[tasks.uses] if len(tasks.uses) else limited
        users = tasks.user
        self.queued = _grouped(users[limited & ~shared], tasks.uses[limited & ~shared], count)
        self.shared = _grouped(users[limited & shared], tasks.uses[limited & shared], count)
        earlier, later = _edges(tasks, resources)
        self.next_tasks = _grouped(earlier, later, count)
        self.waits: list[int] = np.bincount(later, minlength=count).tolist()
        self.alone, self.capacity = alone, capacities.tolist()
        self.free: list[float] = capacities.tolist()
        self.queues: list[deque[int]] = [deque() for _ in resources]
        self.start, self.end, self.ready = [0.0] * count, [0.0] * count, [0.0] * count
        self.cause = [-1] * count
        self.events: list[tuple[float, int]] = []
        self.now, self.unfinished = 0.0, count
        # Of tasks on shared links: seconds of work left at the time `since`, and the speed from then on.
        self.left, self.since, self.speed = list(alone), [0.0] * count, [0.0] * count
        self.due = [-1.0] * count
        self.active: list[dict[int, None]] = [{} for _ in resources]
        self.dirty: set[int] = set()

    def go(self) -> None:
        events, due = self.events, self.due
        self._arrive([place for place, waits in enumerate(self.waits) if not waits])
        self._pace()
        while events:
            now = self.now = events[0][0]
            ended = []
            while events and events[0][0] == now:
                place = heapq.heappop(events)[1]
                if due[place] == now:  # else it was put off when its link filled up
                    due[place] = -1.0
                    ended.append(place)
            if ended:
                self._finish(ended)
                self._pace()

    def _finish(self, ended: list[int]) -> None:
        """Tasks that end now, in task order: free what they held, let the next ones in."""
        now, waits, free = self.now, self.waits, self.free
        freed: list[tuple[int, int]] = []
        came = []
        for place in ended:
            self.end[place] = now
            for resource in self.queued[place]:
                free[resource] += 1
                freed.append((resource, place))
            for resource in self.shared[place]:
                del self.active[resource][place]
                self.dirty.add(resource)
            for later in self.next_tasks[place]:
                waits[later] -= 1
                if not waits[later]:
                    self.ready[later] = now
                    self.cause[later] = place
                    came.append(later)
        self.unfinished -= len(ended)
        for resource, place in freed:
            self._serve(resource, place)
        came.sort()
        self._arrive(came)

    def _arrive(self, places: list[int]) -> None:
        """Tasks that get ready now, in task order."""
        queues, free = self.queues, self.free
        for place in places:
            resources = self.queued[place]
            for resource in resources:
                queues[resource].append(place)
            if all(queues[resource][0] == place and free[resource] for resource in resources):
                for resource in resources:
                    queues[resource].popleft()
                self._begin(place)

    def _serve(self, resource: int, ended: int) -> None:
        """Start what waits at the head of this queue, and what that lets through elsewhere."""
        queues, free, look = self.queues, self.free, [resource]
        while look:
            here = look.pop()
            while queues[here] and free[here]:
                place = queues[here][0]
                resources = self.queued[place]
                if not all(queues[other][0] == place and free[other] for other in resources):
                    break
                for other in resources:
                    queues[other].popleft()
                self.cause[place] = ended
                self._begin(place)
                look += [other for other in resources if other != here]

    def _begin(self, place: int) -> None:
        now = self.now
        self.start[place] = now
        for resource in self.queued[place]:
            self.free[resource] -= 1
        if self.shared[place]:
            self.since[place] = now
            for resource in self.shared[place]:
                self.active[resource][place] = None
                self.dirty.add(resource)
        else:
            self.due[place] = now + self.alone[place]
            heapq.heappush(self.events, (self.due[place], place))

    def _pace(self) -> None:
        """New speeds for the tasks on links whose number of tasks has changed."""
        if not self.dirty:
            return
        now, active = self.now, self.active
        speeds = {r: min(1.0, self.capacity[r] / len(active[r])) for r in self.dirty if active[r]}
        for place in sorted({place for resource in speeds for place in active[resource]}):
            speed = min(
                speeds[r] if r in speeds else min(1.0, self.capacity[r] / len(active[r])) for r in self.shared[place]
            )
            if speed != self.speed[place]:
                self.left[place] = max(0.0, self.left[place] - self.speed[place] * (now - self.since[place]))
                self.since[place], self.speed[place] = now, speed
                self.due[place] = now + self.left[place] / speed
                heapq.heappush(self.events, (self.due[place], place))
        self.dirty.clear()
