"""flax on eight devices: nnx states, linen boxes, logical rules and constraints, specs given back in flax's form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import spmd
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.hints import annotated

MESH = {"data": 4, "model": 2}
X = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
Y = X[:, :8] ** 2
RULES = (("batch", "data"), ("embed", None), ("mlp", "model"), ("out", None))
TX = optax.adam(1e-2)

# --------------------------------------------------------------------------------------------------- nnx


def partitioned(*names: str | None) -> Callable[..., Any]:
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names, eager_sharding=False)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(32, 128, kernel_init=partitioned("embed", "mlp"), rngs=rngs)
        self.norm = nnx.BatchNorm(128, rngs=rngs)
        self.down = nnx.Linear(128, 8, kernel_init=partitioned("mlp", "out"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.norm(nnx.relu(self.up(x))))


def nnx_step() -> tuple[Callable[..., Any], Any]:
    """A step over the state of a split module and optimizer, batch statistics updated."""
    net = Net(nnx.Rngs(0))
    graph, state = nnx.split((net, nnx.Optimizer(net, TX, wrt=nnx.Param)))

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        net, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(lambda n: ((n(x) - y) ** 2).mean())(net)
        optimizer.update(net, grads)
        return nnx.state((net, optimizer)), loss

    return step, state


def test_a_step_over_an_nnx_state_is_planned_by_the_names_of_its_variables() -> None:
    step, state = nnx_step()
    made = mp.plan(step, state, X, Y, machine="cpu:8", mesh=MESH, pins=RULES)
    kernels = {path: spec for path, spec in made.specs.items() if path.endswith("up/kernel")}
    assert kernels == dict.fromkeys(
        ("state/0/up/kernel", "state/1/opt_state/0/mu/up/kernel", "state/1/opt_state/0/nu/up/kernel"), P(None, "model")
    )
    assert made.specs["state/0/down/kernel"] == P("model")
    assert made.verify(state, X, Y).ok


def test_an_nnx_state_is_placed_trained_and_merged_again() -> None:
    step, state = nnx_step()
    made = mp.plan(step, state, X, Y, machine="cpu:8", mesh=MESH, pins={"x": P("data"), r"up/kernel": P(None, "model")})
    wanted, *_ = made.in_shardings()
    assert isinstance(wanted, nnx.State)
    placed = jax.device_put(jax.tree.map(np.asarray, state), wanted)
    run, losses = made.jit(), []
    for _ in range(8):
        placed, loss = run(placed, X, Y)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    net = Net(nnx.Rngs(0))
    nnx.update(net, placed[0])
    kernel: Any = net.up.kernel.get_value()
    assert kernel.sharding.spec == P(None, "model")
    assert net.norm.mean.get_value().any(), "batch statistics moved"


def test_specs_come_back_as_metadata_of_variables(make_mesh: Callable[..., Mesh]) -> None:
    step, state = nnx_step()
    made = mp.plan(step, state, X, Y, machine="cpu:8", mesh=MESH, pins=RULES)
    written = annotated(state, made.in_specs[0])
    assert jax.tree.leaves(nnx.get_partition_spec(written)) == jax.tree.leaves(made.in_specs[0])
    mesh = make_mesh(**MESH)
    assert jax.tree.leaves(nnx.get_named_sharding(written, mesh)) == jax.tree.leaves(made.in_shardings(mesh)[0])
    assert state[0]["up"]["kernel"].get_metadata()["out_sharding"] == ("embed", "mlp"), "the user's own is untouched"
    assert written[0]["up"]["kernel"].get_value() is state[0]["up"]["kernel"].get_value()


def test_rules_of_a_variable_are_pins() -> None:
    rules = (("embed", "data"), ("mlp", "model"))
    weight = nnx.Param(jnp.ones((32, 128)), out_sharding=("embed", "mlp"), sharding_rules=rules, eager_sharding=False)
    made = mp.plan(lambda w, x: x @ w["w"][...], {"w": weight}, X, machine="cpu:8", mesh=MESH, donate_argnums=())
    assert made.specs["w/w"] == P("data", "model") == nnx.get_partition_spec(weight).get_value()


def test_a_module_made_on_a_mesh_pins_its_arrays(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh(**MESH)
    kernel = nnx.with_partitioning(nnx.initializers.ones_init(), (None, "model"), mesh=mesh)
    linear = nnx.Linear(32, 128, kernel_init=kernel, rngs=nnx.Rngs(0))
    made = mp.plan(lambda m, x: m(x), linear, X, machine="cpu:8", donate_argnums=())
    assert made.mesh_shape["model"] == 2
    assert made.specs["m/kernel"] == P(None, "model")


# ------------------------------------------------------------------------------------------------- linen


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        logical = nn.with_logical_partitioning
        x = nn.Dense(128, kernel_init=logical(init, ("embed", "mlp")))(x)
        x = spmd.with_logical_constraint(nn.relu(x), ("batch", "mlp"))
        return nn.Dense(8, kernel_init=logical(init, ("mlp", "out")))(x)


def linen_step(model: Any) -> tuple[Callable[..., Any], TrainState]:
    """A step over a TrainState whose parameters are boxed."""
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), X)["params"], tx=TX)

    def step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(lambda p: ((model.apply({"params": p}, x) - y) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), loss

    return step, state


def test_boxed_parameters_and_their_moments_follow_the_rules() -> None:
    step, state = linen_step(Mlp())
    made = mp.plan(step, state, X, Y, machine="cpu:8", mesh=MESH, pins=RULES)
    specs = spmd.logical_to_mesh(nn.get_partition_spec(state.params), RULES)
    for root in ("params", "opt_state/0/mu", "opt_state/0/nu"):
        assert made.specs[f"state/{root}/Dense_0/kernel"] == specs["Dense_0"]["kernel"] == P(None, "model")
        assert entries(made.specs[f"state/{root}/Dense_1/kernel"]) == entries(specs["Dense_1"]["kernel"])
    assert made.verify(state, X, Y).ok


def entries(spec: P) -> tuple[Any, ...]:
    """Without trailing Nones, in which flax and meshplan differ."""
    found = list(spec)
    while found and found[-1] is None:
        found.pop()
    return tuple(found)


def test_logical_constraints_inside_the_model_are_pins_under_rules_and_mesh(make_mesh: Callable[..., Mesh]) -> None:
    model = Mlp()
    step, state = linen_step(model)
    rules = [("batch", "model"), ("mlp", "model"), ("mlp", "data")]
    with jax.set_mesh(make_mesh(**MESH)), nn.logical_axis_rules(rules):
        made = mp.plan(step, state, X, Y, machine="cpu:8")
    assert made.mesh_shape == MESH
    assert made.program is not None
    inside = {str(p) for v, p in made.program.pins.items() if made.program.values[v].op >= 0}
    assert inside == {"(model, data)", "(None, model)", "(model, None)"}, "activations by the fallback, boxes"
    assert made.verify(state, X, Y).ok


def test_specs_come_back_as_boxes_of_mesh_axes(make_mesh: Callable[..., Mesh]) -> None:
    step, state = linen_step(Mlp())
    made = mp.plan(step, state, X, Y, machine="cpu:8", mesh=MESH, pins=RULES)
    written = annotated(state, made.in_specs[0])
    kernel = written.params["Dense_0"]["kernel"]
    assert type(kernel) is nn.Partitioned
    assert kernel.names == (None, "model")
    planned = made.in_specs[0].params["Dense_0"]["kernel"].value
    assert nn.get_partition_spec(written.params)["Dense_0"]["kernel"] == planned
    mesh = make_mesh(**MESH)
    params = jax.device_put(nn.unbox(state.params), nn.get_sharding(written.params, mesh))
    assert params["Dense_0"]["kernel"].sharding == NamedSharding(mesh, P(None, "model"))


@pytest.mark.parametrize("boxes", ["logical", "partitioned"])
def test_boxes_that_say_what_their_names_stand_for_are_pins(boxes: str, make_mesh: Callable[..., Mesh]) -> None:
    ones = jnp.ones((32, 128))
    if boxes == "logical":
        rules = (("a", "data"), ("b", "data"), ("b", "model"))
        w: Any = nn.LogicallyPartitioned(ones, names=("a", "b"), rules=rules)
    else:
        w = nn.Partitioned(ones, names=("data", "model"), mesh=make_mesh(**MESH))

    def step(w: Any, x: jax.Array) -> jax.Array:
        return x @ w["w"].unbox(apply_constraint=False)

    made = mp.plan(step, {"w": w}, X, machine="cpu:8", mesh=MESH, donate_argnums=())
    assert made.specs["w/w"] == P("data", "model")


# ----------------------------------------------------------------------------- the table that comes back


def test_the_rules_of_a_plan_work_unchanged_in_flax(make_mesh: Callable[..., Mesh]) -> None:
    """Trained once as planned, once by flax itself under the plan's rules: boxes, constraints, shardings."""
    model = Mlp()
    step, state = linen_step(model)
    pins = {"x": P("data"), "Dense_0/kernel": P(None, "model"), "Dense_1/kernel": P("model")}
    made = mp.plan(step, state, X, Y, machine="cpu:8", mesh=MESH, pins=pins)
    rules = made.logical_axis_rules()
    assert dict(rules)["mlp"] == "model"
    wanted = made.jit()(*made.shard(jax.tree.map(jnp.copy, state), X, Y))
    mesh, values = make_mesh(**MESH), nn.unbox(state)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        specs = spmd.logical_to_mesh(nn.get_partition_spec(state))
        shardings = spmd.logical_to_mesh_sharding(nn.get_partition_spec(state), mesh)
        unboxed = jax.device_put(values, shardings)
        text = jax.jit(step).lower(unboxed, X, Y).as_text()
        found = jax.jit(step)(unboxed, X, Y)
    assert specs.params["Dense_0"]["kernel"] == P(None, "model")
    assert text.count("@Sharding") + text.count("sdy.sharding_constraint") >= 1, "flax placed the constraint"
    assert float(found[1]) == pytest.approx(float(wanted[1]), rel=1e-5)
    kernel = found[0].params["Dense_0"]["kernel"]
    assert entries(kernel.sharding.spec) == (None, "model")
    np.testing.assert_allclose(np.asarray(kernel), np.asarray(wanted[0].params["Dense_0"]["kernel"].value), rtol=1e-4)


def test_the_rules_of_a_plan_work_in_nnx_where_every_name_is_read_by_itself() -> None:
    step, state = nnx_step()
    made = mp.plan(step, state, X, Y, machine="cpu:8", mesh=MESH, pins={"x": P("data"), r"up/kernel": P(None, "model")})
    with nnx.logical_axis_rules(made.logical_axis_rules()):
        specs = nnx.get_partition_spec(state)
    for spec in jax.tree.leaves(specs):
        axes = [a for entry in spec for a in ((entry,) if isinstance(entry, str) else entry or ())]
        assert len(axes) == len(set(axes))
    assert specs[0]["up"]["kernel"].get_value() == P(None, "model")
