"""The simulator against closed forms and two slow simulators, and what a timeline says."""

from __future__ import annotations

import math
from functools import reduce
from itertools import pairwise
from operator import add

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshplan.core import ArgumentError, MeshplanError, ProblemError
from meshplan.machine import Machine
from meshplan.simulate import (
    Resource,
    Task,
    TaskList,
    Tasks,
    concatenate,
    device_resources,
    repeat,
    simulate,
    unlimited,
)
from tests._timelines import ENGINE, LINKS, STREAM, WIDE, fluid, resources_strategy, stepped, task_graphs

MODEST = settings(max_examples=80, deadline=None)
COMPUTE, LINK = 0, 1
PAIR = (STREAM, LINKS[0])


def times(tasks: list[Task], resources: tuple[Resource, ...], **more: str) -> list[tuple[float, float]]:
    found = simulate(Tasks.of(tasks), resources, **more)  # type: ignore[arg-type]
    return list(zip(found.start.tolist(), found.end.tolist(), strict=True))


# --------------------------------------------------------------------------------------------------- closed forms


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20))
@MODEST
def test_a_chain_takes_the_sum(seconds: list[float]) -> None:
    tasks = [Task(id=k, kind="compute", seconds=s, after=(k - 1,) if k else ()) for k, s in enumerate(seconds)]
    assert simulate(Tasks.of(tasks), ()).makespan_seconds == reduce(add, seconds)  # sum() of 3.12 rounds less


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20))
@MODEST
def test_one_engine_takes_the_sum_of_independent_tasks(seconds: list[float]) -> None:
    tasks = [Task(id=k, kind="compute", seconds=s, uses=(0,)) for k, s in enumerate(seconds)]
    assert simulate(Tasks.of(tasks), (ENGINE,)).makespan_seconds == reduce(add, seconds)  # sum() of 3.12 rounds less


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8))
@MODEST
def test_tasks_on_engines_of_their_own_take_the_longest(seconds: list[float]) -> None:
    tasks = [Task(id=k, kind="compute", seconds=s, uses=(k,)) for k, s in enumerate(seconds)]
    assert simulate(Tasks.of(tasks), (ENGINE,) * len(seconds)).makespan_seconds == max(seconds)


@given(st.integers(1, 12), st.integers(1, 5))
@MODEST
def test_fork_and_join_over_engines(branches: int, engines: int) -> None:
    """2 s, then `branches` tasks of 3 s dealt out to the engines, then 5 s."""
    middle = [Task(id=1 + k, kind="compute", seconds=3, uses=(k % engines,), after=(0,)) for k in range(branches)]
    first = Task(id=0, kind="compute", seconds=2, uses=(0,))
    last = Task(id=99, kind="compute", seconds=5, uses=(0,), after=tuple(task.id for task in middle))
    found = simulate(Tasks.of([first, *middle, last]), (ENGINE,) * engines)
    assert found.makespan_seconds == 2 + 3 * math.ceil(branches / engines) + 5


def test_an_engine_of_capacity_two_serves_two_at_once() -> None:
    tasks = [Task(id=k, kind="collective", seconds=2, uses=(0,)) for k in range(5)]
    assert [start for start, _ in times(tasks, (WIDE,))] == [0, 0, 2, 2, 4]


def test_bytes_take_the_slowest_link_and_the_seconds_come_on_top() -> None:
    rates = {"fast": 100.0, "slow": 10.0}
    links = [Resource(name=name, kind="link", bytes_per_second=rate) for name, rate in rates.items()]
    task = Task(id=0, kind="collective", seconds=0.5, uses=(0, 1), use_bytes=(400, 20))
    assert simulate(Tasks.of([task]), links).makespan_seconds == 4.5


def test_two_transfers_on_one_link_queue_or_share() -> None:
    tasks = [Task(id=0, kind="send", seconds=4, uses=(0,)), Task(id=1, kind="send", seconds=2, uses=(0,))]
    assert times(tasks, LINKS[:1]) == [(0, 4), (4, 6)]
    assert times(tasks, LINKS[:1], sharing="fair") == [(0, 6), (0, 4)]
    assert times(tasks, unlimited(LINKS[:1])) == [(0, 4), (0, 2)]


def test_a_transfer_goes_at_the_pace_of_its_most_crowded_link() -> None:
    """The first shares link 0 with one and link 1 with two others: a third of its speed while all run."""
    uses = [(0, 1), (0,), (1,), (1,)]
    tasks = [Task(id=k, kind="send", seconds=6, uses=u) for k, u in enumerate(uses)]
    assert times(tasks, LINKS[:2], sharing="fair") == [(0, 18), (0, 12), (0, 18), (0, 18)]


def test_a_collective_waits_for_all_of_its_links_and_keeps_its_place() -> None:
    tasks = [
        Task(id=0, kind="collective", seconds=5, uses=(0,)), Task(id=1, kind="collective", seconds=1, uses=(0, 1)),
        Task(id=2, kind="collective", seconds=1, uses=(1,)),
    ]
    assert times(tasks, LINKS[:2]) == [(0, 5), (5, 6), (6, 7)]


def test_tasks_that_get_ready_at_once_are_served_in_task_order() -> None:
    """Task 2 is let in by task 1, task 3 by task 0, which comes first."""
    tasks = [
        Task(id=0, kind="collective", seconds=1), Task(id=1, kind="collective", seconds=1),
        Task(id=2, kind="compute", seconds=1, uses=(0,), after=(1,)),
        Task(id=3, kind="compute", seconds=1, uses=(0,), after=(0,)),
    ]
    assert times(tasks, (ENGINE,))[2:] == [(1, 2), (2, 3)]


def test_a_resource_in_order_serves_its_program() -> None:
    """Task 0 is ready late; a queue lets task 1 go first, an instruction stream does not."""
    tasks = [
        Task(id=0, kind="compute", seconds=1, uses=(0,), after=(2,)), Task(id=1, kind="compute", seconds=1, uses=(0,)),
        Task(id=2, kind="collective", seconds=4),
    ]
    assert times(tasks, (ENGINE,))[:2] == [(4, 5), (0, 1)]
    assert times(tasks, (STREAM,))[:2] == [(4, 5), (5, 6)]


# ------------------------------------------------------------------------------------------- two slow simulators


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_equals_a_simulator_that_looks_at_everything_every_second(data: st.DataObject) -> None:
    resources = data.draw(resources_strategy(ENGINE, STREAM, WIDE, LINKS[0]))
    tasks = data.draw(task_graphs(12, len(resources)))
    assert times(tasks, resources) == stepped(tasks, resources)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_fair_sharing_equals_exact_fractions(data: st.DataObject) -> None:
    resources = data.draw(resources_strategy(STREAM, WIDE, LINKS[0]))
    tasks = data.draw(task_graphs(8, len(resources)))
    found, exact = times(tasks, resources, sharing="fair"), fluid(tasks, resources)
    np.testing.assert_allclose(found, [(float(a), float(b)) for a, b in exact], rtol=1e-12, atol=1e-12)


@given(st.data(), st.sampled_from(["fifo", "fair"]))
@settings(max_examples=150, deadline=None)
def test_congestion_never_lets_a_task_end_earlier(data: st.DataObject, sharing: str) -> None:
    resources = data.draw(resources_strategy(STREAM, WIDE, *LINKS))
    tasks = data.draw(task_graphs(15, len(resources)))
    aware, unaware = times(tasks, resources, sharing=sharing), times(tasks, unlimited(resources))
    for (_, late), (_, early) in zip(aware, unaware, strict=True):
        assert late >= early * (1 - 1e-12)


# ------------------------------------------------------------------------------------------------- what must hold


@given(st.data(), st.sampled_from(["fifo", "fair"]))
@settings(max_examples=150, deadline=None)
def test_what_holds_of_every_timeline(data: st.DataObject, sharing: str) -> None:
    resources = data.draw(resources_strategy(ENGINE, STREAM, WIDE, *LINKS))
    tasks = data.draw(task_graphs(15, len(resources)))
    found = simulate(Tasks.of(tasks), resources, sharing=sharing)  # type: ignore[arg-type]
    for task in tasks:
        assert all(found.end[before] <= found.ready[task.id] for before in task.after)
        assert found.ready[task.id] <= found.start[task.id] <= found.end[task.id]
    if sharing == "fifo":
        assert np.array_equal(found.end, found.start + found.alone_seconds)
    communication, exposed = found.communication_seconds(), found.exposed_seconds()
    assert -1e-9 <= exposed <= communication + 1e-9 <= found.makespan_seconds + 2e-9
    assert found.compute_seconds() + exposed + found.idle_seconds() == pytest.approx(found.makespan_seconds)
    assert all(0 <= found.utilisation(r) <= 1 + 1e-12 for r in range(len(resources)))
    level = found.memory()[1]
    assert found.peak_bytes() >= level.max() and level[-1] == sum(t.allocates - t.frees for t in tasks)


@given(st.data(), st.sampled_from(["fifo", "fair"]))
@MODEST
def test_the_critical_path_joins_start_and_end_without_a_gap(data: st.DataObject, sharing: str) -> None:
    resources = data.draw(resources_strategy(ENGINE, STREAM, WIDE, *LINKS))
    tasks = data.draw(task_graphs(15, len(resources)))
    found = simulate(Tasks.of(tasks), resources, sharing=sharing)  # type: ignore[arg-type]
    path = found.critical_path()
    assert path[0].start_seconds == 0 and path[0].waited_for == "start"
    assert path[-1].end_seconds == found.makespan_seconds
    for step, later in pairwise(path):
        assert step.end_seconds == later.start_seconds
        depends = step.task in tasks[later.task].after
        assert later.waited_for == ("dependence" if depends else "resource")


@given(st.data(), st.sampled_from(["fifo", "fair"]))
@MODEST
def test_two_runs_are_equal_bit_by_bit(data: st.DataObject, sharing: str) -> None:
    resources = data.draw(resources_strategy(ENGINE, STREAM, WIDE, *LINKS))
    tasks = data.draw(task_graphs(15, len(resources)))
    scaled = [Task(**{**{f: getattr(t, f) for f in Task.__slots__}, "seconds": t.seconds / 7}) for t in tasks]
    one = simulate(Tasks.of(scaled), resources, sharing=sharing)  # type: ignore[arg-type]
    two = simulate(Tasks.of(scaled), resources, sharing=sharing)  # type: ignore[arg-type]
    assert one == two
    for field in ("start", "end", "ready", "cause"):
        assert getattr(one, field).tobytes() == getattr(two, field).tobytes()


def test_timelines_of_different_times_differ() -> None:
    one, two = (simulate(Tasks.of([Task(id=0, kind="compute", seconds=s)]), ()) for s in (1.0, 1.0 + 1e-15))
    assert one != two


# --------------------------------------------------------------------------------------------- what a timeline says


def overlapped() -> list[Task]:
    """0-4 compute, 4-6 compute; a collective 1-5 that began after a 1 s task, and one 6-9 that ends the step."""
    return [
        Task(id=0, kind="compute", seconds=1, uses=(COMPUTE,), allocates=10, name="first"),
        Task(id=1, kind="compute", seconds=3, uses=(COMPUTE,), allocates=5, frees=5),
        Task(id=2, kind="collective", seconds=4, uses=(LINK,), after=(0,), detail="all-gather", source="model.py:3"),
        Task(id=3, kind="compute", seconds=2, uses=(COMPUTE,), after=(1,), frees=10),
        Task(id=4, kind="collective", seconds=3, uses=(LINK,), after=(3,), detail="all-reduce", source="model.py:9"),
    ]


def test_communication_beside_compute_is_hidden_and_the_rest_exposed() -> None:
    found = simulate(Tasks.of(overlapped()), PAIR)
    assert (found.makespan_seconds, found.compute_seconds(), found.communication_seconds()) == (9, 6, 7)
    assert (found.exposed_seconds(), found.hidden_seconds(), found.idle_seconds()) == (3, 4, 0)
    assert found.exposed_by_task().tolist() == [0, 0, 0, 0, 3]
    assert found.busy(LINK).tolist() == [[1, 5], [6, 9]]
    assert (found.utilisation(COMPUTE), found.utilisation(LINK)) == (6 / 9, 7 / 9)
    assert found.exposed_seconds(kinds=("host",)) == 0


def test_the_critical_path_names_the_collective_that_ends_the_step() -> None:
    found = simulate(Tasks.of(overlapped()), PAIR)
    assert [(s.task, s.waited_for) for s in found.critical_path()] == [
        (0, "start"), (1, "resource"), (3, "dependence"), (4, "dependence"),
    ]


def test_memory_over_time_and_its_peak() -> None:
    found = simulate(Tasks.of(overlapped()), PAIR)
    at, held = found.memory()
    assert (at.tolist(), held.tolist()) == ([0, 1, 4, 6], [10, 15, 10, 0])
    assert found.peak_bytes() == 15


def test_a_task_that_ends_frees_before_the_next_allocates_and_one_of_no_seconds_counts() -> None:
    tasks = [
        Task(id=0, kind="compute", seconds=1, uses=(0,), allocates=4, frees=4),
        Task(id=1, kind="compute", seconds=1, uses=(0,), allocates=4, frees=4),
        Task(id=2, kind="compute", seconds=0, uses=(0,), allocates=7, frees=7),
    ]
    found = simulate(Tasks.of(tasks), (ENGINE,))
    assert found.peak_bytes() == 7
    assert [each.tolist() for each in found.memory()] == [[0, 2], [4, 0]]


def test_a_collective_runs_on_every_device_whose_links_it_uses() -> None:
    links = [Resource(name="link", kind="link", device=d) for d in range(2)]
    tasks = [Task(id=0, kind="collective", seconds=2, uses=(0, 1)), Task(id=1, kind="compute", seconds=1, device=1)]
    found = simulate(Tasks.of(tasks), links)
    assert found.devices == (0, 1)
    assert [found.exposed_seconds(device) for device in found.devices] == [2, 1]


# ------------------------------------------------------------------------------------------------------- many tasks


def test_a_loop_repeats_its_tasks_and_carries() -> None:
    body = TaskList()
    first = body.add("compute", seconds=1, uses=(0,), name="up")
    last = body.add("collective", seconds=2, uses=(1,), after=(first,))
    found = simulate(repeat(body.build(), 3, carried=[(last, first)]), PAIR)
    assert found.makespan_seconds == 9
    assert found.tasks.names == ("up", "") * 3
    assert simulate(repeat(body.build(), 3), PAIR).makespan_seconds == 7


def test_lists_are_joined_with_ids_counted_on() -> None:
    part = Tasks.of([Task(id=7, kind="compute", seconds=1), Task(id=3, kind="compute", seconds=2, after=(7,))])
    joined = concatenate([part, part])
    assert [joined.task(k).after for k in range(4)] == [(), (0,), (), (2,)]
    assert simulate(joined, ()).makespan_seconds == 3
    assert len(concatenate([])) == 0 and simulate(concatenate([]), ()).makespan_seconds == 0


@given(st.data())
@MODEST
def test_tasks_come_back_from_their_arrays(data: st.DataObject) -> None:
    tasks = data.draw(task_graphs(10, 3))
    arrays = Tasks.of(tasks)
    assert [arrays.task(k) for k in range(len(arrays))] == [
        Task(**{**{f: getattr(t, f) for f in Task.__slots__}, "use_bytes": (0.0,) * len(t.uses)}) for t in tasks
    ]


def test_resources_of_a_machine_lie_where_their_indices_say() -> None:
    machine = Machine.preset("h100:4x8")
    found = device_resources(machine, start=5)
    names = [found.resources[link - 5].name for level in found.links for link in level]
    assert names == [dim.name for level in machine.levels for dim in level.dims]
    assert [r.kind for r in found.resources] == ["compute", *["link"] * len(names), "host"]
    assert found.resources[found.host - 5].bytes_per_second == machine.chip.host_bytes_per_second


# ---------------------------------------------------------------------------------------------------------- errors


def test_tasks_that_wait_for_each_other_are_named() -> None:
    tasks = [
        Task(id=0, kind="compute", name="free"), Task(id=1, kind="compute", name="up", after=(2,)),
        Task(id=2, kind="compute", name="down", after=(0, 1)), Task(id=3, kind="compute", after=(2,)),
    ]
    with pytest.raises(ProblemError, match="task 1 'up' after task 2 'down' after task 1 'up'"):
        simulate(Tasks.of(tasks), ())


def test_a_program_order_against_the_dependences_is_a_cycle() -> None:
    tasks = [Task(id=0, kind="compute", uses=(0,), after=(1,)), Task(id=1, kind="compute", uses=(0,))]
    with pytest.raises(ProblemError, match=r"wait for each other.*in order"):
        simulate(Tasks.of(tasks), (STREAM,))
    assert simulate(Tasks.of(tasks), (ENGINE,)).makespan_seconds == 0


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task(id=0, kind="compute", seconds=-1, name="op"), "task 0 'op' takes seconds -1; give a finite"),
        (Task(id=0, kind="compute", seconds=math.nan), "task 0 takes seconds nan"),
        (Task(id=0, kind="compute", allocates=-3), "task 0 has allocates = -3"),
        (Task(id=0, kind="kompute", name="op"), "kind 'kompute', which is none. Nearest: compute"),  # type: ignore[arg-type]
        (Task(id=0, kind="compute", after=(4,)), "task 0 '' comes after task 4, which is not given"),
        (Task(id=0, kind="compute", uses=(3,)), "task 0 uses resource 3; 2 resources are given"),
        (Task(id=0, kind="compute", uses=(1, 1)), "task 0 uses resource 'link0' twice"),
        (Task(id=0, kind="send", uses=(0,), use_bytes=(8,)), "moves 8 bytes over 'stream', a resource without b"),
        (Task(id=0, kind="send", uses=(1,), use_bytes=(8, 8)), "uses 1 resources and moves bytes over 2"),
        (Task(id=0, kind="send", uses=(1,), use_bytes=(-8,)), "task 0 moves -8 bytes"),
    ],
)
def test_a_task_that_cannot_be_is_refused(task: Task, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        simulate(Tasks.of([task]), PAIR)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"capacity": 0}, "capacity 0; give the number of tasks"),
        ({"capacity": 1.5}, "capacity 1.5"),
        ({"bytes_per_second": 0.0}, "moves 0 bytes/s; give a positive rate"),
        ({"in_order": True, "capacity": 2}, "only a resource of capacity 1"),
        ({"kind": "wire"}, "kind 'wire', which is none; give one of compute, link, host"),
    ],
)
def test_a_resource_that_cannot_be_is_refused(figures: dict[str, object], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        Resource(**{"name": "x", "kind": "link", **figures})  # type: ignore[arg-type]


def test_other_words_for_sharing_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"sharing='fare' is none. Nearest: fair"):
        simulate(Tasks.of(()), (), sharing="fare")  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
@MODEST
def test_any_graph_is_either_run_or_refused(pairs: list[tuple[int, int]]) -> None:
    after = {k: tuple(sorted({b for a, b in pairs if a == k})) for k in range(6)}
    tasks = [Task(id=k, kind="compute", seconds=1, after=after[k]) for k in range(6)]
    try:
        found = simulate(Tasks.of(tasks), ())
    except MeshplanError as error:
        assert "wait for each other" in str(error)
        return
    assume(pairs)
    assert all(found.start[a] >= found.end[b] for a, b in pairs)
