"""Llama in flax nnx: rotary positions, RMSNorm, SwiGLU, grouped key and value heads.

Shapes as published for Llama 3 (arXiv 2407.21783, table 3) and Llama 3.2 1B. Modules are
pytrees, so the step is an ordinary function of (state, batch). Parameters are f32 and are
cast to the compute dtype where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from meshplan.hints import Workload, dims, params
from models import _text
from models._train import Optimizer, cross_entropy, make_optimizer, new_state, token_batch, train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shapes and switches. `batch` is the global batch in sequences; `heads` is a multiple of `kv_heads`."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int = 128256
    head_dim: int = 128
    seq: int = 8192
    batch: int = 64
    dtype: str = "bfloat16"
    scan: bool = False
    remat: bool = True
    tied: bool = False
    rope_theta: float = 500_000.0
    learning_rate: float = 3e-4
    clip: float | None = 1.0


SIZES = {
    "tiny": Config(layers=2, width=64, heads=4, kv_heads=2, head_dim=16, mlp=192, vocab=256, seq=64, batch=8,
                   dtype="float32", remat=False, learning_rate=3e-3),
    "small": Config(layers=8, width=2048, heads=32, kv_heads=8, head_dim=64, mlp=5632, vocab=32000, seq=1024,
                    scan=True),
    "1b": Config(layers=16, width=2048, heads=32, kv_heads=8, head_dim=64, mlp=8192, seq=2048, tied=True),
    "llama3-8b": Config(layers=32, width=4096, heads=32, kv_heads=8, mlp=14336),
    "llama3-70b": Config(layers=80, width=8192, heads=64, kv_heads=8, mlp=28672, batch=256),
    "llama3-405b": Config(layers=126, width=16384, heads=128, kv_heads=8, mlp=53248, batch=1024, scan=True),
}  # fmt: skip


def _normal(rngs: nnx.Rngs, *shape: int, scale: float = 0.02) -> nnx.Param[jax.Array]:
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape))


@params(scale="embed")
class Norm(nnx.Module):
    def __init__(self, width: int) -> None:
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normal = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
        return (normal * self.scale[...]).astype(x.dtype)


@dims("batch seq heads head_dim, batch seq kv_heads head_dim, batch seq kv_heads head_dim -> batch seq heads head_dim")
def grouped_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention in which heads/kv_heads neighbouring query heads share a key and value head."""
    batch, seq, heads, head_dim = q.shape
    q = q.reshape(batch, seq, k.shape[2], -1, head_dim)
    scores = jnp.einsum("bsngk,btnk->bngst", q, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    at, seen = (lax.broadcasted_iota(jnp.int32, (seq, seq), i) for i in (0, 1))
    weights = jax.nn.softmax(jnp.where(seen <= at, scores, -1e30), axis=-1).astype(v.dtype)
    return jnp.einsum("bngst,btnk->bsngk", weights, v).reshape(batch, seq, heads, head_dim)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions for [batch, seq, heads, head_dim]: dim i turns with dim i + head_dim/2."""
    half = x.shape[-1] // 2
    frequency = theta ** (-lax.broadcasted_iota(jnp.float32, (x.shape[1], 1, half), 2) / half)
    angle = lax.broadcasted_iota(jnp.float32, (x.shape[1], 1, half), 0) * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    low, high = x[..., :half], x[..., half:]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


@params(q="embed heads head_dim", k="embed kv_heads head_dim", v="embed kv_heads head_dim", o="heads head_dim embed")
class Attention(nnx.Module):
    def __init__(self, cfg: Config, rngs: nnx.Rngs) -> None:
        self.theta = cfg.rope_theta
        self.q = _normal(rngs, cfg.width, cfg.heads, cfg.head_dim)
        self.k = _normal(rngs, cfg.width, cfg.kv_heads, cfg.head_dim)
        self.v = _normal(rngs, cfg.width, cfg.kv_heads, cfg.head_dim)
        self.o = _normal(rngs, cfg.heads, cfg.head_dim, cfg.width, scale=0.02 / (2 * cfg.layers) ** 0.5)

    @dims("batch seq embed -> batch seq embed")
    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[...].astype(x.dtype)) for w in (self.q, self.k, self.v))
        mixed = grouped_attention(rotate(q, self.theta), rotate(k, self.theta), v)
        return jnp.einsum("bshk,hkd->bsd", mixed, self.o[...].astype(x.dtype))


@params(gate="embed mlp", up="embed mlp", down="mlp embed")
class Mlp(nnx.Module):
    def __init__(self, cfg: Config, rngs: nnx.Rngs) -> None:
        self.gate = _normal(rngs, cfg.width, cfg.mlp)
        self.up = _normal(rngs, cfg.width, cfg.mlp)
        self.down = _normal(rngs, cfg.mlp, cfg.width, scale=0.02 / (2 * cfg.layers) ** 0.5)

    @dims("batch seq embed -> batch seq embed")
    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = (jnp.einsum("bsd,df->bsf", x, w[...].astype(x.dtype)) for w in (self.gate, self.up))
        return jnp.einsum("bsf,fd->bsd", jax.nn.silu(gate) * up, self.down[...].astype(x.dtype))


class Block(nnx.Module):
    def __init__(self, cfg: Config, rngs: nnx.Rngs) -> None:
        self.attn_norm, self.mlp_norm = Norm(cfg.width), Norm(cfg.width)
        self.attn, self.mlp = Attention(cfg, rngs), Mlp(cfg, rngs)

    @dims("batch seq embed -> batch seq embed")
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


@params(embed="vocab embed", head="embed vocab")
class Llama(nnx.Module):
    """`layers`: a list of blocks, or one block whose arrays have a leading dim of layers (scan)."""

    def __init__(self, cfg: Config, key: jax.Array) -> None:
        self.cfg = cfg
        embed_key, head_key, layer_key = jax.random.split(key, 3)
        layer_keys = jax.random.split(layer_key, cfg.layers)
        make = lambda key: Block(cfg, nnx.Rngs(params=key))  # noqa: E731
        self.embed = _normal(nnx.Rngs(params=embed_key), cfg.vocab, cfg.width)
        self.layers = jax.vmap(make)(layer_keys) if cfg.scan else nnx.List([make(k) for k in layer_keys])
        self.final_norm = Norm(cfg.width)
        self.head = None if cfg.tied else _normal(nnx.Rngs(params=head_key), cfg.width, cfg.vocab)

    @dims("batch seq -> batch seq vocab")
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits, f32 [batch, seq, vocab], of tokens int32 [batch, seq]."""
        x = self.embed[...][tokens].astype(self.cfg.dtype)
        run = jax.checkpoint(Block.__call__, prevent_cse=not self.cfg.scan) if self.cfg.remat else Block.__call__
        if isinstance(self.layers, Block):
            x, _ = lax.scan(lambda x, layer: (run(layer, x), None), x, self.layers)
        else:
            for layer in self.layers:
                x = run(layer, x)
        x = self.final_norm(x)
        if self.head is None:
            return jnp.einsum("bsd,vd->bsv", x, self.embed[...].astype(x.dtype), preferred_element_type=jnp.float32)
        return jnp.einsum("bsd,dv->bsv", x, self.head[...].astype(x.dtype), preferred_element_type=jnp.float32)


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

    def loss(model: Llama, data: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(model(data["tokens"]), data["targets"])

    def init_state(key: jax.Array) -> tuple[dict[str, Any]]:
        return (new_state(Llama(cfg, key), tx),)

    return Workload(
        step=train_step(loss, tx),
        args=(*jax.eval_shape(init_state, jax.random.key(0)), token_batch(cfg.batch, cfg.seq)),
        donate_argnums=(0,),
        init=init_state,
        batches=partial(_text.batches, cfg.batch, cfg.seq),
        name=f"llama-{size}",
    )
