"""The demo's stages, in order. Each returns what the summary and the page need."""

from __future__ import annotations

import itertools
import math
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import meshplan as mp
from demo import _page
from demo._screen import chart, console, counting, heading, working
from meshplan.report import Doc, compare_doc, plan_doc, show
from models import _text, gpt

STEPS = 120
ALONE_STEPS = 20
LEARNING_RATE = 2e-3
SHOWN = 12
PAGE = Path(__file__).resolve().parents[1] / "build" / "demo.html"

# The scores of a row of attention all shift by the same amount with the key bias, and softmax does not see that: its
# gradient is zero. What arithmetic leaves of it is rounding, which Adam scales up to a full step in any direction.
WITHOUT_GRADIENT = "attn/k_bias"


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, and whether it held."""

    what: str
    ok: bool
    found: str


def run(machine: str) -> int:
    """Everything; the exit status is 0 where every check held."""
    began, out = time.monotonic(), console()
    workload = gpt.workload("demo", learning_rate=LEARNING_RATE)
    introduce(out, workload)
    comparison, plan = planned(out, workload, machine)
    audit = audited(out, comparison)
    verification, verified = checked(out, plan, workload)
    losses, learned = trained(out, plan, workload)
    agreed = alone(out, workload, losses)
    checks = [beside_templates(comparison), *audit_checks(audit), verified, *learned, agreed]
    _page.write(PAGE, plan, comparison, audit, verification, losses, [(c.what, c.ok, c.found) for c in checks])
    return summarise(out, checks, time.monotonic() - began)


def introduce(out: Console, workload: mp.Workload) -> None:
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(workload.args[0]["params"]))
    text = len(_text.corpus())
    out.print(
        f"[bold]meshplan[/bold]: a GPT of {count:,} parameters, trained on {text / 1e6:.1f} MB of Python sources over "
        f"{jax.device_count()} host devices (jax {jax.__version__}, Python {platform.python_version()}).",
        highlight=False,
    )


def planned(out: Console, workload: mp.Workload, machine: str) -> tuple[mp.Comparison, mp.Plan]:
    heading(out, "1  Plan, and the templates beside it")
    with working(out, "searching mesh shapes and strategies, for the plan and for six templates"):
        comparison = mp.compare(workload, machine=machine, options=mp.Options(max_axes=2))
    plan = comparison.plans["plan"]
    out.print()
    show(compare_doc(comparison.rows, "Predicted, per device and step"), sys.stdout)
    heading(out, "2  The plan")
    show(shortened(plan_doc(plan.data)), sys.stdout)
    return comparison, plan


def shortened(doc: Doc) -> Doc:
    """The report up to the table of results; the page has all of it."""
    ends = [i for i, part in enumerate(doc.parts) if getattr(part, "text", "") == "Results"]
    return Doc(doc.title, doc.subtitle, doc.parts[: ends[0]] if ends else doc.parts)


def beside_templates(comparison: mp.Comparison) -> Check:
    best = comparison.best_template
    assert best is not None, "no template fits"
    found = f"{comparison.rows[0].seconds * 1e3:.1f} ms, {best.name} {best.seconds * 1e3:.1f} ms"
    return Check("not slower than the best template, by the prediction", comparison.ratio <= 1.0 + 1e-6, found)


def audited(out: Console, comparison: mp.Comparison) -> mp.Audit:
    """Compile the plan, hold it against the prediction, and show the best template's module beside it."""
    heading(out, "3  Audit: what XLA made of it")
    with working(out, "compiling the plan"):
        audit = comparison.plans["plan"].audit()
    row = comparison.best_template
    assert row is not None, "no template fits"
    with working(out, f"compiling the best template, {row.name}"):
        best = comparison.plans[row.name].audit()
    head, *lines = str(audit).splitlines()
    out.print("\n".join(["", head, *lines[:SHOWN]]), highlight=False, markup=False, no_wrap=True, overflow="ellipsis")
    if len(lines) > SHOWN:
        out.print(f"    and {len(lines) - SHOWN} lines more, on the page", style="dim")
    assert audit.seconds is not None
    assert best.seconds is not None
    out.print(
        f"  By FLOPs at the chip's peak plus collectives: {audit.seconds * 1e3:.1f} ms a step, {row.name} "
        f"{best.seconds * 1e3:.1f} ms.", highlight=False,
    )  # fmt: skip
    return audit


def audit_checks(audit: mp.Audit) -> list[Check]:
    """Collectives of kinds above 1 MB and FLOPs within 5 %; the compiled peak at most 20 % above the prediction."""
    assert audit.predicted is not None
    assert audit.memory is not None
    wrong = [m for m in audit.mismatches(0.05) if m.kind not in ("flops", "peak memory")]
    said = ", ".join(f"{k} {v / 1e6:.2f} MB" for k, v in audit.bytes_by_kind().items() if v > 1e6)
    off = "".join(f"; {m.kind} predicted {m.predicted / 1e6:.2f} MB" for m in wrong)
    flops = audit.flops / audit.predicted.flops - 1
    peak = audit.memory.peak_bytes / audit.predicted.peak_bytes - 1
    return [
        Check("collectives as predicted, to 5 %", not wrong, said + off),
        Check("FLOPs as predicted, to 5 %", abs(flops) <= 0.05, f"{flops:+.1%}"),
        Check("memory fits, at most 20 % above the prediction", audit.fits and peak <= 0.2,
              f"{audit.memory.peak_bytes / 1e6:.1f} MB, {peak:+.0%}"),
    ]  # fmt: skip


def first_state(workload: mp.Workload) -> Any:
    assert workload.init is not None
    (state,) = jax.block_until_ready(workload.init(jax.random.key(0)))
    return state


def batches(workload: mp.Workload) -> Iterator[Any]:
    assert workload.batches is not None
    return iter(workload.batches())


def checked(out: Console, plan: mp.Plan, workload: mp.Workload) -> tuple[mp.Verification, Check]:
    heading(out, "4  Verify: one step, planned and on one device")
    with working(out, "making the first state"):
        state = first_state(workload)
    with working(out, "compiling and running the step both ways"):
        found = plan.verify(state, next(batches(workload)))
    free = [leaf for leaf in found.leaves if WITHOUT_GRADIENT in leaf.path]
    held = [leaf for leaf in found.leaves if WITHOUT_GRADIENT not in leaf.path]
    wrong = [leaf for leaf in held if not leaf.ok]
    worst = max(held, key=lambda leaf: leaf.relative_error)
    said = f"{len(held) - len(wrong)} of {len(held)} agree, worst {worst.path} at {worst.relative_error:.1e}"
    out.print(f"  arrays of the new state: {said}", highlight=False, markup=False)
    out.print(
        f"  {len(free)} more, the key biases and their moments, have no gradient but rounding, which Adam scales up; "
        "no result depends on them.", highlight=False,
    )  # fmt: skip
    return found, Check(f"every array as on one device, to {worst.tolerance:g}", not wrong, said)


def trained(out: Console, plan: mp.Plan, workload: mp.Workload) -> tuple[list[float], list[Check]]:
    heading(out, "5  Train")
    mesh, data = plan.mesh(), batches(workload)
    step, losses = plan.jit(mesh), []

    def take(at: Any, batch: Any) -> Any:
        at, metrics = step(at, batch)
        losses.append(float(metrics["loss"]))
        return at

    with working(out, "compiling the planned step, and the first step"):
        at = take(plan.shard(first_state(workload), mesh=mesh), next(data))
    with counting(out, f"training on {plan.data.mesh}", STEPS - 1) as advance:
        for batch in itertools.islice(data, STEPS - 1):
            at = take(at, batch)
            advance(f"loss {losses[-1]:.3f}")
    out.print("\n  loss, nats per byte")
    out.print("\n".join(chart(losses)), highlight=False, markup=False)
    shown = [n for n in (1, 10, 20, 40, 80, STEPS) if n <= len(losses)]
    out.print("  " + "   ".join(f"step {n}: {losses[n - 1]:.3f}" for n in shown), highlight=False)
    last = sum(losses[-10:]) / 10
    return losses, [
        Check("the loss starts at about 5.5 nats per byte", abs(losses[0] - math.log(256)) < 0.2, f"{losses[0]:.3f}"),
        Check("and falls below 3.0", last < 3.0, f"{last:.3f}, mean of the last 10 steps"),
    ]


def alone(out: Console, workload: mp.Workload, losses: list[float]) -> Check:
    heading(out, "6  The same steps on one device")
    step = jax.jit(workload.step, donate_argnums=workload.donate_argnums)
    state, found = first_state(workload), []
    with counting(out, "training on one device, its compile included", ALONE_STEPS) as advance:
        for batch in itertools.islice(batches(workload), ALONE_STEPS):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
            advance(f"loss {found[-1]:.3f}")
    largest = max(abs(a - b) for a, b in zip(losses, found, strict=False))
    out.print(f"  largest difference of the losses over {ALONE_STEPS} steps: {largest:.1e}", highlight=False)
    return Check(f"losses as on one device over {ALONE_STEPS} steps, to 1e-4", largest <= 1e-4, f"{largest:.1e}")


def summarise(out: Console, checks: list[Check], seconds: float) -> int:
    heading(out, "Summary")
    for check in checks:
        mark = "[green]ok  [/green]" if check.ok else "[bold red]FAIL[/bold red]"
        out.print(f"  {mark} {check.what}: {check.found}", highlight=False)
    bad = sum(not c.ok for c in checks)
    out.print(f"\n  the whole report: {PAGE}", highlight=False)
    out.print(f"  {len(checks) - bad} of {len(checks)} hold; {seconds:.0f} s in all", highlight=False)
    return 1 if bad else 0
