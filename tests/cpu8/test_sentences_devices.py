"""What a user reads when a planned function meets other arrays or devices than it was planned for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import meshplan as mp


def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
    def loss(p: Any) -> jax.Array:
        return ((batch["x"] @ p["up"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arrays(rows: int = 64, dtype: Any = np.float32) -> tuple[Any, Any]:
    return {"up": np.ones((16, 32), np.float32)}, {"x": np.ones((rows, 16), dtype)}


@pytest.fixture(scope="module")
def plan() -> mp.Plan:
    return mp.plan(step, *arrays(), machine="cpu:8", mesh={"data": 8})


@pytest.fixture(scope="module")
def planned(plan: mp.Plan) -> Any:
    return plan.jit()


def sentence(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as raised:
        call()
    assert raised.type is kind
    assert isinstance(raised.value, mp.MeshplanError)
    return str(raised.value)


# 9 rows do not divide: jax must not be the one who says so
@pytest.mark.parametrize(("rows", "dtype"), [(32, "float32"), (9, "float32"), (64, "int32"), (128, "bfloat16")])
def test_arguments_of_other_shapes_than_planned_are_named(planned: Any, rows: int, dtype: str) -> None:
    said = sentence(mp.ArgumentError, lambda: planned(*arrays(rows, jnp.dtype(dtype))))
    assert said == (
        f"argument 'batch/x' has {dtype}[{rows}, 16], the plan is for float32[64, 16]. Plan again for this shape, or "
        "pass what was planned."
    )


def test_lowering_and_verifying_with_other_shapes_say_the_same(plan: mp.Plan, planned: Any) -> None:
    for call in (planned.lower, plan.verify):
        said = sentence(mp.ArgumentError, lambda call=call: call(*arrays(32)))
        assert said.startswith("argument 'batch/x' has float32[32, 16], the plan is for float32[64, 16].")


def test_the_planned_function_still_runs_after_an_error(planned: Any) -> None:
    sentence(mp.ArgumentError, lambda: planned(*arrays(32)))
    _, value = planned(*arrays())
    assert float(value) == pytest.approx(256.0)


def test_another_number_of_devices_is_counted(plan: mp.Plan) -> None:
    assert sentence(mp.MeshError, lambda: plan.mesh(jax.devices()[:4])) == (
        "the plan is for 8 devices (data=8), found 4. Pass devices=..., plan for 4 devices, or compile ahead of time "
        "with plan.audit('cpu:8')."
    )
    wide = mp.plan(step, *arrays(), machine="cpu:16", mesh={"data": 16})
    for call in (wide.mesh, wide.jit, wide.in_shardings, lambda: wide.verify(*arrays())):
        assert sentence(mp.MeshError, call).startswith("the plan is for 16 devices (data=16), found 8.")


def test_a_mesh_of_another_shape_is_refused_wherever_one_is_given(plan: mp.Plan) -> None:
    grid = np.asarray(jax.devices()).reshape(2, 4)
    other = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    calls = (plan.jit, plan.in_shardings, plan.out_shardings, plan.abstract_args,
             lambda mesh: plan.shard(*arrays(), mesh=mesh), lambda mesh: plan.verify(*arrays(), mesh=mesh))  # fmt: skip
    for call in calls:
        said = sentence(mp.MeshError, lambda call=call: call(other))
        assert said.startswith("the plan is for mesh data=8, found {'data': 2, 'model': 4}. Use plan.mesh()")


def test_a_mesh_with_explicit_axes_says_which_kind_is_needed(plan: mp.Plan) -> None:
    explicit = Mesh(np.asarray(jax.devices()), ("data",), axis_types=(AxisType.Explicit,))
    said = sentence(mp.MeshError, lambda: plan.jit(explicit))
    assert "plans need Auto axes: use plan.mesh(), or axis_types=(AxisType.Auto,) * 1." in said


def test_auditing_for_another_number_of_devices_says_both(plan: mp.Plan) -> None:
    said = sentence(mp.MeshError, lambda: plan.audit("h100:2x8"))
    assert said.startswith("the plan is for 8 devices (data=8), h100:2x8 has 16.")
    assert sentence(mp.ArgumentError, lambda: mp.audit(step, *arrays())) == (
        "'step' is not a jitted function. Wrap it: jax.jit(step, in_shardings=...)."
    )


@pytest.mark.parametrize(
    "inside",
    [
        lambda f: jax.jit(lambda p, b: f(p, b))(*arrays()),
        lambda f: jax.grad(lambda p: f(p, arrays()[1])[1])(arrays()[0]),
        lambda f: jax.vmap(lambda i: f(*arrays()))(jnp.arange(2.0)),
        lambda f: jax.eval_shape(f, *arrays()),
    ],
    ids=["jit", "grad", "vmap", "eval_shape"],
)
def test_a_decorated_function_called_inside_a_transformation_says_so(inside: Callable[[Any], Any]) -> None:
    decorated = mp.shard(step, mesh={"data": 8})
    said = sentence(mp.ArgumentError, lambda: inside(decorated))
    assert said.startswith("'step' is decorated with mp.shard and was called inside a jax transformation")
    assert said.endswith("call it from plain Python, or use the undecorated 'step.__wrapped__' inside.")
    assert decorated.__wrapped__ is step


def test_a_decorated_step_names_its_own_faults() -> None:
    pinned = mp.shard(step, pins={"params/upp": jax.P()})
    assert "pin 'params/upp' matches no argument. Nearest: params/up." in sentence(
        mp.PinError, lambda: pinned(*arrays())
    )
    with pytest.raises(mp.TraceError, match="step 'step' does not trace with arguments") as raised:
        mp.shard(step)(arrays()[0], {"x": np.ones((4, 5), np.float32)})
    assert isinstance(raised.value.__cause__, TypeError)
