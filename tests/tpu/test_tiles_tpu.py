"""What the TPU compiler does by tiles and before it partitions, against the model of it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.core import MeshShape, Spec, bytes_by_kind
from meshplan.cost import Emission
from meshplan.cost._reshard import reshard_path

TARGET = "tpu-v5e:2x4"
# Sums of two dims, split along one: at the edges of what pieces of whole tiles are.
SUMS = [
    ((32, 4096), 0, "bfloat16"), ((64, 4096), 0, "bfloat16"), ((64, 128), 0, "bfloat16"), ((256, 64), 1, "bfloat16"),
    ((479, 1024), 1, "bfloat16"), ((479, 2048), 1, "bfloat16"), ((32, 4096), 0, "float32"), ((64, 4096), 0, "float32"),
    ((1024, 32), 1, "float32"), ((1024, 1024), 1, "float32"), ((32768,), 0, "float32"),
]  # fmt: skip


@pytest.fixture(scope="module")
def mesh() -> AbstractMesh:
    return AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))


def test_sums_are_scattered_where_the_model_says_so(mesh: AbstractMesh):
    def target(shape: tuple[int, ...], dim: int) -> Spec:
        return Spec(tuple(("x",) if d == dim else () for d in range(len(shape))))

    def step(parts: list[Any]) -> list[Any]:
        out = []
        for (a, b), (shape, dim, _) in zip(parts, SUMS, strict=True):
            y = a.T @ b if len(shape) == 2 else a @ b
            y = lax.with_sharding_constraint(y, NamedSharding(mesh, P()))
            out.append(lax.with_sharding_constraint(y, NamedSharding(mesh, target(shape, dim).partition_spec())) + 1)
        return out

    def part(*shape: int, dtype: str) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("x")))

    parts = [[part(4096, *s[:-1], dtype=t), part(4096, s[-1], dtype=t)] for s, _, t in SUMS]
    expected: Counter[str] = Counter()
    for shape, dim, dtype in SUMS:
        (move,) = reshard_path(Spec(((),) * len(shape), ("x",)), target(shape, dim), MeshShape.of({"x": 8}))
        piece = target(shape, dim).local_shape(shape, MeshShape.of({"x": 8}))
        expected[str(Emission("tpu").kind(move, dtype, piece))] += jnp.dtype(dtype).itemsize * math.prod(shape)
    assert len(expected) == 2
    assert mp.audit(jax.jit(step), parts, target=TARGET).bytes_by_kind() == expected


def test_equal_fills_that_are_split_differently_are_not_gathered():
    def scaled(total: Any, count: Any) -> Any:
        return total * (1 / jnp.maximum(count, 1))[:, None]

    def step(a: Any, b: Any, count: Any, w: Any, v: Any) -> dict[str, Any]:
        return {"a": jnp.sin(scaled(a, count)) @ w, "b": jnp.sin(scaled(b, count)) @ v}

    wide, square = jax.ShapeDtypeStruct((512, 256), jnp.float32), jax.ShapeDtypeStruct((256, 256), jnp.float32)
    plan = mp.plan(
        step, wide, wide, jax.ShapeDtypeStruct((512,), jnp.float32), square, square, machine=TARGET, mesh={"data": 8},
        pins={"a": P(None, None), "b": P(None, "data"), "w": P(None, None), "v": P("data", None)},
    )  # fmt: skip
    found = plan.audit().bytes_by_kind()
    assert found == bytes_by_kind(plan.collectives)
    assert "all-gather" not in found
