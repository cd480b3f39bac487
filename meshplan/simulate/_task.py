"""What is simulated: tasks, the resources that they occupy, and many tasks as arrays.

A task waits for the tasks it comes after, then for all of its resources at once, and
occupies them for its seconds. Which resources a task needs and how long it takes are told
by whoever builds it: this room knows nothing of operations, meshes or specs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshplan.core import ProblemError

TaskKind = Literal["compute", "collective", "send", "receive", "host"]
ResourceKind = Literal["compute", "link", "host"]
TASK_KINDS: tuple[TaskKind, ...] = ("compute", "collective", "send", "receive", "host")
RESOURCE_KINDS: tuple[ResourceKind, ...] = ("compute", "link", "host")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """Something that tasks occupy: a compute engine, the links of one dim, the link to the host.

    `device`: whose it is, -1 where it belongs to none alone. `capacity`: tasks that it serves at
    once at full rate (a whole number, or inf: it never makes a task wait). `bytes_per_second`:
    None where tasks on it are given in seconds only. `in_order`: it serves tasks in the order in
    which they were added (an instruction stream), not in the order in which they get ready.
    Raises ProblemError for figures that cannot be.
    """

    name: str
    kind: ResourceKind
    device: int = -1
    capacity: float = 1.0
    bytes_per_second: float | None = None
    in_order: bool = False

    def __post_init__(self) -> None:
        if self.kind not in RESOURCE_KINDS:
            known = ", ".join(RESOURCE_KINDS)
            raise ProblemError(f"resource '{self.name}' has kind '{self.kind}', which is none; give one of {known}.")
        whole = self.capacity >= 1 and (math.isinf(self.capacity) or self.capacity == int(self.capacity))
        if not whole:
            raise ProblemError(
                f"resource '{self.name}' has capacity {self.capacity:g}; give the number of tasks that it serves "
                "at once, 1 or more, or math.inf."
            )
        if self.bytes_per_second is not None and not self.bytes_per_second > 0:
            raise ProblemError(
                f"resource '{self.name}' moves {self.bytes_per_second:g} bytes/s; give a positive rate, or None."
            )
        if self.in_order and self.capacity != 1:
            raise ProblemError(
                f"resource '{self.name}' serves tasks in program order and has capacity {self.capacity:g}; "
                "only a resource of capacity 1 can be in order."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of work, for reading and for small cases; `TaskList` and `Tasks` hold many.

    `after`: ids of the tasks that must have ended. `uses`: indices of the resources it occupies,
    all at once, from start to end. It takes `seconds`, plus the longest of
    `use_bytes[k] / bytes_per_second` over its resources where `use_bytes` is given.
    `allocates` bytes on its device when it starts, `frees` bytes when it ends (its own or another
    task's). `nbytes` is its payload, `detail` the kind of a collective, or "load" or "store" of a
    host transfer; `peer` the other device of a send or receive. `source` is `file:line`.
    """

    id: int
    kind: TaskKind
    seconds: float = 0.0
    uses: tuple[int, ...] = ()
    use_bytes: tuple[float, ...] = ()
    after: tuple[int, ...] = ()
    device: int = 0
    nbytes: int = 0
    allocates: int = 0
    frees: int = 0
    name: str = ""
    source: str = ""
    detail: str = ""
    peer: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tasks:
    """n tasks as arrays; a task's id is its place, and the place breaks ties.

    `kind` indexes TASK_KINDS. Task i comes after `after[after_ptr[i]:after_ptr[i + 1]]` and uses
    the resources `uses[use_ptr[i]:use_ptr[i + 1]]`, over which it moves `use_bytes` of the same
    places. The other fields have n entries, with the meaning and units of `Task`.
    Raises ProblemError for tasks that cannot be.
    """

    kind: Ints
    seconds: Floats
    device: Ints
    peer: Ints
    nbytes: Ints
    allocates: Ints
    frees: Ints
    after_ptr: Ints
    after: Ints
    use_ptr: Ints
    uses: Ints
    use_bytes: Floats
    names: tuple[str, ...]
    sources: tuple[str, ...]
    details: tuple[str, ...]

    def __post_init__(self) -> None:
        from meshplan.simulate._check import check_tasks

        check_tasks(self)

    def __len__(self) -> int:
        return len(self.kind)

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> Tasks:
        """Arrays of these tasks, in this order; `after` may name tasks that come later in it."""
        from meshplan.simulate._build import TaskList

        tasks = list(tasks)
        places = {task.id: place for place, task in enumerate(tasks)}
        if len(places) != len(tasks):
            twice = next(task.id for place, task in enumerate(tasks) if places[task.id] != place)
            raise ProblemError(f"two tasks have the id {twice}; give every task an id of its own.")
        found = TaskList()
        for task in tasks:
            missing = [before for before in task.after if before not in places]
            if missing:
                raise ProblemError(f"task {task.id} '{task.name}' comes after task {missing[0]}, which is not given.")
            found.add(
                task.kind, seconds=task.seconds, uses=task.uses, use_bytes=task.use_bytes, device=task.device,
                after=[places[before] for before in task.after], nbytes=task.nbytes, allocates=task.allocates,
                frees=task.frees, name=task.name, source=task.source, detail=task.detail, peer=task.peer,
            )
        return found.build()

    def task(self, place: int) -> Task:
        """One of the tasks, with its place for id."""
        uses = slice(self.use_ptr[place], self.use_ptr[place + 1])
        return Task(
            id=place, kind=TASK_KINDS[self.kind[place]], seconds=float(self.seconds[place]),
            uses=tuple(self.uses[uses].tolist()), use_bytes=tuple(self.use_bytes[uses].tolist()),
            after=tuple(self.after[self.after_ptr[place] : self.after_ptr[place + 1]].tolist()),
            device=int(self.device[place]), peer=int(self.peer[place]), nbytes=int(self.nbytes[place]),
            allocates=int(self.allocates[place]), frees=int(self.frees[place]),
            name=self.names[place], source=self.sources[place], detail=self.details[place],
        )

    def of_kind(self, *kinds: TaskKind) -> NDArray[np.bool_]:
        """Which tasks are of one of these kinds."""
        return np.isin(self.kind, [TASK_KINDS.index(kind) for kind in kinds])

    def on_device(self, device: int, resources: Sequence[Resource]) -> NDArray[np.bool_]:
        """Which tasks are the device's own or occupy a resource of it."""
        owners = np.array([resource.device for resource in resources], dtype=np.int64)
        mine = self.device == device
        if len(self.uses):
            mine = mine.copy()
            mine[self.user[owners[self.uses] == device]] = True
        return mine

    @property
    def user(self) -> Ints:
        """For every entry of `uses` the task that it belongs to."""
        return np.repeat(np.arange(len(self)), np.diff(self.use_ptr))
