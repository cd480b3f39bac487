"""The noise predictor of a diffusion model in pure JAX, parameters in dicts: a U-net with group norm and attention.

Denoising diffusion as in Ho et al. 2020 (arXiv 2006.11239): a linear schedule, times and noise drawn inside the step
from a key that is part of the state, the mean squared error of the noise. Attention at the lowest resolution.
Parameters are f32 and are cast to the compute dtype where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from meshplan.hints import Workload, dims
from models import _digits
from models._train import Optimizer, State, make_optimizer, new_state

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shapes and switches. Level i has `width` * `scales[i]` channels, and half the pixels of the level above."""

    width: int
    scales: tuple[int, ...]
    blocks: int
    groups: int = 32
    heads: int = 1
    image: int = 32
    channels: int = 3
    batch: int = 1024
    times: int = 1000
    dtype: str = "bfloat16"
    learning_rate: float = 2e-4
    clip: float | None = 1.0


# "cifar" and "large" have the widths of the paper's models for CIFAR10 and for 256 x 256 pixels.
SIZES = {
    "tiny": Config(width=16, scales=(1, 2), blocks=1, groups=4, heads=2, image=8, channels=1, batch=32,
                   dtype="float32", learning_rate=2e-3),
    "cifar": Config(width=128, scales=(1, 2, 2, 2), blocks=2),
    "large": Config(width=128, scales=(1, 1, 2, 2, 4, 4), blocks=2, image=256, batch=64),
}  # fmt: skip


class Keys:
    """Hands out fresh keys and the arrays drawn from them."""

    def __init__(self, key: jax.Array) -> None:
        self.key = key

    def normal(self, *shape: int, scale: float = 1.0) -> jax.Array:
        """Deviation `scale` over the root of the fan-in: all dims but the last."""
        self.key, key = jax.random.split(self.key)
        return scale * math.prod(shape[:-1]) ** -0.5 * jax.random.normal(key, shape)

    def conv(self, size: int, fan_in: int, fan_out: int, scale: float = 1.0) -> Tree:
        return {"w": self.normal(size, size, fan_in, fan_out, scale=scale), "b": jnp.zeros(fan_out)}

    def dense(self, fan_in: int, fan_out: int) -> Tree:
        return {"w": self.normal(fan_in, fan_out), "b": jnp.zeros(fan_out)}

    def norm(self, width: int) -> Tree:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def block(self, fan_in: int, fan_out: int, time: int) -> Tree:
        found = {
            "norm0": self.norm(fan_in), "conv0": self.conv(3, fan_in, fan_out), "time": self.dense(time, fan_out),
            "norm1": self.norm(fan_out), "conv1": self.conv(3, fan_out, fan_out, 0.1),
        }  # fmt: skip
        return found if fan_in == fan_out else {**found, "skip": self.conv(1, fan_in, fan_out)}

    def attention(self, width: int, heads: int) -> Tree:
        return {
            "norm": self.norm(width), "qkv": self.normal(width, 3, heads, width // heads) * (3 * heads) ** 0.5,
            "out": self.normal(heads, width // heads, width, scale=0.1),
        }  # fmt: skip


def init(key: jax.Array, cfg: Config) -> Tree:
    """Fresh parameters, f32."""
    keys, time = Keys(key), 4 * cfg.width
    widths = [cfg.width * scale for scale in cfg.scales]
    down, up, kept, at = [], [], [cfg.width], cfg.width
    for level, width in enumerate(widths):
        blocks = []
        for _ in range(cfg.blocks):
            blocks.append(keys.block(at, width, time))
            at = width
            kept.append(at)
        last = level == len(widths) - 1
        down.append({"blocks": blocks} if last else {"blocks": blocks, "shrink": keys.conv(3, at, at)})
        kept += [] if last else [at]
    middle = {"block0": keys.block(at, at, time), "attn": keys.attention(at, cfg.heads),
              "block1": keys.block(at, at, time)}  # fmt: skip
    for level, width in reversed(list(enumerate(widths))):
        blocks = []
        for _ in range(cfg.blocks + 1):
            blocks.append(keys.block(at + kept.pop(), width, time))
            at = width
        up.append({"blocks": blocks, "grow": keys.conv(3, at, at)} if level else {"blocks": blocks})
    return {
        "time0": keys.dense(cfg.width, time), "time1": keys.dense(time, time),
        "first": keys.conv(3, cfg.channels, cfg.width), "down": down, "middle": middle, "up": up,
        "norm": keys.norm(at), "last": keys.conv(3, at, cfg.channels, 0.1),
    }  # fmt: skip


@dims("batch _ _ channels -> batch _ _ _")
def conv(x: jax.Array, params: Tree, stride: int = 1) -> jax.Array:
    w = params["w"].astype(x.dtype)
    side = w.shape[0] // 2
    y = lax.conv_general_dilated(
        x, w, (stride, stride), [(side, side)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y + params["b"].astype(x.dtype)


def dense(x: jax.Array, params: Tree) -> jax.Array:
    return x @ params["w"].astype(x.dtype) + params["b"].astype(x.dtype)


def group_norm(x: jax.Array, params: Tree, groups: int) -> jax.Array:
    """Over the pixels and the channels of each group; the statistics are f32."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:3], groups, -1)
    centred = wide - wide.mean((1, 2, 4), keepdims=True)
    normal = centred * lax.rsqrt(jnp.square(centred).mean((1, 2, 4), keepdims=True) + 1e-5)
    return (normal.reshape(x.shape) * params["scale"] + params["bias"]).astype(x.dtype)


def run_block(params: Tree, x: jax.Array, time: jax.Array, groups: int) -> jax.Array:
    y = conv(jax.nn.silu(group_norm(x, params["norm0"], groups)), params["conv0"])
    y = y + dense(jax.nn.silu(time), params["time"])[:, None, None]
    y = conv(jax.nn.silu(group_norm(y, params["norm1"], groups)), params["conv1"])
    return y + (conv(x, params["skip"]) if "skip" in params else x)


def attention(params: Tree, x: jax.Array, groups: int) -> jax.Array:
    """Every pixel attends to all; the scores and their softmax are f32."""
    batch, high, wide, width = x.shape
    y = group_norm(x, params["norm"], groups).reshape(batch, high * wide, width)
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dchk->bschk", y, params["qkv"].astype(x.dtype)), 2, 0)
    scores = jnp.einsum("bshk,bthk->bhst", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    mixed = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores, -1).astype(x.dtype), v)
    return x + jnp.einsum("bshk,hkd->bsd", mixed, params["out"].astype(x.dtype)).reshape(x.shape)


def embed_time(params: Tree, time: jax.Array, cfg: Config) -> jax.Array:
    """[batch, 4 width] of times int32 [batch]: sines and cosines through two dense layers."""
    half = cfg.width // 2
    angle = time[:, None] * jnp.exp(-math.log(1e4) * jnp.arange(half) / half)
    waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1).astype(cfg.dtype)
    return dense(jax.nn.silu(dense(waves, params["time0"])), params["time1"])


@dims("_, batch _ _ _, batch -> batch _ _ _")
def apply(params: Tree, images: jax.Array, time: jax.Array, cfg: Config) -> jax.Array:
    """The predicted noise, f32, of noisy images f32 [batch, height, width, channels] at times int32 [batch]."""
    embedded = embed_time(params, time, cfg)
    x = conv(images.astype(cfg.dtype), params["first"])
    kept = [x]
    for level in params["down"]:
        for block in level["blocks"]:
            x = run_block(block, x, embedded, cfg.groups)
            kept.append(x)
        if "shrink" in level:
            x = conv(x, level["shrink"], stride=2)
            kept.append(x)
    middle = params["middle"]
    x = attention(middle["attn"], run_block(middle["block0"], x, embedded, cfg.groups), cfg.groups)
    x = run_block(middle["block1"], x, embedded, cfg.groups)
    for level in params["up"]:
        for block in level["blocks"]:
            x = run_block(block, jnp.concatenate([x, kept.pop()], -1), embedded, cfg.groups)
        if "grow" in level:
            x = conv(x.repeat(2, 1).repeat(2, 2), level["grow"])
    return conv(jax.nn.silu(group_norm(x, params["norm"], cfg.groups)), params["last"]).astype(jnp.float32)


def make_step(cfg: Config, tx: optax.GradientTransformation) -> Callable[[State, Any], tuple[State, Any]]:
    """`step(state, batch) -> (state, {"loss"})`; the state holds a `key` beside the usual entries."""

    def loss(params: Tree, images: jax.Array, key: jax.Array) -> jax.Array:
        time_key, noise_key = jax.random.split(key)
        time = jax.random.randint(time_key, images.shape[:1], 0, cfg.times)
        noise = jax.random.normal(noise_key, images.shape)
        kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, cfg.times))[time][:, None, None, None]
        noisy = jnp.sqrt(kept) * images + jnp.sqrt(1 - kept) * noise
        return jnp.square(apply(params, noisy, time, cfg) - noise).mean()

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
        key, used = jax.random.split(state["key"])
        value, grads = jax.value_and_grad(loss)(state["params"], batch["images"], used)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "key": key, "opt_state": opt_state, "step": state["step"] + 1}, {"loss": value}

    return step


def workload(
    size: str = "tiny", *, batch: int | None = None, dtype: str | None = None, optimizer: Optimizer = "adamw",
    **overrides: Any,
) -> Workload:  # fmt: skip
    """A training step of the size, one of `SIZES`; the arguments, and any field of `Config`, override it.

    The step is `step(state, batch) -> (state, {"loss"})` with the state donated; the batches are
    enlarged digits (their labels are not used). Nothing is allocated.
    """
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown. Known: {', '.join(SIZES)}.")
    given = {"batch": batch, "dtype": dtype}
    cfg = replace(SIZES[size], **{k: v for k, v in given.items() if v is not None}, **overrides)
    tx = make_optimizer(optimizer, cfg.learning_rate, cfg.clip)

    def init_state(key: jax.Array) -> tuple[State]:
        params_key, step_key = jax.random.split(key)
        return ({**new_state(init(params_key, cfg), tx), "key": step_key},)

    return Workload(
        step=make_step(cfg, tx),
        args=(
            *jax.eval_shape(init_state, jax.random.key(0)),
            _digits.image_batch(cfg.batch, cfg.image, cfg.channels),
        ),
        donate_argnums=(0,),
        init=init_state,
        batches=lambda: _digits.batches(cfg.batch, cfg.image, cfg.channels),
        name=f"unet-{size}",
    )
