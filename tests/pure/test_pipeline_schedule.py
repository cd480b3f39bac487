"""Schedules as tables: every one passes the checker, broken ones do not, and what cannot be is a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.core import ArgumentError, ProblemError
from meshplan.pipeline import SCHEDULES, Schedule, Slot, StageSeconds, check, schedule

STAGES, MICRO = st.integers(1, 8), st.integers(1, 12)


def made(name: str, stages: int, micro: int, chunks: int = 2, **more) -> Schedule:
    """The schedule with its own further arguments filled in."""
    if name == "interleaved":
        micro = -(-micro // stages) * stages
    more |= {"chunks": chunks} if name in ("interleaved", "circular") else {}
    more |= {"switch_at": 2} if name == "stale" else {}
    return schedule(name, stages, micro, **more)


@given(st.sampled_from(SCHEDULES), STAGES, MICRO, st.integers(2, 3), st.sampled_from(["none", "late", "early", None]))
@settings(max_examples=120, deadline=None)
def test_every_schedule_passes_the_checker(name: str, stages: int, micro: int, chunks: int, recompute) -> None:
    table = made(name, stages, micro, chunks, recompute=recompute)
    found = check(table)
    assert found.in_flight == table.in_flight()
    assert all(0 < held <= bound for held, bound in zip(found.in_flight, found.in_flight_bounds, strict=True))
    for stage in range(stages):
        assert table.count(stage, "forward") == table.total_micro_batches * table.chunks
        assert table.count(stage, "update") == table.mini_batches


@given(STAGES, MICRO)
@settings(max_examples=30, deadline=None)
def test_activations_in_flight(n: int, m: int) -> None:
    assert schedule("gpipe", n, m).in_flight() == (m,) * n
    one = tuple(min(m, n - k) for k in range(n))
    assert schedule("1f1b", n, m).in_flight() == one
    assert schedule("async-1f1b", n, m, mini_batches=9).in_flight() == tuple(min(9 * m, n - k) for k in range(n))
    assert schedule("zb-h1", n, m).in_flight() == (min(m, n),) * n
    assert schedule("circular", n, m, chunks=2).in_flight() == (2 * m,) * n
    again = schedule("merak", n, m).in_flight()
    assert again == tuple(min(m, n - k + (k == n - 2)) for k in range(n))
    assert max(schedule("axonn", n, m).in_flight()) == min(n, m)


def test_what_a_stage_of_1f1b_does() -> None:
    row = schedule("1f1b", 3, 4).slots[1]
    assert [f"{slot.kind[0]}{slot.micro_batch}" for slot in row] == "f0 f1 b0 f2 b1 f3 b2 b3 u3".split()
    row = schedule("1f1b", 3, 2, recompute="late", last_recomputes=False).slots
    assert [slot.kind for slot in row[2]].count("recompute") == 0
    assert row[0][2:4] == (Slot("recompute", 0), Slot("backward", 0))


def test_interleaved_runs_groups_of_micro_batches_through_chunks() -> None:
    row = schedule("interleaved", 2, 4, chunks=2).slots[0]
    forwards = [(slot.micro_batch, slot.chunk) for slot in row if slot.kind == "forward"]
    assert forwards == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    backwards = [(slot.micro_batch, slot.chunk) for slot in row if slot.kind == "backward"]
    assert backwards == [(m, 1 - c) for m, c in forwards]


def test_stale_is_asynchronous_up_to_the_switch_and_1f1b_after_it() -> None:
    table = schedule("stale", 4, 2, mini_batches=5, switch_at=3)
    free = schedule("async-1f1b", 4, 2, mini_batches=3)
    step = schedule("1f1b", 4, 2)
    for stage in range(4):
        head = free.slots[stage]
        assert table.slots[stage][: len(head)] == head
        tail = table.slots[stage][len(head):]
        shifted = [replace(slot, micro_batch=slot.micro_batch + 6) for slot in step.slots[stage]]
        assert list(tail[: len(shifted)]) == shifted
    assert schedule("stale", 4, 2, switch_at=0, mini_batches=1).slots == step.slots


def test_axonn_takes_what_arrives_first() -> None:
    """With a slow stage in the middle its queue fills and the order is no longer 1F1B's."""
    plain = schedule("axonn", 4, 8)
    slow = schedule("axonn", 4, 8, seconds=StageSeconds(forward=[1, 3, 1, 1], backward=[2, 1, 2, 2]))
    assert plain.slots != slow.slots
    assert check(slow).in_flight_bounds == (4, 4, 4, 4)
    for row in plain.slots:
        backwards = [slot.micro_batch for slot in row if slot.kind == "backward"]
        assert backwards == sorted(backwards)


# ------------------------------------------------------------------------------------------------- broken tables


def broken(table: Schedule, stage: int, change) -> Schedule:
    rows = [list(row) for row in table.slots]
    change(rows[stage])
    return replace(table, slots=tuple(tuple(row) for row in rows))


def swap(a: int, b: int):
    def change(row):
        row[a], row[b] = row[b], row[a]

    return change


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda row: row.pop(2),
     "schedule '1f1b', stage 1: the backward of micro-batch 0 is missing; give it once."),
    (lambda row: row.append(Slot("forward", 1)),
     "schedule '1f1b', stage 1: the forward of micro-batch 1 is there 2 times; give it once."),
    (lambda row: row.append(Slot("forward", 7)),
     "schedule '1f1b', stage 1: the forward of micro-batch 7 has no place in it; it has 4 forwards."),
    (lambda row: row.append(Slot("weight", 1)),
     "schedule '1f1b', stage 1: the weight of micro-batch 1 has no place in it; it has 4 forwards."),
    (swap(0, 2),
     "schedule '1f1b' never ends: stage 1 waits at the backward of micro-batch 0 for the forward of micro-batch 0 on "
     "stage 1, which comes after it or waits in turn; put what it waits for earlier."),
    (swap(7, 8),
     "schedule '1f1b' never ends: stage 1 waits at the update of micro-batch 3 for the backward of micro-batch 3 on "
     "stage 1, which comes after it or waits in turn; put what it waits for earlier."),
    (swap(2, 3),
     "schedule '1f1b', stage 1: 3 forwards wait for their backward at once and the bound is 2; run backwards "
     "earlier, or raise the bound."),
])
def test_broken_tables_are_refused(change, sentence: str) -> None:
    table = schedule("1f1b", 3, 4)
    check(table)
    with pytest.raises(ProblemError) as error:
        check(broken(table, 1, change))
    assert str(error.value) == sentence


def test_second_forwards_are_for_all_micro_batches_and_before_the_backward() -> None:
    table = schedule("1f1b", 3, 4, recompute="early")
    row = table.slots[1]
    with pytest.raises(ProblemError, match=r"stage 1: the recompute of micro-batch 2 is missing; give it once"):
        check(broken(table, 1, lambda row: row.remove(Slot("recompute", 2))))
    at = row.index(Slot("recompute", 2))
    with pytest.raises(ProblemError, match=r"stage 1 waits at the backward of micro-batch 2 for the recompute of mic"):
        check(broken(table, 1, swap(at, at + 1)))
    rows = [row if k != 1 else [slot for slot in row if slot.kind != "recompute"] for k, row in enumerate(table.slots)]
    assert check(replace(table, slots=tuple(tuple(row) for row in rows))).in_flight == (3, 2, 1)


def test_versions_are_checked() -> None:
    table = schedule("stale", 2, 2, mini_batches=3, switch_at=1)
    row = table.slots[1]
    update = row.index(Slot("update", 1, -1))
    assert row[update + 1] == Slot("forward", 2)
    with pytest.raises(ProblemError) as error:
        check(broken(table, 1, swap(update, update + 1)))
    assert str(error.value) == (
        "schedule 'stale', stage 1: the forward of micro-batch 2 of mini-batch 1 lacks 1 of the updates before it, "
        "and may lack 0; put the updates earlier."
    )
    free = schedule("async-1f1b", 2, 1, mini_batches=4)
    late = broken(free, 1, lambda row: row.append(row.pop(row.index(Slot("update", 0, -1)))))
    with pytest.raises(ProblemError, match="the updates are not in the order of their mini-batches"):
        check(late)
    with pytest.raises(ProblemError, match=r"of 3 stages has 2 rows of slots and 2 in-flight bounds"):
        check(replace(free, stages=3))


@given(st.sampled_from(SCHEDULES), st.integers(2, 5), st.integers(2, 6), st.data())
@settings(max_examples=80, deadline=None)
def test_the_checker_refuses_a_dropped_slot_wherever_it_is(name: str, stages: int, micro: int, data) -> None:
    table = made(name, stages, micro)
    stage = data.draw(st.integers(0, stages - 1))
    needed = [place for place, slot in enumerate(table.slots[stage]) if slot.kind != "recompute"]
    place = data.draw(st.sampled_from(needed))
    with pytest.raises(ProblemError, match="is missing"):
        check(broken(table, stage, lambda row: row.pop(place)))


# -------------------------------------------------------------------------------------------- what cannot be asked


@pytest.mark.parametrize(("name", "stages", "micro", "more", "sentence"), [
    ("1f1", 4, 8, {}, "schedule '1f1' is unknown. Nearest: 1f1b."),
    ("gpipe", 0, 8, {}, "schedule 'gpipe' with stages=0 cannot be; give a whole number from 1 on."),
    ("gpipe", 4, 2.5, {}, "schedule 'gpipe' with micro_batches=2.5 cannot be; give a whole number from 1 on."),
    ("interleaved", 4, 10, {"chunks": 2},
     "schedule 'interleaved' runs micro-batches in groups of 4, one for each stage, and 10 micro-batches do not "
     "divide into such; give 8 or 12."),
    ("interleaved", 4, 3, {"chunks": 2},
     "schedule 'interleaved' runs micro-batches in groups of 4, one for each stage, and 3 micro-batches do not "
     "divide into such; give 4."),
    ("interleaved", 4, 8, {},
     "schedule 'interleaved' has 1 chunk a stage; give chunks=2 or more, or take '1f1b'."),
    ("1f1b", 4, 8, {"chunks": 2},
     "schedule '1f1b' with chunks=2 cannot be: its stages hold one part of the model each; take one of interleaved, "
     "circular."),
    ("1f1b", 4, 8, {"mini_batches": 3},
     "schedule '1f1b' ends with each mini-batch, and mini_batches=3 was given; leave it out, or take one of "
     "async-1f1b, stale."),
    ("stale", 4, 8, {}, "schedule 'stale' goes over to synchronous at some mini-batch; give switch_at=."),
    ("stale", 4, 8, {"mini_batches": 3, "switch_at": 4},
     "schedule 'stale' of 3 mini-batches cannot switch at mini-batch 4; give 0 to 3."),
    ("async-1f1b", 4, 8, {"switch_at": 4},
     "schedule 'async-1f1b' never switches, and switch_at=4 was given; take 'stale'."),
    ("1f1b", 4, 8, {"recompute": "erly"}, "schedule '1f1b': recompute='erly' is none. Nearest: early."),
])
def test_what_cannot_be_is_refused(name: str, stages: int, micro, more: dict, sentence: str) -> None:
    with pytest.raises(ArgumentError) as error:
        schedule(name, stages, micro, **more)
    assert str(error.value) == sentence


def test_a_slot_of_another_kind_is_refused() -> None:
    with pytest.raises(ProblemError) as error:
        Slot("backwards", 0)  # type: ignore[arg-type]
    assert str(error.value) == "a slot of kind 'backwards' cannot be. Nearest: backward, forward."
