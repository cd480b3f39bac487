"""Figures out of measured seconds, on made-up measurements; and the machine file that they become."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.core import KINDS, CollectiveKind, MachineError, MeshShape
from meshplan.machine import Machine, collective_time
from meshplan.machine._calibrate import Calibration
from meshplan.machine._calibrate_fit import (
    CollectiveSample,
    KernelSample,
    Work,
    alone,
    fit_kernels,
    fit_linear,
    fit_links,
)
from meshplan.machine._chip import KernelFigures
from meshplan.machine._presets import load_preset, preset_text

SOURCE = "measured on toys"
rates = st.floats(1e6, 1e12)


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-7, 1e-4), rates, rates, st.integers(0, 1000))
def test_exact_times_give_their_figures_back(fixed: float, flops: float, nbytes: float, seed: int) -> None:
    work = np.random.default_rng(seed).uniform(0.1, 1, (12, 2)) * [[flops * 1e-3, nbytes * 1e-3]]
    features = np.concatenate([np.ones((12, 1)), work], axis=1)
    truth = np.array([fixed, 1 / flops, 1 / nbytes])
    assert fit_linear(features, features @ truth) @ features.T == pytest.approx(features @ truth, rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-9, 1e3), st.floats(1e-9, 1e3), st.floats(1e-9, 1e3)), min_size=1, max_size=9))
def test_figures_are_never_negative(rows: list[tuple[float, float, float]]) -> None:
    found = fit_linear([r[:2] for r in rows], [r[2] for r in rows])
    assert np.all(found >= 0) and np.all(np.isfinite(found))


def test_a_measurement_that_was_disturbed_does_not_count() -> None:
    sizes = np.array([2.0**k for k in range(10, 22)])
    seconds = 1e-6 + sizes / 1e9
    seconds[[3, 7]] *= 8
    fixed, slowness = fit_linear(np.stack([np.ones(12), sizes], axis=1), seconds)
    assert 1 / slowness == pytest.approx(1e9, rel=0.05)
    assert fixed == pytest.approx(1e-6, rel=0.2)


def test_units_of_the_features_do_not_matter() -> None:
    a = np.random.default_rng(0).uniform(0.1, 1, (9, 3))
    t = a @ [1.0, 2.0, 3.0]
    assert fit_linear(a * [1, 1e12, 1e-9], t) == pytest.approx([1.0, 2e-12, 3e9], rel=1e-3)


@pytest.mark.parametrize("seconds", [[], [0.0, 1.0], [-1.0, 1.0], [math.nan, 1.0]])
def test_no_times_and_times_that_cannot_be_are_refused(seconds: list[float]) -> None:
    with pytest.raises(MachineError, match="must be positive"):
        fit_linear(np.ones((len(seconds), 1)), seconds)


def test_kernels_are_fitted_by_kind_name_and_dtype() -> None:
    def product(n: int, dtype: str, rate: float) -> KernelSample:
        work = Work(flops=2.0 * n**3, nbytes=12.0 * n * n, batches=1)
        seconds = 2e-6 + work.flops / rate + work.nbytes / 1e10
        return KernelSample(kind="matmul", dtype=dtype, work=work, seconds=seconds)

    sizes = (32, 64, 128, 256, 512)
    samples = [product(n, d, r) for d, r in (("float32", 5e10), ("bfloat16", 2e10)) for n in sizes]
    samples.append(KernelSample(kind="map", name="exp", dtype="float32", work=Work(elements=1e6), seconds=1e-3))
    first, second, exp = fit_kernels(samples, SOURCE)
    assert (first.kind, first.dtype, second.dtype, exp.name) == ("matmul", "float32", "bfloat16", "exp")
    assert first.flops_per_second == pytest.approx(5e10, rel=0.02)
    assert second.flops_per_second == pytest.approx(2e10, rel=0.02)
    assert exp.elements_per_second == pytest.approx(1e9) and exp.fixed_seconds == 0
    assert {f.source for f in (first, second, exp)} == {SOURCE}
    for s in samples[:5]:
        assert first.seconds(flops=s.work.flops, nbytes=s.work.nbytes, batches=1) == pytest.approx(s.seconds, rel=0.02)


def kernel_samples() -> list[KernelSample]:
    """A call of 100 us and 5 us a leaf, 2 us a kernel, copies at 10 GB/s and 1 us, fresh memory at 1 GB/s."""
    calls = [KernelSample(kind="dispatch", work=Work(batches=n), seconds=1e-4 + 5e-6 * n) for n in (1, 16)]
    starts = [KernelSample(kind="kernel", work=Work(batches=n), seconds=1.05e-4 + 2e-6 * n) for n in (16, 80)]
    maps = [KernelSample(kind="map", work=Work(nbytes=n), seconds=1e-6 + n * 1e-10) for n in (1e4, 1e5, 1e6, 1e7)]
    touch = KernelSample(kind="first-touch", work=Work(nbytes=4e6), seconds=1.05e-4 + 1e-6 + 8e-4 + 4e-3)
    apart = [
        KernelSample(kind="apart", name=f"{name} {n}", work=Work(), seconds=seconds)
        for n, product in ((64, 2e-4), (128, 2e-3))
        for name, seconds in (("product", product), ("sum", 1e-4), ("both", 1.2 * product + 1e-4 + 5e-5))
    ]  # fmt: skip
    return [*calls, *starts, *maps, touch, *apart]


def test_calls_and_touching_kernels_are_taken_out() -> None:
    figures = {k.kind: k for k in fit_kernels(alone(kernel_samples()), SOURCE)}
    assert figures["kernel"].seconds(batches=1, runs=0) == pytest.approx(2e-6, rel=0.05)
    assert figures["map"].bytes_per_second == pytest.approx(1e10, rel=0.02)
    assert figures["first-touch"].bytes_per_second == pytest.approx(1e9, rel=0.02)
    assert figures["apart"].seconds(batches=1e-3) == pytest.approx(5e-5 + 2e-4, rel=0.02)
    assert figures["dispatch"].seconds(batches=10) == pytest.approx(1.5e-4, rel=0.01)


def link_samples(latency: float, rate: float, own: float) -> list[CollectiveSample]:
    """As a machine with these figures would take, for groups of 2, 4 and 8."""
    samples = []
    for kind in KINDS:
        for n in (2, 4, 8):
            for nbytes in (1e3, 1e5, 1e7):
                twice = 2 if kind == "all-reduce" else 1
                steps, moved, piece = twice * (n - 1), twice * (n - 1) / n * nbytes, nbytes / n
                if kind == "collective-permute":
                    steps, moved, piece = 1, nbytes, 0.0
                part = 0.5 if kind == "all-to-all" else 1.0
                seconds = 1e-5 + steps * latency + moved / (rate * part) + piece / own
                samples.append(CollectiveSample(kind=kind, size=n, nbytes=nbytes, seconds=seconds))
    return samples


def calibration(base: str, links: bool = True) -> Calibration:
    kernels = kernel_samples()
    moved = link_samples(2e-6, 4e9, 1e10)
    products = KernelFigures(kind="matmul", dtype="float32", flops_per_second=2.5e10, fixed_seconds=1e-6, source=SOURCE)
    return Calibration(
        base=Machine.preset(base), device_kind="Toy 1", source=SOURCE, host_bytes_per_second=7e9,
        chip_kernels=(products, *fit_kernels(alone(kernels), SOURCE)), link=fit_links(moved, SOURCE) if links else None,
        kernel_samples=tuple(kernels), collective_samples=tuple(moved), notes=("a note",),
    )


def test_collectives_of_a_fitted_machine_take_what_was_measured() -> None:
    machine = calibration("cpu:8").machine()
    for s in link_samples(2e-6, 4e9, 1e10):
        mesh = MeshShape((("a", 8 // s.size), ("b", s.size))) if s.size < 8 else MeshShape((("b", 8),))
        found = collective_time(machine, mesh, s.kind, s.nbytes, ("b",))
        assert found.seconds == pytest.approx(s.seconds, rel=0.03), s


def test_the_kind_with_the_best_rate_sets_the_links_rate() -> None:
    fit = fit_links(link_samples(2e-6, 4e9, 1e10), SOURCE)
    efficiency: dict[CollectiveKind, float] = {a.kind: a.efficiency for a in fit.algorithms}
    assert fit.bytes_per_second == pytest.approx(4e9, rel=0.05)
    assert efficiency["all-to-all"] == pytest.approx(0.5, rel=0.1)
    assert max(efficiency.values()) == 1


@pytest.mark.parametrize("base", ["cpu:8", "h100:1x8", "tpu-v5e:2x4", "v100:1x4"])
def test_a_calibration_is_a_machine_file(base: str) -> None:
    found = calibration(base, links=base in ("cpu:8", "h100:1x8"))
    machine = found.machine()
    assert machine.devices == found.base.devices and machine.name.startswith(base.partition(":")[0] + "-calibrated:")
    assert machine.chip.flops["float32"] == 2.5e10 and machine.chip.sources["flops.float32"] == SOURCE
    assert machine.chip.host_bytes_per_second == 7e9
    assert machine.chip.memory_bytes == found.base.chip.memory_bytes
    assert machine.chip.sources["memory_bytes"] == found.base.chip.sources["memory_bytes"]
    product = machine.chip.kernel("matmul", dtype="float32")
    assert product is not None and product.flops_per_second == 2.5e10 and product.source == SOURCE
    if found.link is None:
        assert machine.dims == found.base.dims
    else:
        assert machine.dims[-1].bytes_per_second == pytest.approx(found.link.bytes_per_second, rel=1e-5)
        assert {a.kind for a in machine.dims[-1].algorithms} == set(KINDS)
        assert machine.dims[:-1] == found.base.dims[:-1]
    assert load_preset(found.toml(), "again.toml").device_kinds == (
        ("cpu",) if base == "cpu:8" else ("Toy 1",)
    )
    assert "# a note" in found.toml()
    shown = "\n".join(machine.describe())
    assert SOURCE in shown and "first-touch" in shown


def test_a_machine_that_was_not_measured_has_no_kernels() -> None:
    chip = Machine.preset("cpu:8").chip
    assert chip.kernels == () and chip.kernel("matmul") is None


def test_the_figures_nearest_to_what_is_asked_are_found() -> None:
    figures = [
        KernelFigures(kind="map", dtype="float32"), KernelFigures(kind="map", name="exp", dtype="float32"),
        KernelFigures(kind="map", name="exp", dtype="bfloat16"),
    ]  # fmt: skip
    chip = replace(Machine.preset("cpu:8").chip, kernels=tuple(figures))
    assert chip.kernel("map", "exp", "bfloat16") is figures[2]
    assert chip.kernel("map", "exp", "float64") is figures[1]
    assert chip.kernel("map", "unknown") is figures[0]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('kind = "matmull"\nfixed_seconds = { value = 1.0, source = "s" }', "must be one of dispatch, kernel"),
        ('kind = "matmul"', "is 'matmul' without a figure"),
        ('kind = "matmul"\nfixed_seconds = { value = -1.0, source = "s" }', "must be a positive number"),
        ('kind = "matmul"\nflops_per_secon = { value = 1.0, source = "s" }', "without a figure"),
    ],
)
def test_a_wrong_kernel_is_told_with_its_line(entry: str, message: str) -> None:
    text = preset_text("cpu").replace("[size]", f"[[chip.kernels]]\n{entry}\n[size]")
    at = text[: text.index("[[chip.kernels]]")].count("\n") + 1
    with pytest.raises(MachineError, match=message) as raised:
        load_preset(text, "mine.toml")
    line = re.search(r"mine\.toml, line (\d+)", str(raised.value))
    assert line is not None and at < int(line[1]) <= at + 2
