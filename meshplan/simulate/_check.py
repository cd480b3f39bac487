"""What must hold of tasks before they are simulated; every sentence names the task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from meshplan.core import ProblemError
from meshplan.simulate._task import TASK_KINDS, Floats, Resource, Tasks


def _named(tasks: Tasks, place: int) -> str:
    name = tasks.names[place] if place < len(tasks.names) else ""
    return f"task {place}" + (f" '{name}'" if name else "")


def _refuse(tasks: Tasks, bad: NDArray[np.bool_], values: NDArray, found: str, wanted: str) -> None:
    if bad.any():
        place = int(np.argmax(bad))
        raise ProblemError(f"{_named(tasks, place)} {found} {values[place]:g}; {wanted}.")


def check_tasks(tasks: Tasks) -> None:
    """Raise ProblemError for arrays that do not belong together and for figures that cannot be."""
    count = len(tasks.kind)
    for field in ("seconds", "device", "peer", "nbytes", "allocates", "frees", "names", "sources", "details"):
        if len(getattr(tasks, field)) != count:
            raise ProblemError(f"tasks have {count} kinds and {len(getattr(tasks, field))} {field}; give one for each.")
    for pointers, field in ((tasks.after_ptr, "after"), (tasks.use_ptr, "uses")):
        length = len(getattr(tasks, field))
        if len(pointers) != count + 1 or pointers[0] != 0 or pointers[-1] != length or (np.diff(pointers) < 0).any():
            raise ProblemError(f"the {len(pointers)} pointers into the {length} entries of '{field}' do not rise "
                               f"from 0 to {length} in {count} steps; give where the entries of each task begin.")
    if len(tasks.use_bytes) != len(tasks.uses):
        raise ProblemError(f"tasks use {len(tasks.uses)} resources and move bytes over {len(tasks.use_bytes)}; "
                           "give the bytes of every use, 0 where none move.")
    _refuse(tasks, (tasks.kind < 0) | (tasks.kind >= len(TASK_KINDS)), tasks.kind, "has kind",
            f"kinds are numbered 0 to {len(TASK_KINDS) - 1}: {', '.join(TASK_KINDS)}")
    _refuse(tasks, ~(np.isfinite(tasks.seconds) & (tasks.seconds >= 0)), tasks.seconds, "takes seconds",
            "give a finite number of at least 0")
    for field in ("nbytes", "allocates", "frees"):
        values = getattr(tasks, field)
        _refuse(tasks, values < 0, values, f"has {field} =", "give a number of bytes of at least 0")
    moved = np.isfinite(tasks.use_bytes) & (tasks.use_bytes >= 0)
    if not moved.all():
        place = int(np.argmin(moved))
        raise ProblemError(f"{_named(tasks, int(tasks.user[place]))} moves {tasks.use_bytes[place]:g} bytes; "
                           "give a finite number of at least 0.")
    outside = (tasks.after < 0) | (tasks.after >= count)
    if outside.any():
        place = int(np.argmax(outside))
        waiting = int(np.searchsorted(tasks.after_ptr, place, side="right")) - 1
        raise ProblemError(f"{_named(tasks, waiting)} comes after task {tasks.after[place]}; there are {count} tasks.")


def alone_seconds(tasks: Tasks, resources: Sequence[Resource]) -> Floats:
    """Seconds of each task where nothing else runs: its own, plus the slowest of its moves.

    Raises ProblemError for a resource that is not there, is used twice by one task, or moves
    bytes without a rate.
    """
    users, count = tasks.user, len(resources)
    wrong = (tasks.uses < 0) | (tasks.uses >= count)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise ProblemError(f"{_named(tasks, int(users[place]))} uses resource {tasks.uses[place]}; "
                           f"{count} resources are given, numbered from 0.")
    pairs = np.sort(users * max(count, 1) + tasks.uses)
    if (pairs[1:] == pairs[:-1]).any():
        task, resource = divmod(int(pairs[1:][pairs[1:] == pairs[:-1]][0]), count)
        raise ProblemError(f"{_named(tasks, task)} uses resource '{resources[resource].name}' twice; name it once.")
    rates = np.array([resource.bytes_per_second or 0.0 for resource in resources], dtype=np.float64)
    moving = np.flatnonzero(tasks.use_bytes)
    found = tasks.seconds.copy()
    if len(moving):
        rate = rates[tasks.uses[moving]]
        if not rate.all():
            place = moving[int(np.argmin(rate))]
            name = resources[int(tasks.uses[place])].name
            raise ProblemError(f"{_named(tasks, int(users[place]))} moves {tasks.use_bytes[place]:g} bytes over "
                               f"'{name}', a resource without bytes_per_second; give it one.")
        slowest = np.zeros(len(tasks))
        np.maximum.at(slowest, users[moving], tasks.use_bytes[moving] / rate)
        found += slowest
    return found


def refuse_cycle(tasks: Tasks, left: Sequence[int], before: Sequence[Sequence[int]]) -> NoReturn:
    """Raise ProblemError that shows a cycle among the tasks that wait for `left` others."""
    here = next(place for place, waits in enumerate(left) if waits)
    seen: dict[int, int] = {}
    path: list[int] = []
    while here not in seen:
        seen[here] = len(path)
        path.append(here)
        here = next(earlier for earlier in before[here] if left[earlier])
    cycle = [*path[seen[here] :], here]
    shown = " after ".join(_named(tasks, place) for place in cycle[:6])
    raise ProblemError(
        f"tasks wait for each other: {shown}{' ...' if len(cycle) > 6 else ''}; a resource that is in order also makes "
        "each of its tasks wait for the one that was added before."
    )
