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


def test_products_that_the_compiler_finds_no_tiles_for_are_compiled_without_fusing_them() -> None:
    """Twelve heads: XLA:GPU refuses these without a device to try tiles on."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def attend(x: jax.Array, q: jax.Array, k: jax.Array, o: jax.Array) -> jax.Array:
        queries, keys, values = (jnp.einsum("bsd,dhk->bshk", x, w.astype(x.dtype)) for w in (q, k, q))
        weights = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", queries, keys).astype(jnp.float32)).astype(x.dtype)
        return jnp.einsum("bshk,hkf->bsf", jnp.einsum("bhst,bthk->bshk", weights, values), o.astype(x.dtype))

    def array(spec: P, dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = [array(P(), "float32", *shape) for shape in ((768, 12, 64), (768, 12, 64), (12, 64, 768))]
    found = audit_jitted(jax.jit(attend), array(P("data"), "bfloat16", 1024, 197, 768), *weights, target="h100:1x8")
    assert found.flops > 0
    assert not found.collectives
