"""Equations that XLA computes wrong on shards, or not at all, written so that it computes them right.

Two come from one pass of jax 0.10's XLA (they are gone in jax 0.12): a dynamic slice of a dynamic slice becomes one
slice at the sum of both starts, although each start is clamped by itself, so that a start out of range counts in full.

* A scatter of one row is expanded to: read the row, choose, write it back. On a shard that does not have the row, the
  read is merged with the slice that cut the shard out of a larger array, and the shard gets a row of another place.
  A barrier between the two leaves nothing to merge.
* A dynamic slice whose start is out of range, split along the sliced dim afterwards. A start that is clamped
  before is in range.

The third is there in jax 0.12 too: on CPU a Fourier transform of an array with a batch dim of one entry may be given
a layout that it refuses when it runs. Without such dims there is one layout only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from meshplan.core import _jax

Guard = Callable[[Any, list[Any]], list[Any]]


def guarded(eqn: Any, args: Sequence[Any], shards: int) -> Sequence[Any]:
    """The operands to bind an equation to. `shards`: into how many pieces rows may be cut at most."""
    guard = _GUARDS.get(eqn.primitive.name.replace("-", "_"))
    if guard is None or (guard is not _slice and _rows(eqn) > shards):  # many rows: a loop, which nothing merges
        return args
    return guard(eqn, list(args))


def has_batch_of_one(eqn: Any) -> bool:
    """Whether the equation is a Fourier transform of an array with a batch dim of one entry."""
    return eqn.primitive.name == "fft" and 1 in eqn.invars[0].aval.shape[: -len(eqn.params["fft_lengths"])]


def transformed(eqn: Any, x: Any) -> list[Any]:
    """The result of such a Fourier transform, taken without its batch dims of one entry."""
    lengths = eqn.params["fft_lengths"]
    batch, rest = x.shape[: -len(lengths)], x.shape[-len(lengths) :]
    y = eqn.primitive.bind(x.reshape(*(n for n in batch if n != 1), *rest), **eqn.params)
    return [y.reshape(*batch, *y.shape[-len(lengths) :])]


def _rows(eqn: Any) -> int:
    """How many rows a gather or a scatter reads or writes."""
    return math.prod(eqn.invars[1].aval.shape[:-1])


def _scatter(eqn: Any, args: list[Any]) -> list[Any]:
    return [jax.lax.optimization_barrier(args[0]), *args[1:]]


def _slice(eqn: Any, args: list[Any]) -> list[Any]:
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    starts = [
        x if size in (1, n) or (isinstance(atom, _jax.Literal) and 0 <= atom.val <= n - size) else _clamped(x, n - size)
        for x, atom, n, size in zip(args[1:], eqn.invars[1:], shape, sizes, strict=True)
    ]
    return [args[0], *starts]


def _gather(eqn: Any, args: list[Any]) -> list[Any]:
    """As a slice, where indices are clamped (other modes mask what is out of range)."""
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    indexed = eqn.params["dimension_numbers"].start_index_map
    if "CLIP" not in str(eqn.params["mode"]) or all(sizes[d] in (1, shape[d]) for d in indexed):
        return args
    room = np.array([shape[d] - sizes[d] for d in indexed])
    return [args[0], _clamped(args[1], room), *args[2:]]


def _clamped(start: Any, room: Any) -> Any:
    top = np.broadcast_to(np.asarray(room, start.dtype), start.shape)
    return jax.lax.clamp(np.zeros_like(top), start, top)


_GUARDS: Mapping[str, Guard] = MappingProxyType({
    "dynamic_slice": _slice, "gather": _gather,
    **dict.fromkeys(
        ("scatter", "scatter_add", "scatter_sub", "scatter_mul", "scatter_min", "scatter_max"), _scatter
    ),
})  # fmt: skip
