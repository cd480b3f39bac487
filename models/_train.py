"""What the training steps share: the loss, the optimizers, the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

Optimizer = Literal["adamw", "sgd", "adafactor"]
State = dict[str, Any]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean nats per token; logits f32 [batch, seq, vocab], targets int32 [batch, seq].

    The target's logit is picked by comparing with an iota and summing: unlike a gather, that
    splits over the vocabulary.
    """
    top = lax.stop_gradient(logits.max(-1, keepdims=True))
    log_sum = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
    vocab = lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    picked = jnp.where(vocab == targets[..., None], logits, 0.0).sum(-1)
    return (log_sum - picked).mean()


def make_optimizer(
    name: Optimizer, learning_rate: float, clip: float | None, weight_decay: float = 0.1
) -> optax.GradientTransformation:
    """The named optimizer, behind a clip of the gradients' global norm where `clip` is given."""
    kinds: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adamw": lambda: optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay),
        "sgd": lambda: optax.sgd(learning_rate, momentum=0.9),
        "adafactor": lambda: optax.adafactor(learning_rate),
    }
    if name not in kinds:
        raise ValueError(f"optimizer {name!r} is unknown. Known: {', '.join(kinds)}.")
    return kinds[name]() if clip is None else optax.chain(optax.clip_by_global_norm(clip), kinds[name]())


def new_state(params: Any, optimizer: optax.GradientTransformation) -> State:
    """`params`, the optimizer's state for them, and the number of steps taken."""
    return {"params": params, "opt_state": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}


def train_step(
    loss: Callable[[Any, Any], jax.Array], optimizer: optax.GradientTransformation
) -> Callable[[State, Any], tuple[State, dict[str, jax.Array]]]:
    """`step(state, batch) -> (state, metrics)` that lowers `loss(params, batch)`."""

    def step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, {"loss": value}

    return step


def token_batch(batch: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of what `models._text.batches` yields."""
    shape = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return {"tokens": shape, "targets": shape}
