"""A recommender in pure JAX: DLRM, with embedding bags, whose features meet in pairwise products.

Naumov et al. 2019, arXiv 1906.00091. "criteo" has the published widths and the tables of the Criteo Kaggle
display advertising logs (rows rounded up to a multiple of 64 where there are more than a thousand), "multihot"
those of MLPerf's DLRM v2 benchmark with their numbers of ids per bag; "terabytes" is multihot with more rows, 1.7 TB of
tables: shapes only. The logs themselves are generated, as `logs` states. Tables learn by Adagrad, like the rest;
models/dlrm_sharded.py keeps them in meshplan's sharded tables instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import register_dataclass

from meshplan.hints import Workload, dims, params
from models._train import make_optimizer, new_state, train_step

_CRITEO = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
_MLPERF = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
    14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
_MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """`rows` of each table; `bags`: ids that each looks up; `bottom` ends in the width of the embeddings."""

    rows: tuple[int, ...]
    bags: tuple[int, ...]
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    batch: int
    numbers: int = 13
    dtype: str = "bfloat16"
    learning_rate: float = 1e-2

    @property
    def width(self) -> int:
        return self.bottom[-1]


def _padded(rows: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n if n <= 1000 else -(-n // 64) * 64 for n in rows)


SIZES = {
    "tiny": Config(rows=(2048, 1024, 256, 32, 3), bags=(4, 1, 2, 1, 1), bottom=(32, 16), top=(64, 32, 1), batch=256,
                   numbers=8, dtype="float32", learning_rate=0.2),
    "criteo": Config(rows=_padded(_CRITEO), bags=(1,) * 26, bottom=(512, 256, 128), top=(1024, 1024, 512, 256, 1),
                     batch=32768),
    "multihot": Config(rows=_padded(_MLPERF), bags=_MLPERF_BAGS, bottom=(512, 256, 128),
                       top=(1024, 1024, 512, 256, 1), batch=65536),
    "terabytes": Config(rows=_padded(tuple(round(16.27 * n) for n in _MLPERF)), bags=_MLPERF_BAGS,
                        bottom=(512, 256, 128), top=(1024, 1024, 512, 256, 1), batch=65536),
}  # fmt: skip


@register_dataclass
@params(kernel="_ hidden", bias="hidden")
@dataclass(frozen=True)
class Dense:
    kernel: jax.Array
    bias: jax.Array


@register_dataclass
@params(tables="rows embed")
@dataclass(frozen=True)
class Dlrm:
    tables: tuple[jax.Array, ...]
    bottom: tuple[Dense, ...]
    top: tuple[Dense, ...]


def _dense(key: jax.Array, widths: tuple[int, ...]) -> tuple[Dense, ...]:
    keys = jax.random.split(key, len(widths) - 1)
    pairs = zip(keys, widths[:-1], widths[1:], strict=True)
    return tuple(Dense(jax.random.normal(k, (m, n)) * (2 / (m + n)) ** 0.5, jnp.zeros(n)) for k, m, n in pairs)


def init(key: jax.Array, cfg: Config) -> Dlrm:
    """Fresh parameters, f32; rows uniform within one over the root of the table's rows."""
    *table_keys, dense_key = jax.random.split(key, len(cfg.rows) + 1)
    tables = (
        jax.random.uniform(k, (n, cfg.width), minval=-1, maxval=1) * n**-0.5
        for k, n in zip(table_keys, cfg.rows, strict=True)
    )
    return Dlrm(tuple(tables), *init_dense(dense_key, cfg))


def init_dense(key: jax.Array, cfg: Config) -> tuple[tuple[Dense, ...], tuple[Dense, ...]]:
    """Fresh layers below and above the features' products."""
    bottom_key, top_key = jax.random.split(key)
    features = len(cfg.rows) + 1
    pairs = features * (features - 1) // 2
    widths = (cfg.width + pairs, *cfg.top)
    return _dense(bottom_key, (cfg.numbers, *cfg.bottom)), _dense(top_key, widths)


@dims("rows embed, batch bag -> batch embed")
def bag(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The sum of the rows that each bag of `ids` int32 [batch, bag] names."""
    return table[ids].sum(1)


@dims("batch feature embed -> batch pair")
def interact(features: jax.Array) -> jax.Array:
    """Products of each feature with those before it."""
    rows, columns = np.tril_indices(features.shape[1], -1)
    return jnp.einsum("bfd,bgd->bfg", features, features)[:, rows, columns]


@dims("_, batch numbers, _ -> batch")
def apply(model: Dlrm, numbers: jax.Array, ids: tuple[jax.Array, ...], cfg: Config) -> jax.Array:
    """Log odds of a click, f32 [batch]."""
    x = hidden(model.bottom, numbers.astype(cfg.dtype))
    bags = [bag(table, chosen).astype(x.dtype) for table, chosen in zip(model.tables, ids, strict=True)]
    return top(model.top, x, bags)


def hidden(layers: tuple[Dense, ...], x: jax.Array) -> jax.Array:
    """x [batch, width of the first] through layers with rectified results."""
    for layer in layers:
        x = jax.nn.relu(x @ layer.kernel.astype(x.dtype) + layer.bias.astype(x.dtype))
    return x


def top(layers: tuple[Dense, ...], x: jax.Array, bags: list[jax.Array]) -> jax.Array:
    """Log odds, f32 [batch], of the bottom's x [batch, width] and the bags' sums, each [batch, width]."""
    x = hidden(layers[:-1], jnp.concatenate([x, interact(jnp.stack([x, *bags], 1))], -1))
    return (x.astype(jnp.float32) @ layers[-1].kernel + layers[-1].bias)[:, 0]


def loss(model: Dlrm, batch: dict[str, Any], cfg: Config) -> jax.Array:
    """Mean cross entropy in nats of a click or none."""
    return click_entropy(apply(model, batch["numbers"], batch["ids"], cfg), batch["clicks"])


def click_entropy(odds: jax.Array, clicks: jax.Array) -> jax.Array:
    """Mean cross entropy in nats of clicks, 0 or 1, and their log odds."""
    return jnp.mean(jax.nn.softplus(odds) - odds * clicks)


def batches(cfg: Config, seed: int = 0) -> Iterator[dict[str, Any]]:
    """The logs of `logs`, without what nobody knows of them."""
    return (batch for batch, _ in logs(cfg, seed))


def logs(cfg: Config, seed: int = 0) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Click logs without end, generated, and the true log odds of each click: no model predicts better than they do.

    Zipf's law: the id r of a table, from 0 on, is drawn with a chance near 1 / (r + 1), by rounding down the power
    (rows + 1)**u, less one, of a uniform u. Numbers are standard normal. Every id and number has a hidden weight
    (normal, of a hash of the id), and a click's log odds are their sum, scaled to a deviation of two, less one.
    """
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=cfg.numbers)
    phases = rng.uniform(1, 2, len(cfg.rows))
    scale = 2 / np.sqrt(0.5 * sum(cfg.bags) + direction @ direction)
    while True:
        uniform = [rng.random((cfg.batch, n)) for n in cfg.bags]
        ids = [((rows + 1.0) ** u - 1).astype(np.int32) for rows, u in zip(cfg.rows, uniform, strict=True)]
        ids = [np.minimum(chosen, rows - 1) for rows, chosen in zip(cfg.rows, ids, strict=True)]
        numbers = rng.normal(size=(cfg.batch, cfg.numbers))
        weights = sum(np.sin(1e4 * phase * (i + 1)).sum(1) for phase, i in zip(phases, ids, strict=True))
        odds = scale * (weights + numbers @ direction) - 1
        yield {
            "numbers": numbers.astype(np.float32),
            "ids": tuple(ids),
            "clicks": (rng.random(cfg.batch) < 1 / (1 + np.exp(-odds))).astype(np.float32),
        }, odds


def workload(
    size: str = "tiny", *, batch: int | None = None, dtype: str | None = None,
    optimizer: Literal["adagrad", "sgd"] = "adagrad", **overrides: Any,
) -> Workload:  # fmt: skip
    """A training step of the size, one of `SIZES`; the arguments, and any field of `Config`, override it.

    The step is `step(state, batch) -> (state, {"loss"})` with the state donated.
    """
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown. Known: {', '.join(SIZES)}.")
    given = {"batch": batch, "dtype": dtype}
    cfg = replace(SIZES[size], **{k: v for k, v in given.items() if v is not None}, **overrides)
    tx = optax.adagrad(cfg.learning_rate) if optimizer == "adagrad" else make_optimizer("sgd", cfg.learning_rate, None)

    def init_state(key: jax.Array) -> tuple[dict[str, Any]]:
        return (new_state(init(key, cfg), tx),)

    data = {
        "numbers": jax.ShapeDtypeStruct((cfg.batch, cfg.numbers), jnp.float32),
        "ids": tuple(jax.ShapeDtypeStruct((cfg.batch, n), jnp.int32) for n in cfg.bags),
        "clicks": jax.ShapeDtypeStruct((cfg.batch,), jnp.float32),
    }
    return Workload(
        step=train_step(partial(loss, cfg=cfg), tx),
        args=(*jax.eval_shape(init_state, jax.random.key(0)), data),
        donate_argnums=(0,),
        init=init_state,
        batches=lambda: batches(cfg),
        name=f"dlrm-{size}",
    )
