"""What each back end of XLA really emits for a step of a reshard path.

Measured on micro-programs with jax 0.10.2 and 0.12.0 compiled for 8 devices of each kind
(tests/ keep the cases): CPU has no reduce-scatter and moves 16-bit floats as 32-bit ones;
TPU gathers the 32-bit operands of a default-precision dot as bfloat16 and falls back to
all-reduce where a reduce-scatter's piece would be narrower than its tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.core import CollectiveKind
from meshplan.cost._reshard import Step

SMALL_FLOATS = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class Emission:
    """The rules of one back end: "cpu", "gpu" or "tpu"."""

    platform: str

    def kind(self, step: Step) -> CollectiveKind | None:
        """The collective that the step becomes; None where it needs none."""
        if step.kind == "slice":
            return None
        if step.kind == "reduce-scatter" and self.platform == "cpu":
            return "all-reduce"
        return step.kind

    def dtype(self, dtype: str, into_dot: bool = False) -> str:
        """The dtype on the wire of a value of `dtype`; `into_dot`: only dots read it."""
        if self.platform == "cpu" and dtype in SMALL_FLOATS:
            return "float32"
        if self.platform == "tpu" and dtype == "float32" and into_dot:
            return "bfloat16"
        return dtype

    def bytes_factor(self, dtype: str, into_dot: bool = False) -> float:
        """Bytes on the wire over the value's own bytes."""
        wire = self.dtype(dtype, into_dot)
        if wire == dtype:
            return 1.0
        return 2.0 if wire == "float32" else 0.5

    @property
    def merges_sums(self) -> bool:
        """Whether partial sums that are added are reduced once, after the addition."""
        return self.platform != "cpu"
