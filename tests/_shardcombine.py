"""A search over executions for parallel factors that a rule lacks.

The idea is EasyDist's ShardCombine (Alibaba 2023): without looking at what an operation means, cut
its operands along one dim each, run it on the pieces, and try whether the results, put together along
a dim, added, multiplied, or compared, give the whole. What can be put together is a factor; one that the
rule does not have is reported. Two sets of random operands must agree, so that no accident counts.
Pieces with up to three rows of their neighbour, their results trimmed to half, show halos.

    python -m tests._shardcombine [PRIMITIVE ...]     prints what every rule of tests/_rule_cases lacks
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshplan.rules import OpRule, OpView, rule_for, with_halos
from tests._proof import COMBINE, equation, is_key, random_operands, run, view_of
from tests._rule_cases import ALL, Case

Cut = tuple[int | None, ...]  # the dim along which each operand is cut, None where every shard has the whole
_POSITIONS = ("gather", "scatter", "dynamic_")  # positions count from the beginning: a piece is another operation
_SHAPES = ("shape", "new_sizes", "slice_sizes", "limit_indices")


@dataclass(frozen=True, slots=True)
class Found:
    """A factor seen by execution: dims of the operands, and per result its dim or how parts combine."""

    primitive: str
    operands: Cut
    results: tuple[int | str, ...]


def cuts(view: OpView, count: int) -> Iterator[Cut]:
    """Every way to cut at least one operand along a dim that `count` divides."""
    options = [[None, *(d for d, n in enumerate(a.shape) if n % count == 0 and n > 1)] for a in view.operands]
    for chosen in itertools.product(*options):
        if any(d is not None for d in chosen):
            yield chosen


def _pieces(operands: list[Any], chosen: Cut, count: int, index: int) -> list[Any]:
    pieces = []
    for x, d in zip(operands, chosen, strict=True):
        if d is None:
            pieces.append(x)
            continue
        size = x.shape[d] // count
        pieces.append(x[(slice(None),) * d + (slice(index * size, (index + 1) * size),)])
    return pieces


def _variants(view: OpView, chosen: Cut, count: int) -> Iterator[dict[str, Any]]:
    """Parameters for a shard: as they are, and with one entry of a parameter that holds sizes divided."""
    yield dict(view.params)
    for name in _SHAPES:
        sizes = view.params.get(name)
        if isinstance(sizes, tuple):
            for i, n in enumerate(sizes):
                if isinstance(n, (int, np.integer)) and n % count == 0 and n > 1:
                    yield dict(view.params) | {name: (*sizes[:i], int(n) // count, *sizes[i + 1 :])}
    groups = [n for n in ("feature_group_count", "batch_group_count") if view.params.get(n, 1) % count == 0]
    for name in groups:
        yield dict(view.params) | {name: view.params[name] // count}


def _shapes(eqn: Any, pieces: list[Any], params: dict[str, Any]) -> list[tuple[int, ...]] | None:
    """Shapes of a shard's results, None where the operation does not take the pieces."""
    try:
        made = jax.eval_shape(lambda *xs: eqn.primitive.bind(*xs, **params), *pieces)
    except Exception:  # whatever the primitive's own shape rule objects to
        return None
    return [tuple(x.shape) for x in (made if eqn.primitive.multiple_results else [made])]


def _plausible(view: OpView, shapes: list[tuple[int, ...]], count: int) -> bool:
    """Whether every result has the whole's shape, or a part of it along one dim."""
    for shape, result in zip(shapes, view.results, strict=True):
        if len(shape) != len(result.shape):
            return False
        differing = [(a, b) for a, b in zip(shape, result.shape, strict=True) if a != b]
        if len(differing) > 1 or any(a * count != b for a, b in differing):
            return False
    return True


def _close(got: Any, wanted: Any) -> bool:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    tolerance = 2e-2 if wanted.dtype.itemsize == 2 else 2e-5
    return bool(np.allclose(got, wanted, tolerance, tolerance, equal_nan=True))


def _combined(parts: list[Any], wanted: Any) -> int | str | None:
    """How the parts make the whole: a dim, an operation, "same" where each is the whole; None where nothing does."""
    if parts[0].shape != wanted.shape:
        (d,) = [d for d, (a, b) in enumerate(zip(parts[0].shape, wanted.shape, strict=True)) if a != b]
        return d if _close(np.concatenate(parts, d), wanted) else None
    if all(_close(p, wanted) for p in parts):
        return "same"
    for name, operation in COMBINE.items():
        if (name in ("and", "or")) != (wanted.dtype == bool):
            continue
        total = parts[0]
        for part in parts[1:]:
            total = operation(total, part)
        if _close(total, wanted):
            return name
    return None


def _ways(eqn: Any, pieces: list[list[Any]], params: dict[str, Any], whole: list[Any]) -> tuple[int | str | None, ...]:
    """How each result comes of the shards' results."""
    try:
        parts = [run(eqn, piece, params) for piece in pieces]
    except Exception:  # shapes that the shape rule passes and the compiler does not
        return (None,)
    return tuple(_combined([p[r] for p in parts], w) for r, w in enumerate(whole))


def search(case: Case, count: int = 2) -> tuple[OpView, OpRule, list[Found]]:
    """Every factor that executions of the case show, with the case's operation and rule."""
    eqn = equation(case.name, case.fn, *case.args)
    view = view_of(eqn)
    rule = rule_for(view)
    assert rule is not None
    sets = [list(case.args)] if case.exact else [random_operands(eqn, seed) for seed in (3, 4)]
    if any(is_key(x) for x in sets[0]) or any(a.dtype.startswith("key<") for a in view.results):
        return view, rule, []
    sets = [[np.asarray(x) for x in operands] for operands in sets]
    wholes = [run(eqn, operands, dict(eqn.params)) for operands in sets]
    found = []
    for chosen in cuts(view, count):
        for params in _variants(view, chosen, count):
            shapes = _shapes(eqn, _pieces(sets[0], chosen, count, 0), params)
            if shapes is None or not _plausible(view, shapes, count):
                continue
            ways = []
            for operands, whole in zip(sets, wholes, strict=True):
                ways.append(_ways(eqn, [_pieces(operands, chosen, count, k) for k in range(count)], params, whole))
            if None not in ways[0] and all(way == ways[0] for way in ways) and set(ways[0]) != {"same"}:
                found.append(Found(case.name, chosen, ways[0]))  # type: ignore[arg-type]
                break
    return view, rule, found


def has_factor(rule: OpRule, found: Found, count: int = 2) -> bool:
    """Whether the rule has what was found, halos included: one factor, or two that touch different operands."""
    extended, halos = with_halos(rule)
    known = [_seen(extended, f, f in halos) for f, size in enumerate(extended.sizes) if size % count == 0]
    if any(_matches(one, found) for one in known):
        return True
    pairs = (_joined(a, b) for a, b in itertools.combinations(known, 2))
    return any(both is not None and _matches(both, found) for both in pairs)


def _seen(rule: OpRule, factor: int, halo: bool) -> Found:
    """A factor of a rule in the form of one that was found; "same" for results that do not depend on it."""
    operands = tuple(_major(dims, factor) for dims in rule.operands)
    results = [_major(dims, factor) for dims in rule.results]
    reduced = not halo and factor in rule.reduced_factors()
    combine = rule.combine.get(factor, "sum") if reduced else "same"
    return Found("", operands, tuple(combine if r is None else r for r in results))


def _joined(a: Found, b: Found) -> Found | None:
    """Two factors at once, None where they meet in an operand or a result."""
    if any(x is not None and y is not None for x, y in zip(a.operands, b.operands, strict=True)):
        return None
    if any(x != "same" and y != "same" for x, y in zip(a.results, b.results, strict=True)):
        return None
    operands = tuple(y if x is None else x for x, y in zip(a.operands, b.operands, strict=True))
    return Found("", operands, tuple(y if x == "same" else x for x, y in zip(a.results, b.results, strict=True)))


def _matches(known: Found, found: Found) -> bool:
    """Parts that were all alike combine by any of these operations."""
    alike = {"same", "max", "min", "and", "or"}
    return known.operands == found.operands and all(
        k == f or (f == "same" and k in alike) for k, f in zip(known.results, found.results, strict=True)
    )


def _major(dims: tuple[tuple[int, ...], ...], factor: int) -> int | None:
    places = [d for d, entry in enumerate(dims) if entry and entry[0] == factor]
    return places[0] if places else None


def halos_seen(case: Case) -> list[tuple[int, int]]:
    """Dims of operand 0, with the rows needed of a neighbour, whose halves give halves of result 0."""
    eqn = equation(case.name, case.fn, *case.args)
    view = view_of(eqn)
    operands = list(case.args) if case.exact else random_operands(eqn, 3)
    if view.primitive.startswith(_POSITIONS):
        return []
    keys = any(a.dtype.startswith("key<") for a in (*view.operands, *view.results))
    if not operands or keys or len(view.results[0].shape) != len(operands[0].shape):
        return []
    operands = [np.asarray(x) for x in operands]
    whole = run(eqn, operands, dict(eqn.params))[0]
    found = []
    for d, (n, m) in enumerate(zip(operands[0].shape, whole.shape, strict=True)):
        if n % 2 or m % 2:
            continue
        for rows in range(1, min(4, n // 2)):  # half of the rows of a neighbour would be all of them
            if _halves_fit(eqn, operands, whole, d, rows):
                found.append((d, rows))
                break
    return found


def _halves_fit(eqn: Any, operands: list[Any], whole: Any, d: int, rows: int) -> bool:
    n, half = operands[0].shape[d], whole.shape[d] // 2
    sides = (slice(0, n // 2 + rows), slice(n // 2 - rows, n))
    lead = (slice(None),) * d
    pieces = [[x[(*lead, side)] if x.shape == operands[0].shape else x for x in operands] for side in sides]
    if any(_shapes(eqn, piece, dict(eqn.params)) is None for piece in pieces):
        return False
    try:
        first, second = (run(eqn, piece, dict(eqn.params))[0] for piece in pieces)
    except Exception:  # shapes that the shape rule passes and the compiler does not
        return False
    if min(first.shape[d], second.shape[d]) < half:
        return False
    second = second[(*lead, slice(second.shape[d] - half, None))]
    return _close(np.concatenate([first[(*lead, slice(0, half))], second], d), whole)


def lacking(case: Case) -> list[Found]:
    """Factors and halos that executions show and the rule does not have."""
    _, rule, found = search(case)
    missing = [f for f in found if not has_factor(rule, f)]
    extended, _ = with_halos(rule)
    for d, rows in halos_seen(case):
        if not extended.operands[0][d]:
            missing.append(Found(case.name, (d,), (f"halo of {rows}",)))
    return missing


if __name__ == "__main__":
    for number, one in enumerate(ALL):
        if len(sys.argv) > 1 and one.name not in sys.argv[1:]:
            continue
        try:
            print(number, one.name, [(f.operands, f.results) for f in lacking(one)] or "nothing")
        except (AssertionError, AttributeError, ModuleNotFoundError) as error:
            print(number, one.name, "not traced:", str(error)[:80])
