"""One word for what a plan predicts and what a compiled module holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from meshplan.core._spec import Axes

CollectiveKind = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
]
KINDS: tuple[CollectiveKind, ...] = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a step, as every device sees it.

    `nbytes` is the larger of a device's input and output buffer for one execution:
    all-gather its result, reduce-scatter its operand, all others the operand.
    `count` is how often it runs in a step (trip counts of loops included).
    `axes` are the mesh axes of the group where known. `source` is `file:line`.
    """

    kind: CollectiveKind
    nbytes: int
    group_size: int
    count: float = 1.0
    axes: Axes = ()
    dtype: str = ""
    source: str = ""
    op_name: str = ""

    @property
    def total_bytes(self) -> float:
        return self.nbytes * self.count

    @property
    def wire_bytes(self) -> float:
        """Bytes each device sends in a step with the ring algorithm."""
        n = self.group_size
        per_run = {
            "all-reduce": 2 * (n - 1) / n, "all-gather": (n - 1) / n, "reduce-scatter": (n - 1) / n,
            "all-to-all": (n - 1) / n, "collective-permute": 1.0,
        }[self.kind]
        return per_run * self.total_bytes


def bytes_by_kind(collectives: Iterable[Collective]) -> dict[str, float]:
    """Bytes per step of each kind that occurs, in the order of `KINDS`."""
    sums: dict[str, float] = {}
    for c in collectives:
        sums[c.kind] = sums.get(c.kind, 0.0) + c.total_bytes
    return {k: sums[k] for k in KINDS if k in sums}
