"""The models' figures: plans against the compiled modules and against the best template.

    python tests/benchmarks/measure_zoo.py vit,moe:ragged base h100:1x8
    python tests/benchmarks/measure_zoo.py all tiny cpu:8 --mesh data=4,model=2 --batch 8

A model is `name` or `name:dispatch`. Ahead-of-time targets need their compiler (`pip install 'meshplan[cuda-aot]'`
or `'meshplan[tpu]'`), no accelerator.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parents[2]))

import meshplan as mp
from meshplan.core import Collective, CompileError, bytes_by_kind, format_bytes, format_flops, format_seconds

ALL = "gpt llama moe moe:ragged vit resnet unet lstm encoder_decoder ssm gnn dlrm mixer"
ABOVE = 1e6  # bytes from which a kind of collective is compared by itself


def choice_of(plan: mp.Plan) -> object:
    """What two plans that compile to one module have in common."""
    return plan.data.mesh, plan.data.arguments, plan.data.results, plan.data.ops, plan.data.kept


def compiled(plan: mp.Plan, known: dict[object, mp.Audit]) -> mp.Audit:
    """The plan's audit, made once for plans that are the same."""
    same = choice_of(plan)
    if same not in known:
        known[same] = plan.audit()
    return known[same]


def error(predicted: float, compiled: float) -> str:
    return f"{predicted / compiled - 1:+.1%}" if compiled else ("0" if not predicted else "none compiled")


def by_line(collectives: Iterable[Collective]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = defaultdict(float)
    for c in collectives:
        found[c.kind, c.source.rsplit("/", 1)[-1]] += c.total_bytes
    return found


def kinds(plan: mp.Plan, audit: mp.Audit) -> list[tuple[str, float, float]]:
    """(kind, predicted, compiled) of kinds above 1 MB, or their total where none is."""
    predicted, compiled = bytes_by_kind(plan.collectives), audit.bytes_by_kind()
    rows = [(k, predicted.get(k, 0.0), compiled.get(k, 0.0)) for k in dict.fromkeys((*predicted, *compiled))]
    large = [r for r in rows if max(r[1:]) > ABOVE]
    return large or [("all", sum(predicted.values()), sum(compiled.values()))]


def print_lines(plan: mp.Plan, audit: mp.Audit) -> None:
    """Source lines whose bytes differ by more than 1 % of all."""
    predicted, compiled = by_line(plan.collectives), by_line(audit.collectives)
    least = 0.01 * max(sum(compiled.values()), sum(predicted.values()))
    for key in sorted(predicted.keys() | compiled.keys()):
        p, c = predicted.get(key, 0.0), compiled.get(key, 0.0)
        if abs(p - c) > max(least, 0.03 * c):
            print(f"      {key[0]} {key[1]}: predicted {format_bytes(p)}, compiled {format_bytes(c)}")


def print_audit(name: str, plan: mp.Plan, audit: mp.Audit, lines: bool) -> None:
    print(f"  {name} on {plan.data.mesh}: gap {plan.gap:.2g}, audit compiled in {audit.compile_seconds:.0f} s")
    if audit.memory is None:
        print(f"    does not fit: {audit.out_of_memory}")
        return
    for kind, p, c in kinds(plan, audit):
        print(f"    {kind}: predicted {format_bytes(p)}, compiled {format_bytes(c)} ({error(p, c)})")
    print(f"    FLOPs: {format_flops(plan.data.flops)}, {format_flops(audit.flops)} "
          f"({error(plan.data.flops, audit.flops)})")  # fmt: skip
    peak = audit.memory.peak_bytes
    off = error(plan.peak_bytes, peak)
    print(f"    peak: {format_bytes(plan.peak_bytes)}, {format_bytes(peak)} ({off})", flush=True)
    if lines:
        print_lines(plan, audit)


def against_templates(workload: mp.Workload, about: argparse.Namespace, mesh: dict[str, int] | None) -> None:
    """Seconds of the compiled modules: the plan and the templates predicted to be the fastest."""
    compared = mp.compare(workload, machine=about.machine, mesh=mesh)
    rows = sorted((r for r in compared.rows[1:] if r.feasible), key=lambda r: r.step_seconds)
    seconds: dict[str, float] = {}
    known: dict[object, mp.Audit] = {}
    for row in (compared.rows[0], *rows[: about.templates]):
        plan = compared.plans[row.name]
        audit = compiled(plan, known)
        moved = ", ".join(f"{k} {format_bytes(v)}" for k, v in audit.bytes_by_kind().items())
        shown = format_seconds(audit.seconds) if audit.fits and audit.seconds is not None else "does not fit"
        print(f"    {row.name:12} {row.mesh!s:28} {shown:>12} (predicted {format_seconds(row.step_seconds)})  {moved}")
        if audit.fits and audit.seconds is not None:
            seconds[row.name] = audit.seconds
    best = min((n for n in seconds if n != "plan"), key=lambda n: seconds[n], default=None)
    if best is not None and "plan" in seconds:
        print(f"    plan over {best}: {seconds['plan'] / seconds[best]:.3f}", flush=True)


def measure(model: str, about: argparse.Namespace) -> None:
    name, _, dispatch = model.partition(":")
    more = {**({"dispatch": dispatch} if dispatch else {}), **({"batch": about.batch} if about.batch else {})}
    workload = importlib.import_module(f"models.{name}").workload(about.size, **more)
    mesh = {k: int(n) for k, _, n in (part.partition("=") for part in about.mesh.split(","))} if about.mesh else None
    began = time.process_time()
    plan = mp.plan(workload, machine=about.machine, mesh=mesh)
    took = time.process_time() - began
    batch = f", batch {about.batch}" if about.batch else ""
    where = f"{about.machine}, mesh {mesh or 'searched'}{batch}"
    print(f"{model} {about.size} on {where}: planned in {took:.1f} s of process time")
    for note in plan.notes:
        print(f"    note: {note}")
    try:
        print_audit("plan", plan, plan.audit(), about.lines)
        if about.templates:
            against_templates(workload, about, mesh)
    except CompileError as refused:
        print(f"    {str(refused)[:600]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", help=f"names joined by commas, or all: {ALL}")
    parser.add_argument("size")
    parser.add_argument("machine")
    parser.add_argument("--mesh", default="", help="data=4,model=2; searched where left out")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--lines", action="store_true", help="print source lines whose bytes differ")
    parser.add_argument("--templates", type=int, default=0, help="compile this many of the fastest templates too")
    about = parser.parse_args()
    for model in ALL.split() if about.models == "all" else about.models.split(","):
        measure(model, about)


if __name__ == "__main__":
    main()
