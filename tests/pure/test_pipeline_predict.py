"""Weight prediction from Adam's moments: XPipe's formula, exact and literal, in any optax state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshplan.core import ArgumentError
from meshplan.pipeline import predict, prediction_error

RATE = 1e-2


def params() -> Any:
    return {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": [jnp.array([0.25])]}


def gradients() -> Any:
    return {"w": jnp.array([[0.3, -0.1], [2.0, 0.7]]), "b": [jnp.array([-4.0])]}


def steps(optimizer: optax.GradientTransformation, state: Any, weights: Any, count: int) -> tuple[Any, Any]:
    for _ in range(count):
        updates, state = optimizer.update(gradients(), state, weights)
        weights = optax.apply_updates(weights, updates)
    return state, weights


def close(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("lag", [1, 2, 5])
def test_exact_prediction_is_what_adam_does_while_the_gradient_stays(count: int, lag: int) -> None:
    optimizer = optax.adam(RATE)
    state, weights = steps(optimizer, optimizer.init(params()), params(), count)
    predicted = predict(state, weights, lag, learning_rate=RATE)
    close(predicted, steps(optimizer, state, weights, lag)[1])
    assert not np.allclose(predicted["w"], weights["w"], atol=0.5 * RATE)


def test_literal_prediction_steps_0_316_of_adams_in_the_long_run() -> None:
    optimizer = optax.adam(RATE)
    state, weights = steps(optimizer, optimizer.init(params()), params(), 1)
    # the moments of an endless run of one gradient
    state = (state[0]._replace(count=jnp.array(100_000), mu=gradients(), nu=jax.tree.map(jnp.square, gradients())),)
    moved = {}
    for how in ("exact", "literal"):
        found = predict(state, weights, 1, learning_rate=RATE, bias_correction=how)
        moved[how] = np.asarray(found["w"] - weights["w"])
    np.testing.assert_allclose(moved["literal"] / moved["exact"], 0.1**0.5, rtol=2e-4)
    assert round(float((moved["literal"] / moved["exact"]).mean()), 3) == 0.316
    np.testing.assert_allclose(moved["exact"], -RATE * np.sign(gradients()["w"]), rtol=1e-3)


def test_both_forms_agree_after_the_first_update() -> None:
    optimizer = optax.adam(RATE)
    state, weights = steps(optimizer, optimizer.init(params()), params(), 1)
    close(
        predict(state, weights, 3, learning_rate=RATE),
        predict(state, weights, 3, learning_rate=RATE, bias_correction="literal"),
    )


def test_no_lag_gives_the_params_bit_by_bit_known_or_traced() -> None:
    optimizer = optax.adam(RATE)
    state, weights = steps(optimizer, optimizer.init(params()), params(), 3)
    assert predict(state, weights, 0, learning_rate=RATE) is weights
    traced = jax.jit(lambda lag: predict(state, weights, lag, learning_rate=RATE))
    equal(traced(jnp.array(0)), weights)
    close(traced(jnp.array(2)), predict(state, weights, 2, learning_rate=RATE))


def test_before_the_first_update_the_params_come_back() -> None:
    equal(predict(optax.adam(RATE).init(params()), params(), 4, learning_rate=RATE), params())


def test_a_learning_rate_schedule_is_asked_at_the_count() -> None:
    rates = optax.linear_schedule(0.1, 0.0, 10)
    optimizer = optax.adam(rates)
    state, weights = steps(optimizer, optimizer.init(params()), params(), 4)
    close(predict(state, weights, 1, learning_rate=rates), steps(optimizer, state, weights, 1)[1])


def optimizers() -> dict[str, optax.GradientTransformation]:
    return {
        "adamw": optax.adamw(RATE, weight_decay=0.0),
        "chain": optax.chain(optax.clip_by_global_norm(1e6), optax.adam(RATE)),
        "nested": optax.chain(optax.chain(optax.identity(), optax.chain(optax.scale_by_adam(), optax.scale(-RATE)))),
        "injected": optax.inject_hyperparams(optax.adam)(learning_rate=RATE),
        "steps": optax.apply_if_finite(optax.adam(RATE), 3),
        "partition": optax.partition({"a": optax.adam(RATE), "b": optax.adam(RATE)}, {"w": "a", "b": ["b"]}),
        "bfloat16": optax.adam(RATE, mu_dtype=jnp.bfloat16),
    }


@pytest.mark.parametrize("name", optimizers())
def test_moments_are_found_in_every_optimizer_that_holds_some(name: str) -> None:
    optimizer = optimizers()[name]
    state, weights = steps(optimizer, optimizer.init(params()), params(), 2)
    predicted = predict(state, weights, 2, learning_rate=RATE)
    close(predicted, steps(optimizer, state, weights, 2)[1], 2e-4 if name == "bfloat16" else 1e-5)
    assert jax.tree.map(lambda x: x.dtype, predicted) == jax.tree.map(lambda x: x.dtype, weights)


def test_an_optimizer_without_moments_is_refused() -> None:
    with pytest.raises(ArgumentError) as error:
        predict(optax.sgd(RATE, momentum=0.9).init(params()), params(), 1, learning_rate=RATE)
    assert str(error.value) == (
        "predict(): the optimizer state holds no ScaleByAdamState, whose moments say where weights are going; found "
        "TraceState, EmptyState. Use optax.adam, adamw or a chain with optax.scale_by_adam."
    )


def test_a_leaf_without_moments_is_refused() -> None:
    mixed = optax.partition({"a": optax.adam(RATE), "b": optax.sgd(RATE)}, {"w": "a", "b": ["b"]})
    with pytest.raises(ArgumentError) as error:
        predict(mixed.init(params()), params(), 1, learning_rate=RATE)
    assert str(error.value) == (
        "predict(): params['b'][0] has no Adam moments in the optimizer state; give the params that this state was "
        "made for, or predict only those that Adam updates."
    )


def test_other_forms_and_negative_lags_are_refused() -> None:
    state = optax.adam(RATE).init(params())
    with pytest.raises(ArgumentError, match=r"bias_correction='exakt' is none\. Nearest: exact"):
        predict(state, params(), 1, learning_rate=RATE, bias_correction="exakt")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="lag=-1 updates cannot be; give 0 or more"):
        predict(state, params(), -1, learning_rate=RATE)


def test_the_error_of_a_prediction_is_a_fraction_of_the_way() -> None:
    old, new = {"w": jnp.array([0.0, 0.0])}, {"w": jnp.array([3.0, 4.0])}
    assert float(prediction_error(old, new, old)) == 1.0
    assert float(prediction_error(old, new, new)) == 0.0
    assert float(prediction_error(old, new, {"w": jnp.array([3.0, 2.0])})) == pytest.approx(0.4)
