"""ResNet in pure JAX, its parameters and running statistics in dicts: strided residual blocks, batch norm.

Shapes as published (He et al. 2015, arXiv 1512.03385, table 1), the stride in a bottleneck's 3 x 3 convolution.
Batch norm runs in training mode: statistics of the whole global batch, and a moving average of them as state.
Parameters and statistics are f32; images are [batch, height, width, channels].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from meshplan.hints import Workload, dims
from models import _digits
from models._train import Optimizer, State, cross_entropy, make_optimizer, new_state

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shapes and switches. `blocks` per stage; stage i is `width` * 2**i wide; `batch` is in images."""

    blocks: tuple[int, ...]
    bottleneck: bool
    width: int = 64
    stem: int = 7
    stem_stride: int = 2
    image: int = 224
    channels: int = 3
    classes: int = 1000
    batch: int = 1024
    dtype: str = "bfloat16"
    learning_rate: float = 0.1
    momentum: float = 0.9
    clip: float | None = None


SIZES = {
    "tiny": Config(blocks=(1, 1), bottleneck=False, width=16, stem=3, stem_stride=1, image=16, channels=1, classes=10,
                   batch=64, dtype="float32", learning_rate=0.15),
    "resnet18": Config(blocks=(2, 2, 2, 2), bottleneck=False),
    "resnet50": Config(blocks=(3, 4, 6, 3), bottleneck=True),
    "resnet101": Config(blocks=(3, 4, 23, 3), bottleneck=True),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """One block: channels in and out, width of the convolutions between, stride."""

    fan_in: int
    width: int
    fan_out: int
    stride: int


def block_shapes(cfg: Config) -> list[Shape]:
    found, fan_in = [], cfg.width
    for stage, count in enumerate(cfg.blocks):
        width = cfg.width * 2**stage
        fan_out = 4 * width if cfg.bottleneck else width
        for i in range(count):
            found.append(Shape(fan_in, width, fan_out, 2 if stage and not i else 1))
            fan_in = fan_out
    return found


def _conv(key: jax.Array, size: int, fan_in: int, fan_out: int) -> jax.Array:
    return (2 / (size * size * fan_out)) ** 0.5 * jax.random.normal(key, (size, size, fan_in, fan_out))


def _norm(width: int, scale: float = 1.0) -> Tree:
    return {"scale": jnp.full(width, scale), "bias": jnp.zeros(width)}


def _stats(width: int) -> Tree:
    return {"mean": jnp.zeros(width), "var": jnp.ones(width)}


def init_block(key: jax.Array, shape: Shape, bottleneck: bool) -> Tree:
    """Convolutions with their norms; the last norm starts at a small scale, so that a block starts near identity."""
    keys = jax.random.split(key, 4)
    a, w, b = shape.fan_in, shape.width, shape.fan_out
    kinds = [(1, a, w), (3, w, w), (1, w, b)] if bottleneck else [(3, a, w), (3, w, b)]
    block: Tree = {}
    for i, (size, fan_in, fan_out) in enumerate(kinds):
        block[f"conv{i}"] = _conv(keys[i], size, fan_in, fan_out)
        block[f"norm{i}"] = _norm(fan_out, 0.2 if i == len(kinds) - 1 else 1.0)
    if shape.stride > 1 or a != b:
        block |= {"project": _conv(keys[3], 1, a, b), "project_norm": _norm(b)}
    return block


def init(key: jax.Array, cfg: Config) -> tuple[Tree, Tree]:
    """Fresh (parameters, running statistics), f32."""
    shapes = block_shapes(cfg)
    stem_key, head_key, *keys = jax.random.split(key, 2 + len(shapes))
    last = shapes[-1].fan_out
    params = {
        "stem": _conv(stem_key, cfg.stem, cfg.channels, cfg.width),
        "stem_norm": _norm(cfg.width),
        "blocks": [init_block(k, shape, cfg.bottleneck) for k, shape in zip(keys, shapes, strict=True)],
        "head": last**-0.5 * jax.random.normal(head_key, (last, cfg.classes)),
        "head_bias": jnp.zeros(cfg.classes),
    }
    names = lambda tree: {k: _stats(v["scale"].size) for k, v in tree.items() if "norm" in k}  # noqa: E731
    return params, {**names(params), "blocks": [names(block) for block in params["blocks"]]}


@dims("batch _ _ channels, _ _ channels channels_out -> batch _ _ channels_out")
def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    """Padded so that height and width shrink by the stride alone."""
    side = (w.shape[0] - 1) // 2
    return lax.conv_general_dilated(
        x, w.astype(x.dtype), (stride, stride), [(side, side)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_norm(params: Tree, stats: Tree, x: jax.Array, momentum: float) -> tuple[jax.Array, Tree]:
    """The normalised batch, and the moving averages with this batch's mean and variance in them."""
    wide = x.astype(jnp.float32)
    mean = wide.mean((0, 1, 2))
    var = jnp.square(wide - mean).mean((0, 1, 2))
    normal = (wide - mean) * lax.rsqrt(var + 1e-5)
    seen = {"mean": mean, "var": var}
    moved = {k: momentum * stats[k] + (1 - momentum) * lax.stop_gradient(seen[k]) for k in seen}
    return (normal * params["scale"] + params["bias"]).astype(x.dtype), moved


def run_block(params: Tree, stats: Tree, x: jax.Array, stride: int, momentum: float) -> tuple[jax.Array, Tree]:
    """The stride is in the first 3 x 3 convolution, and in the projection of the shortcut."""
    moved: Tree = {}
    count = sum(name.startswith("conv") for name in params)
    strided = next(i for i in range(count) if params[f"conv{i}"].shape[0] == 3)
    y = x
    for i in range(count):
        y = conv(y, params[f"conv{i}"], stride if i == strided else 1)
        y, moved[f"norm{i}"] = batch_norm(params[f"norm{i}"], stats[f"norm{i}"], y, momentum)
        y = jax.nn.relu(y) if i < count - 1 else y
    if "project" in params:
        x = conv(x, params["project"], stride)
        x, moved["project_norm"] = batch_norm(params["project_norm"], stats["project_norm"], x, momentum)
    return jax.nn.relu(x + y), moved


def apply(params: Tree, stats: Tree, images: jax.Array, cfg: Config) -> tuple[jax.Array, Tree]:
    """Logits, f32 [batch, classes], of images f32 [batch, height, width, channels]; the statistics moved on."""
    x = conv(images.astype(cfg.dtype), params["stem"], cfg.stem_stride)
    x, stem_norm = batch_norm(params["stem_norm"], stats["stem_norm"], x, cfg.momentum)
    x = jax.nn.relu(x)
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)])
    blocks = []
    for block, kept, shape in zip(params["blocks"], stats["blocks"], block_shapes(cfg), strict=True):
        x, moved = run_block(block, kept, x, shape.stride, cfg.momentum)
        blocks.append(moved)
    logits = x.astype(jnp.float32).mean((1, 2)) @ params["head"] + params["head_bias"]
    return logits, {"stem_norm": stem_norm, "blocks": blocks}


def make_step(cfg: Config, tx: optax.GradientTransformation) -> Callable[[State, Any], tuple[State, Any]]:
    """`step(state, batch) -> (state, {"loss"})`; the state holds `stats` beside the usual entries."""

    def loss(params: Tree, stats: Tree, batch: dict[str, jax.Array]) -> tuple[jax.Array, Tree]:
        logits, moved = apply(params, stats, batch["images"], cfg)
        return cross_entropy(logits, batch["labels"]), moved

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], state["stats"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "stats": stats, "opt_state": opt_state, "step": state["step"] + 1}, {"loss": value}

    return step


def workload(
    size: str = "tiny", *, batch: int | None = None, dtype: str | None = None, optimizer: Optimizer = "sgd",
    **overrides: Any,
) -> Workload:  # fmt: skip
    """A training step of the size, one of `SIZES`; the arguments, and any field of `Config`, override it.

    The step is `step(state, batch) -> (state, {"loss"})` with the state donated; the batches are
    enlarged digits, of ten classes even where the model knows more. Nothing is allocated.
    """
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown. Known: {', '.join(SIZES)}.")
    given = {"batch": batch, "dtype": dtype}
    cfg = replace(SIZES[size], **{k: v for k, v in given.items() if v is not None}, **overrides)
    tx = make_optimizer(optimizer, cfg.learning_rate, cfg.clip)

    def init_state(key: jax.Array) -> tuple[State]:
        params, stats = init(key, cfg)
        return ({**new_state(params, tx), "stats": stats},)

    return Workload(
        step=make_step(cfg, tx),
        args=(
            *jax.eval_shape(init_state, jax.random.key(0)),
            _digits.image_batch(cfg.batch, cfg.image, cfg.channels),
        ),
        donate_argnums=(0,),
        init=init_state,
        batches=lambda: _digits.batches(cfg.batch, cfg.image, cfg.channels),
        name=f"resnet-{size}",
    )
