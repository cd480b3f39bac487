"""A step on a timeline: closed forms where nothing overlaps, bounds where it does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshplan.core import MeshShape
from meshplan.cost import timeline_of
from meshplan.cost._compute import modelled_compute_seconds
from meshplan.plan import Found, Search
from meshplan.plan._step_timeline import step_timeline
from tests._programs import adam_args, adam_step, block_args, block_step, f32, search_of

MACHINES = ("cpu:8", "h100:1x8", "tpu-v5e:2x4")


def scanned(ws: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        return jnp.mean(lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0] ** 2)

    return ws - 0.1 * jax.grad(loss)(ws)


CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "adam": (adam_step, adam_args(2, batch=1024, width=512, hidden=2048)),
    "block": (block_step, block_args(batch=64, seq=64, width=64, vocab=512)),
    "scanned": (scanned, (f32(6, 256, 256), f32(512, 256))),
}


def found_for(name: str, machine: str, template: str, **mesh: int) -> Found:
    step, args = CASES[name]
    search: Search = search_of(step, *args, machine=machine, donate=(0,))
    found = search.at(MeshShape.of(mesh), template)
    assert found is not None
    return found


def all_collectives(found: Found) -> float:
    """Seconds of all collectives, one after the other."""
    rates = found.chosen.model.rates
    return sum(
        run.count * rates.fitted_seconds(c.kind, c.axes, run.nbytes)
        for run in found.chosen.runs() for c in [run.members[0].collective]
    )  # fmt: skip


def copied_seconds(found: Found) -> float:
    """Seconds of bringing pieces in order where they are gathered or scattered along another dim than the first."""
    rates, machine = found.chosen.model.rates, found.chosen.model.machine
    members = [(e, run.count) for run in found.chosen.runs() for e in run.members if e.laid_out]
    return sum(n * (e.laid_out / machine.chip.memory_bytes_per_second + rates.kernel_seconds) for e, n in members)


@pytest.mark.parametrize("template", ["dp", "fsdp", "megatron"])
@pytest.mark.parametrize("name", CASES)
def test_without_overlap_a_step_is_its_roofline_and_all_its_collectives(name: str, template: str):
    found = found_for(name, "cpu:8", template, data=4, model=2)
    step, communication = timeline_of(found.chosen), all_collectives(found)
    assert step.collective_seconds == pytest.approx(communication)
    assert step.exposed_seconds == pytest.approx(communication)
    assert step.seconds == pytest.approx(found.chosen.roofline_seconds() + communication)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("template", ["dp", "fsdp", "megatron"])
@pytest.mark.parametrize("name", CASES)
def test_overlap_shortens_a_step_and_never_below_its_longer_part(name: str, template: str, machine: str):
    found = found_for(name, machine, template, data=4, model=2)
    step = timeline_of(found.chosen)
    compute, communication = step.busy_seconds, all_collectives(found)
    fitted = modelled_compute_seconds(found.chosen) if machine.startswith("tpu") else found.chosen.roofline_seconds()
    assert compute == pytest.approx(fitted + copied_seconds(found))
    assert step.collective_seconds <= communication * (1 + 1e-9)
    assert 0 <= step.exposed_seconds <= step.collective_seconds * (1 + 1e-9)
    assert compute + step.exposed_seconds <= step.seconds * (1 + 1e-9)
    assert step.seconds <= (compute + communication) * (1 + 1e-9)


def test_what_each_collective_adds_sums_up_to_what_is_exposed():
    step = timeline_of(found_for("adam", "h100:1x8", "fsdp", data=8).chosen)
    by_run = list(step.exposed_by_run())
    assert len(by_run) == len(found_for("adam", "h100:1x8", "fsdp", data=8).chosen.runs())
    assert sum(seconds for _, seconds in by_run) == pytest.approx(step.exposed_seconds)


def test_a_gradient_is_reduced_while_the_next_is_computed():
    """In an unrolled data-parallel step only the last reduction has nothing beside it to hide behind."""
    found = found_for("adam", "h100:1x8", "dp", data=8)
    step = timeline_of(found.chosen)
    assert not step.inner
    assert step.exposed_seconds <= all_collectives(found)
    again = timeline_of(found.chosen)
    assert again.timeline == step.timeline, "bit by bit"


def test_the_body_of_a_loop_counts_with_its_trips():
    step = timeline_of(found_for("scanned", "h100:1x8", "dp", data=8).chosen)
    assert [s.trips for s in step.inner.values()] == [6.0, 6.0]
    assert step.seconds > sum(s.seconds for s in step.inner.values())


def test_what_is_only_put_away_waits_at_the_end_of_its_region():
    """Gradients of a loop's body are reduced beside the rest of it; a machine that waits at once hides nothing."""
    beside, at_once = (timeline_of(found_for("scanned", m, "dp", data=8).chosen) for m in ("h100:1x8", "cpu:8"))
    assert beside.exposed_seconds < 0.95 * beside.collective_seconds
    assert at_once.exposed_seconds == pytest.approx(at_once.collective_seconds)


def test_figures_of_a_timeline_name_the_lines_that_are_waited_for():
    found = found_for("adam", "h100:1x8", "fsdp", data=8)
    line, step = step_timeline(found.chosen), timeline_of(found.chosen)
    assert line.seconds == step.seconds and line.hidden_seconds >= 0
    assert line.busy_seconds + line.exposed_seconds == pytest.approx(line.seconds)
    assert sum(w.seconds for w in line.waits) == pytest.approx(line.exposed_seconds)
    assert list(line.waits) == sorted(line.waits, key=lambda w: -w.seconds)
    assert all(w.source and w.runs >= 1 and w.axes == ("data",) for w in line.waits)
