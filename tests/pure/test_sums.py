"""Sums over shards that a back end completes later than they are written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshplan.core import MeshShape
from meshplan.strategy import Hoists, build_graph
from tests._programs import f32, program_of, search_of

N, TRIPS = 64, 6
STACKS = (f32(TRIPS, N, N), f32(TRIPS, N, N))


def loop(body: Any) -> Any:
    """A step that scans `body(carry, a, b) -> (carry, result of the turn)` over two stacks."""

    def step(x: jax.Array, a: jax.Array, b: jax.Array) -> Any:
        return lax.scan(lambda k, ab: body(k, *ab), x, (a, b))

    return step


def product(k: Any, a: Any, b: Any) -> Any:
    return k + a @ b, None


def reduced(k: Any, a: Any, b: Any) -> Any:
    return k + jnp.sum(jnp.tanh(a)[:, :, None] * b[None, :, :], 1), None


def converted(k: Any, a: Any, b: Any) -> Any:
    return k + (a.astype(jnp.bfloat16) @ b.astype(jnp.bfloat16)).astype(jnp.float32), None


def reshaped(k: Any, a: Any, b: Any) -> Any:
    return k + (a @ b).reshape(N // 2, 2, N).transpose(1, 0, 2).reshape(N, N), None


def added(k: Any, a: Any, b: Any) -> Any:
    return k + (jnp.tanh(a) @ b + a @ b), None


def in_turn(k: Any, a: Any, b: Any) -> Any:
    return k + jnp.tanh(a) @ b + a @ b, None


def scaled(k: Any, a: Any, b: Any) -> Any:
    return k + 0.5 * (a @ b), None


def carry_read(k: Any, a: Any, b: Any) -> Any:
    return k + a @ b, jnp.tanh(k).sum()


def sum_read(k: Any, a: Any, b: Any) -> Any:
    s = a @ b
    return k + s, jnp.tanh(s).sum()



def hoisted(body: Any, hoists: Hoists, step: Any = None) -> list[float]:
    """Trips of the loops out of which sums are taken."""
    program = program_of(step or loop(body), f32(N, N), *STACKS)
    graph = build_graph(program, hoists != "none", hoists=hoists)
    inside = [r.trips for n in graph.nodes for r in n.inner if r.trips > 1]
    return inside + [e.trips for e in graph.edges if e.trips > 1]


@pytest.mark.parametrize("body", [product, reduced, converted, reshaped])
def test_a_sum_that_a_loop_only_adds_up_is_completed_after_it(body: Any):
    assert hoisted(body, "merged") == hoisted(body, "single") == [TRIPS]
    assert hoisted(body, "none") == []


def test_sums_that_are_added_first_are_taken_out_of_the_loop_where_the_back_end_does():
    assert hoisted(added, "merged") == [TRIPS]
    assert hoisted(added, "single") == []


@pytest.mark.parametrize("body", [in_turn, scaled, carry_read, sum_read])
def test_a_sum_that_the_body_uses_otherwise_is_completed_in_every_turn(body: Any):
    assert hoisted(body, "merged") == []


def test_a_sum_leaves_the_innermost_loop_alone():
    def step(x: jax.Array, a: jax.Array, b: jax.Array) -> Any:
        inner = lambda k, ab: (lax.scan(lambda k, ab: product(k, *ab), k, ab)[0], None)  # noqa: E731
        return lax.scan(inner, x, (a.reshape(2, 3, N, N), b.reshape(2, 3, N, N)))

    assert hoisted(None, "merged", step) == [3]


@pytest.mark.parametrize("machine", ["h100:1x8", "tpu-v5e:2x4"])
def test_the_bytes_of_a_hoisted_sum_are_those_of_one_turn(machine: str):
    pins = {"x": P(), "a": P(None, None, "data"), "b": P(None, "data")}
    search = search_of(lambda x, a, b: loop(product)(x, a, b)[0], f32(N, N), *STACKS, machine=machine, pins=pins)
    found = search.at(MeshShape.of({"data": 8}))
    assert found is not None
    assert [(c.kind, c.nbytes, c.count) for c in found.prediction.collectives] == [("all-reduce", 4 * N * N, 1)]


def test_a_sum_that_is_reshaped_and_converted_before_it_leaves_is_left_unreduced():
    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        return y @ jnp.sum(jnp.tanh(x), 0, keepdims=True).astype(jnp.bfloat16).reshape(N, N)

    program = program_of(step, f32(8, N * N), jax.ShapeDtypeStruct((N, N), jnp.bfloat16))
    (node,) = [n for n in build_graph(program).nodes if n.kind == "chain" and n.partial]
    ((left, reduction),) = node.partial.items()
    assert program.values[left].aval.dtype == "bfloat16"
    assert program.values[reduction.value].aval.dtype == "float32"
    assert node.leaving[reduction.value] == left
    assert not node.inner
