"""Training a table that lies on the host by way of a cache on the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshplan.core import ArgumentError
from meshplan.embedding._cache import CacheStep, look_ahead
from meshplan.embedding._runtime import Embeddings
from meshplan.embedding._runtime_state import EmbeddingState

Rows = dict[str, np.ndarray]  # "weights" [rows, dim] and every sum of the optimizer, [rows] or [rows, dim]
Step = Callable[[EmbeddingState, np.ndarray, Any], EmbeddingState]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTable:
    """Table `name` of `embeddings` is the cache: its rows are slots, placed "data", for a larger table on the host.

    `host`: "weights" [rows, dim], and each sum of the row optimizer by its name; training changes them in place.
    `window`: batches beyond the present one whose ids are known. Raises ArgumentError where the table is not placed
    "data" in one group, or the host's arrays do not fit it.
    """

    embeddings: Embeddings
    name: str
    host: Rows
    window: int = 4

    def __post_init__(self) -> None:
        emb = self.embeddings
        scheme = next((p.scheme for p in emb.placements if p.table == self.name), None)
        if scheme != "data" or emb.groups.replicas > 1:
            raise ArgumentError(
                f"cached table {self.name!r}: scheme {scheme!r} in {emb.groups.replicas} groups; a cache is kept "
                f"whole on every device of one group: place it 'data' with Groups(replicas=1, ...)."
            )
        wanted = {"weights", *emb.optimizer.per_row, *emb.optimizer.per_entry}
        if set(self.host) != wanted:
            found = sorted(self.host)
            raise ArgumentError(f"cached table {self.name!r}: the host has {found}, needed: {sorted(wanted)}.")

    def train(
        self, state: EmbeddingState, step: Step, batches: Iterable[tuple[np.ndarray, Any]]
    ) -> tuple[EmbeddingState, list[CacheStep]]:
        """Runs `state = step(state, ids, rest)` over batches (ids of the host's rows, anything else).

        `step` sees slots in place of rows.

        While a step runs, the host writes back the rows that left at the step before and sends those of the next
        batch. At the end every row is back on the host. Returns the state and what was done for each batch.
        """
        rest: list[Any] = []

        def ids() -> Iterator[np.ndarray]:
            for found, other in batches:
                rest.append(other)
                yield found

        rows, slots = len(self.host["weights"]), self.embeddings.collection.by_name[self.name].rows
        steps = look_ahead(ids(), rows=rows, window=self.window, slots=slots)
        done: list[CacheStep] = []
        leaving: tuple[np.ndarray, Any] | None = None
        present = next(steps, None)
        if present is not None:
            state = self._fetch(state, present)
        while present is not None:
            state = step(state, present.ids, rest[len(done)])
            rest[len(done)] = None
            left = present.evict_ids, self._read(state, present.evict_slots)
            done.append(present)
            if leaving is not None:
                self._write_back(*leaving)
            leaving = left
            present = next(steps, None)
            if present is not None:
                state = self._fetch(state, present)
        if leaving is not None:
            self._write_back(*leaving)
        return state, done

    @property
    def _place(self) -> tuple[int, int]:
        """(pack, first local row) of the cache, the same on every device."""
        index = [t.name for t in self.embeddings.layout.tables].index(self.name)
        piece = next(p for p in self.embeddings.layout.pieces if p.table == index)
        return piece.pack, piece.start

    def _local(self, slots: np.ndarray) -> np.ndarray:
        pack, start = self._place
        none = self.embeddings.layout.packs[pack].rows
        table = self.embeddings.collection.by_name[self.name]
        return np.where(slots < table.rows, slots + start, none).astype(np.int32)

    def _fetch(self, state: EmbeddingState, step: CacheStep) -> EmbeddingState:
        rows = {k: v[np.maximum(step.fetch_ids, 0)] for k, v in self.host.items()}
        return _put(state, self._place[0], self._local(step.fetch_slots), rows)

    def _read(self, state: EmbeddingState, slots: np.ndarray) -> dict[str, jax.Array]:
        return _take(state, self._place[0], self._local(slots))

    def _write_back(self, ids: np.ndarray, rows: dict[str, jax.Array]) -> None:
        n = int((ids >= 0).sum())
        for name, values in rows.items():
            self.host[name][ids[:n]] = np.asarray(values)[:n]


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def _put(state: EmbeddingState, pack: int, at: jax.Array, rows: dict[str, jax.Array]) -> EmbeddingState:
    packs, sums = list(state.packs), list(state.sums)
    packs[pack] = packs[pack].at[:, :, at].set(rows["weights"].astype(packs[pack].dtype), mode="drop")
    sums[pack] = {k: v.at[:, :, at].set(rows[k], mode="drop") for k, v in sums[pack].items()}
    return EmbeddingState(
        packs=tuple(packs), sums=tuple(sums), late=state.late, noise=state.noise, count=state.count
    )  # fmt: skip


@partial(jax.jit, static_argnums=1)
def _take(state: EmbeddingState, pack: int, at: jax.Array) -> dict[str, jax.Array]:
    """From the first device of the group."""
    held = {"weights": state.packs[pack], **state.sums[pack]}
    return {k: jnp.take(v[0, 0], at, axis=0, mode="clip") for k, v in held.items()}
