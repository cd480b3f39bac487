"""An embedding plan as an engineer reads it."""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.core import format_bytes, format_seconds
from meshplan.embedding._plan_data import EmbeddingPlan

_LINES = 40
_PARTS = {
    "ids": "all-to-all of ids", "lookup": "rows read", "outputs": "all-to-all of rows and sums",
    "gradients": "gradients back", "update": "rows and sums updated", "sync": "replicas averaged, a step's part",
    "dense": "the rest of the step",
}  # fmt: skip


def plan_text(plan: EmbeddingPlan) -> str:
    g, total = plan.groups, sum(t.nbytes for t in plan.tables)
    where = "near" if g.near else "far"
    lines = [
        f"{len(plan.tables)} tables, {format_bytes(total)}, on {plan.machine}: {g.replicas} replicas ({where}) of "
        f"{g.shards} shards, batch {plan.batch}",
        f"step {format_seconds(plan.step_seconds)}, {plan.queries_per_second:.3g} queries/s"
        f" (bound {format_seconds(plan.bound_seconds)}{', exact' if plan.exact else ''})",
        *_parts(plan),
        f"  of it waiting for the slowest device: {format_seconds(plan.waiting_seconds)}",
        _memory(plan),
        "imbalance, largest over mean: " + ", ".join(f"{k} {v:.2f}" for k, v in sorted(plan.imbalance.items())),
        "",
        *_tables(plan),
    ]
    if len(plan.considered) > 1:
        lines += ["", "groups considered:"]
        for c in plan.considered:
            found = "" if c.seconds is None else format_seconds(c.seconds)
            lines.append(f"  {c.replicas} x {c.shards}: {', '.join(x for x in (found, c.why) if x)}")
    lines += ["", *(f"note: {n}" for n in plan.notes)] if plan.notes else []
    return "\n".join(lines)


def _parts(plan: EmbeddingPlan) -> list[str]:
    return [
        f"  {name:<10} {format_seconds(s):>9}  {100 * s / plan.step_seconds:5.1f} %  {said}"
        for name, said in _PARTS.items()
        if (s := plan.parts[name]) > 0
    ]


def _memory(plan: EmbeddingPlan) -> str:
    at = max(range(len(plan.device_bytes)), key=lambda d: plan.device_bytes[d])
    kept = f"weights {format_bytes(plan.weight_bytes[at])}, optimizer {format_bytes(plan.sum_bytes[at])}"
    kept += f", buffers {format_bytes(plan.buffer_bytes[at])}"
    if plan.pricing.reserved_bytes:
        kept += f", reserved {format_bytes(plan.pricing.reserved_bytes)}"
    part = 100 * plan.peak_bytes / plan.memory_limit
    return f"memory of the fullest device: {format_bytes(plan.peak_bytes)}, {part:.1f} % of the limit ({kept})"


def _tables(plan: EmbeddingPlan) -> list[str]:
    shown = sorted(plan.lines, key=lambda x: -x.seconds)[:_LINES]
    tables = {t.name: t for t in plan.tables}
    rows = [("table", "rows x dim", "ids", "scheme", "devices", "bytes there", "time there", "why")]
    for x in shown:
        t = tables[x.table]
        rows.append(
            (x.table, f"{t.rows:,} x {t.dim}", f"{t.hotness:.3g}", x.scheme, str(x.devices), format_bytes(x.nbytes),
             format_seconds(x.seconds), x.why)
        )  # fmt: skip
    found = _aligned(rows)
    left = len(plan.lines) - len(shown)
    if left:
        rest = [x for x in plan.lines if x not in shown]
        kinds = {k: sum(x.scheme == k for x in rest) for k in dict.fromkeys(x.scheme for x in rest)}
        found.append(f"and {left} more that take less: " + ", ".join(f"{n} {k}" for k, n in kinds.items()))
    return found


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(r[c]) for r in rows) for c in range(len(rows[0]) - 1)]
    return ["  ".join([*(x.ljust(w) for x, w in zip(r, widths, strict=False)), r[-1]]).rstrip() for r in rows]
