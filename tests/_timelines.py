"""Helpers of the simulator's tests: random tasks, two slow simulators that share no code with it, pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from hypothesis import strategies as st

from meshplan.simulate import Resource, Task, TaskList, Tasks

ENGINE = Resource(name="compute", kind="compute", device=0)
STREAM = Resource(name="stream", kind="compute", device=0, in_order=True)
LINKS = tuple(Resource(name=f"link{k}", kind="link", device=0, bytes_per_second=1.0) for k in range(3))
WIDE = Resource(name="wide", kind="link", device=0, capacity=2)


def resources_strategy(*kinds: Resource) -> st.SearchStrategy[tuple[Resource, ...]]:
    return st.lists(st.sampled_from(kinds), min_size=1, max_size=4).map(tuple)


@st.composite
def task_graphs(draw: st.DrawFn, most: int, resources: int, longest: int = 4) -> list[Task]:
    """Acyclic, whole seconds, zero among them; kinds follow the first resource."""
    tasks = []
    for place in range(draw(st.integers(1, most))):
        uses = draw(st.sets(st.integers(0, resources - 1), max_size=min(3, resources)))
        after = draw(st.sets(st.integers(0, place - 1), max_size=3)) if place else set()
        tasks.append(Task(
            id=place, kind=draw(st.sampled_from(["compute", "collective"])), seconds=draw(st.integers(0, longest)),
            uses=tuple(sorted(uses)), after=tuple(sorted(after)), allocates=draw(st.integers(0, 3)),
            frees=draw(st.integers(0, 3)),
        ))
    return tasks


def predecessors(tasks: Sequence[Task], resources: Sequence[Resource]) -> list[set[int]]:
    found = [set(task.after) for task in tasks]
    for number, resource in enumerate(resources):
        stream = [task.id for task in tasks if number in task.uses]
        if resource.in_order:
            for earlier, later in pairwise(stream):
                found[later].add(earlier)
    return found


def stepped(tasks: Sequence[Task], resources: Sequence[Resource]) -> list[tuple[int, int]]:
    """(start, end) of every task, one whole second after the other, everything looked at every time."""
    before = predecessors(tasks, resources)
    start: dict[int, int] = {}
    ended: set[int] = set()
    waiting: list[int] = []
    now = 0
    while len(ended) < len(tasks):
        changed = True
        while changed:
            done = {t for t in start if t not in ended and start[t] + tasks[t].seconds == now}
            ended |= done
            came = [t.id for t in tasks if t.id not in start and t.id not in waiting and before[t.id] <= ended]
            waiting += came
            running = [t for t in start if t not in ended]
            passed: set[int] = set()
            begun = []
            for t in waiting:
                uses = set(tasks[t].uses)
                load = {r: sum(r in tasks[o].uses for o in running + begun) for r in uses}
                if not uses & passed and all(load[r] < resources[r].capacity for r in uses):
                    begun.append(t)
                else:
                    passed |= uses
            for t in begun:
                waiting.remove(t)
                start[t] = now
            changed = bool(done or begun or came)
        now += 1
    return [(start[t.id], start[t.id] + int(tasks[t.id].seconds)) for t in tasks]


def fluid(tasks: Sequence[Task], resources: Sequence[Resource]) -> list[tuple[Fraction, Fraction]]:
    """(start, end) with links shared fairly, in exact fractions; only for engines that are in order."""
    before = predecessors(tasks, resources)
    left = {task.id: Fraction(task.seconds) for task in tasks}
    start: dict[int, Fraction] = {}
    end: dict[int, Fraction] = {}
    now = Fraction(0)
    while len(end) < len(tasks):
        for task in tasks:
            if task.id not in start and before[task.id] <= end.keys():
                start[task.id] = now
        running = [t for t in start if t not in end]
        over = [t for t in running if not left[t]]
        if over:
            end.update(dict.fromkeys(over, now))
            continue
        speed = {}
        for t in running:
            links = [r for r in tasks[t].uses if resources[r].kind != "compute"]
            shares = [Fraction(int(resources[r].capacity), sum(r in tasks[o].uses for o in running)) for r in links]
            speed[t] = min([Fraction(1), *shares])
        step = min(left[t] / speed[t] for t in running)
        for t in running:
            left[t] -= speed[t] * step
        now += step
    return [(start[task.id], end[task.id]) for task in tasks]


# ----------------------------------------------------------------------------------------------------- pipelines


def gpipe(stages: int, micro: int) -> list[list[str]]:
    """For each stage its work in order: "F3" is the forward of micro-batch 3."""
    return [[f"F{m}" for m in range(micro)] + [f"B{m}" for m in range(micro)] for _ in range(stages)]


def one_forward_one_backward(stages: int, micro: int) -> list[list[str]]:
    """1F1B: stage k runs stages - 1 - k forwards first, then a forward and a backward in turn."""
    found = []
    for stage in range(stages):
        warm = min(micro, stages - 1 - stage)
        work = [f"F{m}" for m in range(warm)]
        for m in range(micro):
            work += ([f"F{warm + m}"] if warm + m < micro else []) + [f"B{m}"]
        found.append(work)
    return found


def pipeline(
    schedule: Sequence[Sequence[str]], *, forward: float, backward: float, again: float = 0.0, early: bool = False,
    last_again: bool = True, nbytes: int = 1,
) -> tuple[Tasks, tuple[Resource, ...]]:
    """The schedule's tasks, one engine in program order per stage.

    `again`: seconds of a second forward before each backward; `early`: before the gradient is
    there, too; `last_again`: on the last stage, too. Each forward keeps `nbytes` until its backward.
    """
    last = len(schedule) - 1
    order: list[tuple[int, str]] = []
    for stage, work in enumerate(schedule):
        for each in work:
            redo = again and each[0] == "B" and (stage < last or last_again)
            order += ([(stage, "R" + each[1:])] if redo else []) + [(stage, each)]
    ids = {each: place for place, each in enumerate(order)}
    tasks = TaskList()
    for stage, each in order:
        kind, micro = each[0], each[1:]
        came = {
            "F": (stage - 1, "F" + micro), "B": (stage + 1, "B" + micro) if stage < last else (stage, "F" + micro),
            "R": (stage, "F" + micro) if early or stage == last else (stage + 1, "B" + micro),
        }[kind]
        tasks.add(
            "compute", name=f"{each} of stage {stage}", device=stage, uses=(stage,),
            seconds={"F": forward, "B": backward, "R": again}[kind], after=[ids[came]] if came in ids else [],
            allocates=nbytes if kind == "F" else 0, frees=nbytes if kind == "B" else 0,
        )
    engines = [Resource(name="compute", kind="compute", device=s, in_order=True) for s in range(len(schedule))]
    return tasks.build(), tuple(engines)
