"""One row of a comparison: a plan or a template on the same machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshplan.core import MeshShape, bytes_by_kind
from meshplan.plan._data import PlanData


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRow:
    """Predicted seconds and bytes of one way to shard, per device and step.

    `compiled` holds the same figures read from the compiled module where it was compiled: "seconds",
    "peak_bytes", "bytes_by_kind" (kind -> bytes); None where it was not.
    """

    name: str
    mesh: MeshShape
    step_seconds: float
    peak_bytes: float
    feasible: bool
    bytes_by_kind: Mapping[str, float] = field(default_factory=dict)
    compiled: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, name: str, data: PlanData, compiled: Mapping[str, Any] | None = None) -> CompareRow:
        return cls(
            name=name, mesh=data.mesh, step_seconds=data.step_seconds, peak_bytes=data.peak_bytes,
            feasible=data.peak_bytes <= data.memory_limit, bytes_by_kind=bytes_by_kind(data.collectives),
            compiled=compiled,
        )

    @property
    def seconds(self) -> float:
        """Of the compiled module where known, else predicted."""
        found = (self.compiled or {}).get("seconds")
        return self.step_seconds if found is None else float(found)

    @property
    def total_bytes(self) -> float:
        """Bytes of all collectives, of the compiled module where known."""
        return float(sum((self.compiled or {}).get("bytes_by_kind", self.bytes_by_kind).values()))
