"""An encoder and a decoder in flax linen: T5 1.1, which repairs text with masked spans.

Shapes as published for T5 1.1 (Raffel et al. 2019, arXiv 1910.10683; gated GELU after Shazeer 2020,
arXiv 2002.05202): RMSNorm, no biases, relative positions in buckets, scores without a scale, a head of
its own. Every parameter carries the logical names of its dims, as `nn.with_logical_partitioning` boxes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from meshplan.hints import Workload, dims
from models import _text
from models._train import Optimizer, cross_entropy, make_optimizer, new_state, train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Shapes and switches. `layers` in the encoder and as many in the decoder; `source` and `target` in tokens."""

    layers: int
    width: int
    heads: int
    mlp: int
    source: int
    target: int
    batch: int
    head_dim: int = 64
    vocab: int = 32128
    buckets: int = 32
    farthest: int = 128
    dtype: str = "bfloat16"
    scan: bool = True
    remat: bool = True
    learning_rate: float = 1e-3
    clip: float | None = 1.0


SIZES = {
    "tiny": Config(layers=1, width=64, heads=4, head_dim=16, mlp=128, source=32, target=32, batch=16, vocab=256,
                   dtype="float32", scan=False, remat=False, learning_rate=3e-3),
    "base": Config(layers=12, width=768, heads=12, mlp=2048, source=512, target=512, batch=128),
    "large": Config(layers=24, width=1024, heads=16, mlp=2816, source=512, target=512, batch=128),
    "xl": Config(layers=24, width=2048, heads=32, mlp=5120, source=512, target=512, batch=128),
}  # fmt: skip


def _weights(scale: float, *names: str) -> Callable[..., Any]:
    """An initialiser: normal, of this deviation, boxed with the logical names of the dims."""
    return nn.with_logical_partitioning(nn.initializers.normal(scale), names)


class Norm(nn.Module):
    """Root mean square norm, in f32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale: Any = self.param("scale", nn.with_logical_partitioning(nn.initializers.ones, ("embed",)), (x.shape[-1],))
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def bucket(distance: jax.Array, causal: bool, buckets: int, farthest: int) -> jax.Array:
    """Bucket, int32, of `distance` = key - query: exact when near, logarithmic up to `farthest`."""
    base = jnp.zeros_like(distance)
    if causal:
        distance = jnp.maximum(-distance, 0)
    else:
        buckets //= 2
        base, distance = buckets * (distance > 0), jnp.abs(distance)
    exact = buckets // 2
    steps = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(farthest / exact) * (buckets - exact)
    far = jnp.minimum(exact + steps.astype(jnp.int32), buckets - 1)
    return base + jnp.where(distance < exact, distance, far)


class RelativeBias(nn.Module):
    """What is added to the scores, f32 [1, heads, queries, keys]; one table for all layers of a stack."""

    cfg: Config
    causal: bool

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        cfg = self.cfg
        table = self.param("table", _weights(cfg.width**-0.5, "buckets", "heads"), (cfg.buckets, cfg.heads))
        query, key = (lax.broadcasted_iota(jnp.int32, (length, length), i) for i in (0, 1))
        bias = table[bucket(key - query, self.causal, cfg.buckets, cfg.farthest)]
        if self.causal:
            bias = jnp.where((key <= query)[..., None], bias, -1e30)
        return bias.transpose(2, 0, 1)[None]


class Attention(nn.Module):
    """`x` attends to `seen`; the scores and their softmax are f32."""

    cfg: Config

    @nn.compact
    @dims("batch target embed, batch source embed, _ -> batch target embed")
    def __call__(self, x: jax.Array, seen: jax.Array, bias: jax.Array | None) -> jax.Array:
        cfg = self.cfg
        project = lambda name, scale: nn.DenseGeneral(  # noqa: E731
            (cfg.heads, cfg.head_dim), use_bias=False, dtype=x.dtype, name=name,
            kernel_init=_weights(scale, "embed", "heads", "head_dim"),
        )  # fmt: skip
        deviation = cfg.width**-0.5
        q, k = project("q", (cfg.width * cfg.head_dim) ** -0.5)(x), project("k", deviation)(seen)
        v = project("v", deviation)(seen)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        scores = scores if bias is None else scores + bias
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(x.dtype), v)
        return nn.DenseGeneral(
            cfg.width, axis=(-2, -1), use_bias=False, dtype=x.dtype, name="o",
            kernel_init=_weights((cfg.heads * cfg.head_dim) ** -0.5, "heads", "head_dim", "embed"),
        )(mixed)  # fmt: skip


class Mlp(nn.Module):
    cfg: Config

    @nn.compact
    @dims("batch seq embed -> batch seq embed")
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.cfg
        up = lambda name: nn.Dense(  # noqa: E731
            cfg.mlp, use_bias=False, dtype=x.dtype, name=name, kernel_init=_weights(cfg.width**-0.5, "embed", "mlp")
        )
        hidden = jax.nn.gelu(up("gate")(x)) * up("up")(x)
        down = _weights(cfg.mlp**-0.5, "mlp", "embed")
        return nn.Dense(cfg.width, use_bias=False, dtype=x.dtype, name="down", kernel_init=down)(hidden)


class EncoderBlock(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array) -> tuple[jax.Array, None]:
        normal = Norm(name="attn_norm")(x)
        x = x + Attention(self.cfg, name="attn")(normal, normal, bias)
        return x + Mlp(self.cfg, name="mlp")(Norm(name="mlp_norm")(x)), None


class DecoderBlock(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array, encoded: jax.Array) -> tuple[jax.Array, None]:
        normal = Norm(name="attn_norm")(x)
        x = x + Attention(self.cfg, name="attn")(normal, normal, bias)
        x = x + Attention(self.cfg, name="cross")(Norm(name="cross_norm")(x), encoded, None)
        return x + Mlp(self.cfg, name="mlp")(Norm(name="mlp_norm")(x)), None


class Stack(nn.Module):
    """`layers` blocks and a norm: unrolled, or one block scanned, whose arrays have a leading dim "layers"."""

    cfg: Config
    block: type[nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array, *seen: jax.Array) -> jax.Array:
        cfg = self.cfg
        block = nn.remat(self.block, prevent_cse=not cfg.scan) if cfg.remat else self.block
        if cfg.scan:
            broadcast: Any = nn.broadcast
            scanned = nn.scan(
                block, variable_axes={"params": 0}, split_rngs={"params": True}, length=cfg.layers,
                in_axes=broadcast, metadata_params={nn.PARTITION_NAME: "layers"},
            )  # fmt: skip
            x, _ = scanned(cfg, name="layers")(x, *seen)
        else:
            for i in range(cfg.layers):
                x, _ = block(cfg, name=f"layers_{i}")(x, *seen)
        return Norm(name="final_norm")(x)


class EncoderDecoder(nn.Module):
    cfg: Config

    @nn.compact
    @dims("batch source, batch target -> batch target vocab")
    def __call__(self, source: jax.Array, previous: jax.Array) -> jax.Array:
        """Logits, f32 [batch, target, vocab], of source and previous target tokens, int32 [batch, source or target]."""
        cfg = self.cfg
        table = self.param("embed", _weights(1.0, "vocab", "embed"), (cfg.vocab, cfg.width))
        head = self.param("head", _weights(cfg.width**-0.5, "embed", "vocab"), (cfg.width, cfg.vocab))
        bias = RelativeBias(cfg, causal=False, name="encoder_bias")(cfg.source)
        encoded = Stack(cfg, EncoderBlock, name="encoder")(table[source].astype(cfg.dtype), bias)
        bias = RelativeBias(cfg, causal=True, name="decoder_bias")(cfg.target)
        x = Stack(cfg, DecoderBlock, name="decoder")(table[previous].astype(cfg.dtype), bias, encoded)
        return jnp.einsum("btd,dv->btv", x, head.astype(x.dtype), preferred_element_type=jnp.float32)


def loss(params: Any, batch: dict[str, jax.Array], cfg: Config) -> jax.Array:
    """Mean nats per token of the target."""
    logits: Any = EncoderDecoder(cfg).apply({"params": params}, batch["source"], batch["previous"])
    return cross_entropy(logits, batch["targets"])


def batches(cfg: Config, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Windows of the standard library's sources: the source with half of its bytes blotted out (0), in runs of four.

    The decoder writes the window down: `targets`, and `previous` the same one byte later, after a 0.
    """
    rng = np.random.default_rng(seed)
    for window in _text.batches(cfg.batch, max(cfg.source, cfg.target), seed):
        tokens = window["tokens"]
        runs = rng.random((cfg.batch, -(-cfg.source // 4))) < 0.5
        source = np.where(np.repeat(runs, 4, 1)[:, : cfg.source], 0, tokens[:, : cfg.source]).astype(np.int32)
        targets = tokens[:, : cfg.target]
        previous = np.concatenate([np.zeros((cfg.batch, 1), np.int32), targets[:, :-1]], 1)
        yield {"source": source, "previous": previous, "targets": targets}


def workload(
    size: str = "tiny", *, batch: int | None = None, scan: bool | None = None, remat: bool | None = None,
    dtype: str | None = None, optimizer: Optimizer = "adamw", **overrides: Any,
) -> Workload:  # fmt: skip
    """A training step of the size, one of `SIZES`; the arguments, and any field of `Config`, override it.

    The step is `step(state, batch) -> (state, {"loss"})` with the state donated; the parameters are boxed.
    """
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown. Known: {', '.join(SIZES)}.")
    given = {"batch": batch, "scan": scan, "remat": remat, "dtype": dtype}
    cfg = replace(SIZES[size], **{k: v for k, v in given.items() if v is not None}, **overrides)
    tx = make_optimizer(optimizer, cfg.learning_rate, cfg.clip)
    source, target = (jax.ShapeDtypeStruct((cfg.batch, n), jnp.int32) for n in (cfg.source, cfg.target))

    def init_state(key: jax.Array) -> tuple[dict[str, Any]]:
        empty = (jnp.zeros(shape.shape, shape.dtype) for shape in (source, target))
        return (new_state(EncoderDecoder(cfg).init(key, *empty)["params"], tx),)

    return Workload(
        step=train_step(lambda params, data: loss(params, data, cfg), tx),
        args=(
            *jax.eval_shape(init_state, jax.random.key(0)),
            {"source": source, "previous": target, "targets": target},
        ),
        donate_argnums=(0,),
        init=init_state,
        batches=lambda: batches(cfg),
        name=f"encoder_decoder-{size}",
    )
