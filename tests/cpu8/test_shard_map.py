"""`shard_map` inside a step: opaque, its specs respected, over its own mesh alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.core import bytes_by_kind
from tests._programs import f32

MakeMesh = Callable[..., Mesh]
SHAPE = {"x": 4, "y": 2}
W, X = f32(64, 128), f32(256, 64)


def product(mesh: Any, **options: Any) -> Callable[[Any, Any], Any]:
    """`h @ w.T` on shards: rows over x, the contracted dim over y, parts summed inside."""
    specs = {"in_specs": (P("x", "y"), P(None, "y")), "out_specs": P("x")}
    return jax.shard_map(lambda h, w: lax.psum(h @ w.T, "y"), mesh=mesh, **specs, **options)


def block(mesh: Any) -> Callable[[Any, Any], Any]:
    def step(w: Any, x: Any) -> Any:
        return product(mesh)(jnp.tanh(x @ w), w) * 2

    return step


def plainly(w: Any, x: Any) -> Any:
    return (jnp.tanh(x @ w) @ w.T) * 2


def real() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return tuple((rng.normal(size=s.shape) / 8).astype(np.float32) for s in (W, X))  # type: ignore[return-value]


def same(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-4)


def read_and_left(made: mp.Plan) -> tuple[list[P], list[P]]:
    """Specs in which the one shard_map reads its operands and leaves its results."""
    from meshplan.lower._lower import read_and_left
    from meshplan.plan import OpPlan, made_specs

    assert made.program is not None
    (op,) = [op for op in made.program.ops if op.primitive == "shard_map"]
    planned = {p.index: p for p in made.data.ops}.get(op.index, OpPlan(index=op.index))
    known = made_specs(made.data.arguments, made.data.ops, made.program)
    read, left = read_and_left(op, planned, known)
    return [s.partition_spec() for s in read if s is not None], [s.partition_spec() for s in left if s is not None]


INSIDE = {"all-reduce": (256 // 4) * 64 * 4}  # the body's psum, of a shard of the result


def test_operands_arrive_and_results_leave_in_the_specs_of_the_shard_map(make_mesh: MakeMesh) -> None:
    made = mp.plan(block(make_mesh(**SHAPE)), W, X, machine="cpu:8", donate_argnums=())
    assert made.mesh_shape == SHAPE, "the search takes its mesh"
    assert read_and_left(made) == ([P("x", "y"), P(None, "y")], [P("x")])
    assert bytes_by_kind(made.collectives) == {}, "nothing moves on the way"
    assert made.audit().bytes_by_kind() == INSIDE, "and the module has no collective but the one inside"
    same(made.jit()(*real()), plainly(*real()))
    assert made.verify(*real()).ok


def test_the_way_into_the_specs_is_priced(make_mesh: MakeMesh) -> None:
    """The argument is kept as the user pins it: one move, predicted and compiled."""
    mesh = make_mesh(**SHAPE)
    made = mp.plan(lambda x, w: product(mesh)(x, w), f32(256, 128), W, machine="cpu:8", donate_argnums=(),
                   pins={"x": P(("x", "y")), "w": P(None, "y"), "0": P("x")})  # fmt: skip
    assert [(c.kind, c.axes) for c in made.collectives] == [("all-to-all", ("y",))]
    moved = bytes_by_kind(made.collectives)
    assert made.audit().bytes_by_kind() == {**moved, **INSIDE}
    rng = np.random.default_rng(0)
    h, w = (rng.normal(size=s).astype(np.float32) for s in ((256, 128), (64, 128)))
    same(made.jit()(h, w), h @ w.T)


def test_gradients_through_a_shard_map_keep_to_the_specs(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(**SHAPE)

    def training(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def trained(w: Any, x: Any) -> Any:
            value, gradient = jax.value_and_grad(lambda w: (step(w, x) ** 2).mean())(w)
            return w - 0.1 * gradient, value

        return trained

    made = mp.plan(training(block(mesh)), W, X, machine="cpu:8")
    wanted = training(plainly)(*real())
    same(made.jit()(*made.shard(*real())), wanted)
    assert made.verify(*real()).ok
    predicted, compiled = bytes_by_kind(made.collectives), made.audit().bytes_by_kind()
    assert compiled.keys() <= predicted.keys() | {"all-reduce"}
    sums = compiled.pop("all-reduce") - predicted.pop("all-reduce")
    assert compiled == pytest.approx(predicted, abs=64), "no move that is not planned"
    assert sums == pytest.approx(INSIDE["all-reduce"] + 64 * 64 * 4, abs=64), "both bodies' own sums"
    assert [("runs as it is written" in note) for note in made.notes] == [True], "forward and backward, of one line"


@pytest.mark.parametrize("inside", ["scan", "checkpoint", "cond"])
def test_shard_maps_in_loops_branches_and_rematerialised_blocks(make_mesh: MakeMesh, inside: str) -> None:
    mesh = make_mesh(**SHAPE)

    def step(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def run(w: Any, x: Any) -> Any:
            layer = lambda x: jnp.sin(call(jnp.tanh(x @ w), w))  # noqa: E731
            if inside == "scan":
                return lax.scan(lambda c, _: (layer(c), None), x, None, length=3)[0]
            if inside == "cond":
                return lax.cond(x.sum() > 0, layer, jnp.cos, x)
            return jax.grad(lambda x: (jax.checkpoint(layer)(x) ** 2).sum())(x)

        return run

    made = mp.plan(step(product(mesh)), W, X, machine="cpu:8", donate_argnums=())
    same(made.jit()(*real()), step(lambda h, w: h @ w.T)(*real()))


def test_some_axes_of_the_mesh_may_stay_automatic(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(**SHAPE)
    rows = jax.shard_map(lambda h: h / lax.psum(h.sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"),
                         axis_names={"x"})  # fmt: skip
    made = mp.plan(lambda w, x: rows(jnp.exp(x @ w)).sum(0), W, X, machine="cpu:8", donate_argnums=())
    assert read_and_left(made) == ([P("x")], [P("x")])
    w, x = real()
    h = np.exp(x @ w)
    same(made.jit()(w, x), (h / h.sum()).sum(0))


def test_a_shard_map_of_an_abstract_mesh_compiles_for_another_machine() -> None:
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        made = mp.plan(block(mesh), W, X, machine="h100:1x8", donate_argnums=(), pins={"0": P("x")})
    assert made.mesh_shape == SHAPE
    assert made.audit().bytes_by_kind() == INSIDE


def test_a_shard_map_of_this_process_compiles_for_another_machine(make_mesh: MakeMesh) -> None:
    step = block(make_mesh(**SHAPE))
    made = mp.plan(step, W, X, machine="h100:1x8", donate_argnums=(), pins={"0": P("x")})
    assert made.audit().bytes_by_kind() == INSIDE


def test_a_mesh_that_is_not_its_own_is_an_error_with_the_line(make_mesh: MakeMesh) -> None:
    where = r"operand 0 of the shard_map at .*test_shard_map.py:\d+ is for mesh x=4 x y=2"
    step = block(make_mesh(**SHAPE))
    for mesh, found in (({"data": 8}, "data=8"), ({"y": 2, "x": 4}, "y=2 x x=4"), ({"x": 2, "y": 4}, "x=2 x y=4")):
        with pytest.raises(mp.MeshError, match=where + f", the plan's is {found}; .*over its own mesh alone") as caught:
            mp.plan(step, W, X, machine="cpu:8", mesh=mesh)
        assert "Plan with mesh={'x': 4, 'y': 2}, or write it for" in str(caught.value)
    with pytest.raises(mp.MeshError, match=where + r", and no mesh of cpu:4 \(4 devices\) has those axes"):
        mp.plan(step, W, X, machine="cpu:4")
    other = block(make_mesh(x=2, y=4))
    with pytest.raises(mp.MeshplanError, match=r"shard_map at .*test_shard_map.py:\d+"):
        mp.plan(lambda w, x: step(w, x) + other(w, x), W, X, machine="cpu:8", donate_argnums=())
