"""A two-layer classifier of scikit-learn's handwritten digits: the smallest real workload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import register_dataclass

from meshplan.hints import Workload, dims, params
from models._train import new_state, train_step

PIXELS, DIGITS = 64, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    width: int
    batch: int
    learning_rate: float = 1e-3


SIZES = {"tiny": Config(width=128, batch=64), "small": Config(width=4096, batch=1024)}


@register_dataclass
@params(up="pixels mlp", up_bias="mlp", down="mlp digits", down_bias="digits")
@dataclass(frozen=True)
class Mlp:
    up: jax.Array
    up_bias: jax.Array
    down: jax.Array
    down_bias: jax.Array


def init(key: jax.Array, cfg: Config) -> Mlp:
    up_key, down_key = jax.random.split(key)
    return Mlp(
        up=jax.random.normal(up_key, (PIXELS, cfg.width)) * (2 / PIXELS) ** 0.5,
        up_bias=jnp.zeros(cfg.width),
        down=jax.random.normal(down_key, (cfg.width, DIGITS)) * cfg.width**-0.5,
        down_bias=jnp.zeros(DIGITS),
    )


@dims("_, batch pixels -> batch digits")
def apply(model: Mlp, images: jax.Array) -> jax.Array:
    """Logits [batch, 10] of images [batch, 64], whose pixels lie in 0 to 1."""
    return jax.nn.relu(images @ model.up + model.up_bias) @ model.down + model.down_bias


def loss(model: Mlp, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross entropy in nats; labels are int32 [batch]."""
    log_probs = jax.nn.log_softmax(apply(model, batch["images"]))
    return -(log_probs * jax.nn.one_hot(batch["labels"], DIGITS)).sum(-1).mean()


def batches(size: int, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Random draws, without end, from the 1797 images."""
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images, labels = np.asarray(pixels / 16, np.float32), np.asarray(digits, np.int32)
    rng = np.random.default_rng(seed)
    while True:
        chosen = rng.integers(0, len(labels), size)
        yield {"images": images[chosen], "labels": labels[chosen]}


def workload(size: str = "tiny", *, batch: int | None = None) -> Workload:
    """A training step with Adam: `step(state, batch) -> (state, {"loss"})`, the state donated."""
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown. Known: {', '.join(SIZES)}.")
    cfg = SIZES[size] if batch is None else replace(SIZES[size], batch=batch)
    tx = optax.adam(cfg.learning_rate)

    def init_state(key: jax.Array) -> tuple[dict]:
        return (new_state(init(key, cfg), tx),)

    data = {
        "images": jax.ShapeDtypeStruct((cfg.batch, PIXELS), jnp.float32),
        "labels": jax.ShapeDtypeStruct((cfg.batch,), jnp.int32),
    }
    return Workload(
        step=train_step(loss, tx),
        args=(*jax.eval_shape(init_state, jax.random.key(0)), data),
        donate_argnums=(0,),
        init=init_state,
        batches=lambda: batches(cfg.batch),
        name=f"mlp-{size}",
    )
