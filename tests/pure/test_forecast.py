"""One step on many machines: rows, efficiency, reasons, and what it costs."""

from __future__ import annotations

import pytest

import meshplan as mp
from meshplan import _api
from models import gpt
from tests._programs import adam_args, adam_step

MACHINES = ["h100:1x8", "h100:2x8", "h100:8x8", "tpu-v5e:2x4"]


@pytest.fixture(scope="module")
def found() -> mp.Forecast:
    return mp.forecast(gpt.workload("tiny"), machines=MACHINES)


def test_rows_come_in_the_order_of_the_machines_with_ordinary_plans(found: mp.Forecast):
    assert [r.machine for r in found] == MACHINES and [r.devices for r in found] == [8, 16, 64, 8]
    assert found.traced == 1 and found.unit == "tokens"
    for row in found:
        assert row.feasible and row.step_seconds and row.peak_bytes and row.mesh is not None
        plan = found.plans[row.machine]
        assert plan.step_seconds == row.step_seconds and plan.data.mesh.devices == row.devices
        rate = row.tokens / row.step_seconds / row.devices
        assert row.tokens_per_second_per_device == pytest.approx(rate)


def test_the_smallest_machine_of_a_chip_is_the_measure_of_efficiency(found: mp.Forecast):
    by_name = {r.machine: r for r in found}
    assert by_name["h100:1x8"].efficiency == by_name["tpu-v5e:2x4"].efficiency == 1.0
    first, large = by_name["h100:1x8"], by_name["h100:8x8"]
    assert large.efficiency == pytest.approx(
        large.tokens_per_second_per_device / first.tokens_per_second_per_device  # type: ignore[operator]
    )


def test_a_machine_that_is_too_small_is_a_row_with_its_reason():
    rows = mp.forecast(adam_step, *adam_args(2, batch=64), machines=["h100:1x8"], memory_limit=1000, tokens=64).rows
    assert not rows[0].feasible and rows[0].step_seconds is None
    assert "no plan fits 1 kB per device" in rows[0].reason


def test_wrong_machines_are_sentences():
    with pytest.raises(mp.MachineError, match="h100"):
        mp.forecast(gpt.workload("tiny"), machines=["h10:1x8"])
    with pytest.raises(mp.ArgumentError, match="is given twice"):
        mp.forecast(gpt.workload("tiny"), machines=["h100:1x8", "h100:1x8"])
    with pytest.raises(mp.ArgumentError, match="give a list of names"):
        mp.forecast(gpt.workload("tiny"), machines="h100:1x8")
    with pytest.raises(mp.ArgumentError, match="scaling 'wek' is unknown"):
        mp.forecast(gpt.workload("tiny"), machines=["h100:1x8"], scaling="wek")  # type: ignore[arg-type]


def test_thousands_of_chips_take_no_more_solves_than_tens():
    rows = mp.forecast(gpt.workload("tiny"), machines=["h100:8x8", "h100:1024x8"]).rows
    assert rows[1].devices == 8192 and rows[1].solves <= 3 * rows[0].solves


def test_the_table_says_that_it_is_modelled(found: mp.Forecast):
    shown = str(found)
    assert "modelled" in shown and all(name in shown for name in MACHINES)
    assert "modelled" in found._repr_html_() and "h100:2x8" in found._repr_html_()
    assert _api.forecast is mp.forecast
