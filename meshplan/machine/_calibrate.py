"""Measure the devices of this process: kernels, memory, the way from the host, each collective.

All devices do the same at the same time, so that the rates are those of one device while the others work too (host
devices share cores). Every probe is compiled first; then all of them run once a round, in a fixed order, and the
median over the rounds counts: what disturbs one round disturbs no probe alone.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshplan.core import MachineError
from meshplan.machine._calibrate_fit import (
    CollectiveSample,
    KernelSample,
    LinkFit,
    alone,
    fit_kernels,
    fit_linear,
    fit_links,
)
from meshplan.machine._calibrate_probes import (
    CollectiveProbe,
    Input,
    KernelProbe,
    array,
    called,
    collective_function,
    collective_input,
    collective_probes,
    kernel_probes,
    looped,
)
from meshplan.machine._chip import KernelFigures
from meshplan.machine._detect import detect, device_order
from meshplan.machine._machine import Machine

Clock = Callable[[], float]
Progress = Callable[[int, int, str], None]
# The turns of the shorter run take this long and as long as a run without any; the longer run has so many times more.
LEAST_SECONDS, LONGER = 2e-3, 3
MOST_TURNS = 1 << 17
HOST_BYTES = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured. `base`: the machine as its preset describes it, which the figures replace.

    `link`: None where there is one device, or where the links are no single switch: then they stay the preset's.
    """

    base: Machine
    device_kind: str
    chip_kernels: tuple[KernelFigures, ...]
    host_bytes_per_second: float
    link: LinkFit | None
    source: str
    kernel_samples: tuple[KernelSample, ...]
    collective_samples: tuple[CollectiveSample, ...]
    notes: tuple[str, ...] = ()

    def machine(self) -> Machine:
        """The preset's machine with the measured figures in place of its own."""
        from meshplan.machine._calibrate_toml import calibrated

        return calibrated(self)

    def toml(self) -> str:
        """The machine as a file, from which `Machine.from_toml` reads it again."""
        from meshplan.machine._calibrate_toml import to_toml

        return to_toml(self)


@dataclass(slots=True)
class _Ready:
    """A compiled probe: `turns` of the shorter run, seconds of a turn round by round."""

    probe: KernelProbe | CollectiveProbe
    run: Callable[..., Any]
    arrays: tuple[Any, ...]
    turns: int
    seconds: list[float]


def calibrate(
    devices: Sequence[Any] | None = None, *, quick: bool = False, clock: Clock = time.perf_counter,
    progress: Progress = lambda done, total, what: None, date: str = "",
) -> Calibration:
    """Measure jax devices (default: all of this process).

    Args:
      quick: fewer sizes and rounds; rough figures in well under a minute.
      clock: seconds; another than the wall's where other processes disturb it (see `process_clock`).
      progress: told (steps done, steps in all, what is measured).
      date: of the sources; default today.

    Raises: MachineError for no devices, devices of several processes, and as `Machine.detect`; and where nothing
    could be measured, because the clock stands still or the machine is too noisy.
    """
    import jax

    try:
        found = list(jax.devices() if devices is None else devices)
    except RuntimeError as error:
        raise MachineError(f"no devices to measure: {str(error).splitlines()[0]}.") from error
    base = detect(found)
    if {d.process_index for d in found} != {jax.process_index()}:
        raise MachineError("devices of several processes; calibrate measures those of one. Run it on one host.")
    found = device_order(found)
    rounds = 3 if quick else 7
    source = _source(found, date)
    bench = _Bench(found, clock, rounds, progress)
    notes, links = _measurable_links(base)
    collectives = collective_probes(len(found), quick) if links else ()
    samples, moved = bench.measure(kernel_probes(quick, len(found)), collectives)
    return Calibration(
        base=base, device_kind=str(found[0].device_kind).strip(), source=source,
        chip_kernels=fit_kernels(alone(samples), source),
        host_bytes_per_second=bench.host_rate(), link=fit_links(moved, source) if moved else None,
        kernel_samples=tuple(samples), collective_samples=tuple(moved), notes=notes,
    )


def process_clock() -> float:
    """CPU seconds of this process over the cores it may use: what the wall clock shows where nothing else runs and
    all cores are busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return time.process_time() / cores


def _source(devices: Sequence[Any], date: str) -> str:
    import jax

    kind = str(devices[0].device_kind).strip()
    day = date or time.strftime("%Y-%m-%d")
    return f"measured on {devices[0].platform} ({len(devices)} x {kind}), {day}, jax {jax.__version__}"


def _measurable_links(base: Machine) -> tuple[tuple[str, ...], bool]:
    """(notes, whether collectives are measured): where all devices are on one switch."""
    if base.devices == 1:
        return ("one device: no collectives measured, the links keep the preset's figures",), False
    if [level.kind for level in base.levels] != ["switch"]:
        kinds = ", ".join(f"{level.name} ({level.kind})" for level in base.levels)
        return (f"collectives are measured on one switch alone, found {kinds}: links keep the preset's figures",), False
    return (), True


class _Bench:
    def __init__(self, devices: list[Any], clock: Clock, rounds: int, progress: Progress) -> None:
        self.devices, self.clock, self.rounds, self.progress = devices, clock, rounds, progress
        self.arrays: dict[tuple[Input, tuple[int, ...], int], Any] = {}
        self.done = self.total = 0

    def measure(
        self, kernels: Sequence[KernelProbe], collectives: Sequence[CollectiveProbe]
    ) -> tuple[list[KernelSample], list[CollectiveSample]]:
        """The samples of both, in the order of the probes."""
        probes = (*kernels, *collectives)
        self.total = len(probes) * (1 + self.rounds)
        ready = [self._prepare(p) for p in probes]
        for _ in range(self.rounds):
            for r in ready:
                self._step(f"measuring {r.probe.kind}")
                r.seconds.append(self._turn_seconds(r))
        kernel_samples = [
            KernelSample(
                kind=r.probe.kind, name=r.probe.name, dtype=r.probe.dtype, work=r.probe.work,
                seconds=t / r.probe.copies,
            )
            for r, t in _medians(ready) if isinstance(r.probe, KernelProbe)
        ]  # fmt: skip
        collective_samples = [
            CollectiveSample(
                kind=r.probe.kind, size=r.probe.size, nbytes=float(r.probe.nbytes),
                seconds=t / r.probe.copies,
            )
            for r, t in _medians(ready) if isinstance(r.probe, CollectiveProbe)
        ]  # fmt: skip
        return kernel_samples, collective_samples

    def _step(self, what: str) -> None:
        self.done += 1
        self.progress(self.done, self.total, what)

    def _prepare(self, probe: KernelProbe | CollectiveProbe) -> _Ready:
        self._step(f"compiling {probe.kind}")
        if isinstance(probe, KernelProbe):
            mesh, inputs, function = self._mesh((len(self.devices),)), probe.inputs, probe.function
            one = (function, mesh, len(inputs))
            run, inputs = looped(*one, probe.copies) if probe.looped else called(*one), inputs * probe.copies
        else:
            mesh, inputs = self._mesh(probe.mesh), (collective_input(probe),) * probe.copies
            function = collective_function(probe.kind, mesh.axis_names[probe.axis], probe.size)
            run = looped(function, mesh, 1, probe.copies)
        arrays = tuple(self._array(given, mesh, i) for i, given in enumerate(inputs))
        ready = _Ready(probe, run, arrays, 1, [])
        if not self._time(ready, 1) > 0:  # compiles
            raise MachineError("the clock stood still while a program was compiled; give one that tells seconds.")
        least = max(LEAST_SECONDS, none := self._time(ready, 0))
        while (took := self._time(ready, ready.turns) - none) < least and ready.turns < MOST_TURNS:
            more = math.ceil(ready.turns * min(8.0, 1.3 * least / max(took, 1e-9)))
            ready.turns = min(MOST_TURNS, max(ready.turns + 1, more))
        return ready

    def _turn_seconds(self, ready: _Ready) -> float:
        few, many = self._time(ready, ready.turns), self._time(ready, LONGER * ready.turns)
        return (many - few) / ((LONGER - 1) * ready.turns)

    def _time(self, ready: _Ready, turns: int) -> float:
        import jax

        began = self.clock()
        jax.block_until_ready(ready.run(np.int32(turns), *ready.arrays))
        return self.clock() - began

    def _mesh(self, sizes: tuple[int, ...]) -> Any:
        from jax.sharding import AxisType, Mesh

        names = ("a", "b")[: len(sizes)]
        return Mesh(np.asarray(self.devices).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(sizes))

    def _array(self, given: Input, mesh: Any, place: int) -> Any:
        """One for each place: a probe has no array twice."""
        key = given, tuple(mesh.shape.values()), place
        if key not in self.arrays:
            self.arrays[key] = array(given, self.devices, mesh)
        return self.arrays[key]

    def host_rate(self) -> float:
        """Bytes per second from the host to one device, all devices at a time."""
        import jax

        values = np.ones(HOST_BYTES // 4, np.float32)
        took = []
        for _ in range(self.rounds):
            began = self.clock()
            jax.block_until_ready([jax.device_put(values, d) for d in self.devices])
            took.append(self.clock() - began)
        return 1 / float(fit_linear([[HOST_BYTES]], [float(np.median(took))])[0])


def _medians(ready: Iterable[_Ready]) -> list[tuple[_Ready, float]]:
    """Probes with the median of their rounds; those whose difference noise has eaten up are left out.

    Raises MachineError where that leaves a kind without any.
    """
    medians = [(r, float(np.median(r.seconds))) for r in ready]
    good = [(r, t) for r, t in medians if t > 0]
    lost = {r.probe.kind for r, _ in medians} - {r.probe.kind for r, _ in good}
    if lost:
        raise MachineError(
            f"{', '.join(sorted(lost))}: no difference between many and few turns could be measured: the machine is "
            "too busy. Run it again when other programs have ended."
        )
    return good
