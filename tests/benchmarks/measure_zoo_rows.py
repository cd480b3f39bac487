"""Every model's figures on one machine, with a large batch and with one sample a device, and their means.

    python tests/benchmarks/measure_zoo_rows.py h100:1x8 --out /tmp/rows
    python tests/benchmarks/measure_zoo_rows.py cpu:8 --out /tmp/rows --verify
    python tests/benchmarks/measure_zoo_rows.py tpu-v5e:2x4 --out /tmp/rows --only vit,moe

Each case runs in its own process and leaves one JSON file in the folder; a case whose file is there is not run again.
For a case: the plan, the fastest templates as predicted (`--templates`), all compiled; predicted against compiled
bytes by kind; the plan's seconds from its module over the best template's (FLOPs at peak + latency + bytes over links).
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import meshplan as mp
from meshplan.core import CompileError, bytes_by_kind
from tests.benchmarks.measure_zoo import compiled, kinds


@dataclass(frozen=True)
class Case:
    """A model at a size; `batch` 0: the model's own. `more` shortens what would compile for hours."""

    model: str
    size: str
    batch: int
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        less = "".join(f"-{k}{v}" for k, v in self.more.items()).replace("(", "").replace(")", "").replace(", ", ".")
        return f"{self.model.replace(':', '_')}-{self.size}-{'b' + str(self.batch) if self.batch else 'default'}{less}"


# (model, size, what is shortened): 8 is one sample a device; graphs and click logs have one size of batch.
AHEAD: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("gpt", "1.3b", {}), ("llama", "1b", {}), ("moe", "base", {"layers": 2}), ("moe:ragged", "base", {"layers": 2}),
    ("vit", "base", {}), ("resnet", "resnet50", {}), ("unet", "cifar", {}), ("encoder_decoder", "base", {}),
    ("ssm", "130m", {}), ("lstm", "base", {}), ("mixer", "b16", {}), ("gnn", "arxiv", {}), ("dlrm", "criteo", {}),
)  # fmt: skip
ONE_BATCH = ("gnn", "dlrm")
LARGE = {"gpt": 64, "llama": 64}  # their own batches are of larger machines
SHORTER_ON_TPU: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2}, "llama": {"layers": 2}, "vit": {"layers": 2}, "mixer": {"layers": 2},
    "encoder_decoder": {"layers": 2}, "ssm": {"layers": 2}, "resnet": {"blocks": (1, 1, 1, 1)}, "unet": {"blocks": 1},
}  # fmt: skip


def cases(machine: str) -> list[Case]:
    if machine.startswith("cpu"):
        return [Case(model, "tiny", 0) for model, _, _ in AHEAD]
    found = []
    for model, size, more in AHEAD:
        name = model.partition(":")[0]
        shorter = {**more, **(SHORTER_ON_TPU.get(name, {}) if machine.startswith("tpu") else {})}
        found += [] if name in ONE_BATCH else [Case(model, size, 8, shorter)]
        found += [Case(model, size, LARGE.get(name, 0), shorter)]
    return found


def bytes_rows(plan: mp.Plan, audit: mp.Audit) -> dict[str, tuple[float, float]]:
    both = bytes_by_kind(plan.collectives), audit.bytes_by_kind()
    return {**{k: (p, c) for k, p, c in kinds(plan, audit)}, "total": (sum(both[0].values()), sum(both[1].values()))}


def verified(workload: mp.Workload, plan: mp.Plan) -> dict[str, Any]:
    import jax

    assert workload.init is not None and workload.batches is not None
    found = plan.verify(*workload.init(jax.random.key(0)), next(iter(workload.batches())))
    return {"ok": found.ok, "leaves": len(found.leaves), "worst": found.worst.relative_error}


def run_case(case: Case, machine: str, templates: int, verify: bool) -> dict[str, Any]:
    name, _, dispatch = case.model.partition(":")
    more = case.more | ({"dispatch": dispatch} if dispatch else {}) | ({"batch": case.batch} if case.batch else {})
    workload = importlib.import_module(f"models.{name}").workload(case.size, **more)
    began = time.process_time()
    compared = mp.compare(workload, machine=machine, audit=False)
    row: dict[str, Any] = {"case": case.name, "machine": machine, "compare_cpu_seconds": time.process_time() - began}
    ranked = sorted((r for r in compared.rows[1:] if r.feasible), key=lambda r: r.step_seconds)
    known: dict[Any, mp.Audit] = {}
    for each in (compared.rows[0], *ranked[:templates]):
        plan = compared.plans[each.name]
        try:
            audit = compiled(plan, known)
        except CompileError as refused:
            row[each.name] = {"refused": str(refused)[:500]}
            continue
        row[each.name] = {
            "mesh": str(each.mesh), "predicted": each.step_seconds, "fits": audit.fits, "seconds": audit.seconds,
            "timeline": audit.timeline and audit.timeline.seconds,
            "modelled": plan.timeline and plan.timeline.seconds,
            "bytes": bytes_rows(plan, audit), "peak": (plan.peak_bytes, audit.memory and audit.memory.peak_bytes),
        }  # fmt: skip
    row["templates_predicted"] = {r.name: r.step_seconds if r.feasible else None for r in compared.rows[1:]}
    if verify:
        row["verify"] = verified(workload, compared.plans["plan"])
    return row


def ratio(row: dict[str, Any]) -> tuple[float, str] | None:
    seconds = {k: v["seconds"] for k, v in row.items() if isinstance(v, dict) and v.get("fits") and v.get("seconds")}
    best = min((k for k in seconds if k != "plan"), key=lambda k: seconds[k], default=None)
    return (seconds["plan"] / seconds[best], best) if best and "plan" in seconds else None


def errors(row: dict[str, Any]) -> dict[str, float]:
    rows = row["plan"].get("bytes", {})
    return {k: (p / c - 1 if c else (0.0 if not p else math.inf)) for k, (p, c) in rows.items()}


def summary(rows: list[dict[str, Any]]) -> None:
    worst, small, all_ratios = [], [], []
    for row in rows:
        plan = row["plan"]
        if "refused" in plan:
            print(f"{row['case']:34} refused: {plan['refused'][:200]}")
            continue
        off, than = errors(row), ratio(row)
        worst.append(max(off.values(), key=abs))
        if than:
            all_ratios.append(than[0])
            small += [than[0]] if "-b8" in row["case"] else []
        shown = f"{than[0]:.4f} of {than[1]}" if than else "no template fits"
        held = f", verify {'holds' if row['verify']['ok'] else 'FAILS'} {row['verify']['leaves']} leaves, worst {row['verify']['worst']:.1e}" if "verify" in row else ""  # noqa: E501
        kinds_off = ", ".join(f"{k} {v:+.1%}" for k, v in off.items())
        print(f"{row['case']:34} {plan['mesh']:26} {plan['seconds'] * 1e3:.4g} ms, {shown}; {kinds_off}{held}")
    sizes = [abs(w) for w in worst]
    print(f"{len(rows)} cases: worst kind of each, median {statistics.median(sizes):.2%}, largest {max(sizes):.2%}")
    if all_ratios:
        print(f"over the best template: largest {max(all_ratios):.4f}, geometric mean "
              f"{math.exp(statistics.fmean(map(math.log, all_ratios))):.4f} of {len(all_ratios)}")  # fmt: skip
    if small:
        print(f"one sample a device: geometric mean {math.exp(statistics.fmean(map(math.log, small))):.4f} "
              f"of {len(small)}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--templates", type=int, default=2)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    about = parser.parse_args()
    about.out.mkdir(parents=True, exist_ok=True)
    chosen = [c for c in cases(about.machine) if not about.only or c.model in about.only.split(",")]
    if about.case:
        case = next(c for c in chosen if c.name == about.case)
        found = run_case(case, about.machine, about.templates, about.verify)
        file_of(about, case).write_text(json.dumps(found))
        return
    for case in chosen:
        if not file_of(about, case).exists():
            print(f"{time.strftime('%H:%M:%S')} {case.name}", flush=True)
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--case", case.name], check=False)
    summary([json.loads(file_of(about, c).read_text()) for c in chosen if file_of(about, c).exists()])


def file_of(about: argparse.Namespace, case: Case) -> Path:
    return about.out / f"{about.machine.replace(':', '_')}-{case.name}.json"


if __name__ == "__main__":
    main()
