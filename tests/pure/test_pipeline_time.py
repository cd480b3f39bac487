"""Schedules timed: closed forms, Merak's and AxoNN's makespans, sends, activation bytes, lags, the picture."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from meshplan.core import ProblemError
from meshplan.pipeline import (
    StageSeconds,
    backward_lags,
    compare_schedules,
    forward_lags,
    lag_bound,
    lags,
    schedule,
    time_schedule,
    weight_copies,
    xpipe_steps,
)

STAGES, MICRO, WHOLE = st.integers(1, 6), st.integers(1, 10), st.integers(1, 4)


def seconds_of(name: str, stages: int, micro: int, timed: StageSeconds, **more) -> float:
    return time_schedule(schedule(name, stages, micro, **more), timed).makespan_seconds


@given(st.sampled_from(["gpipe", "1f1b", "axonn"]), STAGES, MICRO, WHOLE, WHOLE)
@settings(max_examples=60, deadline=None)
def test_bubble_of_flushed_schedules(name: str, n: int, m: int, forward: int, backward: int) -> None:
    """AxoNN's where a backward is a whole number of forwards (see the next test)."""
    backward *= forward if name == "axonn" else 1
    seconds = StageSeconds(forward=forward, backward=backward)
    found = time_schedule(schedule(name, n, m, seconds=seconds), seconds)
    assert found.makespan_seconds == (m + n - 1) * (forward + backward)
    assert found.bubble == pytest.approx((n - 1) / (m + n - 1))


def test_makespan_of_axonn_at_eight_stages() -> None:
    seconds = StageSeconds(forward=1, backward=2)
    assert seconds_of("axonn", 8, 32, seconds, seconds=seconds) == (32 + 8 - 1) * 3


@pytest.mark.parametrize(("forward", "backward", "stages", "micro", "found"), [
    (2, 1, 3, 4, 19), (2, 3, 4, 8, 56), (2, 3, 8, 32, 200),
])
def test_gradients_that_meet_a_busy_stage_delay_axonn(forward, backward, stages, micro, found) -> None:
    """Where no whole number of forwards makes a backward, it is behind 1F1B and its own closed form."""
    seconds = StageSeconds(forward=forward, backward=backward)
    assert seconds_of("axonn", stages, micro, seconds, seconds=seconds) == found
    assert found > seconds_of("1f1b", stages, micro, seconds) == (micro + stages - 1) * (forward + backward)


@given(st.integers(2, 5), st.integers(1, 3), st.integers(2, 4), WHOLE, WHOLE)
@settings(max_examples=30, deadline=None)
def test_bubble_of_interleaved_and_circular(n: int, groups: int, v: int, forward: int, backward: int) -> None:
    """(N - 1)/(v m) of the work, which is (N - 1)/(v m + N - 1) of the makespan."""
    m = groups * n
    seconds = StageSeconds(forward=forward, backward=backward)
    for name in ("interleaved", "circular"):
        found = time_schedule(schedule(name, n, m, chunks=v), seconds)
        work = v * m * (forward + backward)
        assert (found.makespan_seconds - work) / work == pytest.approx((n - 1) / (v * m))
        assert found.bubble == pytest.approx((n - 1) / (v * m + n - 1))


@given(st.integers(1, 6), st.integers(0, 6), WHOLE, st.integers(0, 3), WHOLE)
@settings(max_examples=60, deadline=None)
def test_bubble_of_zero_bubble_h1(n: int, more: int, forward: int, longer: int, weight: int) -> None:
    """(N - 1)(F + B - W) as printed, from m = N on and with W no longer than F; a longer W leaves (N - 1) B."""
    backward = forward + longer
    seconds = StageSeconds(forward=forward, backward=backward, weight=weight)
    m = n + more
    bubble = seconds_of("zb-h1", n, m, seconds) - m * (forward + backward + weight)
    assert bubble == (n - 1) * (backward + max(0, forward - weight))
    if weight <= forward:
        assert bubble == (n - 1) * (forward + backward - weight)
    assert bubble <= seconds_of("1f1b", n, m, seconds) - m * (forward + backward + weight)


# Merak (arXiv 2206.04959): F = R = 1, B = 2; recomputed figures.
@pytest.mark.parametrize(("stages", "micro", "makespans"), [
    (4, 8, (44, 41, 39, 38)), (8, 16, (92, 85, 83, 82)), (8, 32, (156, 149, 147, 146)),
])
def test_makespans_of_merak(stages: int, micro: int, makespans: tuple[int, ...]) -> None:
    """Plain; then (a) early second forwards; (b) none on the last stage; (c) a third forward before the last."""
    seconds = StageSeconds(forward=1, backward=2)
    found = (
        seconds_of("1f1b", stages, micro, seconds, recompute="late"),
        seconds_of("1f1b", stages, micro, seconds, recompute="early"),
        seconds_of("1f1b", stages, micro, seconds, recompute="early", last_recomputes=False),
        seconds_of("merak", stages, micro, seconds),
    )
    assert found == makespans
    assert found[0] == (micro + stages - 1) * (1 + 1 + 2)


def test_more_in_flight_hides_slow_sends() -> None:
    """A send as long as a forward: AxoNN's N micro-batches in flight at every stage keep it from 1F1B's waits."""
    seconds = StageSeconds(forward=1, backward=2, send=1)
    found = {
        "1f1b": seconds_of("1f1b", 4, 8, seconds), "axonn": seconds_of("axonn", 4, 8, seconds, seconds=seconds),
        "gpipe": seconds_of("gpipe", 4, 8, seconds),
    }
    assert found == {"1f1b": 49, "axonn": 46, "gpipe": 39}


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_asynchronous_stages_idle_only_at_the_ends(n: int, t: int, minis: int) -> None:
    seconds = StageSeconds(forward=1, backward=2)
    found = time_schedule(schedule("async-1f1b", n, t, mini_batches=minis), seconds)
    assert found.makespan_seconds == (minis * t + n - 1) * 3
    flushed = time_schedule(schedule("stale", n, t, mini_batches=minis, switch_at=0), seconds)
    assert flushed.makespan_seconds <= minis * (t + n - 1) * 3


def test_sends_run_beside_the_compute_and_delay_what_waits_for_them() -> None:
    seconds = StageSeconds(forward=2, backward=4, send=1, send_back=0.5)
    assert seconds_of("gpipe", 3, 1, seconds) == 3 * 6 + 2 * 1 + 2 * 0.5
    # gpipe of many: the forwards fill one after the other, each send hidden by the next forward
    assert seconds_of("gpipe", 2, 4, seconds) == 4 * 2 + 1 + 2 + 4 + 0.5 + 4 * 4
    slow = StageSeconds(forward=2, backward=4, send=5)
    assert seconds_of("gpipe", 2, 4, slow) >= 2 + 4 * 5  # one send at a time on a link
    uneven = StageSeconds(forward=[2, 2, 2], backward=4, send=[1, 3, 0])
    assert seconds_of("1f1b", 3, 1, uneven) == 3 * 6 + 1 + 3 + 3 + 0


def test_updates_and_second_forwards_take_their_time() -> None:
    seconds = StageSeconds(forward=2, backward=4, recompute=1, update=7)
    assert seconds_of("1f1b", 1, 3, seconds) == 3 * 6 + 7
    assert seconds_of("1f1b", 1, 3, seconds, recompute="late") == 3 * 7 + 7
    assert seconds_of("async-1f1b", 1, 3, seconds, mini_batches=2) == 2 * (3 * 6 + 7)


def test_peak_activation_bytes_follow_the_table() -> None:
    seconds = StageSeconds(forward=1, backward=2, activation_bytes=[10, 20, 30, 40], input_bytes=3)
    table = schedule("1f1b", 4, 8)
    assert time_schedule(table, seconds).peak_activation_bytes == (40, 60, 60, 40)
    assert table.in_flight() == (4, 3, 2, 1)
    again = time_schedule(schedule("1f1b", 4, 8, recompute="late"), seconds)
    # inputs of all in flight, one of them in full
    assert again.peak_activation_bytes == (3 * 3 + 10, 2 * 3 + 20, 3 + 30, 40)


# ---------------------------------------------------------------------------------------------------------- lags


@pytest.mark.parametrize("stages", range(1, 9))
def test_lags_of_the_table_are_the_formula(stages: int) -> None:
    """Enumerated for N, T <= 8; XPipe's printed steps are never smaller, at the forward and at the backward."""
    for t in range(1, 9):
        table = schedule("async-1f1b", stages, t, mini_batches=-(-stages // t) + 2)
        formula = tuple(lag_bound(stages, t, k) for k in range(stages))
        assert lags(table) == formula
        for k in range(stages):
            forward, backward = xpipe_steps(stages, t, k)
            assert forward_lags(table, k)[-1] == formula[k] <= forward
            assert max(backward_lags(table, k)) == 0 <= backward


@given(st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_synchronous_schedules_have_no_lag(n: int, m: int) -> None:
    for name in ("gpipe", "1f1b", "zb-h1", "merak", "axonn"):
        assert lags(schedule(name, n, m)) == (0,) * n
        assert weight_copies(schedule(name, n, m)) == (1,) * n
    switched = schedule("stale", n, m, mini_batches=4, switch_at=2)
    for stage in range(n):
        assert forward_lags(switched, stage)[2:] == (0, 0)


def test_stashing_keeps_a_version_for_every_micro_batch_in_flight_of_its_own() -> None:
    """PipeDream, an update after every micro-batch: N - k versions at stage k; 2 where a mini-batch is long."""
    assert weight_copies(schedule("async-1f1b", 4, 1, mini_batches=8)) == (4, 3, 2, 1)
    assert weight_copies(schedule("async-1f1b", 4, 4, mini_batches=3)) == (2, 2, 2, 1)


# ------------------------------------------------------------------------------------------------------- picture


def test_picture_has_a_row_for_each_stage() -> None:
    found = time_schedule(schedule("1f1b", 3, 4), StageSeconds(forward=1, backward=2, update=1))
    assert "\n".join(found.picture()) == snapshot("""\
0 |012....aa3bb.cc.ddU|
1 |.01..aa2bb3cc.ddU..|
2 |..0aa1bb2cc3ddU....|
   0-9 forward of micro-batch 0-9, 10-19, ..., a-t backward, R second forward, W weight part, U update, . idle
   a column is 1 s\
""")


def test_wide_timelines_are_drawn_in_the_width_asked_for() -> None:
    found = time_schedule(schedule("gpipe", 12, 40), StageSeconds(forward=1, backward=2.1))
    picture = found.picture(60)
    assert len(picture) == 14
    assert {len(line) for line in picture[:-2]} == {60 + len("11 ||")}
    assert picture[0].startswith(" 0 |1") and picture[11].startswith("11 |....0")


def test_schedules_side_by_side() -> None:
    tables = [schedule("gpipe", 3, 4), schedule("zb-h1", 3, 4), schedule("async-1f1b", 3, 2, mini_batches=2)]
    found = compare_schedules(tables, StageSeconds(forward=1, backward=1, weight=1, activation_bytes=10))
    assert "\n".join(found) == snapshot("""\
schedule    seconds  bubble  in flight  activations  lag  weight copies
gpipe          18 s  33.3 %          4         40 B    0              1
zb-h1          14 s  14.3 %          3         30 B    0              1
async-1f1b     18 s  33.3 %          3         30 B    1              2

gpipe, a column is 1 s
0 |0123......ddccbbaa|
1 |.0123...ddccbbaa..|
2 |..0123ddccbbaa....|

zb-h1, a column is 1 s
0 |012..aW3bWcWdW|
1 |.01.a2bW3cWdWW|
2 |..0a1b2cW3dWWW|

async-1f1b, a column is 1 s
0 |012....aa3bb.cc.dd|
1 |.01..aa2bb3cc.dd..|
2 |..0aa1bb2cc3dd....|
   0-9 forward of micro-batch 0-9, 10-19, ..., a-t backward, R second forward, W weight part, U update, . idle\
""")


def test_figures_that_cannot_be_are_refused() -> None:
    with pytest.raises(ProblemError) as error:
        StageSeconds(forward=-1, backward=2)
    assert str(error.value) == "StageSeconds: forward has -1; give figures of at least 0."
    with pytest.raises(ProblemError) as error:
        time_schedule(schedule("1f1b", 4, 2), StageSeconds(forward=[1, 2], backward=2))
    assert str(error.value) == (
        "StageSeconds: forward has 2 figures and the schedule 4 stages; give one figure for all, or one for each stage."
    )
