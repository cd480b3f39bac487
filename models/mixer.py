"""MLP-Mixer in equinox, an image classifier: multilayer perceptrons across patches and across channels.

Tolstikhin et al. 2021, arXiv 2105.01601, table 1. A model is a function of one image; the batch is a `vmap`.
The arrays of the model are the step's argument, what is left of it (shapes, activations) is closed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshplan.hints import Workload, dims, params
from models._train import Optimizer, make_optimizer, new_state, train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shapes and switches. `image` pixels a side, a multiple of 8; `tokens` and `channels`: widths of the two MLPs."""

    layers: int
    width: int
    tokens: int
    channels: int
    image: int
    patch: int
    batch: int
    colours: int = 3
    classes: int = 1000
    dtype: str = "bfloat16"
    remat: bool = True
    learning_rate: float = 1e-3
    clip: float | None = 1.0

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2


SIZES = {
    "tiny": Config(layers=2, width=32, tokens=32, channels=64, image=8, patch=2, batch=64, colours=1, classes=10,
                   dtype="float32", remat=False, learning_rate=5e-3),
    "b16": Config(layers=12, width=768, tokens=384, channels=3072, image=224, patch=16, batch=1024),
    "l16": Config(layers=24, width=1024, tokens=512, channels=4096, image=224, patch=16, batch=1024),
}  # fmt: skip


class Mlp(eqx.Module):
    """Two layers over the last dim of a [rows, width] array."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, width: int, hidden: int, key: jax.Array) -> None:
        up_key, down_key = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(width, hidden, key=up_key), eqx.nn.Linear(hidden, width, key=down_key)
        self.activation = jax.nn.gelu

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.vmap(self.down)(self.activation(jax.vmap(self.up)(x)))


@params(**{
    "tokens.up.weight": "tokens patch", "tokens.up.bias": "tokens",
    "tokens.down.weight": "patch tokens", "tokens.down.bias": "patch",
    "channels.up.weight": "mlp embed", "channels.up.bias": "mlp",
    "channels.down.weight": "embed mlp", "channels.down.bias": "embed",
})  # fmt: skip
class Block(eqx.Module):
    """`tokens` mixes the patches of an image, `channels` the channels of a patch."""

    token_norm: eqx.nn.LayerNorm
    tokens: Mlp
    channel_norm: eqx.nn.LayerNorm
    channels: Mlp

    def __init__(self, cfg: Config, key: jax.Array) -> None:
        token_key, channel_key = jax.random.split(key)
        self.token_norm, self.channel_norm = eqx.nn.LayerNorm(cfg.width), eqx.nn.LayerNorm(cfg.width)
        self.tokens = Mlp(cfg.patches, cfg.tokens, token_key)
        self.channels = Mlp(cfg.width, cfg.channels, channel_key)

    @dims("patch embed -> patch embed")
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.tokens(jax.vmap(self.token_norm)(x).T).T
        return x + self.channels(jax.vmap(self.channel_norm)(x))


@params(**{"patches.weight": "embed _ _ _", "patches.bias": "embed _ _", "head.weight": "class embed",
           "head.bias": "class"})  # fmt: skip
class Mixer(eqx.Module):
    patches: eqx.nn.Conv2d
    blocks: tuple[Block, ...]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    remat: bool = eqx.field(static=True)

    def __init__(self, cfg: Config, key: jax.Array) -> None:
        patch_key, head_key, *block_keys = jax.random.split(key, cfg.layers + 2)
        self.patches = eqx.nn.Conv2d(cfg.colours, cfg.width, cfg.patch, cfg.patch, key=patch_key)
        self.blocks = tuple(Block(cfg, k) for k in block_keys)
        self.norm = eqx.nn.LayerNorm(cfg.width)
        self.head = eqx.nn.Linear(cfg.width, cfg.classes, key=head_key)
        self.remat = cfg.remat

    def __call__(self, image: jax.Array) -> jax.Array:
        """Logits [classes] of an image [colours, side, side]."""
        x = self.patches(image)
        x = x.reshape(x.shape[0], -1).T
        for block in self.blocks:
            x = eqx.filter_checkpoint(block)(x) if self.remat else block(x)
        return self.head(jax.vmap(self.norm)(x).mean(0))


def loss(arrays: Mixer, batch: dict[str, jax.Array], static: Mixer, cfg: Config) -> jax.Array:
    """Mean cross entropy in nats. `arrays` and `static`: the two parts of the model, as `eqx.partition` gives them."""
    model = eqx.combine(jax.tree.map(lambda w: w.astype(cfg.dtype), arrays), static)
    logits = jax.vmap(model)(batch["images"].astype(cfg.dtype)).astype(jnp.float32)
    classes = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return -jnp.where(classes == batch["labels"][:, None], jax.nn.log_softmax(logits), 0.0).sum(-1).mean()


def batches(cfg: Config, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Random draws, without end, of scikit-learn's 1797 digits; 8 by 8 pixels are drawn as squares in larger images."""
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images, labels = np.asarray(pixels / 16, np.float32).reshape(-1, 1, 8, 8), np.asarray(digits, np.int32)
    square = np.ones((1, cfg.colours, cfg.image // 8, cfg.image // 8), np.float32)
    rng = np.random.default_rng(seed)
    while True:
        chosen = rng.integers(0, len(labels), cfg.batch)
        yield {"images": np.kron(images[chosen], square), "labels": labels[chosen]}


def workload(
    size: str = "tiny", *, batch: int | None = None, remat: bool | None = None, dtype: str | None = None,
    optimizer: Optimizer = "adamw", **overrides: Any,
) -> Workload:  # fmt: skip
    """A training step of the size, one of `SIZES`; the arguments, and any field of `Config`, override it.

    The step is `step(state, batch) -> (state, {"loss"})` with the state donated.
    """
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown. Known: {', '.join(SIZES)}.")
    given = {"batch": batch, "remat": remat, "dtype": dtype}
    cfg = replace(SIZES[size], **{k: v for k, v in given.items() if v is not None}, **overrides)
    tx = make_optimizer(optimizer, cfg.learning_rate, cfg.clip)
    _, static = eqx.partition(eqx.filter_eval_shape(Mixer, cfg, jax.random.key(0)), is_weight)

    def init_state(key: jax.Array) -> tuple[dict[str, Any]]:
        return (new_state(eqx.filter(Mixer(cfg, key), is_weight), tx),)

    data = {
        "images": jax.ShapeDtypeStruct((cfg.batch, cfg.colours, cfg.image, cfg.image), jnp.float32),
        "labels": jax.ShapeDtypeStruct((cfg.batch,), jnp.int32),
    }
    return Workload(
        step=train_step(partial(loss, static=static, cfg=cfg), tx),
        args=(*jax.eval_shape(init_state, jax.random.key(0)), data),
        donate_argnums=(0,),
        init=init_state,
        batches=lambda: batches(cfg),
        name=f"mixer-{size}",
    )


def is_weight(leaf: Any) -> bool:
    """Whether a leaf of the model is an array, or stands for one."""
    return eqx.is_inexact_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
