"""A quick calibration of the eight host devices; and what cannot be calibrated."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import pytest

from meshplan.cli._main import main
from meshplan.core import KINDS, MachineError, MeshShape
from meshplan.machine import Calibration, Machine, calibrate, collective_time, process_clock
from meshplan.machine._calibrate import _medians, _Ready
from meshplan.machine._calibrate_fit import Work
from meshplan.machine._calibrate_probes import (
    Input,
    KernelProbe,
    array,
    collective_probes,
    kernel_probes,
    looped,
)
from meshplan.machine._chip import KERNEL_KINDS


@pytest.fixture(scope="module")
def quick() -> Calibration:
    """By the clock of this process: other tests run beside it."""
    return calibrate(quick=True, clock=process_clock, date="2025-01-31")


def test_a_quick_calibration_is_a_machine_file(quick: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(quick.toml())
    machine = Machine.from_toml(path)
    assert machine == quick.machine() and machine.devices == 8 and machine.name == "cpu-calibrated:8"
    chip = machine.chip
    rates = (*chip.flops.values(), chip.memory_bytes_per_second, chip.host_bytes_per_second)
    for rate in rates:
        assert 1e6 < rate < 1e14
    assert f"measured on cpu (8 x cpu), 2025-01-31, jax {jax.__version__}" == chip.sources["flops.float32"]
    assert chip.sources["memory_bytes"].startswith("modelled"), "what was not measured keeps its source"


def test_every_kind_of_kernel_is_measured(quick: Calibration) -> None:
    assert {k.kind for k in quick.chip_kernels} == set(KERNEL_KINDS)
    for k in quick.machine().chip.kernels:
        seconds = k.seconds(flops=1e6, elements=1e6, nbytes=1e6, batches=1)
        assert 0 < seconds < 10 and "jax" in k.source, k


def test_every_collective_is_measured_in_every_group(quick: Calibration) -> None:
    machine = quick.machine()
    for kind in KINDS:
        for n in (2, 4, 8):
            mesh = MeshShape((("a", 8 // n), ("b", n))) if n < 8 else MeshShape((("b", 8),))
            for nbytes in (1e3, 1e6, 1e9):
                found = collective_time(machine, mesh, kind, nbytes, ("b",))
                assert math.isfinite(found.seconds) and found.seconds > 0, (kind, n, nbytes)
            assert collective_time(machine, mesh, kind, 1e9, ("b",)).seconds > 1e-3, "no link moves 1 TB/s here"


def test_a_turn_takes_its_kernel_and_not_the_call(quick: Calibration) -> None:
    """The loop is not computed at once: many turns of a large product take many times one."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    run = looped(lambda x, y: x @ y, mesh, 2)
    arrays = [array(Input((128, 128)), jax.devices(), mesh) for _ in range(2)]

    def seconds(turns: int) -> float:
        began = process_clock()
        jax.block_until_ready(run(np.int32(turns), *arrays))
        return process_clock() - began

    seconds(1)
    few, many = (float(np.median([seconds(n) for _ in range(3)])) for n in (20, 200))
    assert 4 < many / few < 25


def test_one_device_has_no_collectives() -> None:
    found = calibrate(jax.devices()[:1], quick=True, clock=process_clock)
    assert found.link is None and not found.collective_samples
    assert found.notes == ("one device: no collectives measured, the links keep the preset's figures",)
    assert found.machine().dims == (Machine.preset("cpu:1").dims)


def test_a_clock_that_stands_still_is_told() -> None:
    with pytest.raises(MachineError, match="the clock stood still"):
        calibrate(jax.devices()[:1], quick=True, clock=lambda: 0.0)


def test_what_noise_has_eaten_up_is_left_out_or_told() -> None:
    def ready(kind: Literal["map", "reduce"], *seconds: float) -> _Ready:
        probe = KernelProbe(kind=kind, work=Work(elements=1), function=abs, inputs=(Input((8,)),))
        return _Ready(probe, abs, (), 1, list(seconds))

    kept = [ready("map", 1.0, -9.0, 2.0), ready("reduce", 3.0)]
    assert [t for _, t in _medians([*kept, ready("map", -1.0, 5.0, -2.0)])] == [1.0, 3.0]
    with pytest.raises(MachineError, match=r"^reduce: no difference between many and few turns"):
        _medians([kept[0], ready("reduce", -1.0, 0.0, 1.0)])


def test_no_devices_are_told() -> None:
    with pytest.raises(MachineError, match="no devices"):
        calibrate([])


def test_probes_are_the_same_every_time() -> None:
    def names(quick: bool) -> list[object]:
        kernels = [(p.kind, p.name, p.dtype, p.work, p.inputs, p.copies) for p in kernel_probes(quick)]
        return [*kernels, *collective_probes(8, quick)]

    assert names(True) == names(True) and names(False) == names(False)
    assert len(names(True)) < len(names(False)) / 2
    sizes = {(p.mesh, p.axis) for p in collective_probes(8, False)}
    assert sizes == {((8,), 0), ((2, 4), 0), ((2, 4), 1), ((4, 2), 0), ((4, 2), 1)}


def test_the_command_refuses_before_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    assert main(["calibrate", "-o", str(tmp_path / "none" / "m.toml")]) == 2
    assert "does not exist. Create it first." in capsys.readouterr().err
    assert main(["calibrate", "-o", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(["calibrate", "--cpu-devices", "3"]) == 2
    assert "this process has 8 cpu devices already" in capsys.readouterr().err
    assert time.process_time() - began < 20 and not list(tmp_path.iterdir())


def test_the_command_writes_a_file(
    quick: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshplan.machine.calibrate", lambda **given: quick)
    path = tmp_path / "m.toml"
    assert main(["calibrate", "--quick", "-o", str(path)]) == 0
    shown = capsys.readouterr()
    assert path.read_text() == quick.toml() and "wrote" in shown.err
    assert "all-reduce by ring" in shown.out and "matmul float32" in shown.out
    assert main(["calibrate", "--quick"]) == 0
    assert capsys.readouterr().out == quick.toml()
    assert main(["machines", "--show", str(path)]) == 0
    assert "measured on cpu" in capsys.readouterr().out
