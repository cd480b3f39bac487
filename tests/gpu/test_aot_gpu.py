"""Compiles for an H100 node without its hardware, in a child process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshplan.lower._audit import audit_jitted

N = 512


def test_a_sharded_step_compiles_to_gather_and_reduce_scatter() -> None:
    mesh = AbstractMesh((4, 8), ("slow", "fast"), axis_types=(AxisType.Auto,) * 2)

    def held(x: jax.Array, *spec: str | tuple[str, ...] | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        grad = jax.grad(lambda w: jnp.sum(jnp.tanh(held(x @ held(w), ("slow", "fast"))).astype(jnp.float32)))(w)
        return held(w - grad, ("slow", "fast"))

    args = [jax.ShapeDtypeStruct((N, N), jnp.bfloat16, sharding=NamedSharding(mesh, P(("slow", "fast"))))] * 2
    audit = audit_jitted(jax.jit(step, donate_argnums=(0,)), *args, target="h100:4x8")
    assert audit.bytes_by_kind() == {"all-gather": N * N * 2, "reduce-scatter": N * N * 2}
    assert all((c.axes, c.group_size, c.dtype) == (("slow", "fast"), 32, "bf16") for c in audit.collectives)
    assert audit.flops_by_dtype == {"bfloat16": 2 * 2 * (N // 32) * N * N}
    assert audit.memory is not None
    assert audit.memory.argument_bytes == 2 * N * N * 2 // 32
    assert audit.memory.alias_bytes == N * N * 2 // 32
    assert all(c.source.startswith(f"{__file__}:") for c in audit.collectives)
    assert audit.fits
    assert audit.seconds is not None
    assert audit.seconds > 0
