"""`mp.forecast`: one step on many machines, up to thousands of chips, at a cost that stays the same."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from meshplan._api._plan import Plan
from meshplan._api._planning import answer, find_machine, make_call
from meshplan._options import Options
from meshplan.core import ArgumentError, MachineError, MeshError, nearest
from meshplan.hints import Workload
from meshplan.machine import Machine
from meshplan.plan import (
    Bounded,
    ForecastRow,
    Found,
    Given,
    Search,
    best_bounded,
    gather_pins,
    names_decide,
    prepare,
    with_efficiency,
    write_atomically,
)
from meshplan.program import Call, Program, trace

Scaling = Literal["strong", "weak"]
SCALINGS = ("strong", "weak")


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One step on several machines, modelled, in the order they were given.

    `plans`: by machine name, of the rows that fit: ordinary plans. `unit`: what is counted, "tokens" or "samples", and
    `counted` where the number is from. `traced`: programs that were traced. `scaling`: "strong" for one batch on all
    machines, "weak" for a batch that grows with the devices.
    """

    step: str
    rows: tuple[ForecastRow, ...]
    plans: Mapping[str, Plan] = field(repr=False)
    scaling: Scaling
    unit: str
    counted: str
    traced: int

    def __iter__(self) -> Iterator[ForecastRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, machine: str) -> ForecastRow:
        found = {r.machine: r for r in self.rows}
        if machine not in found:
            raise MachineError(f"the forecast has no row for machine '{machine}'. {nearest(machine, found)}")
        return found[machine]

    @property
    def doc(self) -> Any:
        """The report, from which text and HTML are made."""
        from meshplan.report import forecast_doc

        return forecast_doc(self.rows, step=self.step, scaling=self.scaling, unit=self.unit, counted=self.counted)

    def __str__(self) -> str:
        from meshplan.report import text

        return text(self.doc)

    def html(self, path: str | Path) -> None:
        """Write the forecast as one self-contained page."""
        from meshplan.report import html

        write_atomically(html(self.doc).encode(), path)

    def _repr_html_(self) -> str:
        """In a notebook: the page in a frame of its own, so that its style stays inside."""
        from meshplan.report import html

        height = 560 + 68 * len(self.rows)
        return f'<iframe srcdoc="{escape(html(self.doc))}" style="width:100%;height:{height}px;border:0"></iframe>'

    def plot(self, ax: Any = None) -> Any:
        """Tokens (or samples) per second and device over the number of devices, a line a chip, with matplotlib.

        `ax`: matplotlib axes to draw on, by default new ones; returns them. Raises ImportError where matplotlib is
        missing (`pip install matplotlib`).
        """
        if ax is None:
            import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]

            _, ax = plt.subplots()
        for chip in dict.fromkeys(r.chip for r in self.rows if r.feasible):
            rows = sorted((r for r in self.rows if r.chip == chip and r.feasible), key=lambda r: r.devices)
            ax.plot([r.devices for r in rows], [r.tokens_per_second_per_device for r in rows], marker="o", label=chip)
        ax.set_xscale("log", base=2)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("devices")
        ax.set_ylabel(f"{self.unit} per second and device (modelled)")
        ax.set_title(f"{self.step}, {self.scaling} scaling, modelled")
        if any(r.feasible for r in self.rows):
            ax.legend()
        return ax


def forecast(
    step: Callable[..., Any] | Workload,
    *args: Any,
    machines: Sequence[Machine | str],
    scaling: Scaling = "strong",
    tokens: int | Callable[[int], int] | None = None,
    pins: Given | None = None,
    memory_limit: float | None = None,
    donate_argnums: int | Sequence[int] = (0,),
    options: Options | None = None,
) -> Forecast:
    """Model one step on many machines: seconds, memory, tokens per second and device, scaling efficiency.

    Args:
      step, *args: as in `meshplan.plan`. With `scaling="weak"` instead a function from a number of devices to a
        `Workload`, such as `lambda n: models.gpt.workload("1.3b", batch=4 * n)`.
      machines: names or `Machine`s, each once; of any chips and sizes, in any order.
      scaling: "strong": the step as it is, its whole batch on every machine. "weak": the batch grows with the devices.
      tokens: how many a step works on, over all devices; with "weak" a function of the devices. By default the number
        of integers of the batch's leaf "tokens", else the samples: the leading dim of the last argument's leaves.
      pins, memory_limit, donate_argnums, options: as in `meshplan.plan`.

    The step is traced once. Each row is planned by a search with a bounded number of solves that starts from the
    answer on the next smaller machine (`meshplan.plan._bounded`): `meshplan.plan` on one machine looks further.
    A machine on which the step does not fit, or whose links the pins or `max_axes` do not allow, is a row with its
    reason.

    Raises: MachineError for a name that is no machine, ArgumentError, TraceError, PinError, SpecError.
    """
    options = options or Options()
    where = find_machines(machines)
    if memory_limit is not None and not memory_limit > 0:
        raise ArgumentError(f"memory_limit is {memory_limit!r}; give bytes per device above 0, or None for the chip's.")
    source = _source(step, args, donate_argnums, scaling)
    made = _Rows(source=source, tokens=tokens, pins=pins or {}, memory_limit=memory_limit, options=options)
    for machine in sorted(where, key=lambda m: m.devices):
        made.add(machine)
    first = made.traced[min(made.traced)]
    return Forecast(
        step=first.call.name, rows=with_efficiency([made.rows[m.name] for m in where]), plans=made.plans,
        scaling=scaling, unit=first.unit, counted=first.counted, traced=len(made.traced),
    )


def find_machines(machines: Sequence[Machine | str]) -> list[Machine]:
    """All of them, before anything is traced. Raises MachineError and ArgumentError."""
    if isinstance(machines, str | Machine) or not machines:
        raise ArgumentError(
            f"machines is {machines!r}; give a list of names or Machines, such as ['h100:1x8', 'h100:16x8']."
        )
    found = [find_machine(m) for m in machines]
    twice = [name for name, count in Counter(m.name for m in found).items() if count > 1]
    if twice:
        raise ArgumentError(f"machine '{twice[0]}' is given twice. Give each once, or other names to Machines.")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """A step of one batch. `count` of `unit` per step; `batch`: the leading dim of its batch, 0 for none."""

    call: Call
    program: Program
    count: int
    unit: str
    counted: str
    batch: int


def _source(
    step: Callable[..., Any] | Workload, args: Sequence[Any], donate_argnums: int | Sequence[int], scaling: Scaling
) -> Callable[[int], tuple[int, Call]]:
    """From a number of devices to (what tells its program from others, the call)."""
    if scaling not in SCALINGS:
        raise ArgumentError(f"scaling '{scaling}' is unknown. {nearest(str(scaling), SCALINGS)}")
    if scaling == "strong":
        call = make_call(step, args, donate_argnums)
        return lambda devices: (0, call)
    if isinstance(step, Workload) or not callable(step) or args:
        raise ArgumentError(
            "scaling='weak' takes a function from a number of devices to a Workload, and no arguments: "
            "mp.forecast(lambda n: workload(batch=4 * n), machines=[...], scaling='weak')."
        )

    def grown(devices: int) -> tuple[int, Call]:
        made = step(devices)
        if not isinstance(made, Workload):
            raise ArgumentError(
                f"scaling='weak': the function made a {type(made).__name__} of {devices} devices, not a Workload."
            )
        return devices, make_call(made, (), ())

    return grown


@dataclass(slots=True, kw_only=True)
class _Rows:
    """The rows as they come about, smaller machines first, so that larger ones start from their answers."""

    source: Callable[[int], tuple[int, Call]]
    tokens: int | Callable[[int], int] | None
    pins: Given
    memory_limit: float | None
    options: Options
    traced: dict[int, _Traced] = field(default_factory=dict)
    prepared: dict[tuple[int, str], Search] = field(default_factory=dict)
    known: dict[tuple[int, str], list[Found]] = field(default_factory=dict)
    rows: dict[str, ForecastRow] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)

    def add(self, machine: Machine) -> None:
        """Plan one machine."""
        key, what = self.trace(machine.devices)
        began, started = time.process_time(), time.perf_counter()
        place = key, machine.chip.platform
        if place not in self.prepared:
            pins = gather_pins(self.pins, what.program)
            self.prepared[place] = prepare(what.program, machine, pins, self.memory_limit, self.options)
        budget = self.memory_limit or machine.memory_bytes * self.options.memory_fraction
        search = replace(self.prepared[place], machine=machine, limit=float(budget), models={})
        row = ForecastRow(
            machine=machine.name, chip=machine.chip.name, devices=machine.devices, mesh=None, feasible=False,
            memory_limit=search.limit, tokens=what.count,
        )
        try:
            found = best_bounded(search, self.known.get(place, ()))
        except (MeshError, MachineError) as error:
            row = replace(row, reason=str(error).rstrip("."))
        else:
            row = self.found(row, what, search, found, started)
            if found.best is not None and found.best.feasible:
                self.known[place] = [found.best]
        self.rows[machine.name] = replace(row, plan_seconds=time.process_time() - began)

    def found(self, row: ForecastRow, what: _Traced, search: Search, found: Bounded, started: float) -> ForecastRow:
        """The row of an answer, and its plan where it fits."""
        row = replace(row, solves=found.solves, reason=found.reason)
        best = found.best
        if best is None or not best.feasible:
            return replace(
                row, mesh=best.mesh if best else None,
                peak_bytes=best.prediction.peak_bytes if best else found.least_bytes or None,
            )
        seconds = time.perf_counter() - started
        plan = answer(search, what.call, best, found.tried, self.pins, self.options, seconds)
        self.plans[row.machine] = plan
        line = plan.data.timeline
        return replace(
            row, mesh=plan.data.mesh, feasible=True, step_seconds=plan.step_seconds, peak_bytes=plan.peak_bytes,
            timeline_seconds=line.seconds if line else None,
            tokens_per_second_per_device=what.count / plan.step_seconds / row.devices, note=_note(what, row.devices),
        )

    def trace(self, devices: int) -> tuple[int, _Traced]:
        """The program for so many devices: the same one for all where the batch does not grow."""
        key, call = self.source(devices)
        if key not in self.traced:
            cuts = names_decide(self.pins)
            program = trace(call, rules=self.options.rules, follow=self.options.follow_shardings, cut_names=cuts)
            count, unit, counted = _counted(call, program, self.tokens, devices)
            self.traced[key] = _Traced(
                call=call, program=program, count=count, unit=unit, counted=counted, batch=_leading(call)[0]
            )
        return key, self.traced[key]


def _note(what: _Traced, devices: int) -> str:
    """What is special where the batch alone cannot occupy all devices."""
    if not what.batch or what.batch % devices == 0:
        return ""
    return f"the batch of {what.batch} does not divide over {devices} devices: other dims are split too"


def _counted(
    call: Call, program: Program, tokens: int | Callable[[int], int] | None, devices: int
) -> tuple[int, str, str]:
    """(how many a step works on, "tokens" or "samples", where that is from)."""
    if tokens is not None:
        count = tokens(devices) if callable(tokens) else tokens
        if not isinstance(count, int | np.integer) or count < 1:
            raise ArgumentError(f"tokens is {count!r}; give the number that a step works on, a whole number from 1.")
        return int(count), "tokens", "as given by tokens="
    for leaf in program.args:
        name = re.split(r"[/.\[\]'\"]+", leaf.path.rstrip("/.]'\""))[-1]
        if name == "tokens" and np.issubdtype(leaf.aval.dtype, np.integer) and leaf.aval.size:
            return leaf.aval.size, "tokens", f"the integers of {leaf.path}"
    batch, said = _leading(call)
    if not batch:
        raise ArgumentError(
            "no argument named 'tokens' and no leading dim of a batch in the last argument: give tokens=..., the "
            "number that a step works on."
        )
    return batch, "samples", said


def _leading(call: Call) -> tuple[int, str]:
    """(the leading dim that most leaves of the last positional argument have, in words); 0 for none."""
    leaves = jax.tree.leaves(call.args[-1]) if call.args else []
    dims = Counter(int(x.shape[0]) for x in leaves if getattr(x, "shape", ()))
    if not dims:
        return 0, ""
    return dims.most_common(1)[0][0], "the leading dim of the last argument"
