"""`mp.compare`: this plan beside the templates, predicted and, where asked, compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshplan._api._plan import Plan
from meshplan._api._planning import answer, make_call, make_search
from meshplan._options import Options
from meshplan.core import ArgumentError, format_bytes, format_seconds, nearest
from meshplan.hints import Workload
from meshplan.lower import Audit
from meshplan.machine import Machine
from meshplan.plan import CompareRow, fixed_mesh
from meshplan.strategy import TEMPLATES


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The plan and the templates on one machine. `rows`: the plan first; `plans` and `audits` by name."""

    rows: tuple[CompareRow, ...]
    plans: Mapping[str, Plan]
    audits: Mapping[str, Audit]

    def __iter__(self) -> Iterator[CompareRow]:
        return iter(self.rows)

    @property
    def best_template(self) -> CompareRow | None:
        """The fastest template that fits, judged by the compiled module where there is one."""
        return min((r for r in self.rows[1:] if r.feasible), key=lambda r: r.seconds, default=None)

    @property
    def ratio(self) -> float:
        """Seconds of the plan over those of the best template: at most 1 where the plan is never slower; 0 where no
        template fits."""
        best = self.best_template
        return self.rows[0].seconds / best.seconds if best is not None else 0.0

    def __str__(self) -> str:
        lines = [f"{'':12} {'mesh':34} {'predicted':>10} {'compiled':>10} {'peak':>9}  collectives"]
        for r in self.rows:
            compiled = format_seconds(r.seconds) if r.compiled else ""
            moved = ", ".join(f"{k} {format_bytes(v)}" for k, v in r.bytes_by_kind.items())
            fits = "" if r.feasible else "  does not fit"
            lines.append(
                f"{r.name:12} {r.mesh!s:34} {format_seconds(r.step_seconds):>10} {compiled:>10} "
                f"{format_bytes(r.peak_bytes):>9}  {moved}{fits}"
            )
        return "\n".join(lines)


def compare(
    step: Callable[..., Any] | Workload,
    *args: Any,
    machine: Machine | str | None = None,
    mesh: Mapping[str, int] | None = None,
    pins: Mapping[str, Any] | None = None,
    memory_limit: float | None = None,
    donate_argnums: int | Sequence[int] = (0,),
    templates: Sequence[str] = TEMPLATES,
    audit: bool = False,
    options: Options | None = None,
) -> Comparison:
    """Plan a step and every template (dp, zero1, fsdp, megatron, megatron_sp, tp_fsdp) on one machine.

    Templates are restrictions of the same strategy graph, solved as well as the plan. With
    `audit=True` each is compiled (ahead of time where need be) and priced from the compiled module.
    Other arguments and errors as in `meshplan.plan`.
    """
    for name in templates:
        if name not in TEMPLATES:
            raise ArgumentError(f"template '{name}' is unknown. {nearest(name, TEMPLATES)}")
    options = options or Options()
    began = time.perf_counter()
    call = make_call(step, args, donate_argnums)
    search = make_search(call, machine, pins or {}, memory_limit, options)
    plans: dict[str, Plan] = {}
    for name in ("plan", *templates):
        template = None if name == "plan" else name
        meshes = [fixed_mesh(mesh, search.machine)] if mesh is not None else search.meshes(template)
        if not meshes:
            continue
        found, tried = search.best(meshes, template)
        seconds, began = time.perf_counter() - began, time.perf_counter()
        plans[name] = answer(search, call, found, tried, pins or {}, options, seconds, template or "")
    audits = {name: p.audit() for name, p in plans.items()} if audit else {}
    return Comparison(
        rows=tuple(row(name, p, audits.get(name)) for name, p in plans.items()), plans=plans, audits=audits
    )


def row(name: str, plan: Plan, audit: Audit | None) -> CompareRow:
    if audit is None:
        return CompareRow.of(name, plan.data)
    peak = audit.memory.peak_bytes if audit.memory is not None else None
    line = audit.timeline if plan.data.simulated else None
    seconds = line.seconds if line else audit.seconds
    compiled = {"seconds": seconds, "peak_bytes": peak, "bytes_by_kind": audit.bytes_by_kind()}
    return replace(CompareRow.of(name, plan.data, compiled), feasible=audit.fits)
