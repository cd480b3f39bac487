"""DLRM with sharded tables in two dimensions: M replicas of groups of N devices (arXiv 2508.03854).

The dense layers are those of models/dlrm.py, whole on every device, under optax's Adagrad; the tables are
`meshplan.embedding.Embeddings` under row-wise AdaGrad, placed by its planner or as given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshplan.embedding import (
    Collection,
    Embeddings,
    EmbeddingState,
    Groups,
    Placement,
    Residuals,
    RowAdagrad,
    RowOptimizer,
    Table,
    place,
    plan,
)
from meshplan.machine import Machine
from models import dlrm


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """`init(key) -> (dense state, tables)`, `predict(dense, tables, batch) -> log odds`, and
    `step(dense, tables, batch) -> (dense, tables, loss, residuals)`, jitted, both states donated."""

    embeddings: Embeddings
    init: Callable[[jax.Array], tuple[Any, EmbeddingState]]
    step: Callable[..., tuple[Any, EmbeddingState, jax.Array, Residuals]]
    predict: Callable[..., jax.Array]


def tables(cfg: dlrm.Config, zipf: float = 1.0) -> Collection:
    """The tables of a size, "t0", "t1", ...; their ids follow Zipf's law."""
    return Collection(
        tables=tuple(
            Table(name=f"t{i}", rows=rows, dim=cfg.width, hotness=bag, length=bag, zipf=zipf)
            for i, (rows, bag) in enumerate(zip(cfg.rows, cfg.bags, strict=True))
        )
    )


def by_row(collection: Collection, shards: int, small: int = 64) -> list[Placement]:
    """Every table by rows, those of up to `small` rows whole on one device of the group after the other."""
    return [
        place(t, "row", range(shards)) if t.rows > small else place(t, "table", [i % shards])
        for i, t in enumerate(collection.tables)
    ]


def planned(cfg: dlrm.Config, machine: Machine, groups: Groups) -> list[Placement]:
    """The planner's placements for groups of these sizes."""
    return list(plan(tables(cfg), machine, cfg.batch, groups=groups).placements)


def make(
    cfg: dlrm.Config, groups: Groups, optimizer: RowOptimizer | None = None,
    placements: Sequence[Placement] | None = None, **more: Any,
) -> Sharded:
    """The model on all devices of the groups. `more`: arguments of `Embeddings`."""
    collection = tables(cfg)
    optimizer = optimizer or RowAdagrad(learning_rate=cfg.learning_rate)
    emb = Embeddings(
        collection, placements or by_row(collection, groups.shards), groups, optimizer=optimizer, **more
    )
    tx = optax.adagrad(cfg.learning_rate)

    def init(key: jax.Array) -> tuple[Any, EmbeddingState]:
        dense_key, table_key = jax.random.split(key)
        params: Any = dlrm.init_dense(dense_key, cfg)
        whole = NamedSharding(emb.device_mesh, P())  # where a step leaves them: else its second call compiles again
        return jax.device_put((params, tx.init(params)), whole), emb.init(table_key)

    def odds(params: Any, features: dict[str, jax.Array], numbers: jax.Array) -> jax.Array:
        x = dlrm.hidden(params[0], numbers.astype(cfg.dtype))
        return dlrm.top(params[1], x, [features[t.name].astype(x.dtype) for t in collection.tables])

    def loss(params: Any, features: dict[str, jax.Array], batch: dict[str, Any]) -> jax.Array:
        return dlrm.click_entropy(odds(params, features, batch["numbers"]), batch["clicks"])

    def ids_of(batch: dict[str, Any]) -> dict[str, Any]:
        return {t.name: x for t, x in zip(collection.tables, batch["ids"], strict=True)}

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(dense: Any, state: EmbeddingState, batch: dict[str, Any]) -> Any:
        params, opt_state = dense
        value, grads, state, residuals = emb.value_and_update(loss, params, state, ids_of(batch), batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), state, value, residuals

    @jax.jit
    def predict(dense: Any, state: EmbeddingState, batch: dict[str, Any]) -> jax.Array:
        features, _ = emb.lookup(state, ids_of(batch))
        return odds(dense[0], features, batch["numbers"])

    return Sharded(embeddings=emb, init=init, step=step, predict=predict)


def table_bytes(cfg: dlrm.Config) -> int:
    """Of all tables, without the optimizer's sums."""
    return int(sum(np.int64(t.nbytes) for t in tables(cfg).tables))
