"""Random programs, planned in every way, compute on eight devices what they compute on one.

A hundred programs of 20 to 45 operations as written (some hundred in the jaxpr): scans, loops, branches, rematerialised
and batched functions inside, most with gradients; on random meshes of eight. Most are planned as no cost model would:
random legal strategies, or the best for random prices. A failure names its seed, is made smaller, and is printed as
source. `tests/benchmarks/fuzz_many.py` runs thousands.
"""

from __future__ import annotations

import collections
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from jax import lax

from meshplan.program import Call, trace
from tests import _fuzz
from tests._fuzz import MESHES, Outcome, Program, Way, check, compared, made_from, planned, reduced, reference, report
from tests._fuzz_writer import Writer, count

CHUNKS, PER_CHUNK, SEEDS = 20, 5, 1 << 20
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs_compute_what_one_device_does(chunk: int) -> None:
    """Hypothesis chooses seeds, which are all there is to make smaller: `reduced` works on the program's lines."""
    leaves: collections.Counter[str] = collections.Counter()

    @seed(chunk)
    @settings(max_examples=PER_CHUNK, phases=[Phase.generate], suppress_health_check=SLOW)
    @given(st.integers(chunk * SEEDS, (chunk + 1) * SEEDS - 1))
    def run(number: int) -> None:
        program, way = made_from(number)
        outcome = check(program, way)
        if not outcome.ok:
            small, failure = reduced(program, way, outcome, tries=40)
            pytest.fail(f"seed {number}\n{report(small, way, failure)}")
        leaves.update(compared=outcome.leaves[0], left_out=outcome.leaves[1])
        jax.clear_caches()

    run()
    assert leaves["left_out"] <= 0.1 * leaves["compared"], "too many results are too badly conditioned to compare"


# ---------------------------------------------------------------------------------- what was found, made small


def written(text: str, mode: str = "forward", **values: Any) -> Program:
    """A program of one line on `v0`, `v1` ...: shapes of floats, or (shape, bound) of integers."""
    w = Writer(np.random.default_rng(0))  # type: ignore[arg-type]  # draws nothing
    for about in values.values():
        whole = isinstance(about[0], tuple)
        w.argument(about[0] if whole else about, bound=about[1] if whole else 0)
    assert [v.name for v in w.pool] == list(values)
    out = w.emit(text, *w.pool)
    return Program(tuple(w.lines), (out,), mode, 0)


FOUND = {
    "a row written on shards that do not have it": written("v0.at[9].set(0.25) * 2.0", v0=(16,)),
    "a row of a batch of one added, other dims split": written(
        "jax.vmap(lambda r, k: lax.dynamic_slice_in_dim(r, k, 1, 0) * r)(v0, v1)", "gradient",
        v0=(1, 6, 8), v1=((1,), 6),
    ),
    "everything written, in a block that is rematerialised": written(
        "jax.checkpoint(lambda x: x.at[0:].set(0.25))(v0) * 2.0", v0=(8, 16)
    ),
    "a row of each of two written": written(
        "jax.vmap(lambda r, k: r.at[k].add(5.0))(v0, v1)", v0=(2, 12), v1=((2, 1), 12)
    ),
    "a row added at a computed place": written("v0.at[v1[0]].add(v0[0])", "gradient", v0=(8, 4), v1=((3,), 8)),
    "a slice out of range": written("lax.dynamic_slice_in_dim(v0, v1[0] + 6, 8, 0)", v0=(12,), v1=((2,), 6)),
    "slices out of range": written(
        "jax.vmap(lambda r, k: lax.dynamic_slice_in_dim(r, k, 8, 0))(v0, v1 + 6)", v0=(2, 12), v1=((2,), 6)
    ),
    "an update out of range": written("lax.dynamic_update_slice(v0, 0.5 * v0[:5], (6, 1))", v0=(24, 8)),
    "the gradient of a grouped convolution's kernel": written(
        "lax.conv_general_dilated(v0, v1, (1,), 'VALID', dimension_numbers=('HNC', 'HIO', 'HNC'), "
        "feature_group_count=2)", "gradient", v0=(24, 8, 2), v1=(3, 1, 4),
    ),
    "a dim that windows step over, split beside the features": written(
        "lax.conv_general_dilated(v0, v1, (2,), 'VALID', dimension_numbers=('NHC', 'HIO', 'NHC'))",
        v0=(1, 16, 2), v1=(2, 2, 8),
    ),
    "a dim that windows spread over, split beside the features": written(
        "lax.conv_general_dilated(v0, v1, (1,), 'VALID', rhs_dilation=(2,), dimension_numbers=('NHC', 'HIO', 'NHC'))",
        v0=(1, 8, 2), v1=(1, 2, 4),
    ),
    "a dim spread and cut at its start": written("lax.pad(v0, jnp.float32(0), ((-1, 3, 2), (0, 0, 0)))", v0=(8, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_was_once_wrong_is_right_under_any_plan(name: str) -> None:
    for number in range(8):
        way = Way(("random", "priced")[number % 2], dict(MESHES[number % 4]), number)
        outcome = check(FOUND[name], way)
        assert outcome.ok, report(FOUND[name], way, outcome)


@pytest.mark.parametrize("number", [693])  # a Fourier transform of one row of two entries
def test_seeds_that_once_failed(number: int) -> None:
    program, way = made_from(number)
    outcome = check(program, way)
    assert outcome.kind == "same", report(program, way, outcome)


def test_a_loop_whose_body_calls_something_without_results_has_its_trips_counted() -> None:
    def body(c: Any) -> Any:
        jax.jit(lambda x: None)(c[1])
        return c[0] + 1, c[1] * 0.5

    call = Call(step=lambda x: lax.while_loop(lambda c: c[0] < 3, body, (0, x)), args=(jnp.ones(8),), kwargs={})
    (loop,) = [r for r in trace(call).regions if r.kind == "while"]
    assert (loop.trips, loop.known_trips) == (3.0, True)


# ------------------------------------------------------------------------------------------ the fuzzer itself


def test_seeds_make_the_same_programs_which_are_large_and_of_every_kind() -> None:
    programs = [made_from(number) for number in range(30)]
    assert [p.source() for p, _ in programs] == [made_from(number)[0].source() for number in range(30)]
    assert all(20 <= count(p.lines) <= 60 for p, _ in programs)
    together = "".join(p.source().split("def forward")[1] for p, _ in programs)
    for word in ("lax.scan", "while_loop", "lax.cond", "jax.checkpoint", "jax.vmap", "dot_general", "lax.conv", ".at["):
        assert word in together
    assert {p.mode for p, _ in programs} == set(_fuzz.MODES)
    assert {way.kind for _, way in programs} >= {"random", "priced", "mixed", "planned", "template", "pinned"}


def test_a_wrong_result_is_noticed() -> None:
    program, way = written("jnp.tanh(v0 @ v1)", v0=(8, 8), v1=(8, 16)), Way("random", dict(MESHES[1]), 3)
    plan, wanted = planned(program, way), reference(program)
    found = plan.jit()(*program.values())
    assert compared(plan, found, wanted).kind == "same"
    off = ([wanted[0][0] + np.float32(0.01) * (np.arange(16) == 3)], wanted[1])
    outcome = compared(plan, found, off)
    assert (outcome.kind, outcome.leaves) == ("wrong", (1, 0))
    misplaced = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), found)
    assert "placed as" in compared(plan, misplaced, wanted).detail


def test_a_failure_is_reduced_to_the_line_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    program, way = next(made for made in map(made_from, range(30)) if any(line.bodies for line in made[0].lines[3:]))
    culprit = next(line for line in program.lines[3:] if line.bodies)

    def planted(candidate: Program, _: Way) -> Outcome:
        there = any(line.text == culprit.text for line in candidate.lines)
        return Outcome("wrong", "compare", "off") if there else Outcome("same")

    monkeypatch.setattr(_fuzz, "check", planted)
    small, outcome = reduced(program, way, planted(program, way))
    (line,) = small.lines
    assert line.text == culprit.text
    assert not any(body.lines for body in line.bodies)
    assert (outcome.kind, small.mode) == ("wrong", "forward")
    runnable: dict[str, Any] = {}
    exec(report(small, way, outcome), runnable)
    jax.eval_shape(runnable["step"], *small.values())


def test_a_refusal_without_need_counts_as_a_failure() -> None:
    program = written("v0 * 2.0", v0=(6, 8))
    ways = [Way("indivisible", {"data": 4, "model": 2}, number) for number in range(8)]
    refused = next(outcome for way in ways if (outcome := check(program, way)).kind == "refused")
    assert "6 is not divisible by 4" in refused.detail
    needless = _fuzz.refusal(replace(Way("planned", {"data": 8}, 0)), _fuzz.mp.SpecError("dim 0 ..."))
    assert (needless.kind, needless.ok) == ("crashed", False)
