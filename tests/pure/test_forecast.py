"""One step on many machines: rows, efficiency, reasons, and what it costs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import meshplan as mp
from meshplan import _api
from meshplan.cli import main
from meshplan.plan import ForecastRow, Search, best_bounded
from meshplan.plan._bounded import MOST_MESHES, least_bytes
from models import gpt
from tests._programs import adam_args, adam_step, f32, search_of

MACHINES = ["h100:1x8", "h100:2x8", "h100:8x8", "tpu-v5e:2x4"]


@pytest.fixture(scope="module")
def found() -> mp.Forecast:
    return mp.forecast(gpt.workload("tiny", layers=1), machines=MACHINES)


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
        mp.forecast(gpt.workload("tiny", layers=1), machines=["h10:1x8"])
    with pytest.raises(mp.ArgumentError, match="is given twice"):
        mp.forecast(gpt.workload("tiny", layers=1), machines=["h100:1x8", "h100:1x8"])
    with pytest.raises(mp.ArgumentError, match="give a list of names"):
        mp.forecast(gpt.workload("tiny", layers=1), machines="h100:1x8")
    with pytest.raises(mp.ArgumentError, match="scaling 'wek' is unknown"):
        mp.forecast(gpt.workload("tiny", layers=1), machines=["h100:1x8"], scaling="wek")  # type: ignore[arg-type]


def test_thousands_of_chips_take_no_more_solves_than_tens():
    rows = mp.forecast(gpt.workload("tiny", layers=1), machines=["h100:8x8", "h100:1024x8"]).rows
    assert rows[1].devices == 8192 and rows[1].solves <= 3 * rows[0].solves


def test_the_table_says_that_it_is_modelled(found: mp.Forecast):
    shown = str(found)
    assert "modelled" in shown and all(name in shown for name in MACHINES)
    assert "modelled" in found._repr_html_() and "h100:2x8" in found._repr_html_()
    assert _api.forecast is mp.forecast


# --------------------------------------------------------------------------------------------------- what is bounded


@pytest.mark.parametrize("machine", ["h100:1x8", "tpu-v5e:2x4"])
def test_no_plan_holds_less_than_the_least_that_is_claimed(machine: str):
    search = search_of(adam_step, *adam_args(1, batch=64), machine=machine, donate=(0,))
    least, whole = least_bytes(search), adam_bytes(search)
    found = search.at(search.meshes()[-1], known=(), exact=False)
    assert found is not None
    lowest = search.least(found.chosen.model, (), found)
    assert whole / 8 < least <= lowest.prediction.peak_bytes <= found.prediction.peak_bytes
    tight = best_bounded(dataclasses.replace(search, limit=0.99 * least, models={}))
    assert tight.best is None and tight.solves == 0 and "however they are split" in tight.reason


def adam_bytes(search: Search) -> float:
    """Of all arguments, whole."""
    return float(sum(leaf.aval.nbytes for leaf in search.program.args))


def test_the_bounded_search_comes_close_to_the_full_one():
    for machine in ("h100:2x8", "tpu-v5e:2x4"):
        search = search_of(adam_step, *adam_args(1, batch=64), machine=machine, donate=(0,))
        full, _ = search.best(search.meshes())
        found = best_bounded(search).best
        assert found is not None and found.feasible
        assert found.prediction.score <= 1.05 * full.prediction.score


def test_at_most_so_many_meshes_are_solved_however_many_there_are():
    search = search_of(adam_step, *adam_args(1, batch=64), machine="tpu-v5p:16x16x32", donate=(0,))
    assert len(search.meshes()) == 79
    found = best_bounded(search)
    assert 0 < len(found.tried) <= MOST_MESHES and found.best is not None and found.best.mesh.devices == 8192


def test_the_order_of_the_machines_changes_no_row():
    def told(machines: Sequence[str]) -> list[ForecastRow]:
        rows = mp.forecast(adam_step, *adam_args(1, batch=64), machines=machines).rows
        return [dataclasses.replace(r, plan_seconds=0.0) for r in rows]

    assert told(["h100:2x8", "h100:1x8"]) == told(["h100:1x8", "h100:2x8"])[::-1]


# ------------------------------------------------------------------------------------------------ what is counted


def forecast_one(**more: Any) -> mp.Forecast:
    return mp.forecast(adam_step, *adam_args(1, batch=64), machines=["h100:1x8"], **more)


def test_without_tokens_the_samples_of_the_batch_are_counted():
    counted = forecast_one()
    assert (counted.unit, counted.counted, counted.rows[0].tokens) == (
        "samples", "the leading dim of the last argument", 64
    )  # fmt: skip
    given = forecast_one(tokens=640)
    assert (given.unit, given.rows[0].tokens) == ("tokens", 640)
    for wrong in (0, 1.5):
        with pytest.raises(mp.ArgumentError, match="give the number that a step works on"):
            forecast_one(tokens=wrong)


def test_a_step_without_a_batch_must_be_told_its_tokens():
    with pytest.raises(mp.ArgumentError, match=r"give tokens=\.\.\."):
        mp.forecast(lambda x: x + 1, f32(), machines=["h100:1x8"])


def test_a_batch_that_does_not_divide_is_a_note_of_the_row(found: mp.Forecast):
    assert found["h100:1x8"].note == ""
    assert "the batch of 8 does not divide over 64 devices" in found["h100:8x8"].note
    with pytest.raises(mp.MachineError, match="Nearest: h100:8x8"):
        found["h100:8x9"]


def test_a_machine_with_more_levels_of_links_than_axes_is_a_row_with_its_reason():
    rows = forecast_one(options=mp.Options(max_axes=1)).rows
    assert rows[0].feasible
    rows = mp.forecast(
        adam_step, *adam_args(1, batch=64), machines=["h100:2x8", "h100:1x8"], options=mp.Options(max_axes=1)
    ).rows
    assert "raise max_axes" in rows[0].reason and rows[1].feasible


def test_weak_scaling_grows_the_batch_and_traces_a_program_a_size():
    grown = mp.forecast(
        lambda n: mp.Workload(adam_step, adam_args(1, batch=4 * n), (0,)), machines=["h100:1x8", "h100:2x8"],
        scaling="weak",
    )  # fmt: skip
    assert grown.traced == 2 and [r.tokens for r in grown] == [4 * 8, 4 * 16]
    assert grown.rows[0].efficiency == 1.0 and grown.rows[1].note == ""
    with pytest.raises(mp.ArgumentError, match="takes a function from a number of devices to a Workload"):
        mp.forecast(gpt.workload("tiny", layers=1), machines=["h100:1x8"], scaling="weak")
    with pytest.raises(mp.ArgumentError, match="made a int of 8 devices, not a Workload"):
        mp.forecast(lambda n: n, machines=["h100:1x8"], scaling="weak")


# ------------------------------------------------------------------------------------- reports and the command line


def test_the_page_holds_the_reason_of_a_row_that_does_not_fit(tmp_path: Path):
    page = tmp_path / "forecast.html"
    mp.forecast(
        adam_step, *adam_args(2, batch=64), machines=["h100:1x8", "h100:2x8"], memory_limit=1000, tokens=64
    ).html(page)
    shown = page.read_text()
    assert shown.startswith("<!doctype html>") and "h100:2x8 does not fit: no plan fits 1 kB per device" in shown


def test_a_plot_has_a_line_for_each_chip(found: mp.Forecast):
    pytest.importorskip("matplotlib").use("agg")
    ax = found.plot()
    assert [line.get_label() for line in ax.get_lines()] == list(dict.fromkeys(r.chip for r in found))
    assert list(ax.get_lines()[0].get_xdata()) == [8, 16, 64]
    assert "modelled" in ax.get_title()


def test_the_command_prints_writes_and_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    page = tmp_path / "out.html"
    typed = ["forecast", "models.mlp:workload", "--size", "tiny",
            "--machine", "h100:1x8", "--machine", "h100:2x8"]  # fmt: skip
    assert main([*typed, "-o", str(page)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Forecast of mlp-tiny, modelled\nstrong scaling") and "efficiency 100.0%" in out
    assert "modelled" in page.read_text()
    assert main([*typed, "--json", "--per-device", "batch=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["modelled"] is True and found["scaling"] == "weak"
    assert [r["tokens"] for r in found["rows"]] == [16, 32] and found["unit"] == "samples"
    assert main([*typed, "--memory-limit", "1kB"]) == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--machine", "h10:1x8"], "there is no preset 'h10'. Nearest: h100"),
        (["--machine", "h100:1x8", "--per-device", "batch"], "Write batch=4."),
        (["--machine", "h100:1x8", "--per-device", "batch=4", "--tokens", "8"], "Leave one of the two away."),
        (["--machine", "h100:1x8", "-o", "no/such/folder/x.html"], "does not exist. Create it first."),
        ([], "required: --machine"),
    ],
)
def test_mistakes_on_the_command_line_are_one_sentence(capsys: pytest.CaptureFixture[str], more: list[str], said: str):
    assert main(["forecast", "models.gpt:workload", *more]) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err
