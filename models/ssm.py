"""A state-space language model: Mamba in pure JAX, its recurrence an associative scan over the sequence.

Shapes as published for Mamba (Gu and Dao 2023, arXiv 2312.00752). Every channel of a block keeps `state`
numbers, which decay and are written to by amounts that the token chooses. Parameters are f32 and are cast to
the compute dtype where they are used; the recurrence is f32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_dataclass

from meshplan.hints import Workload, dims, params
from models import _text
from models._train import Optimizer, cross_entropy, make_optimizer, new_state, token_batch, train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shapes and switches. A block is twice as wide inside; `rank` of the step sizes' projection: width / 16."""

    layers: int
    width: int
    seq: int
    batch: int
    state: int = 16
    window: int = 4
    vocab: int = 50280
    dtype: str = "bfloat16"
    scan: bool = True
    remat: bool = True
    learning_rate: float = 6e-4
    clip: float | None = 1.0

    @property
    def inner(self) -> int:
        return 2 * self.width

    @property
    def rank(self) -> int:
        return -(-self.width // 16)


SIZES = {
    "tiny": Config(layers=2, width=32, state=4, seq=32, batch=16, vocab=256, dtype="float32", scan=False,
                   remat=False, learning_rate=1e-2),
    "130m": Config(layers=24, width=768, seq=1024, batch=32),
    "370m": Config(layers=48, width=1024, seq=1024, batch=32),
    "1.4b": Config(layers=48, width=2048, seq=1024, batch=32),
}  # fmt: skip


@register_dataclass
@params(norm="embed", into="embed _ inner", taps="_ _ inner", taps_bias="inner", choose="inner _", step="_ inner",
        step_bias="inner", decay="inner state", skip="inner", out="inner embed")  # fmt: skip
@dataclass(frozen=True)
class Block:
    """`into` makes the channels and their gate; `choose` makes low-rank step sizes, what is written, what is read."""

    norm: jax.Array
    into: jax.Array
    taps: jax.Array
    taps_bias: jax.Array
    choose: jax.Array
    step: jax.Array
    step_bias: jax.Array
    decay: jax.Array
    skip: jax.Array
    out: jax.Array


@register_dataclass
@params(embed="vocab embed", final_norm="embed")
@dataclass(frozen=True)
class Mamba:
    """`layers`: a tuple of blocks, or one block whose arrays have a leading dim of layers (scan). The head is tied."""

    embed: jax.Array
    layers: tuple[Block, ...] | Block
    final_norm: jax.Array


def init_block(key: jax.Array, cfg: Config) -> Block:
    """As published: decays -1, -2, .. per channel, step sizes 0.001 to 0.1, spread evenly in their logarithm."""
    d, n, r = cfg.width, cfg.inner, cfg.rank
    keys = iter(jax.random.split(key, 6))
    uniform = lambda shape, fan: jax.random.uniform(next(keys), shape, minval=-1, maxval=1) * fan**-0.5  # noqa: E731
    size = jnp.exp(jax.random.uniform(next(keys), (n,), minval=math.log(1e-3), maxval=math.log(1e-1)))
    return Block(
        norm=jnp.ones(d),
        into=uniform((d, 2, n), d),
        taps=uniform((cfg.window, 1, n), cfg.window),
        taps_bias=jnp.zeros(n),
        choose=uniform((n, r + 2 * cfg.state), n),
        step=uniform((r, n), r),
        step_bias=size + jnp.log(-jnp.expm1(-size)),  # softplus of it is the size
        decay=jnp.broadcast_to(jnp.log(jnp.arange(1, cfg.state + 1, dtype=jnp.float32)), (n, cfg.state)),
        skip=jnp.ones(n),
        out=uniform((n, d), n) / cfg.layers**0.5,
    )


def init(key: jax.Array, cfg: Config) -> Mamba:
    """Fresh parameters, f32."""
    embed_key, layer_key = jax.random.split(key)
    layer_keys = jax.random.split(layer_key, cfg.layers)
    make = partial(init_block, cfg=cfg)
    return Mamba(
        embed=0.02 * jax.random.normal(embed_key, (cfg.vocab, cfg.width)),
        layers=jax.vmap(make)(layer_keys) if cfg.scan else tuple(make(k) for k in layer_keys),
        final_norm=jnp.ones(cfg.width),
    )


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


@dims("batch seq inner, _, inner -> batch seq inner")
def convolve(x: jax.Array, taps: jax.Array, bias: jax.Array) -> jax.Array:
    """Every channel mixes each position with those just before it; `taps` [window, 1, inner]."""
    mixed = lax.conv_general_dilated(
        x, taps.astype(x.dtype), (1,), [(taps.shape[0] - 1, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x.shape[-1],
    )  # fmt: skip
    return mixed + bias.astype(x.dtype)


@dims("batch seq inner state, batch seq inner state -> batch seq inner state")
def recurrence(keep: jax.Array, write: jax.Array) -> jax.Array:
    """h[t] = keep[t] h[t - 1] + write[t] along dim 1, from h = 0."""

    def join(first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return first[0] * then[0], first[1] * then[0] + then[1]

    return lax.associative_scan(join, (keep, write), axis=1)[1]


@dims("_, batch seq inner -> batch seq inner")
def selective(layer: Block, x: jax.Array) -> jax.Array:
    """The selective state space, f32: the token chooses the step size, what is written and what is read."""
    state = layer.decay.shape[-1]
    chosen = jnp.einsum("bsn,nc->bsc", x, layer.choose.astype(x.dtype), preferred_element_type=jnp.float32)
    low, write, read = jnp.split(chosen, [chosen.shape[-1] - 2 * state, chosen.shape[-1] - state], axis=-1)
    step = jax.nn.softplus(jnp.einsum("bsr,rn->bsn", low, layer.step) + layer.step_bias)
    wide = x.astype(jnp.float32)
    keep = jnp.exp(-step[..., None] * jnp.exp(layer.decay))
    h = recurrence(keep, (step * wide)[..., None] * write[:, :, None, :])
    return (jnp.einsum("bsnc,bsc->bsn", h, read) + layer.skip * wide).astype(x.dtype)


@dims("_, batch seq embed -> batch seq embed")
def block(layer: Block, x: jax.Array) -> jax.Array:
    both = jnp.einsum("bsd,dcn->cbsn", rms_norm(layer.norm, x), layer.into.astype(x.dtype))
    y = selective(layer, jax.nn.silu(convolve(both[0], layer.taps, layer.taps_bias)))
    return x + jnp.einsum("bsn,nd->bsd", y * jax.nn.silu(both[1]), layer.out.astype(x.dtype))


@dims("_, batch seq -> batch seq vocab")
def apply(model: Mamba, tokens: jax.Array, cfg: Config) -> jax.Array:
    """Logits, f32 [batch, seq, vocab], of tokens int32 [batch, seq]."""
    x = model.embed[tokens].astype(cfg.dtype)
    run = jax.checkpoint(block, prevent_cse=not cfg.scan) if cfg.remat else block
    if isinstance(model.layers, Block):
        x, _ = lax.scan(lambda x, layer: (run(layer, x), None), x, model.layers)
    else:
        for layer in model.layers:
            x = run(layer, x)
    x = rms_norm(model.final_norm, x)
    return jnp.einsum("bsd,vd->bsv", x, model.embed.astype(x.dtype), preferred_element_type=jnp.float32)


def loss(model: Mamba, batch: dict[str, jax.Array], cfg: Config) -> jax.Array:
    """Mean nats per token."""
    return cross_entropy(apply(model, batch["tokens"], cfg), batch["targets"])


def workload(
    size: str = "tiny", *, batch: int | None = None, seq: int | None = None, scan: bool | None = None,
    remat: bool | None = None, dtype: str | None = None, optimizer: Optimizer = "adamw", **overrides: Any,
) -> Workload:  # fmt: skip
    """A training step of the size, one of `SIZES`; the arguments, and any field of `Config`, override it.

    The step is `step(state, batch) -> (state, {"loss"})` with the state donated; the loss is in nats per byte.
    """
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown. Known: {', '.join(SIZES)}.")
    given = {"batch": batch, "seq": seq, "scan": scan, "remat": remat, "dtype": dtype}
    cfg = replace(SIZES[size], **{k: v for k, v in given.items() if v is not None}, **overrides)
    tx = make_optimizer(optimizer, cfg.learning_rate, cfg.clip)

    def init_state(key: jax.Array) -> tuple[dict[str, Any]]:
        return (new_state(init(key, cfg), tx),)

    return Workload(
        step=train_step(partial(loss, cfg=cfg), tx),
        args=(*jax.eval_shape(init_state, jax.random.key(0)), token_batch(cfg.batch, cfg.seq)),
        donate_argnums=(0,),
        init=init_state,
        batches=lambda: _text.batches(cfg.batch, cfg.seq),
        name=f"ssm-{size}",
    )
