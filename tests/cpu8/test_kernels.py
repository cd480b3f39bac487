"""Kernels with a rule of the user's run on shards; without one they are whole, and the plan states the bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import meshplan as mp
from tests._programs import f32

ROWS, WIDTH = 1024, 64


def scaled(x: jax.Array, s: jax.Array) -> jax.Array:
    """`x * s + 1` by a kernel that takes the rows in blocks of eight, whatever number there are."""

    def kernel(x_ref: Any, s_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * s_ref[...] + 1

    block = pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
    whole = pl.BlockSpec((1, s.shape[1]), lambda i: (0, 0))
    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(x.shape[0] // 8,), in_specs=[block, whole],
        out_specs=block, interpret=True, name="scaled",
    )(x, s)  # fmt: skip


def whole_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x.T @ y` by a kernel of one block: the sum over the rows is its own."""

    def kernel(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
        o_ref[...] = jnp.dot(x_ref[...].T, y_ref[...])

    out = jax.ShapeDtypeStruct((x.shape[1], y.shape[1]), x.dtype)
    return pl.pallas_call(kernel, out_shape=out, interpret=True, name="product")(x, y)


SCALED = ("i j, k j -> i j need_replication={k}", scaled)
PRODUCT = ("i j, i k -> j k reduction={i}", whole_product)


def step(x: jax.Array, s: jax.Array) -> jax.Array:
    return jnp.tanh(scaled(jnp.sin(x), s))


def real(*shapes: Any) -> Any:
    rng = np.random.default_rng(0)
    return [rng.normal(size=s.shape).astype(np.float32) for s in shapes]


ARGS = f32(ROWS, WIDTH), f32(1, WIDTH)


def test_a_kernel_with_a_rule_runs_on_shards() -> None:
    options = mp.Options(rules={"pallas_call:scaled": SCALED})
    for pin in (P("data"), P("data", "model"), P(None, ("data", "model"))):
        made = mp.plan(step, *ARGS, machine="cpu:8", mesh={"data": 4, "model": 2}, pins={"x": pin, "s": P(), "0": pin},
                       donate_argnums=(), options=options)  # fmt: skip
        assert made.notes == ()
        assert made.out_specs == pin
        assert made.collectives == made.audit().collectives == ()
        x, s = real(*ARGS)
        assert made.verify(x, s).ok
        np.testing.assert_allclose(made.jit()(x, s), np.tanh(np.sin(x) * s + 1), rtol=1e-5, atol=1e-5)


def test_partial_results_of_a_kernel_are_summed() -> None:
    options = mp.Options(rules={"pallas_call:product": PRODUCT})
    args = f32(ROWS, WIDTH), f32(ROWS, 32)
    made = mp.plan(lambda x, y: whole_product(jnp.sin(x), y) * 2, *args, machine="cpu:8", mesh={"data": 8},
                   pins={"x": P("data"), "y": P("data"), "0": P()}, donate_argnums=(), options=options)  # fmt: skip
    for found in (made.collectives, made.audit().collectives):
        assert [(c.kind, c.nbytes) for c in found] == [("all-reduce", WIDTH * 32 * 4)]
    assert made.verify(*real(*args)).ok


def test_a_kernel_without_a_rule_is_whole_with_a_warning_of_the_bytes() -> None:
    made = mp.plan(step, *ARGS, machine="cpu:8", mesh={"data": 8}, pins={"x": P("data"), "s": P()}, donate_argnums=())
    (note,) = made.notes
    nbytes = (2 * ROWS * WIDTH + WIDTH) * 4
    assert note.startswith("primitive 'pallas_call:scaled' has no sharding rule: kept whole, ")
    assert f"kept whole, {nbytes / 1e6:.3g} MB per step are not split" in note
    assert "Options(rules={'pallas_call:scaled': ...})" in note
    assert [(c.kind, c.nbytes) for c in made.collectives] == [("all-gather", ROWS * WIDTH * 4)]
    assert made.verify(*real(*ARGS)).ok


def test_a_rule_alone_cannot_cut_the_grid_of_a_kernel() -> None:
    options = mp.Options(rules={"pallas_call:scaled": SCALED[0]})
    with pytest.raises(mp.SpecError, match=r"rule of 'pallas_call:scaled': the grid .* rules=\{'pallas_call:scaled': "):
        mp.plan(step, *ARGS, machine="cpu:8", mesh={"data": 8}, donate_argnums=(), options=options)


def factor(x: jax.Array) -> jax.Array:
    """LAPACK's Cholesky factorisation by its FFI target; matrices are column-major there."""
    whole = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], jnp.int32)
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", whole, input_layouts=[(0, 2, 1)], output_layouts=[(0, 2, 1), (0,)])
    return jnp.tril(call(x, uplo=np.uint8(ord("L")))[0])


@pytest.mark.parametrize("ruled", [True, False])
def test_a_call_of_a_library_runs_on_shards_by_its_rule_alone(ruled: bool) -> None:
    jax.block_until_ready(jnp.linalg.cholesky(jnp.eye(2)))  # jax binds LAPACK's functions when it first needs one
    rules = {"ffi_call:lapack_spotrf_ffi": "b i j -> b i j, b need_replication={i, j}"} if ruled else {}
    made = mp.plan(lambda x: factor(x * 2), f32(64, 8, 8), machine="cpu:8", mesh={"data": 8}, donate_argnums=(),
                   pins={"x": P("data"), "0": P("data")}, options=mp.Options(rules=rules))  # fmt: skip
    assert len(made.notes) == (not ruled)
    gathered = [] if ruled else [("all-gather", 64 * 8 * 8 * 4)]
    for found in (made.collectives, made.audit().collectives):
        assert [(c.kind, c.nbytes) for c in found] == gathered
    (x,) = real(f32(64, 8, 8))
    x = x @ x.swapaxes(1, 2) + 8 * np.eye(8, dtype=np.float32)
    assert made.verify(x).ok
    np.testing.assert_allclose(made.jit()(x), np.linalg.cholesky(2 * x), rtol=1e-4, atol=1e-4)
