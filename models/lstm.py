"""A stacked LSTM language model in pure JAX: one `lax.scan` over time per layer.

The input products of all times are one matrix product before the scan; only the recurrent product is inside
(Hochreiter and Schmidhuber 1997; forget gate biased to one, Jozefowicz et al. 2015). Parameters and the cell state
are f32, products run in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    """Shapes and switches. `batch` is the global batch in sequences; `seq` the steps that gradients go back."""

    layers: int
    embed: int
    width: int
    seq: int
    batch: int
    vocab: int = 256
    dtype: str = "bfloat16"
    learning_rate: float = 1e-3
    clip: float | None = 1.0


# "base" has the shapes of Jozefowicz et al. 2016 (arXiv 1602.02410): two layers of 2048 on an embedding of 1024.
SIZES = {
    "tiny": Config(layers=2, embed=32, width=64, seq=32, batch=16, dtype="float32", learning_rate=1e-2),
    "base": Config(layers=2, embed=1024, width=2048, seq=256, batch=512, vocab=32768),
}


@register_dataclass
@params(input="embed gates mlp", recurrent="mlp_in gates mlp", bias="gates mlp")
@dataclass(frozen=True)
class Cell:
    """`input` [features, 4, width], `recurrent` [width, 4, width]; the gates are input, forget, cell, output."""

    input: jax.Array
    recurrent: jax.Array
    bias: jax.Array


@register_dataclass
@params(embed="vocab embed", head="mlp vocab", head_bias="vocab")
@dataclass(frozen=True)
class Lstm:
    embed: jax.Array
    cells: tuple[Cell, ...]
    head: jax.Array
    head_bias: jax.Array


def init_cell(key: jax.Array, features: int, width: int) -> Cell:
    input_key, recurrent_key = jax.random.split(key)
    return Cell(
        input=features**-0.5 * jax.random.normal(input_key, (features, 4, width)),
        recurrent=width**-0.5 * jax.random.normal(recurrent_key, (width, 4, width)),
        bias=jnp.zeros((4, width)).at[1].set(1.0),
    )


def init(key: jax.Array, cfg: Config) -> Lstm:
    """Fresh parameters, f32."""
    embed_key, head_key, *keys = jax.random.split(key, 2 + cfg.layers)
    return Lstm(
        embed=0.1 * jax.random.normal(embed_key, (cfg.vocab, cfg.embed)),
        cells=tuple(init_cell(k, cfg.width if i else cfg.embed, cfg.width) for i, k in enumerate(keys)),
        head=0.02 * jax.random.normal(head_key, (cfg.width, cfg.vocab)),
        head_bias=jnp.zeros(cfg.vocab),
    )


@dims("_, batch seq embed -> batch seq mlp")
def run_cell(cell: Cell, x: jax.Array) -> jax.Array:
    """Hidden states [batch, seq, width] of inputs [batch, seq, features], from a zero state."""
    recurrent = cell.recurrent.astype(x.dtype)
    driven = jnp.einsum("bsd,dgh->sbgh", x, cell.input.astype(x.dtype)) + cell.bias.astype(x.dtype)
    zero = jnp.zeros((x.shape[0], recurrent.shape[0]))

    def step(carry: tuple[jax.Array, jax.Array], drive: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, memory = carry
        gates = (drive + jnp.einsum("bk,kgh->bgh", hidden, recurrent)).astype(jnp.float32)
        add, keep, show = (jax.nn.sigmoid(gates[:, i]) for i in (0, 1, 3))
        memory = keep * memory + add * jnp.tanh(gates[:, 2])
        hidden = (show * jnp.tanh(memory)).astype(drive.dtype)
        return (hidden, memory), hidden

    _, hidden = lax.scan(step, (zero.astype(x.dtype), zero), driven)
    return hidden.swapaxes(0, 1)


@dims("_, batch seq -> batch seq vocab")
def apply(model: Lstm, tokens: jax.Array, cfg: Config) -> jax.Array:
    """Logits, f32 [batch, seq, vocab], of tokens int32 [batch, seq]."""
    x = model.embed[tokens].astype(cfg.dtype)
    for cell in model.cells:
        x = run_cell(cell, x)
    head = model.head.astype(x.dtype)
    return jnp.einsum("bsd,dv->bsv", x, head, preferred_element_type=jnp.float32) + model.head_bias


def workload(
    size: str = "tiny", *, batch: int | None = None, seq: int | None = None, dtype: str | None = None,
    optimizer: Optimizer = "adamw", **overrides: Any,
) -> Workload:  # fmt: skip
    """A training step of the size, one of `SIZES`; the arguments, and any field of `Config`, override it.

    The step is `step(state, batch) -> (state, {"loss"})` with the state donated; the loss is in
    nats per token (bytes, even where the vocabulary is larger). Nothing is allocated.
    """
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown. Known: {', '.join(SIZES)}.")
    given = {"batch": batch, "seq": seq, "dtype": dtype}
    cfg = replace(SIZES[size], **{k: v for k, v in given.items() if v is not None}, **overrides)
    tx = make_optimizer(optimizer, cfg.learning_rate, cfg.clip)

    def loss(model: Lstm, data: dict[str, jax.Array]) -> jax.Array:
        return cross_entropy(apply(model, data["tokens"], cfg), data["targets"])

    def init_state(key: jax.Array) -> tuple[dict[str, Any]]:
        return (new_state(init(key, cfg), tx),)

    return Workload(
        step=train_step(loss, tx),
        args=(*jax.eval_shape(init_state, jax.random.key(0)), token_batch(cfg.batch, cfg.seq)),
        donate_argnums=(0,),
        init=init_state,
        batches=lambda: _text.batches(cfg.batch, cfg.seq),
        name=f"lstm-{size}",
    )
