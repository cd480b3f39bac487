"""GPT in pure JAX: parameters in dataclasses, pre-layer norm, learned positions, GELU, causal attention.

Sizes up to the largest of GPT-3 (Brown et al. 2020, arXiv 2005.14165, table 2.1). Parameters
are f32 and are cast to the compute dtype where they are used.
"""

from __future__ import annotations

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
    """Shapes and switches. `batch` is the global batch in sequences; the MLP is four times as wide."""

    layers: int
    width: int
    heads: int
    seq: int
    batch: int
    head_dim: int = 0
    vocab: int = 50304
    dtype: str = "bfloat16"
    scan: bool = True
    remat: bool = True
    fused_qkv: bool = False
    tied: bool = True
    learning_rate: float = 3e-4
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", self.head_dim or self.width // self.heads)


# The vocabulary is 50257 rounded up to a multiple of 128, so that it can be split. "1.3b" has 16 heads of
# 128 and "gpt3-13b" a width of 5120: the printed 24 heads and 5140 do not agree with the printed sizes.
_GPT3 = partial(Config, seq=2048)
SIZES = {
    "tiny": Config(layers=2, width=64, heads=4, seq=64, batch=8, vocab=256, dtype="float32", scan=False, remat=False,
                   learning_rate=3e-3),
    "demo": Config(layers=3, width=96, heads=8, seq=64, batch=64, vocab=256, dtype="float32", scan=False, remat=False,
                   tied=False, learning_rate=4e-3),
    "small": Config(layers=8, width=2048, heads=16, seq=1024, batch=64, vocab=32768),
    "1.3b": _GPT3(layers=24, width=2048, heads=16, batch=512),
    "gpt3-125m": _GPT3(layers=12, width=768, heads=12, batch=256),
    "gpt3-350m": _GPT3(layers=24, width=1024, heads=16, batch=256),
    "gpt3-760m": _GPT3(layers=24, width=1536, heads=16, batch=256),
    "gpt3-2.7b": _GPT3(layers=32, width=2560, heads=32, batch=512),
    "gpt3-6.7b": _GPT3(layers=32, width=4096, heads=32, batch=1024),
    "gpt3-13b": _GPT3(layers=40, width=5120, heads=40, batch=1024),
    "gpt3-175b": _GPT3(layers=96, width=12288, heads=96, batch=1536),
}  # fmt: skip


@register_dataclass
@params(scale="embed", bias="embed")
@dataclass(frozen=True)
class Norm:
    scale: jax.Array
    bias: jax.Array


@register_dataclass
@params(q="embed heads head_dim", k="embed heads head_dim", v="embed heads head_dim", o="heads head_dim embed",
        q_bias="heads head_dim", k_bias="heads head_dim", v_bias="heads head_dim", o_bias="embed")  # fmt: skip
@dataclass(frozen=True)
class Attention:
    q: jax.Array
    k: jax.Array
    v: jax.Array
    o: jax.Array
    q_bias: jax.Array
    k_bias: jax.Array
    v_bias: jax.Array
    o_bias: jax.Array


@register_dataclass
@params(qkv="embed _ heads head_dim", o="heads head_dim embed", qkv_bias="_ heads head_dim", o_bias="embed")
@dataclass(frozen=True)
class FusedAttention:
    qkv: jax.Array
    o: jax.Array
    qkv_bias: jax.Array
    o_bias: jax.Array


@register_dataclass
@params(up="embed mlp", up_bias="mlp", down="mlp embed", down_bias="embed")
@dataclass(frozen=True)
class Mlp:
    up: jax.Array
    up_bias: jax.Array
    down: jax.Array
    down_bias: jax.Array


@register_dataclass
@dataclass(frozen=True)
class Block:
    attn_norm: Norm
    attn: Attention | FusedAttention
    mlp_norm: Norm
    mlp: Mlp


@register_dataclass
@params(embed="vocab embed", positions="_ embed", head="embed vocab")
@dataclass(frozen=True)
class GPT:
    """`layers`: a tuple of blocks, or one block whose arrays have a leading dim of layers (scan)."""

    embed: jax.Array
    positions: jax.Array
    layers: tuple[Block, ...] | Block
    final_norm: Norm
    head: jax.Array | None


def init_block(key: jax.Array, cfg: Config) -> Block:
    """Normal weights of deviation 0.02, those that write to the residual scaled down by the depth; zero biases."""
    d, h, k = cfg.width, cfg.heads, cfg.head_dim
    keys = iter(jax.random.split(key, 6))
    out = 0.02 / (2 * cfg.layers) ** 0.5
    normal = lambda shape, scale=0.02: scale * jax.random.normal(next(keys), shape)  # noqa: E731
    o, zeros = normal((h, k, d), out), jnp.zeros
    if cfg.fused_qkv:
        attn = FusedAttention(normal((d, 3, h, k)), o, zeros((3, h, k)), zeros(d))
    else:
        q, k_, v = (normal((d, h, k)) for _ in range(3))
        attn = Attention(q, k_, v, o, zeros((h, k)), zeros((h, k)), zeros((h, k)), zeros(d))
    mlp = Mlp(normal((d, 4 * d)), zeros(4 * d), normal((4 * d, d), out), zeros(d))
    return Block(Norm(jnp.ones(d), zeros(d)), attn, Norm(jnp.ones(d), zeros(d)), mlp)


def init(key: jax.Array, cfg: Config) -> GPT:
    """Fresh parameters, f32."""
    embed_key, position_key, head_key, layer_key = jax.random.split(key, 4)
    layer_keys = jax.random.split(layer_key, cfg.layers)
    make = partial(init_block, cfg=cfg)
    return GPT(
        embed=0.02 * jax.random.normal(embed_key, (cfg.vocab, cfg.width)),
        positions=0.02 * jax.random.normal(position_key, (cfg.seq, cfg.width)),
        layers=jax.vmap(make)(layer_keys) if cfg.scan else tuple(make(k) for k in layer_keys),
        final_norm=Norm(jnp.ones(cfg.width), jnp.zeros(cfg.width)),
        head=None if cfg.tied else 0.02 * jax.random.normal(head_key, (cfg.width, cfg.vocab)),
    )


def layer_norm(norm: Norm, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normal = centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    return (normal * norm.scale + norm.bias).astype(x.dtype)


def project_qkv(attn: Attention | FusedAttention, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    cast = lambda w: w.astype(x.dtype)  # noqa: E731
    if isinstance(attn, FusedAttention):
        qkv = jnp.einsum("bsd,dchk->cbshk", x, cast(attn.qkv)) + cast(attn.qkv_bias)[:, None, None]
        return qkv[0], qkv[1], qkv[2]
    q = jnp.einsum("bsd,dhk->bshk", x, cast(attn.q)) + cast(attn.q_bias)
    k = jnp.einsum("bsd,dhk->bshk", x, cast(attn.k)) + cast(attn.k_bias)
    v = jnp.einsum("bsd,dhk->bshk", x, cast(attn.v)) + cast(attn.v_bias)
    return q, k, v


@dims("_, batch seq embed -> batch seq embed")
def attention(attn: Attention | FusedAttention, x: jax.Array) -> jax.Array:
    """Causal self-attention; the scores and their softmax are f32."""
    q, k, v = project_qkv(attn, x)
    scores = jnp.einsum("bshk,bthk->bhst", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    at, seen = (lax.broadcasted_iota(jnp.int32, scores.shape[-2:], i) for i in (0, 1))
    weights = jax.nn.softmax(jnp.where(seen <= at, scores, -1e30), axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bhst,bthk->bshk", weights, v)
    return jnp.einsum("bshk,hkd->bsd", mixed, attn.o.astype(x.dtype)) + attn.o_bias.astype(x.dtype)


@dims("_, batch seq embed -> batch seq embed")
def feed_forward(mlp: Mlp, x: jax.Array) -> jax.Array:
    hidden = jnp.einsum("bsd,df->bsf", x, mlp.up.astype(x.dtype)) + mlp.up_bias.astype(x.dtype)
    return jnp.einsum("bsf,fd->bsd", jax.nn.gelu(hidden), mlp.down.astype(x.dtype)) + mlp.down_bias.astype(x.dtype)


@dims("_, batch seq embed -> batch seq embed")
def block(layer: Block, x: jax.Array) -> jax.Array:
    x = x + attention(layer.attn, layer_norm(layer.attn_norm, x))
    return x + feed_forward(layer.mlp, layer_norm(layer.mlp_norm, x))


@dims("_, batch seq -> batch seq vocab")
def apply(model: GPT, tokens: jax.Array, cfg: Config) -> jax.Array:
    """Logits, f32 [batch, seq, vocab], of tokens int32 [batch, seq]."""
    x = (model.embed[tokens] + model.positions[: tokens.shape[1]]).astype(cfg.dtype)
    run = jax.checkpoint(block, prevent_cse=not cfg.scan) if cfg.remat else block
    if isinstance(model.layers, Block):
        x, _ = lax.scan(lambda x, layer: (run(layer, x), None), x, model.layers)
    else:
        for layer in model.layers:
            x = run(layer, x)
    x = layer_norm(model.final_norm, x)
    if model.head is None:
        return jnp.einsum("bsd,vd->bsv", x, model.embed.astype(x.dtype), preferred_element_type=jnp.float32)
    return jnp.einsum("bsd,dv->bsv", x, model.head.astype(x.dtype), preferred_element_type=jnp.float32)


def workload(
    size: str = "tiny", *, batch: int | None = None, seq: int | None = None, scan: bool | None = None,
    remat: bool | None = None, dtype: str | None = None, optimizer: Optimizer = "adamw", **overrides: Any,
) -> Workload:  # fmt: skip
    """A training step of the size, one of `SIZES`; the arguments, and any field of `Config`, override it.

    The step is `step(state, batch) -> (state, {"loss"})` with the state donated; the loss is in
    nats per token (bytes, even where the vocabulary is larger). Nothing is allocated.
    """
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown. Known: {', '.join(SIZES)}.")
    given = {"batch": batch, "seq": seq, "scan": scan, "remat": remat, "dtype": dtype}
    cfg = replace(SIZES[size], **{k: v for k, v in given.items() if v is not None}, **overrides)
    tx = make_optimizer(optimizer, cfg.learning_rate, cfg.clip)

    def loss(model: GPT, data: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(apply(model, data["tokens"], cfg), data["targets"])

    def init_state(key: jax.Array) -> tuple[dict[str, Any]]:
        return (new_state(init(key, cfg), tx),)

    return Workload(
        step=train_step(loss, tx),
        args=(*jax.eval_shape(init_state, jax.random.key(0)), token_batch(cfg.batch, cfg.seq)),
        donate_argnums=(0,),
        init=init_state,
        batches=lambda: _text.batches(cfg.batch, cfg.seq),
        name=f"gpt-{size}",
    )
