"""The timeline of programs that are compiled here: on CPU nothing overlaps."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshplan.core import MeshShape, format_seconds
from meshplan.lower._aot_here import compile_jitted
from meshplan.lower._audit import audit_compiled, audit_jitted
from meshplan.machine import Machine, collective_time
from meshplan.report import audit_doc
from meshplan.report import text as plain

L, B, D = 5, 64, 256


def test_on_cpu_a_step_is_its_computation_and_then_its_collectives(mesh8: Mesh) -> None:
    """A scan over stacked weights, each product's result summed over 'model'."""

    def forward(ws: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            h = lax.with_sharding_constraint(jnp.tanh(h) @ w, NamedSharding(mesh8, P("data", None)))
            return lax.with_sharding_constraint(h, NamedSharding(mesh8, P("data", "model"))), None

        return lax.scan(layer, x, ws)[0]

    ws = jax.ShapeDtypeStruct((L, D, D), jnp.float32, sharding=NamedSharding(mesh8, P(None, "model")))
    x = jax.ShapeDtypeStruct((B, D), jnp.float32, sharding=NamedSharding(mesh8, P("data", "model")))
    machine = Machine.preset("cpu:8")
    audit = audit_jitted(jax.jit(forward), ws, x, target=machine)
    timeline = audit.timeline
    assert timeline is not None
    mesh = MeshShape.of({"data": 4, "model": 2})
    one = collective_time(machine, mesh, "all-reduce", B // 4 * D * 4, ("model",)).seconds
    assert timeline.collective_seconds == pytest.approx(L * one)
    assert timeline.exposed_seconds == pytest.approx(timeline.collective_seconds)
    assert timeline.seconds == pytest.approx(timeline.compute_seconds + timeline.collective_seconds)
    assert audit.compute_seconds is not None
    assert timeline.compute_seconds > audit.compute_seconds > 0, "memory traffic and kernel starts come on top"
    weights = L * D * D // 2 * 4 / machine.chip.memory_bytes_per_second
    assert timeline.compute_seconds < 4 * weights + L * 9 * 5e-6, "a turn reads its own layer of the stack, not all"
    assert [(c.kind, c.axes, c.count) for c in timeline.collectives] == [("all-reduce", ("model",), L)]
    parts = f"{format_seconds(timeline.compute_seconds)} computing (roofline, modelled)"
    assert f"{format_seconds(timeline.seconds)} with overlap = {parts} + " in str(audit)
    assert re.search(rf"on a timeline +{format_seconds(timeline.seconds)} with overlap", plain(audit_doc(audit), 300))


def test_where_the_machine_is_of_another_size_there_is_no_timeline(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh(data=4)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    gather = jax.jit(lambda v: lax.with_sharding_constraint(v, NamedSharding(mesh, P())))
    compiled, shape, name = compile_jitted(gather, x)
    audit = audit_compiled(compiled, name=name, machine=Machine.preset("cpu:8"), mesh_shape=shape)
    assert audit.timeline is None
    assert " with overlap = " not in str(audit)
