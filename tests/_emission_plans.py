"""Small steps of operations that XLA gathers by itself, planned for a machine and audited there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.core import bytes_by_kind


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def conv_step(w: Any, x: Any) -> tuple[Any, Any]:
    def loss(w: Any) -> Any:
        y = lax.conv_general_dilated(
            jnp.tanh(x), w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4
        )
        return jnp.mean(y**2)

    value, g = jax.value_and_grad(loss)(w)
    return w - 0.1 * g, value


def experts(x: Any, w: Any, sizes: Any) -> Any:
    return jnp.tanh(lax.ragged_dot(jnp.tanh(x), w, sizes))


PLANS = ("convolution", "transform", "top_k", "experts")
# what each step is, its arguments and their specs over data=4, model=2
STEPS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "convolution": (conv_step, (f32(3, 3, 64, 256), f32(512, 16, 16, 256)), {"x": P("data", None, None, "model")}),
    "transform": (
        lambda x: jnp.abs(jnp.fft.fft(x, axis=1)), (jax.ShapeDtypeStruct((1024, 1024), jnp.complex64),),
        {"x": P(("data", "model"))},
    ),
    "top_k": (lambda x: lax.top_k(jnp.tanh(x), 8), (f32(256, 64, 512),), {"x": P("data", "model")}),
    "experts": (
        experts, (f32(2048, 256), f32(8, 256, 512), jax.ShapeDtypeStruct((8,), jnp.int32)),
        {"x": P("data"), "w": P("model")},
    ),
    "eigh": (lambda x: jnp.linalg.eigh(x @ x.swapaxes(1, 2)), (f32(64, 32, 32),), {"x": P(("data", "model"))}),
}  # fmt: skip


def check(name: str, machine: str) -> None:
    """The plan's collectives are those of the module, nothing is gathered whole, to a few latencies' bytes."""
    step, args, pins = STEPS[name]
    plan = mp.plan(step, *args, machine=machine, mesh={"data": 4, "model": 2}, pins=pins, donate_argnums=())
    found, predicted = plan.audit().bytes_by_kind(), bytes_by_kind(plan.collectives)
    for kind in {*found, *predicted}:
        assert found.get(kind, 0) == pytest.approx(predicted.get(kind, 0), rel=0.02, abs=256), (found, predicted)
