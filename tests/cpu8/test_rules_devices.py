"""Rules on devices: what XLA's partitioner computes and moves where the rules say that dims split."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.rules import rule_for
from tests._proof import equation, view_of

_COLLECTIVES = re.compile(r"= .*? (all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)(?:-start)?\(")


def _compiled(mesh: Any, fn: Callable[..., Any], args: tuple[Any, ...], specs: Any, out: Any) -> tuple[Any, list[str]]:
    """The result on devices, and the collectives of the compiled module."""
    shardings = [NamedSharding(mesh, s) for s in specs]
    jitted = jax.jit(fn, in_shardings=tuple(shardings), out_shardings=NamedSharding(mesh, out))
    module = jitted.lower(*args).compile()
    placed = [jax.device_put(x, s) for x, s in zip(args, shardings, strict=True)]
    return module(*placed), _COLLECTIVES.findall(module.as_text() or "")


# ---------------------------------------------------------------------- a row written out of range (case 12)


def _write(x: Any, row: Any, start: Any) -> Any:
    return lax.dynamic_update_slice(x, row, (0, start))


_X = jnp.array([[0.0, 1.0], [2.0, 3.0]])
_ROW = jnp.array([[99.0], [99.0]])


def test_xla_still_loses_a_row_whose_start_is_out_of_range(make_mesh: Any) -> None:
    """The reason for the refusal; when this fails, XLA is mended and the rule can be."""
    mesh = make_mesh(data=2)
    got, _ = _compiled(mesh, _write, (_X, _ROW, jnp.int32(2)), (P(None, "data"), P(), P()), P(None, "data"))
    np.testing.assert_array_equal(_write(_X, _ROW, 2), [[0, 99], [2, 99]])
    np.testing.assert_array_equal(got, [[0, 1], [2, 3]])


@pytest.mark.parametrize("start", [0, 1, 2, 99, -1, -7])
def test_a_plan_gives_the_right_numbers_wherever_a_row_is_written(start: int) -> None:
    args = (jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((8, 1), jnp.float32), jnp.int32(0))
    for clamped in (False, True):
        step = (lambda x, u, i: _write(x, u, jnp.clip(i, 0, 15))) if clamped else _write
        plan = mp.plan(step, *args, machine="cpu:8", mesh={"data": 8}, pins={"x": P(None, "data")})
        real = (jnp.arange(128.0).reshape(8, 16), -jnp.ones((8, 1)), jnp.int32(start))
        np.testing.assert_array_equal(plan.jit()(*real), step(*real))
        assert len(plan.notes) == (not clamped)


def test_the_plan_says_why_a_row_of_unknown_place_is_not_written_on_shards() -> None:
    """Case 12: x[2, 2] split by columns over two devices, 99s written at column 2: both columns stay where they are."""
    plan = mp.plan(_write, _X, _ROW, jnp.int32(0), machine="cpu:2", mesh={"data": 2}, pins={"x": P(None, "data")})
    (note,) = plan.notes
    assert note.startswith("dynamic_update_slice at ")
    assert "test_rules_devices.py:" in note
    assert note.endswith(
        "XLA gives wrong numbers for a row written into a split dim at a start out of range, and the start of dim 1 is "
        "not known to lie within 0 and 1; clamp it: jnp.clip(start, 0, 1)"
    )
    assert [(c.kind, c.nbytes) for c in plan.collectives] == [("all-gather", 16)]
    got = plan.jit(plan.mesh(jax.devices()[:2]))(_X.copy(), _ROW, jnp.int32(2))
    np.testing.assert_array_equal(got, [[0, 99], [2, 99]])


@pytest.mark.parametrize("where", ["constant", "clipped", "counter"])
def test_an_append_at_a_known_place_of_a_cache_moves_nothing(where: str) -> None:
    """Case 12: a constant, a clipped and a counted position are provably in range; the split dim keeps its split."""

    def append(cache: Any, row: Any, i: Any) -> Any:
        if where == "counter":
            return lax.fori_loop(0, 16, lambda t, c: lax.dynamic_update_slice(c, row * t, (0, t)), cache)
        return lax.dynamic_update_slice(cache, row, (0, 5 if where == "constant" else jnp.clip(i, 0, 15)))

    args = (jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((8, 1), jnp.float32), jnp.int32(0))
    plan = mp.plan(append, *args, machine="cpu:8", mesh={"data": 8}, pins={"cache": P(None, "data"), "row": P()})
    assert plan.notes == ()
    assert plan.collectives == plan.audit().collectives == ()
    real = np.arange(128.0, dtype=np.float32).reshape(8, 16), np.ones((8, 1), np.float32), np.int32(99)
    assert plan.verify(*real).ok


def test_a_clamped_start_keeps_the_cache_where_it_is() -> None:
    args = (jax.ShapeDtypeStruct((8, 1024), jnp.float32), jax.ShapeDtypeStruct((8, 1), jnp.float32), jnp.int32(0))
    moved = {}
    for last in (1023, 1024):
        plan = mp.plan(
            lambda x, u, i, last=last: _write(x, u, jnp.clip(i, 0, last)), *args, machine="cpu:8", mesh={"data": 8},
            pins={"x": P(None, "data")}, donate_argnums=(0,),
        )  # fmt: skip
        mesh = plan.mesh()
        moved[last] = _COLLECTIVES.findall(plan.jit(mesh).lower(*plan.abstract_args(mesh)).compile().as_text())
    assert "all-gather" not in moved[1023]
    assert moved[1024] != moved[1023]


@pytest.mark.parametrize("start", [0, 5, 15])
def test_a_row_written_in_range_moves_nothing(make_mesh: Any, start: int) -> None:
    x, row = jnp.arange(64.0).reshape(16, 4), -jnp.ones((1, 4))
    fn = lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0))  # noqa: E731
    got, moved = _compiled(make_mesh(data=8), fn, (x, row, jnp.int32(start)), (P("data"), P(), P()), P("data"))
    np.testing.assert_array_equal(got, fn(x, row, start))
    assert moved == []


# ------------------------------------------------------------------- blocks that need no rows of others

_W = np.random.default_rng(0).normal(size=(4, 16, 8)).astype(np.float32)
_KERNEL = np.random.default_rng(1).normal(size=(4, 8, 6)).astype(np.float32)


def _patches(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (4,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))


def _pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID")


_ALONE: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]] = {
    "patches": ("conv_general_dilated", _patches, (_W, _KERNEL)),
    "pool": ("reduce_window_max", _pool, (_W,)),
    "pool_gradient": ("select_and_scatter_add", jax.grad(lambda x: (_pool(x) ** 2).sum()), (_W,)),
    "every_other": ("slice", lambda x: x[:, 1::2], (_W,)),
    "spread": ("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (0, 1, 1), (0, 0, 0))), (_W,)),
}


@pytest.mark.parametrize("name", list(_ALONE))
def test_a_factor_through_a_window_needs_no_collective(make_mesh: Any, name: str) -> None:
    primitive, fn, args = _ALONE[name]
    rule = rule_for(view_of(equation(primitive, fn, *args)))
    assert rule is not None
    assert rule.results[0][1]
    specs = (P(None, "data"), P())[: len(args)]
    got, moved = _compiled(make_mesh(data=4), fn, args, specs, P(None, "data"))
    np.testing.assert_allclose(got, fn(*args), rtol=1e-5, atol=1e-5)
    assert moved == []


def test_a_halo_is_what_the_partitioner_moves(make_mesh: Any) -> None:
    kernel = _KERNEL[:3]
    fn = lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))  # noqa: E731
    rule = rule_for(view_of(equation("conv_general_dilated", fn, _W, kernel)))
    assert rule is not None
    assert [h.received(4) for h in rule.halos] == [2]
    got, moved = _compiled(make_mesh(data=4), fn, (_W, kernel), (P(None, "data"), P()), P(None, "data"))
    np.testing.assert_allclose(got, fn(_W, kernel), rtol=1e-4, atol=1e-4)
    assert moved == ["collective-permute"] * 2


# --------------------------------------------------------------------------------- random numbers by place


@pytest.mark.parametrize(
    "draw",
    [
        lambda k: jax.random.gamma(k, jnp.full((16, 2), 2.0)),
        lambda k: jax.random.normal(k, (16, 2)),
        lambda k: jax.random.permutation(k, 16)[:, None] * jnp.ones((1, 2)),
        lambda k: jax.random.key_data(jax.random.split(k, 16)),
    ],
    ids=["gamma", "normal", "permutation", "split"],
)
def test_samples_split_over_devices_are_those_of_one_device(make_mesh: Any, draw: Callable[[Any], Any]) -> None:
    key = jax.random.key(7)
    got, _ = _compiled(make_mesh(data=8), draw, (key,), (P(),), P("data"))
    np.testing.assert_allclose(got, draw(key), rtol=1e-5)


def test_experts_of_a_ragged_dot_split_and_their_parts_sum(make_mesh: Any) -> None:
    """Where jax lowers it to masked products: experts apart, one sum over the rows."""
    rng = np.random.default_rng(3)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((32, 8), (8, 8, 16)))
    sizes = jnp.array([4, 0, 7, 3, 5, 1, 6, 4], jnp.int32)
    specs = (P(), P("data"), P())
    got, moved = _compiled(make_mesh(data=8), lax.ragged_dot, (x, w, sizes), specs, P())
    np.testing.assert_allclose(got, lax.ragged_dot(x, w, sizes), rtol=1e-4, atol=1e-4)
    assert moved.count("all-reduce") == 1
    got, moved = _compiled(make_mesh(data=8), lax.ragged_dot, (x, w, sizes), (P("data"), P(), P()), P("data"))
    np.testing.assert_allclose(got, lax.ragged_dot(x, w, sizes), rtol=1e-4, atol=1e-4)
    assert moved == []
