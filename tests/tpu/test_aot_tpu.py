"""Compiles for a TPU slice without its hardware, in a child process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshplan.lower._audit import audit_jitted

L, N = 3, 512
MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def held(x: jax.Array, *spec: str | None) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def test_a_scanned_step_compiles_to_gathers_and_reduce_scatters_of_every_layer() -> None:
    def step(ws: jax.Array, x: jax.Array) -> jax.Array:
        def loss(ws: jax.Array) -> jax.Array:
            def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                return held(jnp.tanh(held(h @ held(w), "data")), "data"), None

            return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, ws)[0].astype(jnp.float32))

        return held(ws - jax.grad(loss)(ws), None, "data")

    ws = jax.ShapeDtypeStruct((L, N, N), jnp.bfloat16, sharding=NamedSharding(MESH, P(None, "data")))
    x = jax.ShapeDtypeStruct((N, N), jnp.bfloat16, sharding=NamedSharding(MESH, P("data")))
    audit = audit_jitted(jax.jit(step, donate_argnums=(0,)), ws, x, target="tpu-v5e:2x4")
    assert audit.bytes_by_kind() == {"all-gather": 2 * L * N * N * 2, "reduce-scatter": L * N * N * 2}
    assert {(c.axes, c.group_size, c.dtype) for c in audit.collectives} == {(("data",), 4, "bf16")}
    assert audit.flops == 4 * L * 2 * (N // 4) * N * N
    assert audit.memory is not None
    assert audit.memory.alias_bytes == L * N * N * 2 // 4
    assert audit.estimated_cycles is not None
    assert audit.estimated_cycles > 0
    assert audit.notes == ()
    assert audit.fits


def test_a_program_larger_than_the_memory_is_a_result_with_the_bytes() -> None:
    huge = jax.ShapeDtypeStruct((160 * 1024, 1024, 1024), jnp.bfloat16, sharding=NamedSharding(MESH, P("data")))
    audit = audit_jitted(jax.jit(lambda x: jnp.sin(x @ x).astype(jnp.float32)), huge, target="tpu-v5e:2x4")
    assert audit.out_of_memory is not None
    assert audit.out_of_memory.needed_bytes > audit.out_of_memory.limit_bytes > 15 * 2**30
    assert not audit.ok
    assert "does not fit" in str(audit)


def test_traffic_between_slices_is_read_and_priced_apart() -> None:
    mesh = AbstractMesh((2, 8), ("slice", "data"), axis_types=(AxisType.Auto,) * 2)

    def split(*spec: str | tuple[str, ...] | None) -> NamedSharding:
        return NamedSharding(mesh, P(*spec))

    both = ("slice", "data")
    product = jax.jit(lambda p, q: p @ q, out_shardings=split())
    args = (
        jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=split(None, both)),
        jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=split(both)),
    )
    audit = audit_jitted(product, *args, target="tpu-v5e:2*2x4")
    whole = 1024 * 1024 * 4
    assert [(c.kind, c.axes, c.group_size, c.nbytes) for c in audit.collectives] == [
        ("reduce-scatter", ("data",), 8, whole),
        ("all-reduce", ("slice",), 2, whole // 8),
        ("all-gather", ("data",), 8, whole),
    ]
    assert audit.seconds is not None
