"""Which parameter a leaf of an optimizer's state belongs to: its path inside the state is an end of the parameter's."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshplan.hints._walk import LeafView
from meshplan.hints.adapters import factored_dims, state_depths

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """`parameter`: index of the followed leaf. `dims[d]`: which dim of it dim d is, None for one of its own."""

    parameter: int
    dims: tuple[int | None, ...]


def followed_leaves(views: Sequence[LeafView]) -> dict[int, Followed]:
    """For leaves of optimizer states (optax's) the parameter among the other leaves, where there is one.

    Moments of the parameter's shape, memories with leading dims more (L-BFGS), factored moments with some of
    its dims (adafactor, SM3). A leaf whose dims cannot be told apart follows none.
    """
    by_end: dict[tuple[str, ...], list[int]] = {}
    states: dict[int, tuple[int, ...]] = {}
    for i, view in enumerate(views):
        depths = state_depths(view.owners, view.keys)
        if not depths:
            for k in range(len(view.keys) + 1):
                by_end.setdefault(view.keys[k:], []).append(i)
        else:
            states[i] = depths
    found = {}
    for i, depths in states.items():
        tries = (_try(views[i], depth, by_end, views) for depth in depths if views[i].shape)
        match = next((m for m in tries if m is not None), None)
        if match is not None:
            found[i] = match
    return found


def _try(
    view: LeafView, depth: int, by_end: Mapping[tuple[str, ...], Sequence[int]], views: Sequence[LeafView]
) -> Followed | None:
    """The parameter whose path ends as the leaf's does below `depth`, numbers of accumulators aside."""
    rest = view.keys[depth + 1 :]
    for keys, index in ((rest, None), (rest[:-1], rest[-1:])):
        candidates = by_end.get(keys, ())
        if not keys:  # the parameter is one bare array: known by its shape alone, if at all
            alike = [j for j in candidates if views[j].shape == view.shape]
            candidates = alike if len(alike) == 1 and index is None else ()
        match = _best(view, depth, index, candidates, views)
        if match is not None:
            return match
    return None


def _best(
    view: LeafView, depth: int, index: tuple[str, ...] | None, candidates: Sequence[int], views: Sequence[LeafView]
) -> Followed | None:
    """Of the leaves with the right path one of the same shape, else the first whose dims the leaf has some of."""
    for same in (True, False):
        for j in candidates:
            shape = views[j].shape
            if same != (shape == view.shape):
                continue
            given = factored_dims(view.keys[depth], shape)
            dims = _kept(view.shape, shape, given) if index is None else _indexed(view.shape, shape, index)
            if dims is not None:
                return Followed(parameter=j, dims=dims)
    return None


def _indexed(shape: Shape, full: Shape, index: tuple[str, ...]) -> tuple[int | None, ...] | None:
    """An accumulator per dim of the parameter, numbered (SM3)."""
    d = int(index[0]) if index and index[0].isdigit() else -1
    if not 0 <= d < len(full):
        return None
    if shape == (full[d],):
        return (d,)
    alone = tuple(n if k == d else 1 for k, n in enumerate(full))
    return tuple(k if k == d else None for k in range(len(full))) if shape == alone else None


def _kept(shape: Shape, full: Shape, given: tuple[int, ...] | None) -> tuple[int | None, ...] | None:
    if shape == full:
        return tuple(range(len(full)))
    if given is not None and tuple(full[d] for d in given) == shape:
        return given
    extra = len(shape) - len(full)
    if extra > 0:
        return (None,) * extra + tuple(range(len(full))) if shape[extra:] == full else None
    if extra == 0:  # dims of size 1 are what is left of those summed over
        kept = tuple(d if n == m else None for d, (n, m) in enumerate(zip(shape, full, strict=True)))
        return kept if all(n in (1, m) for n, m in zip(shape, full, strict=True)) and any(
            d is not None for d in kept
        ) else None
    ways = [c for c in itertools.combinations(range(len(full)), len(shape)) if tuple(full[d] for d in c) == shape]
    return ways[0] if len(ways) == 1 else None
