"""Reshard paths carried out on eight devices: values stay, and the module holds the path's collectives and no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from meshplan.core import MeshShape, Spec
from meshplan.cost import reshard_path
from meshplan.cost._emission import Emission
from meshplan.lower._hlo import collectives
from meshplan.plan._extract import settled

SIZES = {"x": 4, "y": 2}
MESH = MeshShape.of(SIZES)
CPU = Emission("cpu")

Dims = tuple[str, ...]
MOVES: list[tuple[Dims, Dims]] = [
    (("y", "", "x"), ("", "xy", "")),  # three dims at once: two exchanges, nothing gathered
    (("x", "", ""), ("", "x", "")),
    (("x", "", ""), ("", "", "")),
    (("xy", "", ""), ("x", "", "")),
    (("xy", "", ""), ("y", "", "")),
    (("xy", "", ""), ("", "", "")),
    (("xy", "", ""), ("yx", "", "")),
    (("xy", "", ""), ("x", "y", "")),
    (("xy", "", ""), ("y", "x", "")),
    (("xy", "", ""), ("", "", "xy")),
    (("x", "y", ""), ("", "xy", "")),
    (("x", "y", ""), ("y", "x", "")),
    (("x", "y", ""), ("", "y", "x")),
    (("x", "y", ""), ("", "", "")),
    (("x", "", ""), ("y", "", "")),
    (("y", "", ""), ("x", "", "")),
    (("x", "", ""), ("xy", "", "")),
    (("y", "", ""), ("xy", "", "")),
    (("", "", ""), ("x", "", "y")),
    (("x", "y", ""), ("y", "", "x")),
]


def spec(dims: Dims) -> Spec:
    return Spec(tuple(map(tuple, dims)))


def predicted(source: Spec, target: Spec, nbytes: int, dtype: str) -> Counter[tuple[str, int, int]]:
    found: Counter[tuple[str, int, int]] = Counter()
    for step in reshard_path(source, target, MESH):
        kind = CPU.kind(step)
        if kind is not None:
            wire = nbytes * step.fraction * CPU.bytes_factor(dtype)
            group = MESH.size(step.axes)
            found[kind, round(wire), group if kind != "collective-permute" else 0] += 1
    return found


def compiled(of: Callable[..., jax.Array], *args: jax.ShapeDtypeStruct) -> tuple[Counter[tuple[str, int, int]], object]:
    module = jax.jit(of).lower(*args).compile()
    found = Counter(
        (c.kind, c.nbytes, c.group_size if c.kind != "collective-permute" else 0)
        for c in collectives(module.as_text() or "", MESH)
    )
    return found, module


def along(path: list[Spec], mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    def move(x: jax.Array) -> jax.Array:
        for at in path:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, at.partition_spec()))
        return x

    return move


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("source", "target"), MOVES, ids=lambda dims: ",".join(d or "-" for d in dims))
def test_a_path_becomes_its_collectives_and_changes_no_value(
    source: Dims, target: Dims, dtype: str, make_mesh: Callable[..., Mesh]
):
    mesh = make_mesh(**SIZES)
    begin, end = spec(source), spec(target)
    value = np.arange(16**3, dtype=np.float32).reshape(16, 16, 16) % 251
    array = jax.device_put(jnp.asarray(value, dtype), NamedSharding(mesh, begin.partition_spec()))
    path = [s.after for s in reshard_path(begin, end, MESH)]
    found, module = compiled(along(path, mesh), jax.ShapeDtypeStruct(array.shape, dtype, sharding=array.sharding))
    assert found == predicted(begin, end, array.nbytes, dtype)
    moved = module(array)  # type: ignore[operator]
    assert moved.sharding.is_equivalent_to(NamedSharding(mesh, end.partition_spec()), 3)
    np.testing.assert_array_equal(np.asarray(moved, np.float32), value)


SUMS: list[tuple[Dims, str, Dims]] = [
    (("", ""), "x", ("", "")),
    (("", ""), "x", ("x", "")),
    (("", ""), "y", ("", "y")),
    (("y", ""), "x", ("y", "x")),
    (("y", ""), "x", ("yx", "")),
    (("", ""), "xy", ("xy", "")),
    (("", ""), "xy", ("x", "y")),
    (("", "y"), "x", ("", "")),
]


@pytest.mark.parametrize(("left", "partial", "target"), SUMS)
def test_a_sum_is_completed_as_its_path_says(left: Dims, partial: str, target: Dims, make_mesh: Callable[..., Mesh]):
    """The product leaves `left` unreduced over `partial`; the specs stated are those that a plan states."""
    mesh = make_mesh(**SIZES)
    source = Spec(tuple(map(tuple, left)), tuple(partial))
    steps = reshard_path(source, spec(target), MESH)
    operands = [
        jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, spec(dims).partition_spec()))
        for dims in ((left[0], partial), (partial, left[1]))
    ]
    move = along(settled(source, steps), mesh)
    found, module = compiled(lambda a, b: move(a @ b), *operands)
    assert found == predicted(source, spec(target), 4 * 64 * 64, "float32")
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (64, 64)).astype(np.float32) for _ in range(2))
    placed = [jax.device_put(v, o.sharding) for v, o in zip((a, b), operands, strict=True)]
    np.testing.assert_array_equal(np.asarray(module(*placed)), a @ b)  # type: ignore[operator]
