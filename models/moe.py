"""A decoder with a mixture of experts in every block, in pure JAX: two experts a token, a loss that balances them.

Attention, norms and experts as in Mixtral (Jiang et al. 2024, arXiv 2401.04088). Two ways to bring tokens to experts:
"grouped" (GShard, Lepikhin et al. 2020, arXiv 2006.16668): every sequence is a group in which an expert takes a
fixed number of tokens, moved by products with one-hot arrays, tokens beyond it are dropped; "ragged": all tokens are
sorted by expert and `lax.ragged_dot` multiplies runs of unequal length, none is dropped. Parameters are f32 and are
cast to the compute dtype where they are used; routing is f32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_dataclass

from meshplan.hints import Workload, dims, params
from models import _text
from models._train import Optimizer, cross_entropy, make_optimizer, new_state, token_batch, train_step
from models.llama import grouped_attention, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shapes and switches. `batch` is the global batch in sequences; `capacity` the room of an expert by its share."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    seq: int
    batch: int
    experts: int = 8
    chosen: int = 2
    capacity: float = 1.25
    dispatch: Literal["grouped", "ragged"] = "grouped"
    balance: float = 0.01
    vocab: int = 32000
    dtype: str = "bfloat16"
    scan: bool = False
    remat: bool = True
    learning_rate: float = 3e-4
    clip: float | None = 1.0

    @property
    def room(self) -> int:
        """Tokens of one sequence that an expert takes."""
        return min(self.seq, math.ceil(self.capacity * self.chosen * self.seq / self.experts))


SIZES = {
    "tiny": Config(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64, seq=32, batch=16, vocab=256,
                   dtype="float32", remat=False, learning_rate=1e-2),
    "base": Config(layers=8, width=1024, heads=16, kv_heads=8, head_dim=64, mlp=3584, seq=1024, batch=64),
    "mixtral-8x7b": Config(layers=32, width=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, seq=4096, batch=256,
                           scan=True),
}  # fmt: skip


@register_dataclass
@params(q="embed heads head_dim", k="embed kv_heads head_dim", v="embed kv_heads head_dim", o="heads head_dim embed")
@dataclass(frozen=True)
class Attention:
    q: jax.Array
    k: jax.Array
    v: jax.Array
    o: jax.Array


@register_dataclass
@params(router="embed experts", gate="experts embed mlp", up="experts embed mlp", down="experts mlp embed")
@dataclass(frozen=True)
class Experts:
    router: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array


@register_dataclass
@params(attn_norm="embed", expert_norm="embed")
@dataclass(frozen=True)
class Block:
    attn_norm: jax.Array
    attn: Attention
    expert_norm: jax.Array
    experts: Experts


@register_dataclass
@params(embed="vocab embed", final_norm="embed", head="embed vocab")
@dataclass(frozen=True)
class Moe:
    """`layers`: a tuple of blocks, or one block whose arrays have a leading dim of layers (scan)."""

    embed: jax.Array
    layers: tuple[Block, ...] | Block
    final_norm: jax.Array
    head: jax.Array


def init_block(key: jax.Array, cfg: Config) -> Block:
    """Normal weights scaled by the root of the fan-in, those that write to the residual also by the depth's."""
    d, h, kv, k, e, f = cfg.width, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.experts, cfg.mlp
    keys = iter(jax.random.split(key, 8))
    normal = lambda shape, fan_in: fan_in**-0.5 * jax.random.normal(next(keys), shape)  # noqa: E731
    deep = 2 * cfg.layers
    attn = Attention(
        normal((d, h, k), d), normal((d, kv, k), d), normal((d, kv, k), d), normal((h, k, d), h * k * deep)
    )
    experts = Experts(normal((d, e), d), normal((e, d, f), d), normal((e, d, f), d), normal((e, f, d), f * deep))
    return Block(jnp.ones(d), attn, jnp.ones(d), experts)


def init(key: jax.Array, cfg: Config) -> Moe:
    """Fresh parameters, f32."""
    embed_key, head_key, layer_key = jax.random.split(key, 3)
    layer_keys = jax.random.split(layer_key, cfg.layers)
    make = partial(init_block, cfg=cfg)
    return Moe(
        embed=0.02 * jax.random.normal(embed_key, (cfg.vocab, cfg.width)),
        layers=jax.vmap(make)(layer_keys) if cfg.scan else tuple(make(k) for k in layer_keys),
        final_norm=jnp.ones(cfg.width),
        head=0.02 * jax.random.normal(head_key, (cfg.width, cfg.vocab)),
    )


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


@dims("_, batch seq embed -> batch seq embed")
def attention(attn: Attention, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w.astype(x.dtype)) for w in (attn.q, attn.k, attn.v))
    mixed = grouped_attention(rotate(q, 1e4), rotate(k, 1e4), v)
    return jnp.einsum("bshk,hkd->bsd", mixed, attn.o.astype(x.dtype))


def route(router: jax.Array, x: jax.Array, cfg: Config) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(weights f32, experts int32) of the chosen, both [batch, seq, chosen], and the loss that balances the experts.

    The weights of a token sum to one. The loss (Fedus et al. 2021, arXiv 2101.03961, equation 4) is 1 where every
    expert is chosen first equally often.
    """
    probs = jax.nn.softmax(jnp.einsum("bsd,de->bse", x.astype(jnp.float32), router), -1)
    weights, chosen = lax.top_k(probs, cfg.chosen)
    first = jax.nn.one_hot(chosen[..., 0], cfg.experts)
    balance = cfg.experts * (first.mean((0, 1)) * probs.mean((0, 1))).sum()
    return weights / weights.sum(-1, keepdims=True), chosen, balance


def places(chosen: jax.Array, cfg: Config) -> jax.Array:
    """One-hot f32 [batch, seq, chosen, experts, room]: where each choice of a token sits; nowhere where none is left.

    All first choices of a sequence go before its second choices, earlier tokens before later ones.
    """
    batch, seq, count = chosen.shape
    hot = jax.nn.one_hot(chosen.swapaxes(1, 2).reshape(batch, count * seq), cfg.experts, dtype=jnp.int32)
    place = (jnp.cumsum(hot, 1) * hot).sum(-1) - 1
    place = place.reshape(batch, count, seq).swapaxes(1, 2)
    return jax.nn.one_hot(chosen, cfg.experts)[..., None] * jax.nn.one_hot(place, cfg.room)[..., None, :]


@dims("_, batch seq embed, batch seq _, batch seq _ -> batch seq embed")
def grouped(experts: Experts, x: jax.Array, weights: jax.Array, chosen: jax.Array, cfg: Config) -> jax.Array:
    """Tokens to experts and back by products with one-hot arrays [batch, seq, experts, room]."""
    place = places(chosen, cfg)
    combine = (place * weights[..., None, None]).sum(2).astype(x.dtype)
    inside = jnp.einsum("bsec,bsd->ebcd", place.sum(2).astype(x.dtype), x)
    gate, up = (jnp.einsum("ebcd,edf->ebcf", inside, w.astype(x.dtype)) for w in (experts.gate, experts.up))
    outside = jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(gate) * up, experts.down.astype(x.dtype))
    return jnp.einsum("bsec,ebcd->bsd", combine, outside)


@dims("_, batch seq embed, batch seq _, batch seq _ -> batch seq embed")
def ragged(experts: Experts, x: jax.Array, weights: jax.Array, chosen: jax.Array, cfg: Config) -> jax.Array:
    """Tokens sorted by expert, one run of rows per expert, and sorted back."""
    flat, tokens = chosen.reshape(-1), x.reshape(-1, x.shape[-1])
    order = jnp.argsort(flat)
    sizes = jax.nn.one_hot(flat, cfg.experts, dtype=jnp.int32).sum(0)
    inside = tokens[order // cfg.chosen]
    gate, up = (lax.ragged_dot(inside, w.astype(x.dtype), sizes) for w in (experts.gate, experts.up))
    outside = lax.ragged_dot(jax.nn.silu(gate) * up, experts.down.astype(x.dtype), sizes)
    back = outside[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.einsum("bskd,bsk->bsd", back, weights.astype(x.dtype))


@dims("_, batch seq embed -> batch seq embed, _")
def block(layer: Block, x: jax.Array, cfg: Config) -> tuple[jax.Array, jax.Array]:
    x = x + attention(layer.attn, rms_norm(layer.attn_norm, x))
    y = rms_norm(layer.expert_norm, x)
    weights, chosen, balance = route(layer.experts.router, y, cfg)
    mix = grouped if cfg.dispatch == "grouped" else ragged
    return x + mix(layer.experts, y, weights, chosen, cfg), balance


@dims("_, batch seq -> batch seq vocab, _")
def apply(model: Moe, tokens: jax.Array, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """Logits, f32 [batch, seq, vocab], of tokens int32 [batch, seq], and the mean of the layers' balancing losses."""
    x = model.embed[tokens].astype(cfg.dtype)
    run = partial(block, cfg=cfg)
    run = jax.checkpoint(run, prevent_cse=not cfg.scan) if cfg.remat else run
    if isinstance(model.layers, Block):
        x, losses = lax.scan(lambda x, layer: run(layer, x), x, model.layers)
    else:
        found = []
        for layer in model.layers:
            x, balance = run(layer, x)
            found.append(balance)
        losses = jnp.stack(found)
    x = rms_norm(model.final_norm, x)
    logits = jnp.einsum("bsd,dv->bsv", x, model.head.astype(x.dtype), preferred_element_type=jnp.float32)
    return logits, losses.mean()


def workload(
    size: str = "tiny", *, batch: int | None = None, seq: int | None = None, scan: bool | None = None,
    remat: bool | None = None, dtype: str | None = None, optimizer: Optimizer = "adamw", **overrides: Any,
) -> Workload:  # fmt: skip
    """A training step of the size, one of `SIZES`; the arguments, and any field of `Config`, override it.

    The step is `step(state, batch) -> (state, {"loss"})` with the state donated; the loss is in
    nats per token (bytes, even where the vocabulary is larger) plus `balance` times the balancing loss.
    """
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown. Known: {', '.join(SIZES)}.")
    given = {"batch": batch, "seq": seq, "scan": scan, "remat": remat, "dtype": dtype}
    cfg = replace(SIZES[size], **{k: v for k, v in given.items() if v is not None}, **overrides)
    if cfg.dispatch not in ("grouped", "ragged"):
        raise ValueError(f"dispatch {cfg.dispatch!r} is unknown. Known: grouped, ragged.")
    tx = make_optimizer(optimizer, cfg.learning_rate, cfg.clip)

    def loss(model: Moe, data: dict[str, jax.Array]) -> jax.Array:
        logits, balance = apply(model, data["tokens"], cfg)
        return cross_entropy(logits, data["targets"]) + cfg.balance * balance

    def init_state(key: jax.Array) -> tuple[dict[str, Any]]:
        return (new_state(init(key, cfg), tx),)

    return Workload(
        step=train_step(loss, tx),
        args=(*jax.eval_shape(init_state, jax.random.key(0)), token_batch(cfg.batch, cfg.seq)),
        donate_argnums=(0,),
        init=init_state,
        batches=lambda: _text.batches(cfg.batch, cfg.seq),
        name=f"moe-{size}",
    )
