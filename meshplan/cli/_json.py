"""Answers as plain JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from meshplan.core import Collective, MeshShape, Spec, bytes_by_kind, local_bytes
from meshplan.plan import ArrayPlan, PlanData


def emit(value: Any) -> None:
    """Print as indented JSON; figures that JSON has not become null."""
    json.dump(plain_value(value), sys.stdout, indent=1, allow_nan=False)
    print()


def plain_value(value: Any) -> Any:
    """Dataclasses, tuples and mappings as lists and dicts; a mesh as a dict of sizes, a spec as axes per dim."""
    if isinstance(value, MeshShape):
        return value.to_dict()
    if isinstance(value, Spec):
        return [list(axes) for axes in value.dims]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_value(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {k: plain_value(v) for k, v in value._asdict().items()}  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return {str(k): plain_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_value(v) for v in value]
    if isinstance(value, float):
        return float(value) if abs(value) < float("inf") else None
    if value is None or isinstance(value, str | int | bool):
        return value
    return plain_value(value.item()) if isinstance(value, np.generic) else str(value)


def plan_value(data: PlanData) -> dict[str, Any]:
    """A plan with every table resolved, without the constraints of single operations (the plan file has them)."""
    names = (
        "step", "workload", "template", "machine", "mesh", "fingerprint", "step_seconds", "ranked_by",
        "compute_seconds", "communication_seconds", "peak_bytes", "argument_bytes", "memory_limit", "flops", "gap",
        "donated",
    )
    out: dict[str, Any] = {name: getattr(data, name) for name in names}
    out |= {"bytes_by_kind": bytes_by_kind(data.collectives), "pins": dict(data.pins), "rules": dict(data.rules)}
    out["arguments"] = [_array(a, data.mesh) for a in data.arguments]
    out["results"] = [_array(r, data.mesh) for r in data.results]
    out["collectives"] = [collective_value(c) for c in data.collectives]
    out |= {"timeline": data.timeline, "at_peak": data.at_peak, "candidates": data.candidates, "notes": data.notes}
    return out


def _array(a: ArrayPlan, mesh: MeshShape) -> dict[str, Any]:
    return {
        "path": a.path, "shape": a.shape, "dtype": a.dtype, "spec": a.spec, "used": a.used, "dims": a.dims,
        "pinned": a.pinned, "bytes_per_device": local_bytes(a.nbytes, a.spec, mesh),
    }


def collective_value(c: Collective) -> dict[str, Any]:
    return {**plain_value(c), "total_bytes": c.total_bytes}
