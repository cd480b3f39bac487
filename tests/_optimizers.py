"""Every optimizer that optax lists, on a small tree of parameters, and a step that trains with it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

Transformation = optax.GradientTransformationExtraArgs

# settings without a default, and those that make a small tree interesting
SETTINGS: dict[str, dict[str, Any]] = {
    "adafactor": {"min_dim_size_to_factor": 4},
    "noisy_sgd": {"key": 0},
}
# transformations, wrappers of others, and what needs gradients per example or a Hessian: no optimizers by themselves
NO_OPTIMIZERS = frozenset({
    "differentially_private_aggregate", "dpsgd", "hutchinson_estimator_diag_hessian", "mechanize", "normalize",
    "reduce_on_plateau", "sam", "schedule_free", "schedule_free_eval_params", "sophia", "split_real_and_imaginary",
})  # fmt: skip


def public_optimizers() -> dict[str, Callable[[], Transformation]]:
    """By name: `optax.<name>`, all functions that optax keeps under its optimizers, and those of `optax.contrib`."""
    own = {n: f for n, f in vars(optax).items() if inspect.isfunction(f) and f.__module__.endswith("._src.alias")}
    contributed = {
        f"contrib.{n}": f for n, f in vars(optax.contrib).items()
        if inspect.isfunction(f) and not n.startswith("scale_by_") and n not in NO_OPTIMIZERS
    }
    return {name: (lambda f=f, name=name: build(f, name)) for name, f in sorted({**own, **contributed}.items())}


def build(make: Callable[..., Any], name: str) -> Transformation:
    wanted = {
        p.name for p in inspect.signature(make).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    given = {key: 1e-2 for key in wanted if key == "learning_rate"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # optimistic_adam
        return optax.with_extra_args_support(make(**{**given, **SETTINGS.get(name, {})}))


def parameters() -> dict[str, jax.Array]:
    key = jax.random.key(0)
    return {
        "up": jax.random.normal(key, (32, 128)) / 32**0.5, "down": jax.random.normal(key, (128, 16)) / 128**0.5,
        "bias": jnp.zeros((16,)),
    }  # fmt: skip


def loss(w: Any, x: jax.Array) -> jax.Array:
    return ((jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"] - 1.0) ** 2).mean()


def train_step(tx: Transformation) -> Callable[..., Any]:
    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state["w"], x)
        updates, opt = tx.update(
            grads, state["opt"], state["w"], value=value, grad=grads, value_fn=lambda w: loss(w, x)
        )
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, value

    return step
