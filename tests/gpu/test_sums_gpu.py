"""Sums that XLA:GPU completes later than they are written: the compiled module holds what the plan says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.core import bytes_by_kind

N, TRIPS = 512, 4
WHOLE, STACK = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((N, N), (TRIPS, N, N)))


def added_up(x: jax.Array, a: jax.Array, b: jax.Array) -> Any:
    return lax.scan(lambda k, ab: (k + ab[0] @ ab[1], None), x, (a, b))[0]


def added_up_in_pairs(x: jax.Array, a: jax.Array, b: jax.Array) -> Any:
    return lax.scan(lambda k, ab: (k + (jnp.tanh(ab[0]) @ ab[1] + ab[0] @ ab[1]), None), x, (a, b))[0]


def scaled(x: jax.Array, a: jax.Array, b: jax.Array) -> Any:
    return lax.scan(lambda k, ab: (k + 0.5 * (ab[0] @ ab[1]), None), x, (a, b))[0]


@pytest.mark.parametrize(("step", "turns"), [(added_up, 1), (added_up_in_pairs, 1), (scaled, TRIPS)])
def test_what_a_loop_adds_up_is_reduced_as_often_as_the_plan_says(step: Any, turns: int):
    pins = {"x": P(), "a": P(None, None, "data"), "b": P(None, "data")}
    plan = mp.plan(step, WHOLE, STACK, STACK, machine="h100:1x8", mesh={"data": 8}, pins=pins)
    assert plan.audit().bytes_by_kind() == bytes_by_kind(plan.collectives)
    assert turns > 1 or bytes_by_kind(plan.collectives) == {"all-reduce": 4 * N * N}
