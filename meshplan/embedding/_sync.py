"""Replicas brought together: weights and sums averaged over the mesh axis "replica" (arXiv 2508.03854)."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from meshplan.embedding._route import REPLICA

SyncSums = Literal["none", "exact", "late"]
CHUNK_BYTES = 64 * 1024 * 1024


def replica_mean(x: jax.Array, replicas: int, chunk_bytes: int) -> jax.Array:
    """The mean of local x [rows, ...] over the replicas, `chunk_bytes` at a time so that no second table is needed."""
    height = max(1, chunk_bytes // max(1, x.nbytes // max(1, x.shape[0])))
    whole = x.shape[0] // height if x.shape[0] > height else 0

    def mean(part: jax.Array) -> jax.Array:
        wide = part.astype(jnp.promote_types(part.dtype, jnp.float32))
        return (jax.lax.psum(wide, REPLICA) / replicas).astype(part.dtype)

    def replace(i: jax.Array | int, held: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(held, i * height, height)
        return jax.lax.dynamic_update_slice_in_dim(held, mean(part), i * height, 0)

    x = jax.lax.fori_loop(0, whole, replace, x) if whole else x
    rest = whole * height
    if not whole:
        return mean(x)
    return x.at[rest:].set(mean(x[rest:])) if rest < x.shape[0] else x


def correction(x: jax.Array, replicas: int) -> jax.Array:
    """What a replica's sums lack of the mean: added a step later, so that the all-reduce may take a whole step."""
    return jax.lax.psum(x, REPLICA) / replicas - x
