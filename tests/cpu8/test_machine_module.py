"""Bytes by link dim against the replica groups of a module that runs the phases of a hierarchical collective."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from meshplan.core import MeshShape
from meshplan.lower._hlo import collectives
from meshplan.machine import Machine, collective_time, device_order

SIZES = {"slice": 2, "chip": 4}
ELEMENTS = 4096


def reduced(x: jax.Array) -> jax.Array:
    piece = jax.lax.psum_scatter(x, "chip", tiled=True)
    return jax.lax.all_gather(jax.lax.psum(piece, "slice"), "chip", tiled=True)


def gathered(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(jax.lax.all_gather(x, "slice", tiled=True), "chip", tiled=True)


@pytest.mark.parametrize(("kind", "phases"), [("all-reduce", reduced), ("all-gather", gathered)])
def test_bytes_by_dim_are_what_the_replica_groups_of_the_module_move(kind, phases):
    mesh = jax.make_mesh(
        tuple(SIZES.values()), tuple(SIZES), devices=device_order(jax.devices()),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )
    split = P(("chip", "slice")) if kind == "all-gather" else P()
    step = jax.jit(jax.shard_map(phases, mesh=mesh, in_specs=split, out_specs=P(), check_vma=False))
    text = step.lower(jnp.zeros(ELEMENTS)).compile().as_text()
    assert text is not None
    found = collectives(text, MeshShape.of(SIZES))
    moved = {"slice": 0.0, "chip": 0.0}
    for c in found:
        (axis,) = c.axes
        assert c.group_size == SIZES[axis]
        twice = 2 if c.kind == "all-reduce" else 1
        moved[axis] += c.count * twice * c.nbytes * (c.group_size - 1) / c.group_size
    machine = Machine.preset("tpu-v5e:2*2x2")
    said = collective_time(machine, MeshShape.of({"all": 8}), kind, 4 * ELEMENTS, ("all",), "hierarchical(torus, ring)")
    inside = said.bytes_by_dim["ici.x"] + said.bytes_by_dim["ici.y"]
    assert {"slice": said.bytes_by_dim["dcn"], "chip": inside} == pytest.approx(moved)
