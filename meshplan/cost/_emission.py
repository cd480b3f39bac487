"""What each back end of XLA really emits for a step of a reshard path.

Measured on micro-programs with jax 0.10.2 and 0.12.0 compiled for 8 devices of each kind
(tests/ keep the cases): CPU has no reduce-scatter and moves 16-bit floats as 32-bit ones;
TPU gathers the 32-bit operands of a default-precision dot as bfloat16 and falls back to
all-reduce where a reduce-scatter's piece would be narrower than its tiles.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from meshplan.core import Collective, CollectiveKind
from meshplan.cost import _tiles
from meshplan.cost._combine import combined_bytes
from meshplan.cost._reshard import Step
from meshplan.rules import OpRule, OpView
from meshplan.strategy import Hoists

# Dtypes that travel as another one: all collectives, sums.
_MOVED = {
    "cpu": {"bfloat16": "float32"} | dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), "float16"),
    "gpu": {}, "tpu": {},
}  # fmt: skip
_SUMMED = {"cpu": {}, "gpu": {"int16": "int32", "uint16": "uint32"}, "tpu": {}}
# Sums of other dtypes are not scattered on TPU.
_SCATTERED = {"tpu": frozenset({"float32", "bfloat16"})}
# Primitives that some back end gathers although every shard could do its own part (measured, emission/*.json). Those of
# linear algebra are library calls on GPUs that no compiler takes ahead of time: as on the back ends that were measured.
GATHERED = frozenset({
    "approx_top_k", "cholesky", "cholesky_update", "eig", "eigh", "fft", "geqp3", "geqrf", "hessenberg",
    "householder_product", "lu", "ormqr", "qr", "ragged_dot_general", "schur", "svd", "symmetric_product", "top_k",
    "triangular_solve", "tridiagonal", "tridiagonal_solve",
})  # fmt: skip


def runs_on_shards(view: OpView) -> bool:
    """Whether lower/ runs the operation on the shards itself, because some back end would gather what it reads."""
    if view.primitive == "conv_general_dilated":
        groups = view.params["feature_group_count"], view.params["batch_group_count"]
        steps = *view.params["window_strides"], *view.params["rhs_dilation"]
        # XLA gathers by groups, and computes wrong numbers where a dim that windows step over is split beside features
        return max(*groups, *steps) > 1
    if view.primitive.startswith("scatter"):  # of one index XLA makes an update of a slice, and gathers the dim
        return view.operands[1].size > 0 and math.prod(view.operands[1].shape[:-1]) == 1
    return view.primitive in GATHERED


def _bits(dtype: str) -> int:
    """Of one element, read off the name's first number: 16 for bfloat16, 8 for float8_e4m3fn."""
    found = re.search(r"\d+", dtype)
    return int(found.group()) if found else 8


@dataclass(frozen=True, slots=True)
class Extra:
    """A collective that an operation brings besides its sums, over the axes that split `dim` of operand `operand`.

    Bytes: what a device holds of the operand once this dim is whole.
    """

    kind: CollectiveKind
    operand: int
    dim: int


@dataclass(frozen=True, slots=True)
class Emission:
    """The rules of one back end: "cpu", "gpu" or "tpu"."""

    platform: str

    def kind(
        self, step: Step, dtype: str = "float32", piece: tuple[int, ...] | None = None, how: _tiles.Lies = "close"
    ) -> CollectiveKind | None:
        """The collective that the step becomes for a value of `dtype`; None where it needs none.

        `piece`: the shape of what each device has after the step, where it is known; `how` it lies in memory.
        """
        if step.kind == "slice":
            return None
        if step.kind == "reduce-scatter" and not (self.scatters(dtype) and self._fits(step, dtype, piece, how)):
            return "all-reduce"
        return step.kind

    def _fits(self, step: Step, dtype: str, piece: tuple[int, ...] | None, how: _tiles.Lies) -> bool:
        if self.platform != "tpu" or piece is None:
            return True
        dim = next(d for d, axes in enumerate(step.after.dims) if step.axes[-1] in axes)
        return _tiles.scatters(piece, dim, _bits(dtype) // 8, how)

    def scatters(self, dtype: str) -> bool:
        """Whether a sum whose result is split becomes a reduce-scatter."""
        return self.platform != "cpu" and dtype in _SCATTERED.get(self.platform, {dtype})

    def dtype(self, dtype: str, into_dot: bool = False, sums: bool = False) -> str:
        """The dtype on the wire of a value of `dtype`; `into_dot`: only dots read it; `sums`: while it is reduced."""
        if self.platform == "tpu" and dtype == "float32" and into_dot:
            return "bfloat16"
        moved = _MOVED[self.platform].get(dtype, dtype)
        return _SUMMED[self.platform].get(moved, moved) if sums else moved

    def bytes_factor(self, dtype: str, into_dot: bool = False, sums: bool = False) -> float:
        """Bytes on the wire over the value's own bytes."""
        wire = self.dtype(dtype, into_dot, sums)
        return 1.0 if wire == dtype else _bits(wire) / _bits(dtype)

    @property
    def merges_sums(self) -> bool:
        """Whether partial sums that are added are reduced once, after the addition."""
        return self.platform != "cpu"

    @property
    def narrows_last(self) -> bool:
        """Whether a narrowing conversion is made before the last of several moves, not before them all."""
        return self.platform == "gpu"

    @property
    def lays_out(self) -> bool:
        """Whether pieces gathered or cut along another dim than the first are copied into their order."""
        return self.platform == "gpu"

    @property
    def widens_after(self) -> bool:
        """Whether a widening conversion is made after a move: what it reads is moved instead.

        TPUs do so where the two stand side by side, and not in whole steps.
        """
        return self.platform == "gpu"

    @property
    def drops_conversions(self) -> bool:
        """Whether a narrowing conversion is dropped for those uses that undo it."""
        return self.platform == "gpu"

    @property
    def combined_moves(self) -> frozenset[CollectiveKind]:
        """Kinds of moves that are combined, of whatever dtypes, where they do not wait for each other."""
        return frozenset({"all-gather"}) if self.platform == "gpu" else frozenset()

    def combined_bytes(self, c: Collective) -> float:
        """Bytes of operands up to which a set is filled with collectives like this one.

        TPUs fill sets of reduce-scatters less, the smaller the group (v5e: 4.7 to 5.1, 7.1 to 7.9 and 9.8 to 10.2 MB
        in groups of 2, 4 and 8).
        """
        if self.platform == "tpu" and c.kind == "reduce-scatter":
            return 2.5e6 * (1 + math.log2(c.group_size))
        return combined_bytes(c)

    @property
    def hoists(self) -> Hoists:
        """Which sums are completed after the loop that adds them up."""
        hoisting: dict[str, Hoists] = {"gpu": "merged", "tpu": "single"}
        return hoisting.get(self.platform, "none")

    @property
    def joins_sums(self) -> bool:
        """Whether a sum over several dims that different axes split is one collective."""
        return self.platform != "cpu"

    def flops_factor(self, view: OpView) -> float:
        """FLOPs that are spent over those of the operation: every row meets every group (measured).

        Not on TPU, but where the rows of each group are summed, as in the gradient of the groups' weights.
        """
        if view.primitive != "ragged_dot_general":
            return 1.0
        numbers = view.params["ragged_dot_dimension_numbers"]
        summed = numbers.lhs_ragged_dimensions[0] in numbers.dot_dimension_numbers[0][0]
        return float(view.operands[2].shape[-1]) if summed or self.platform != "tpu" else 1.0

    def extras(self, view: OpView, rule: OpRule) -> tuple[Extra, ...]:
        """What an operation brings that XLA partitions itself; none where lower/ runs it on the shards."""
        if view.primitive == "gather" and self.platform == "gpu" and math.prod(view.operands[1].shape[:-1]) == 1:
            found = view.params["dimension_numbers"].start_index_map  # XLA makes a dynamic_slice of it
            return tuple(Extra("all-gather", 0, d) for d in found if rule.operands[0][d])
        return ()
