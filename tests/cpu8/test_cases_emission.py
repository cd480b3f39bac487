"""What XLA partitions badly by itself, planned: a reshard in three dims, grouped convolutions, batched transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.core import MeshShape, bytes_by_kind
from meshplan.lower._hlo import collectives


def kinds(audit: mp.Audit) -> dict[str, float]:
    """Bytes by kind in the compiled module, where they agree with what the plan says."""
    found = audit.bytes_by_kind()
    predicted = bytes_by_kind(audit.predicted.collectives) if audit.predicted is not None else {}
    for kind in {*found, *predicted}:
        assert found.get(kind, 0) == pytest.approx(predicted.get(kind, 0), abs=64), (found, predicted)
    return found


# ------------------------------------------------------------------------------------------ a reshard in three dims


@pytest.mark.parametrize("inside", [False, True], ids=["result", "inside"])
def test_a_reshard_in_three_dims_is_two_exchanges(inside: bool, make_mesh: Callable[..., Mesh]):
    """Case 1: XLA alone replicates the array; by way of the spec between, nothing is gathered."""
    x = jax.ShapeDtypeStruct((16, 16, 16), jnp.float32)
    pins = {"x": P("y", None, "x"), "y": P(None, ("x", "y"), None)}

    def step(x: Any, y: Any) -> Any:
        both = x + y
        return lax.fori_loop(0, 3, lambda _, z: jnp.tanh(z), both) if inside else both

    plan = mp.plan(step, x, x, machine="cpu:8", mesh={"x": 4, "y": 2}, pins=pins, donate_argnums=())
    assert kinds(plan.audit()) == {"all-to-all": 2 * 16**3 * 4 / 8}
    value = np.arange(16.0**3, dtype=np.float32).reshape(x.shape)
    assert plan.verify(value, -2 * value).ok
    mesh = make_mesh(x=4, y=2)
    ins = NamedSharding(mesh, pins["x"]), NamedSharding(mesh, pins["y"])
    module = jax.jit(step, in_shardings=ins, out_shardings=ins[1]).lower(x, x).compile().as_text()
    gathered = [c for c in collectives(module or "", MeshShape.of({"x": 4, "y": 2})) if c.kind == "all-gather"]
    assert gathered, "XLA has learned it: this path, and the test, are no longer needed"


# --------------------------------------------------------------------------------------------- grouped convolutions


def conv(x: Any, w: Any, groups: int) -> Any:
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def conv_step(w: Any, x: Any, groups: int) -> tuple[Any, Any]:
    def loss(w: Any) -> Any:
        return jnp.mean(conv(jnp.tanh(x), w, groups) ** 2)

    value, g = jax.value_and_grad(loss)(w)
    return w - 0.1 * g, value


@pytest.mark.parametrize("groups", [1, 4, 32])
def test_a_convolution_split_by_batch_gathers_nothing_whatever_its_groups(groups: int):
    """Case 13."""
    x = jax.ShapeDtypeStruct((32, 16, 16, 32), jnp.float32)
    w = jax.ShapeDtypeStruct((3, 3, 32 // groups, 32), jnp.float32)

    def step(w: Any, x: Any) -> tuple[Any, Any]:
        return conv_step(w, x, groups)

    plan = mp.plan(step, w, x, machine="cpu:8", mesh={"data": 8}, pins={"x": P("data"), "w": P()})
    found = kinds(plan.audit())
    assert "all-gather" not in found
    assert found["all-reduce"] == pytest.approx(w.size * 4, abs=64)  # the weights' gradient
    rng = np.random.default_rng(0)
    assert plan.verify(*(rng.normal(size=a.shape).astype(np.float32) for a in (w, x))).ok


def test_a_free_plan_of_a_grouped_convolution_moves_less_than_its_input():
    x = jax.ShapeDtypeStruct((1024, 64, 64, 64), jnp.float32)
    w = jax.ShapeDtypeStruct((3, 3, 16, 64), jnp.float32)

    def step(w: Any, x: Any) -> tuple[Any, Any]:
        return conv_step(w, x, 4)

    plan = mp.plan(step, w, x, machine="h100:1x8", mesh={"data": 8})
    assert sum(c.total_bytes for c in plan.collectives) <= 2 * w.size * 4 + 64
    assert "data" in plan.in_specs[1]


def test_groups_that_hold_several_channels_split_over_devices():
    x = jax.ShapeDtypeStruct((32, 16, 16, 32), jnp.float32)
    w = jax.ShapeDtypeStruct((3, 3, 8, 32), jnp.float32)
    pins = {"x": P("data", None, None, "model"), "w": P(None, None, None, "model")}
    plan = mp.plan(
        lambda w, x: jnp.tanh(conv(x, w, 4)), w, x, machine="cpu:8", mesh={"data": 4, "model": 2}, pins=pins,
        donate_argnums=(),
    )
    assert kinds(plan.audit()) == {}
    rng = np.random.default_rng(0)
    assert plan.verify(*(rng.normal(size=a.shape).astype(np.float32) for a in (w, x))).ok


# ------------------------------------------------------------------------------------------------ batched transforms


def test_a_batched_transform_gathers_nothing():
    """Case 14: XLA alone gathers the 8 MB (CPU and GPU of jax 0.10.2)."""
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.complex64)
    pins = {"x": P("data")}
    plan = mp.plan(lambda x: jnp.fft.fft(x, axis=1), x, machine="cpu:8", mesh={"data": 8}, pins=pins)
    assert tuple(plan.out_specs) == ("data",)
    assert kinds(plan.audit()) == {}
    value = np.random.default_rng(0).normal(size=(1024, 2, 1024)).astype(np.float32)
    assert plan.verify((value[:, 0] + 1j * value[:, 1]).astype(np.complex64)).ok


def test_a_transform_of_the_split_dim_is_exchanged_not_gathered():
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.complex64)
    plan = mp.plan(
        lambda x: jnp.fft.fft(jnp.fft.fft(x, axis=1), axis=0), x, machine="cpu:8", mesh={"data": 8},
        pins={"x": P("data")}, donate_argnums=(),
    )
    assert kinds(plan.audit()) == {"all-to-all": x.size * 8 / 8}
    value = np.random.default_rng(0).normal(size=(1024, 2, 1024)).astype(np.float32)
    assert plan.verify((value[:, 0] + 1j * value[:, 1]).astype(np.complex64)).ok


@pytest.mark.parametrize("name", ["top_k", "eigh", "in_scan"])
def test_other_operations_by_rows_gather_nothing(name: str):
    def in_scan(x: Any) -> Any:
        return lax.scan(lambda c, _: (c + 1, lax.top_k(jnp.tanh(c), 4)), x, None, length=3)

    steps: dict[str, Callable[..., Any]] = {
        "top_k": lambda x: lax.top_k(jnp.tanh(x), 4), "eigh": lambda x: jnp.linalg.eigh(x @ x.swapaxes(1, 2)),
        "in_scan": in_scan,
    }  # fmt: skip
    x = jax.ShapeDtypeStruct((64, 16, 16), jnp.float32)
    plan = mp.plan(steps[name], x, machine="cpu:8", mesh={"data": 8}, pins={"x": P("data")}, donate_argnums=())
    assert kinds(plan.audit()) == {}
