"""A vision transformer of flax nnx's own layers: patches by convolution, class token, pre-norm encoder.

Shapes as published (Dosovitskiy et al. 2020, arXiv 2010.11929, table 1). The module is split once into its static
part and its parameters; the step merges them, as nnx's functional interface has it. Parameters are f32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshplan.hints import Workload, dims
from models import _digits
from models._train import Optimizer, cross_entropy, make_optimizer, new_state, train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shapes and switches. `batch` is the global batch in images of `image` x `image` pixels."""

    layers: int
    width: int
    heads: int
    mlp: int
    patch: int = 16
    image: int = 224
    channels: int = 3
    classes: int = 1000
    batch: int = 1024
    dtype: str = "bfloat16"
    remat: bool = False
    learning_rate: float = 1e-3
    clip: float | None = 1.0

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2


SIZES = {
    "tiny": Config(layers=2, width=64, heads=4, mlp=128, patch=2, image=8, channels=1, classes=10, batch=32,
                   dtype="float32", learning_rate=2e-3),
    "base": Config(layers=12, width=768, heads=12, mlp=3072),
    "large": Config(layers=24, width=1024, heads=16, mlp=4096, remat=True),
}  # fmt: skip


class Block(nnx.Module):
    def __init__(self, cfg: Config, rngs: nnx.Rngs) -> None:
        self.attn_norm = nnx.LayerNorm(cfg.width, dtype=cfg.dtype, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(cfg.heads, cfg.width, dtype=cfg.dtype, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(cfg.width, dtype=cfg.dtype, rngs=rngs)
        self.up = nnx.Linear(cfg.width, cfg.mlp, dtype=cfg.dtype, rngs=rngs)
        self.down = nnx.Linear(cfg.mlp, cfg.width, dtype=cfg.dtype, rngs=rngs)

    @dims("batch seq embed -> batch seq embed")
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.attn_norm(x))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Vit(nnx.Module):
    def __init__(self, cfg: Config, rngs: nnx.Rngs) -> None:
        size = (cfg.patch, cfg.patch)
        self.patch = nnx.Conv(
            cfg.channels, cfg.width, size, strides=size, padding="VALID", dtype=cfg.dtype, rngs=rngs
        )
        self.token = nnx.Param(jnp.zeros((1, 1, cfg.width)))
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (cfg.patches + 1, cfg.width)))
        self.layers = nnx.List([Block(cfg, rngs) for _ in range(cfg.layers)])
        self.norm = nnx.LayerNorm(cfg.width, dtype=cfg.dtype, rngs=rngs)
        self.head = nnx.Linear(cfg.width, cfg.classes, rngs=rngs)
        self.remat = cfg.remat

    @dims("batch _ _ _ -> batch classes")
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits, f32 [batch, classes], of images f32 [batch, height, width, channels]."""
        x = self.patch(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...].astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([token, x], 1) + self.positions[...].astype(x.dtype)
        run = nnx.remat(Block.__call__) if self.remat else Block.__call__
        for layer in self.layers:
            x = run(layer, x)
        return self.head(self.norm(x[:, 0]).astype(jnp.float32))


def workload(
    size: str = "tiny", *, batch: int | None = None, remat: bool | None = None, dtype: str | None = None,
    optimizer: Optimizer = "adamw", **overrides: Any,
) -> Workload:  # fmt: skip
    """A training step of the size, one of `SIZES`; the arguments, and any field of `Config`, override it.

    The step is `step(state, batch) -> (state, {"loss"})` with the state donated; the batches are
    enlarged digits, of ten classes even where the model knows more. Nothing is allocated.
    """
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown. Known: {', '.join(SIZES)}.")
    given = {"batch": batch, "remat": remat, "dtype": dtype}
    cfg = replace(SIZES[size], **{k: v for k, v in given.items() if v is not None}, **overrides)
    tx = make_optimizer(optimizer, cfg.learning_rate, cfg.clip)
    static = nnx.graphdef(nnx.eval_shape(lambda: Vit(cfg, nnx.Rngs(0))))

    def loss(params: nnx.State, data: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(nnx.merge(static, params)(data["images"]), data["labels"])

    def init_state(key: jax.Array) -> tuple[dict[str, Any]]:
        return (new_state(nnx.state(Vit(cfg, nnx.Rngs(params=key)), nnx.Param), tx),)

    return Workload(
        step=train_step(loss, tx),
        args=(
            *jax.eval_shape(init_state, jax.random.key(0)),
            _digits.image_batch(cfg.batch, cfg.image, cfg.channels),
        ),
        donate_argnums=(0,),
        init=init_state,
        batches=lambda: _digits.batches(cfg.batch, cfg.image, cfg.channels),
        name=f"vit-{size}",
    )
