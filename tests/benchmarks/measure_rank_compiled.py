"""Plans ordered by their step_seconds against the same plans priced from their compiled modules.

    python tests/benchmarks/measure_rank_compiled.py gpt,moe tiny h100:1x8

For each model the plans of several mesh shapes and the templates are compiled ahead of time (`pip install
'meshplan[cuda-aot]'` or `'meshplan[tpu]'`, no accelerator), and priced twice: FLOPs at peak and every collective one
after the other (`Audit.seconds`), and the module on a timeline (`Audit.timeline`). Printed with Kendall's tau between
each of the two and the plans' own step_seconds, and how many of the pairs that differ by more than 2 % on the timeline
are in the same order by step_seconds. Plans whose modules agree in seconds and in memory count once.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parents[2]))

from scipy.stats import kendalltau

import meshplan as mp
from meshplan.core import CompileError, format_seconds
from meshplan.machine import legal_mesh_shapes
from tests.benchmarks.measure_zoo import choice_of

AXES = {1: ("data",), 2: ("data", "model"), 3: ("data", "fsdp", "model")}


@dataclass(frozen=True)
class Row:
    """One plan: seconds of a step by the plan, by `Audit.seconds`, and by the timeline with its parts."""

    name: str
    plan: float
    serial: float
    timeline: float
    computing: float
    exposed: float


def candidates(workload: mp.Workload, machine: str) -> Iterator[tuple[str, mp.Plan]]:
    """The best plan, the templates, then the best plan of every mesh shape."""
    yield from mp.compare(workload, machine=machine, audit=False).plans.items()
    for shape in legal_mesh_shapes(mp.Machine.preset(machine)):
        mesh = dict(zip(AXES[len(shape)], shape, strict=True))
        name = "plan " + ",".join(f"{k}={n}" for k, n in mesh.items())
        yield name, mp.plan(workload, machine=machine, mesh=mesh)


def rows(workload: mp.Workload, machine: str, most: int, until: float) -> list[Row]:
    found: list[Row] = []
    plans: set[object] = set()
    modules: set[object] = set()
    for name, plan in candidates(workload, machine):
        same = choice_of(plan)
        if len(found) == most or time.perf_counter() > until:
            break
        if same in plans:
            continue
        plans.add(same)
        try:
            audit = plan.audit(machine)
        except CompileError as refused:
            print(f"  {name}: {str(refused)[:200]}", flush=True)
            continue
        if audit.timeline is None or audit.seconds is None:
            print(f"  {name}: does not fit, or is not priced", flush=True)
            continue
        t = audit.timeline
        key = (audit.seconds, t.seconds, t.compute_seconds, audit.memory)
        if key in modules:
            print(f"  {name}: the module of a plan above", flush=True)
            continue
        modules.add(key)
        found.append(Row(name, plan.step_seconds, audit.seconds, t.seconds, t.compute_seconds, t.exposed_seconds))
        print(
            f"  {name:26} plan {format_seconds(plan.step_seconds):>9}  serial {format_seconds(audit.seconds):>9}  "
            f"timeline {format_seconds(t.seconds):>9} = {format_seconds(t.compute_seconds)} computing + "
            f"{format_seconds(t.exposed_seconds)} exposed; {format_seconds(t.hidden_seconds)} hidden", flush=True,
        )
    return found


def tau(one: list[float], other: list[float]) -> str:
    if len(one) < 2:
        return "none, fewer than two modules"
    found: Any = kendalltau(one, other)
    return f"{found.statistic:.3f}"


def clear_pairs(plan: list[float], timeline: list[float], least: float = 1.02) -> str:
    pairs = [(a, b) for a, b in itertools.combinations(range(len(plan)), 2)
             if max(timeline[a], timeline[b]) > least * min(timeline[a], timeline[b])]  # fmt: skip
    same = sum((plan[a] < plan[b]) == (timeline[a] < timeline[b]) and plan[a] != plan[b] for a, b in pairs)
    return f"{same} of {len(pairs)} pairs that differ by more than {least - 1:.0%} in the same order"


def measure(model: str, about: argparse.Namespace, until: float) -> None:
    name, _, dispatch = model.partition(":")
    more = {"dispatch": dispatch} if dispatch else {}
    workload = importlib.import_module(f"models.{name}").workload(about.size, **more)
    print(f"{model} {about.size} on {about.machine}")
    found = rows(workload, about.machine, about.plans, until)
    plan = [r.plan for r in found]
    serial, timeline = [r.serial for r in found], [r.timeline for r in found]
    print(
        f"  {len(found)} modules, Kendall's tau of step_seconds: with the sum (Audit.seconds) {tau(plan, serial)}, "
        f"with the timeline {tau(plan, timeline)}; {clear_pairs(plan, timeline)}", flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", help="names joined by commas, or name:dispatch")
    parser.add_argument("size")
    parser.add_argument("machine")
    parser.add_argument("--plans", type=int, default=8, help="compile so many of each model")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no further plan after so long")
    about = parser.parse_args()
    until = time.perf_counter() + 60 * about.minutes
    for model in about.models.split(","):
        measure(model, about, until)


if __name__ == "__main__":
    main()
