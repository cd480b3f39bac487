"""Predicted against measured seconds of a step, three models and eight plans each, on 8 host devices.

    python tests/benchmarks/measure_rank.py                      # calibrates first (minutes)
    python tests/benchmarks/measure_rank.py --machine cpu8.toml  # a file that `meshplan calibrate -o cpu8.toml` wrote

Prints for each model Kendall's tau and the median relative error of the predictions, and both over all. Plans are run
interleaved, one step of each a round; the median over the rounds counts. `--clock process` takes CPU seconds over the
cores instead of the wall clock's, for a machine on which other programs run.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np
from scipy.stats import kendalltau

import meshplan as mp
from meshplan._api._planning import answer, make_call, make_search
from meshplan._options import Options
from meshplan.cost._measured import beside_kernels, measured_parts, measured_step_seconds
from meshplan.machine import Machine, calibrate, process_clock
from meshplan.plan import Found, fixed_mesh

# A step takes a twentieth of a second or so where two cores are eight devices, and plans differ: there are few tokens
# for so many parameters, so that it costs to hold what is trained on every device, and to gather it.
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"width": 384, "heads": 8, "seq": 32, "batch": 8, "vocab": 512, "layers": 2},
    "mixer": {"width": 256, "tokens": 128, "channels": 1024, "image": 32, "patch": 4, "batch": 16, "layers": 2},
    "moe": {
        "width": 192, "heads": 8, "kv_heads": 8, "head_dim": 16, "mlp": 384, "seq": 32, "batch": 8, "layers": 2,
        "vocab": 256,
    },
}  # fmt: skip
PLANS: tuple[tuple[str, dict[str, int]], ...] = (
    ("dp", {"data": 8}), ("fsdp", {"data": 8}), ("megatron", {"data": 4, "model": 2}),
    ("megatron", {"data": 2, "model": 4}), ("megatron", {"model": 8}), ("tp_fsdp", {"data": 4, "model": 2}),
    ("tp_fsdp", {"data": 2, "model": 4}), ("", {"data": 2, "model": 4}),
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Case:
    model: str
    name: str
    mesh: dict[str, int]
    predicted: float
    parts: str
    step: Any = None
    args: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def measured(self) -> float:
        return float(np.median(self.seconds))


def cases(model: str, machine: Machine) -> list[Case]:
    """The model's plans, compiled, each with arguments of its own."""
    workload = importlib.import_module(f"models.{model}").workload("tiny", **MODELS[model])
    call = make_call(workload, (), (0,))
    search = make_search(call, machine, {}, None, Options())
    found = []
    for template, mesh in PLANS:
        best, tried = search.best([fixed_mesh(mesh, search.machine)], template or None)
        plan = answer(search, call, best, tried, {}, Options(), 0.0, template)
        case = Case(
            model=model, name=template or "plan", mesh=mesh, predicted=measured_step_seconds(best.chosen),
            parts=shares(best),
        )
        prepare(case, plan, workload)
        found.append(case)
    return found


def shares(found: Found) -> str:
    """Milliseconds by kind of kernel, of collectives and beside both."""
    by_kind: dict[str, float] = {}
    parts = measured_parts(found.chosen)
    for part in parts:
        by_kind[part.kind] = by_kind.get(part.kind, 0.0) + part.seconds * part.count
    beside = beside_kernels(found.chosen, parts)
    collectives = measured_step_seconds(found.chosen) - sum(by_kind.values()) - beside.seconds
    rows = {**by_kind, "collectives": collectives}
    rows |= {"call": beside.dispatch_seconds, "memory": beside.first_touch_seconds, "loops": beside.loop_seconds}
    rows["apart"] = beside.apart_seconds
    return ", ".join(f"{k} {v * 1e3:.1f}" for k, v in rows.items() if v > 5e-5)


def prepare(case: Case, plan: mp.Plan, workload: mp.Workload) -> None:
    assert workload.init is not None and workload.batches is not None
    mesh = plan.mesh()
    case.step = plan.jit().lower(*plan.abstract_args(mesh)).compile()
    given = (*workload.init(jax.random.key(0)), next(workload.batches()))
    case.args = list(jax.device_put(given, plan.in_shardings(mesh)))
    jax.block_until_ready(case.args)
    run(case, time.perf_counter)
    case.seconds.clear()


def run(case: Case, clock: Callable[[], float]) -> None:
    """One step; its state is what the next one starts from."""
    began = clock()
    out = case.step(*case.args)
    jax.block_until_ready(out)
    case.seconds.append(clock() - began)
    case.args[0] = out[0]


def report(found: Sequence[Case]) -> tuple[float, list[float]]:
    """(Kendall's tau, relative errors) of one model, printed with its rows."""
    for c in found:
        mesh = " x ".join(f"{k}={n}" for k, n in c.mesh.items())
        print(f"  {c.name:12} {mesh:20} predicted {c.predicted * 1e3:7.1f} ms, measured {c.measured * 1e3:7.1f} ms "
              f"({c.predicted / c.measured - 1:+.1%})   {c.parts}")  # fmt: skip
    tau: Any = kendalltau([c.predicted for c in found], [c.measured for c in found])[0]
    errors = [abs(c.predicted / c.measured - 1) for c in found]
    print(f"{found[0].model}: Kendall tau {tau:.3f}, median error {np.median(errors):.1%}", flush=True)
    return float(tau), errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="a calibrated machine's file (default: calibrate now)")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="calibrate with fewer sizes")
    parser.add_argument("--clock", choices=("wall", "process"), default="wall")
    about = parser.parse_args()
    clock = process_clock if about.clock == "process" else time.perf_counter
    began = time.perf_counter()
    machine = (
        Machine.from_toml(about.machine) if about.machine else calibrate(quick=about.quick, clock=clock).machine()
    )
    print(f"{machine.name} ({about.clock} clock), ready after {time.perf_counter() - began:.0f} s", flush=True)
    taus, errors = [], []
    for model in about.models.split(","):
        found = cases(model, machine)
        for _ in range(about.rounds):
            for case in found:
                run(case, clock)
        tau, wrong = report(found)
        taus.append(tau)
        errors += wrong
        del found
        gc.collect()
    print(f"all: Kendall tau at least {min(taus):.3f}, mean {np.mean(taus):.3f}; median error {np.median(errors):.1%}, "
          f"largest {max(errors):.1%}; {time.perf_counter() - began:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
