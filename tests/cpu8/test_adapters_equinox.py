"""equinox modules, with leaves that are no arrays, on eight devices; and named axes of haliax where it is installed."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.hints import arrays, axis_mapping, named_leaves

MESH = {"data": 4, "model": 2}
X = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
Y = X[:, :16] ** 2
TX = optax.adam(1e-2)


class Net(eqx.Module):
    """Arrays, functions (the MLP's activation), a rate, a switch, a name."""

    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    name: str
    shift: jax.Array | None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.dropout(x)
        return self.mlp(x) if self.name == "net" else x


def make_net() -> Net:
    return Net(eqx.nn.MLP(32, 16, 64, 2, key=jax.random.key(0)), eqx.nn.Dropout(0.5, inference=True), "net", None)


def step(net: Net, opt: Any, x: jax.Array, y: jax.Array) -> tuple[Net, Any, jax.Array]:
    loss, grads = eqx.filter_value_and_grad(lambda n: ((jax.vmap(n)(x) - y) ** 2).mean())(net)
    updates, opt = TX.update(grads, opt, eqx.filter(net, eqx.is_array))
    return eqx.apply_updates(net, updates), opt, loss


@pytest.fixture(scope="module")
def made() -> mp.Plan:
    net = make_net()
    opt = TX.init(eqx.filter(net, eqx.is_array))
    pins = {"x": P("data"), "layers/0/weight": P("model"), "layers/1/weight": P(None, "model")}
    return mp.plan(step, net, opt, X, Y, machine="cpu:8", mesh=MESH, pins=pins, donate_argnums=(0, 1))


def test_what_is_no_array_stays_as_it_is(made: mp.Plan) -> None:
    net = make_net()
    kept = arrays(net)
    assert jax.tree.structure(kept) == jax.tree.structure(eqx.filter(net, eqx.is_array))
    assert jax.tree.structure(made.in_specs[0]) == jax.tree.structure(kept)
    assert {path for path in made.specs if path.startswith("net")} == {
        f"net/mlp/layers/{i}/{leaf}" for i in range(3) for leaf in ("weight", "bias")
    }
    assert made.specs["net/mlp/layers/1/weight"] == made.specs["opt/0/mu/mlp/layers/1/weight"] == P(None, "model")


def test_a_filtered_module_is_placed_trained_and_combined_again(made: mp.Plan) -> None:
    net = make_net()
    opt = TX.init(eqx.filter(net, eqx.is_array))
    params = eqx.filter_shard(jax.tree.map(np.asarray, arrays(net)), made.in_shardings()[0])
    assert params.mlp.layers[0].weight.sharding.spec == P("model")
    opt = jax.device_put(jax.tree.map(np.asarray, opt), made.in_shardings()[1])
    run, losses = made.jit(), []
    for _ in range(10):
        params, opt, loss = run(params, opt, X, Y)
        losses.append(float(loss))
    trained = eqx.combine(params, net)
    assert losses[-1] < losses[0]
    assert float(((jax.vmap(trained)(X) - Y) ** 2).mean()) < losses[-1]
    alone: Any = eqx.filter_jit(step)(net, TX.init(eqx.filter(net, eqx.is_array)), jnp.asarray(X), jnp.asarray(Y))
    assert losses[0] == pytest.approx(float(alone[2]), rel=1e-5)


def test_verify_takes_the_arrays(made: mp.Plan) -> None:
    net = make_net()
    assert made.verify(arrays(net), TX.init(eqx.filter(net, eqx.is_array)), X, Y).ok


def test_numbers_of_python_are_settings_in_a_module_and_arrays_elsewhere() -> None:
    tree = {"net": make_net(), "count": 3, "scale": np.float32(2), "f": jnp.tanh}
    kept = arrays(tree)
    assert (kept["count"], kept["scale"], kept["f"]) == (3, 2, None)
    assert kept["net"].dropout.p is None
    assert kept["net"].dropout.inference is None


# ------------------------------------------------------------------------------------------------- haliax


def test_named_axes_of_haliax_are_names_of_dims() -> None:
    hax = pytest.importorskip("haliax")
    batch, embed, mlp = hax.Axis("batch", 64), hax.Axis("embed", 32), hax.Axis("mlp", 128)
    shape = lambda *axes: jax.eval_shape(lambda: hax.zeros(axes))  # noqa: E731
    args = {"up": shape(embed, mlp)}, shape(batch, embed)
    assert named_leaves(args) == (("embed", "mlp"), ("batch", "embed"))

    def scaled(w: Any, x: Any) -> Any:  # no product: hax.dot needs a name that jax 0.12 no longer has
        return w["up"].array * 2, hax.tanh(x)

    made = mp.plan(scaled, *args, machine="cpu:8", mesh=MESH, pins=[("batch", "data"), ("mlp", "model")],
                   donate_argnums=())  # fmt: skip
    assert made.specs == {"w/up": P(None, "model"), "x": P("data")}
    mapping = axis_mapping(made.logical_axis_rules())
    assert mapping == {"batch": "data", "mlp": "model"}
    assert hax.partitioning.pspec_for_axis((batch, embed), mapping) == P("data", None)
    values = {"up": hax.ones((embed, mlp))}, hax.ones((batch, embed))
    out = made.jit()(*jax.device_put(values, made.in_shardings()))
    assert out[1].axes == (batch, embed)
    assert out[1].array.sharding.spec == made.out_specs[1].array


def test_a_decorated_step_takes_and_returns_whole_modules() -> None:
    net, traced = make_net(), []

    @mp.shard(mesh=MESH, pins={"x": P("data")}, donate_argnums=())
    def trained(net: Net, opt: Any, x: Any, y: Any) -> tuple[Net, Any, jax.Array]:
        traced.append(net.dropout.p)
        return step(net, opt, x, y)

    opt = TX.init(eqx.filter(net, eqx.is_array))
    new, opt1, loss = trained(net, opt, X, Y)
    assert jax.tree.structure(new) == jax.tree.structure(net)
    assert new.mlp.activation is net.mlp.activation
    assert (new.name, new.dropout.p, new.shift) == ("net", 0.5, None)
    wanted = eqx.filter_jit(step)(net, opt, jnp.asarray(X), jnp.asarray(Y))
    assert float(loss) == pytest.approx(float(wanted[2]), rel=1e-5)
    newer, _, second = trained(new, opt1, X, Y)
    assert traced == [0.5], "planned and traced once"
    assert float(second) < float(loss)
    x = jnp.asarray(X)
    np.testing.assert_allclose(jax.vmap(new)(x), jax.vmap(wanted[0])(x), rtol=1e-4, atol=1e-4)
    trained(eqx.tree_at(lambda n: n.dropout.p, newer, 0.25), opt1, X, Y)
    assert traced == [0.5, 0.25], "what is no array is part of the signature"
