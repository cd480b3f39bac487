"""Shardings that the step itself states, and those of its arguments, are pins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.cost import Space
from meshplan.strategy import tie
from tests._programs import f32, graph_of

MakeMesh = Callable[..., Mesh]
W = {"up": f32(32, 128), "down": f32(128, 16)}
X = f32(64, 32)


def real(*shapes: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: (rng.standard_normal(s.shape) / s.shape[0] ** 0.5).astype(s.dtype), shapes)


def training(mesh: Mesh, *specs: P) -> Callable[..., Any]:
    """A step that states where its hidden layer lies, once per spec."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ w["up"])
        for spec in specs:
            h = lax.with_sharding_constraint(h, NamedSharding(mesh, spec)) * 2
        return (h @ w["down"]).var()

    def step(w: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value

    return step


def pinned(made: mp.Plan) -> dict[int, P]:
    """The spec that the plan leaves every value in that the step pins."""
    program = made.program
    assert program is not None
    by_op = {op.index: op for op in made.data.ops}
    made_by = {v: program.values[v].op for v in program.pins if program.values[v].op >= 0}
    return {v: by_op[op].results[0][-1].partition_spec() for v, op in made_by.items()}


def stated(made: mp.Plan) -> list[P]:
    return list(pinned(made).values())


def test_a_constraint_holds_in_the_plan_forward_and_backward(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(data=4, model=2)
    made = mp.plan(training(mesh, P("data", "model")), W, X, machine="cpu:8", mesh={"data": 4, "model": 2})
    assert stated(made) == [P("data", "model")] * 2, "the value and its cotangent"
    assert made.verify(*real(W, X)).ok
    assert made.notes == ()


def test_constraints_that_follow_each_other_each_hold(make_mesh: MakeMesh) -> None:
    """As around the norm of a sequence-parallel block: elementwise operations between two of them."""
    mesh = make_mesh(data=4, model=2)
    specs = P("data", "model"), P("data"), P(None, ("data", "model"))
    made = mp.plan(training(mesh, *specs), W, X, machine="cpu:8", mesh={"data": 4, "model": 2})
    assert set(stated(made)) == set(specs)
    audit = made.audit()
    assert audit.ok, str(audit)
    assert made.verify(*real(W, X)).ok


def test_a_mesh_search_keeps_the_names_and_sizes_of_the_users_mesh(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(dp=2, tp=4)
    made = mp.plan(training(mesh, P("dp", "tp")), W, X, machine="cpu:8")
    assert made.mesh_shape == {"dp": 2, "tp": 4}
    made = mp.plan(training(mesh, P("dp")), W, X, machine="cpu:8")
    assert made.mesh_shape["dp"] == 2
    assert all(dict(c.mesh.axes)["dp"] == 2 for c in made.data.candidates)
    assert {c.mesh.names for c in made.data.candidates} >= {("dp", "data"), ("data", "dp")}


def test_a_larger_mesh_of_the_user_is_taken_as_it_is(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(a=2, b=2, c=2, d=1)
    made = mp.plan(
        training(mesh, P(("a", "b"), ("c", "d"))), W, X, machine="cpu:8", options=mp.Options(max_axes=2)
    )
    assert made.mesh_shape == {"a": 2, "b": 2, "c": 2, "d": 1}
    assert set(stated(made)) == {P(("a", "b"), "c")}


def test_what_the_mesh_cannot_hold_is_an_error_with_the_line(make_mesh: MakeMesh) -> None:
    step = training(make_mesh(dp=4, tp=2), P("dp", "tp"))
    line = r"with_sharding_constraint at .*test_adapters_pins.py:\d+"
    with pytest.raises(mp.SpecError, match=line + r": axis 'dp' is not in the mesh \(data=4 x model=2\)") as caught:
        mp.plan(step, W, X, machine="cpu:8", mesh={"data": 4, "model": 2})
    assert str(caught.value).endswith("plan with Options(follow_shardings=False).")
    with pytest.raises(mp.MeshError, match=line + r" is for mesh dp=4 x tp=2, and no mesh of cpu:4 \(4 devices\)"):
        mp.plan(step, W, X, machine="cpu:4")
    both = training(make_mesh(dp=2, tp=4), P("dp"))

    def two(w: Any, x: Any) -> Any:
        return step(w, x)[1] + both(w, x)[1]

    with pytest.raises(mp.PinError, match=r"has axis 'dp' of size .* of size .*Write them for one mesh"):
        mp.plan(two, W, X, machine="cpu:8", donate_argnums=())
    odd = training(make_mesh(data=8), P(None, "data"))
    with pytest.raises(mp.SpecError, match=line + ": dim 1 has 12 entries, 12 is not divisible by 8"):
        mp.plan(odd, {"up": f32(32, 12), "down": f32(12, 16)}, X, machine="cpu:8", mesh={"data": 8})


def test_the_planner_may_be_told_not_to_follow(make_mesh: MakeMesh) -> None:
    options = mp.Options(follow_shardings=False)
    step = training(make_mesh(dp=4, tp=2), P("dp", "tp"))
    made = mp.plan(step, W, X, machine="cpu:8", mesh={"z": 8}, options=options)
    assert made.notes == (
        "2 sharding(s) written in the step are not followed, as Options(follow_shardings=False) asks: the plan's specs "
        "take their place",
    )
    assert made.verify(*real(W, X)).ok


def test_unconstrained_dims_are_free(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(data=4, model=2)

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(P.UNCONSTRAINED, "data"))) ** 2

    pins = {"x": P("model"), "0": P("model", "data")}
    made = mp.plan(step, X, f32(32, 64), machine="cpu:8", mesh={"data": 4, "model": 2}, donate_argnums=(), pins=pins)
    (spec,) = stated(made)
    assert spec == P("model", "data")

    def mapped(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: lax.with_sharding_constraint(row * 2, NamedSharding(mesh, P("model"))))(x)

    (spec,) = stated(mp.plan(mapped, X, machine="cpu:8", mesh={"data": 4, "model": 2}, pins={"x": P("data")}))
    assert spec in (P("data", "model"), P(None, "model"))


def test_constraints_in_loops_hold_for_every_layer(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(data=4, model=2)

    def scanned(ws: jax.Array, x: jax.Array) -> jax.Array:
        def layer(c: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return lax.with_sharding_constraint(jnp.tanh(c @ w), NamedSharding(mesh, P("model", "data"))), None

        return lax.scan(jax.checkpoint(layer), x, ws)[0].sum()

    grad = jax.value_and_grad(scanned)
    args = f32(3, 32, 32), X
    made = mp.plan(grad, *args, machine="cpu:8", mesh={"data": 4, "model": 2}, donate_argnums=())
    assert set(stated(made)) == {P("model", "data")}
    assert made.verify(*real(*args)).ok


def test_layers_that_differ_in_a_constraint_are_not_tied(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(data=4, model=2)
    specs = [P("data"), P("data"), P("data"), P(None, "data"), P("data"), P("data")]

    def step(ws: Any, x: jax.Array) -> jax.Array:
        for w, spec in zip(ws, specs, strict=True):
            x = lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(mesh, spec))
        return x.sum()

    made = mp.plan(step, [f32(32, 32)] * 6, X, machine="cpu:8", mesh={"data": 4, "model": 2}, donate_argnums=())
    assert stated(made) == specs


def test_what_the_step_states_is_in_the_plan_file(make_mesh: MakeMesh, tmp_path: Path) -> None:
    mesh = make_mesh(data=4, model=2)

    def step(w: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        rows = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return training(mesh, P("data", "model"), P(P.UNCONSTRAINED, "data"))(w, rows(x))

    made = mp.plan(step, W, X, machine="cpu:8", mesh={"data": 4, "model": 2})
    stated = dict(made.data.stated)
    (constraint,) = [w for w in stated if w.startswith("with_sharding_constraint at ")]
    assert stated[constraint].startswith("(data, model); (any, data)")
    operand, result = (f"{side} 0 of the shard_map at " for side in ("operand", "result"))
    assert [spec for where, spec in stated.items() if where.startswith((operand, result))] == ["(data, None)"] * 2
    made.save(tmp_path / "plan.json")
    alone = mp.load(tmp_path / "plan.json")
    assert alone.data == made.data
    assert constraint in str(alone).replace("\n", " ")
    other = mp.plan(training(mesh, P("data")), W, X, machine="cpu:8", mesh={"data": 4, "model": 2})
    assert [c for c in made.diff(other).setting if c[0] == f"stated {constraint}"]
    again = mp.load(tmp_path / "plan.json", step, W, X).pin({"up": P()})
    assert again.data.stated == made.data.stated, "a further pin is solved under them"
    old = json.loads((tmp_path / "plan.json").read_text())
    del old["stated"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert mp.load(tmp_path / "old.json").data.stated == ()


def test_a_gradient_pinned_on_its_way_to_the_update_is_put_away(make_mesh: MakeMesh) -> None:
    """A constraint on the way changes nothing: what only the update waits for is no sum that the step waits for."""
    mesh = make_mesh(data=8)
    away = []
    for pinned_there in (False, True):

        def step(w: Any, x: jax.Array, pinned_there: bool = pinned_there) -> Any:
            g = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
            return w - 0.1 * (lax.with_sharding_constraint(g, NamedSharding(mesh, P("data"))) if pinned_there else g)

        graph = graph_of(step, f32(64, 64), f32(256, 64), donate=(0,))
        urgent = Space.of(graph, tie(graph, {}, 2)).urgent
        assert all(op in urgent for n in graph.nodes if n.kind == "anchor" and n.group for op in n.group.ops)
        gradient = [op for op in graph.program.ops if op.primitive == "dot_general"][-1]
        put_away = {op.primitive for op in graph.program.ops if op.index > gradient.index and op.index not in urgent}
        away.append("region.pin" in put_away)
        assert {"mul", "sub"} <= put_away
    assert away == [False, True]


# ---------------------------------------------------------------------------------------------- arguments


def plain(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def test_shardings_of_arguments_are_pins(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(data=4, model=2)
    abstract = jax.ShapeDtypeStruct((32, 128), jnp.float32, sharding=NamedSharding(mesh, P(None, "model")))
    array = jax.device_put(np.ones((32, 128), np.float32), NamedSharding(mesh, P("data", "model")))
    for w, spec in ((abstract, P(None, "model")), (array, P("data", "model"))):
        made = mp.plan(plain, w, X, machine="cpu:8", donate_argnums=())
        assert made.mesh_shape == {"data": 4, "model": 2}
        assert made.specs["w"] == spec
        assert made.data.arguments[0].pinned
    free = mp.plan(plain, array, X, machine="cpu:8", options=mp.Options(follow_shardings=False), donate_argnums=())
    assert not free.data.arguments[0].pinned
    alone = mp.plan(plain, jnp.ones((32, 128)), X, machine="cpu:8", mesh={"data": 8}, donate_argnums=())
    assert not alone.data.arguments[0].pinned, "an array on one device says nothing"


def test_a_decorated_step_takes_the_shardings_of_its_first_arguments_as_pins(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(data=4, model=2)
    run = mp.shard(plain, donate_argnums=())
    w, x = real(f32(32, 128), X)
    split = jax.device_put(w, NamedSharding(mesh, P(None, "model")))
    made = run.plan(split, x)
    assert made.mesh_shape == {"data": 4, "model": 2}
    assert made.specs["w"] == P(None, "model")
    assert made.data.arguments[0].pinned
    out = run(split, x)
    np.testing.assert_allclose(out, np.tanh(x @ w), rtol=1e-4, atol=1e-5)
    assert run.plan(w, x) is made, "later arguments of these shapes are moved there"
    np.testing.assert_allclose(run(jax.device_put(w, NamedSharding(mesh, P("data"))), x), out, rtol=1e-6)
    abstract = jax.ShapeDtypeStruct((32, 128), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    assert mp.shard(plain, donate_argnums=()).plan(abstract, X).specs["w"] == P("data")
    assert not mp.shard(plain, donate_argnums=()).plan(jnp.asarray(w), x).data.arguments[0].pinned


def test_a_pin_of_the_call_is_heard_before_an_arguments_sharding(make_mesh: MakeMesh) -> None:
    w = jax.ShapeDtypeStruct((32, 128), jnp.float32, sharding=NamedSharding(make_mesh(data=8), P("data")))
    made = mp.plan(plain, w, X, machine="cpu:8", pins={"w": P(None, "data")}, donate_argnums=())
    assert made.specs["w"] == P(None, "data")


def test_arguments_of_a_plan_pin_the_next(make_mesh: MakeMesh) -> None:
    made = mp.plan(plain, f32(32, 128), X, machine="cpu:8", mesh={"data": 2, "model": 4}, pins={"w": P(None, "model")})
    again = mp.plan(lambda w, x: plain(w, x).sum(), *made.abstract_args(), machine="cpu:8")
    assert again.mesh_shape == made.mesh_shape
    assert again.specs == made.specs


# --------------------------------------------------------------------------------- explicit axes of jax's types


def test_a_step_in_explicit_mode_is_planned_and_runs_on_auto_axes() -> None:
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.dot(x, w, out_sharding=P("data", "model"))
        h = jax.sharding.reshard(jnp.tanh(h), P(None, "model"))
        h, _ = lax.scan(lambda c, _: (jnp.sin(c) + jnp.zeros_like(c), None), h, None, length=2)
        h = h.reshape(64, 64, 2).sum(-1) + h.at[jnp.arange(64)].get(out_sharding=P("data"))[:, :64]
        return h.sum() + jax.random.uniform(jax.random.key(0), (8, 8), out_sharding=P("data")).sum()

    with jax.set_mesh(mesh):
        w = jax.ShapeDtypeStruct((32, 128), jnp.float32, sharding=NamedSharding(mesh, P(None, "model")))
        x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
        made = mp.plan(jax.value_and_grad(step), w, x, machine="cpu:8", donate_argnums=())
    assert made.mesh_shape == {"data": 4, "model": 2}
    assert made.specs == {"w": P(None, "model"), "x": P("data")}
    found = stated(made)
    assert found[:2] == [P("data", "model"), P(None, "model")], "out_sharding, then reshard"
    values = real(w, x)
    assert made.verify(*values).ok

    def unsharded(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.sin(jnp.sin(jnp.tanh(x @ w)))
        h = h.reshape(64, 64, 2).sum(-1) + h[:, :64]
        return h.sum() + jax.random.uniform(jax.random.key(0), (8, 8)).sum()

    wanted = jax.value_and_grad(unsharded)(*values)
    for a, b in zip(jax.tree.leaves(made.jit()(*values)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
    assert made.audit().flops > 0
