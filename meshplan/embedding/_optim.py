"""Row optimizers: each updates the rows that a batch touched, and their sums, and no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp

from meshplan.core import ArgumentError

Scale = Literal["none", "replicas", "estimate"]
Sums = dict[str, jax.Array]


class RowOptimizer(Protocol):
    """What `Embeddings` asks of an optimizer.

    `per_row` and `per_entry` name its sums, f32 [rows] and [rows, width]. `step` sees the touched rows: gradients
    [k, width], their mean squares over a row's whole width [k] (zeros where there is no sum per row), the sums, and the
    moment scale c, one or [k]; it returns what to add to the rows, and the new sums.
    """

    per_row: ClassVar[tuple[str, ...]]
    per_entry: ClassVar[tuple[str, ...]]

    @property
    def learning_rate(self) -> float: ...

    @property
    def initial_sum(self) -> float: ...

    @property
    def moment_scale(self) -> Scale: ...

    def step(
        self, grads: jax.Array, squares: jax.Array, sums: Sums, *, rate: jax.Array | float, count: jax.Array,
        scale: jax.Array,
    ) -> tuple[jax.Array, Sums]: ...  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSgd:
    """w_r -= rate * g_r."""

    learning_rate: float
    per_row: ClassVar[tuple[str, ...]] = ()
    per_entry: ClassVar[tuple[str, ...]] = ()

    @property
    def initial_sum(self) -> float:
        return 0.0

    @property
    def moment_scale(self) -> Scale:
        return "none"

    def step(
        self, grads: jax.Array, squares: jax.Array, sums: Sums, *, rate: jax.Array | float, count: jax.Array,
        scale: jax.Array,
    ) -> tuple[jax.Array, Sums]:  # fmt: skip
        return -rate * grads, sums


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAdagrad:
    """Row-wise AdaGrad: v_r += mean_j g_rj^2, then w_r -= rate * g_r / sqrt(v_r / c + eps).

    c corrects for M replicas that each see an M-th of the batch: "none" is c = 1, "replicas" c = M (moment scaling,
    arXiv 2508.03854: right where noise makes up the gradients), "estimate" measures the ratio of a replica's squared
    gradient to that of the replicas' mean, table by table, and keeps it within [1, M].
    """

    learning_rate: float
    eps: float = 1e-8
    initial_sum: float = 0.0
    moment_scale: Scale = "replicas"
    per_row: ClassVar[tuple[str, ...]] = ("sum",)
    per_entry: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.moment_scale not in ("none", "replicas", "estimate"):
            raise ArgumentError(
                f"RowAdagrad: moment_scale {self.moment_scale!r} is unknown; give 'none', 'replicas' or 'estimate'."
            )

    def step(
        self, grads: jax.Array, squares: jax.Array, sums: Sums, *, rate: jax.Array | float, count: jax.Array,
        scale: jax.Array,
    ) -> tuple[jax.Array, Sums]:  # fmt: skip
        total = sums["sum"] + squares
        return -rate * grads * jax.lax.rsqrt(total / scale + self.eps)[:, None], {"sum": total}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAdam:
    """Lazy row-wise Adam: a first moment per entry, a second one per row (mean_j g_rj^2), moved where a batch comes by.

    Bias is corrected by the steps of the whole run, so a row met late starts from a small second moment.
    """

    learning_rate: float
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    per_row: ClassVar[tuple[str, ...]] = ("second",)
    per_entry: ClassVar[tuple[str, ...]] = ("first",)

    @property
    def initial_sum(self) -> float:
        return 0.0

    @property
    def moment_scale(self) -> Scale:
        return "none"

    def step(
        self, grads: jax.Array, squares: jax.Array, sums: Sums, *, rate: jax.Array | float, count: jax.Array,
        scale: jax.Array,
    ) -> tuple[jax.Array, Sums]:  # fmt: skip
        first = self.b1 * sums["first"] + (1 - self.b1) * grads
        second = self.b2 * sums["second"] + (1 - self.b2) * squares
        n = count.astype(jnp.float32)
        root = jnp.sqrt(second / (1 - self.b2**n)) + self.eps
        return -rate * first / (1 - self.b1**n) / root[:, None], {"first": first, "second": second}


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Gradients of a pack with the duplicates of a row summed; [k] for k requests, the unique ones in front.

    `targets` are ascending local rows, past the pack's end where there are no more; `order` sorts the requests,
    `segments` says which unique row each sorted request has, `firsts` which sorted request is a row's first.
    """

    targets: jax.Array
    grads: jax.Array
    order: jax.Array
    segments: jax.Array
    firsts: jax.Array


def merge(rows: jax.Array, grads: jax.Array, limit: int) -> Merged:
    """Sums grads [k, width] over equal rows int32 [k]; rows from `limit` on are nobody's."""
    k = rows.shape[0]
    order = jnp.argsort(rows, stable=True)
    ordered = rows[order]
    starts = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    segments = jnp.cumsum(starts) - 1
    spare = jnp.arange(k, dtype=jnp.int32)
    firsts = jnp.full(k, k - 1, jnp.int32).at[segments].min(spare, indices_are_sorted=True)
    used = spare <= segments[-1]
    return Merged(
        targets=jnp.where(used, ordered[firsts], limit + 1 + spare),  # all distinct, so that scatters may rely on it
        grads=jax.ops.segment_sum(grads[order], segments, k, indices_are_sorted=True),
        order=order, segments=segments, firsts=firsts,
    )  # fmt: skip


def apply_rows(
    optimizer: RowOptimizer, weights: jax.Array, sums: Sums, merged: Merged, squares: jax.Array | None, *,
    rate: jax.Array | float, count: jax.Array, scale: jax.Array,
) -> tuple[jax.Array, Sums]:  # fmt: skip
    """One step on the touched rows of weights [rows, width] and sums, in place where the caller donates them."""
    at = merged.targets
    held = {name: value.at[at].get(mode="fill", fill_value=1) for name, value in sums.items()}
    squares = jnp.zeros(at.shape[0]) if squares is None else squares
    delta, new = optimizer.step(merged.grads, squares, held, rate=rate, count=count, scale=scale)
    sums = {
        name: value.at[at].set(new[name], mode="drop", unique_indices=True, indices_are_sorted=True)
        for name, value in sums.items()
    }
    delta = delta.astype(weights.dtype)
    return weights.at[at].add(delta, mode="drop", unique_indices=True, indices_are_sorted=True), sums
