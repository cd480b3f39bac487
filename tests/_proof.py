"""Proof of factor rules by execution.

`prove(eqn, operands)` runs a traced equation's primitive on the whole operands, then, factor by
factor, on cut operands with the static parameters of one shard, and holds the shards'
results against the same cut of the whole result, or their combination against the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshplan.rules import JOINTLY_LINEAR, Aval, OpRule, OpView, rule_for

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip
_UNDEFINED = frozenset({"empty"})


def is_key(x: Any) -> bool:
    return str(x.dtype).startswith("key<")


def equations(fn: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """Every equation of the traced function, those of inner jaxprs in place of their call."""

    def walk(jaxpr: Any) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            inner = [j for value in eqn.params.values() for j in _jaxprs(value)]
            if inner and eqn.primitive.name.split("-")[0].split("_")[0] not in ("scatter", "reduce"):
                for j in inner:
                    yield from walk(j)
            else:
                yield eqn

    yield from walk(jax.make_jaxpr(fn)(*args).jaxpr)


def _jaxprs(value: Any) -> list[Any]:
    many = value if isinstance(value, (tuple, list)) else (value,)
    inner = [getattr(v, "jaxpr", v) for v in many]
    return [j for j in inner if hasattr(j, "eqns")]


def equation(name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """The first equation of the primitive `name` in the traced function."""
    found = list(equations(fn, *args))
    for eqn in found:
        if eqn.primitive.name == name:
            return eqn
    raise AssertionError(f"no {name} among {[e.primitive.name for e in found]}")


def aval_of(x: Any) -> Aval:
    return Aval(tuple(int(n) for n in x.shape), str(x.dtype), int(getattr(x.dtype, "itemsize", 8)))


def view_of(eqn: Any) -> OpView:
    return OpView(
        primitive=eqn.primitive.name,
        operands=tuple(aval_of(v.aval) for v in eqn.invars),
        results=tuple(aval_of(v.aval) for v in eqn.outvars),
        params=dict(eqn.params),
        constants=tuple(np.asarray(v.val) if hasattr(v, "val") else None for v in eqn.invars),
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard k of n along factor f."""

    factor: int
    count: int
    index: int


def cut(x: Any, dims: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], shard: Shard) -> Any:
    """The shard's part of x: blocks of the factor, strided where other factors are major to it."""
    for d, entry in enumerate(dims):
        if shard.factor not in entry:
            continue
        parts = [sizes[f] for f in entry]
        parts.append(x.shape[d] // math.prod(parts))
        opened = x.reshape(*x.shape[:d], *parts, *x.shape[d + 1 :])
        size = sizes[shard.factor] // shard.count
        where = d + entry.index(shard.factor)
        rows = slice(shard.index * size, (shard.index + 1) * size)
        piece = opened[(slice(None),) * where + (rows,)]
        x = piece.reshape(*x.shape[:d], x.shape[d] // shard.count, *x.shape[d + 1 :])
    return x


def check_shapes(view: OpView, rule: OpRule) -> None:
    """Entries for every dim, factors that divide it, none twice in an array, none of size 1."""
    assert all(size > 1 for size in rule.sizes)
    for avals, entries in ((view.operands, rule.operands), (view.results, rule.results)):
        assert len(avals) == len(entries), (view.primitive, avals, entries)
        for aval, dims in zip(avals, entries, strict=True):
            assert len(dims) == len(aval.shape), (view.primitive, aval, dims)
            used = [f for d in dims for f in d]
            assert len(used) == len(set(used)), (view.primitive, dims)
            for n, entry in zip(aval.shape, dims, strict=True):
                assert n % math.prod(rule.sizes[f] for f in entry) == 0, (view.primitive, aval, dims)
                if len(entry) == 1 and view.primitive != "reshape":
                    assert rule.sizes[entry[0]] == n, (view.primitive, aval, dims)
    carried = {f for entries in (*rule.operands, *rule.results) for d in entries for f in d}
    assert carried == set(range(len(rule.sizes))), view.primitive
    assert set(rule.combine) <= set(rule.reduced_factors()), view.primitive


def divisors(size: int, most: int = 3) -> list[int]:
    """Numbers of equal shards: the least, the largest and one between, `most` of them."""
    found = [n for n in range(2, size + 1) if size % n == 0]
    return sorted([*dict.fromkeys((found[0], found[-1], found[len(found) // 2]))][:most])


# ---------------------------------------------------------------------------------- running one shard


def _local(entries: tuple[tuple[int, ...], ...], shape: tuple[int, ...], shard: Shard) -> tuple[int, ...]:
    return tuple(n // shard.count if shard.factor in e else n for n, e in zip(shape, entries, strict=True))


def _adapt(view: OpView, rule: OpRule, shard: Shard) -> dict[str, Any]:
    """The static parameters with which a shard runs."""
    params = dict(view.params)
    out = _local(rule.results[0], view.results[0].shape, shard) if rule.results else ()
    ins = [_local(e, a.shape, shard) for e, a in zip(rule.operands, view.operands, strict=True)]
    match view.primitive:
        case "broadcast_in_dim" | "iota" | "iota_2x32_shape" | "empty":
            params["shape"] = out
        case "random_bits" | "random_split":
            params["shape"] = out[len(ins[0]) :]
        case "reshape":
            params["new_sizes"] = out
        case "dynamic_slice":
            params["slice_sizes"] = out
        case "slice":
            full = view.operands[0].shape
            params["limit_indices"] = tuple(
                m if m != n else e for m, n, e in zip(ins[0], full, params["limit_indices"], strict=True)
            )
        case "gather":
            full = view.operands[0].shape
            params["slice_sizes"] = tuple(
                m if s == n else s for m, n, s in zip(ins[0], full, params["slice_sizes"], strict=True)
            )
        case "tile":
            params["reps"] = tuple(m // n for m, n in zip(out, ins[0], strict=True))
        case "conv_general_dilated":
            _adapt_conv(params, view, ins)
    return params


def _adapt_conv(params: dict[str, Any], view: OpView, ins: list[tuple[int, ...]]) -> None:
    numbers = params["dimension_numbers"]
    outputs = ins[1][numbers.rhs_spec[0]]
    if params["feature_group_count"] > 1:
        params["feature_group_count"] = ins[0][numbers.lhs_spec[1]] // ins[1][numbers.rhs_spec[1]]
    if params["batch_group_count"] > 1 and outputs < view.operands[1].shape[numbers.rhs_spec[0]]:
        shrink = view.operands[1].shape[numbers.rhs_spec[0]] // outputs
        shrunk = view.operands[0].shape[numbers.lhs_spec[0]] // ins[0][numbers.lhs_spec[0]]
        if shrunk > 1:
            params["batch_group_count"] //= shrink


def run(eqn: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    results = eqn.primitive.bind(*operands, **params)
    results = results if eqn.primitive.multiple_results else [results]
    return [r if is_key(r) else np.asarray(r) for r in results]


def _indexed(view: OpView, rule: OpRule, shard: Shard) -> int | None:
    """The component of the index vector that chooses rows of the split dim, if the dim is an indexed one."""
    if not view.primitive.startswith(("gather", "scatter")):
        return None
    numbers = view.params["dimension_numbers"]
    name = "start_index_map" if view.primitive == "gather" else "scatter_dims_to_operand_dims"
    batching = numbers.operand_batching_dims
    others = [rule.operands[1], *rule.operands[2:], *(rule.results if view.primitive == "gather" else ())]
    if any(shard.factor in e for dims in others for e in dims):
        return None
    for component, d in enumerate(getattr(numbers, name)):
        if shard.factor in rule.operands[0][d] and d not in batching:
            return component
    return None


def _bounded(view: OpView, indices: Any) -> tuple[Any, Any]:
    """Indices clamped to where a full slice fits, and which of them needed no clamping."""
    numbers = view.params["dimension_numbers"]
    if view.primitive == "gather":
        dims, sizes = numbers.start_index_map, view.params["slice_sizes"]
        heights = [sizes[d] for d in dims]
    else:
        dims = numbers.scatter_dims_to_operand_dims
        kept = [
            d
            for d in range(len(view.operands[0].shape))
            if d not in numbers.inserted_window_dims and d not in numbers.operand_batching_dims
        ]
        sizes = dict(zip(kept, [view.operands[2].shape[w] for w in numbers.update_window_dims], strict=True))
        heights = [sizes.get(d, 1) for d in dims]
    limits = np.array([view.operands[0].shape[d] - h for d, h in zip(dims, heights, strict=True)], indices.dtype)
    return np.clip(indices, 0, limits), np.all((indices >= 0) & (indices <= limits), axis=-1)


def _over_result(view: OpView, mask: Any) -> Any:
    """A mask over the indices' batch dims, spread over the gather's result."""
    shape = view.results[0].shape
    offsets = set(view.params["dimension_numbers"].offset_dims)
    rest = iter(mask.shape)
    return mask.reshape([1 if d in offsets else next(rest) for d in range(len(shape))])


def _run_gather_part(eqn: Any, view: OpView, rule: OpRule, operands: list[Any], shard: Shard, part: int) -> Any:
    """Rows that fall into the shard, zeros elsewhere."""
    size = rule.sizes[shard.factor] // shard.count
    indices, _ = _bounded(view, operands[1])
    mine = (indices[..., part] >= shard.index * size) & (indices[..., part] < (shard.index + 1) * size)
    shifted = indices.copy()
    shifted[..., part] = np.clip(indices[..., part] - shard.index * size, 0, size - 1)
    piece = cut(operands[0], rule.operands[0], rule.sizes, shard)
    rows = run(eqn, [piece, shifted], _adapt(view, rule, shard))[0]
    return np.where(_over_result(view, mine), rows, np.zeros((), rows.dtype))


def _run_scatter_part(eqn: Any, view: OpView, rule: OpRule, operands: list[Any], shard: Shard, part: int) -> Any:
    """The shard's rows of the result: updates of other rows are left out."""
    size = rule.sizes[shard.factor] // shard.count
    indices = operands[1]
    if "CLIP" in str(view.params["mode"]):
        indices, _ = _bounded(view, indices)
    shifted = np.array(indices)
    mine = (indices[..., part] >= shard.index * size) & (indices[..., part] < (shard.index + 1) * size)
    shifted[..., part] = np.where(mine, indices[..., part] - shard.index * size, -1)
    params = _adapt(view, rule, shard) | {"mode": jax.lax.GatherScatterMode.FILL_OR_DROP}
    piece = cut(operands[0], rule.operands[0], rule.sizes, shard)
    return run(eqn, [piece, shifted, operands[2]], params)[0]


def run_shard(eqn: Any, view: OpView, rule: OpRule, operands: list[Any], shard: Shard) -> list[Any]:
    """What one shard computes from its parts of the operands."""
    part = _indexed(view, rule, shard)
    if part is not None:
        runner = _run_gather_part if view.primitive == "gather" else _run_scatter_part
        return [runner(eqn, view, rule, operands, shard, part)]
    pieces = [cut(x, dims, rule.sizes, shard) for x, dims in zip(operands, rule.operands, strict=True)]
    if view.primitive.startswith("scatter") and shard.factor in rule.combine and shard.index:
        neutral = {"sum": 0, "mul": 1}.get(rule.combine[shard.factor])
        pieces[0] = pieces[0] if neutral is None else np.full_like(pieces[0], neutral)
    results = run(eqn, pieces, _adapt(view, rule, shard))
    if view.primitive == "iota" and shard.factor in rule.results[0][view.params["dimension"]]:
        dim = view.params["dimension"]
        results = [results[0] + results[0].shape[dim] * shard.index]
    return results


# ------------------------------------------------------------------------------------------- the proof


def same(got: Any, wanted: Any, what: Any) -> None:
    if is_key(wanted):
        got, wanted = jax.random.key_data(got), jax.random.key_data(wanted)
    assert got.shape == wanted.shape, what
    if np.issubdtype(wanted.dtype, np.inexact) or wanted.dtype.name == "bfloat16":
        tolerance = 2e-2 if wanted.dtype.itemsize == 2 else 2e-5
        wide = np.complex64 if np.iscomplexobj(wanted) else np.float32
        np.testing.assert_allclose(
            got.astype(wide), wanted.astype(wide), rtol=tolerance, atol=tolerance, err_msg=str(what)
        )
    else:
        np.testing.assert_array_equal(got, wanted, err_msg=str(what))


def prove(eqn: Any, operands: list[Any], rule: OpRule | None = None, most_counts: int = 3) -> OpRule:
    """Every factor of the rule, by execution, with up to `most_counts` numbers of shards; returns the rule."""
    view = view_of(eqn)
    rule = rule or rule_for(view)
    assert rule is not None, f"no rule for {view.primitive}"
    check_shapes(view, rule)
    operands = [x if is_key(x) else np.asarray(x) for x in operands]
    whole = run(eqn, operands, dict(eqn.params))
    for factor, size in enumerate(rule.sizes):
        for count in divisors(size, most_counts):
            _prove_factor(eqn, view, rule, operands, whole, factor, count)
    prove_linear(eqn, view, rule, operands, whole)
    return rule


def _prove_factor(
    eqn: Any, view: OpView, rule: OpRule, operands: list[Any], whole: list[Any], factor: int, count: int
) -> None:
    shards = [Shard(factor, count, k) for k in range(count)]
    found = [run_shard(eqn, view, rule, operands, s) for s in shards]
    for i, dims in enumerate(rule.results):
        what = (view.primitive, rule, shards[0], i)
        if any(factor in entry for entry in dims):
            for shard, results in zip(shards, found, strict=True):
                if view.primitive not in _UNDEFINED:
                    same(results[i], cut(whole[i], dims, rule.sizes, shard), what)
            continue
        if factor not in rule.reduced_factors():  # another result carries it: this one does not depend on it
            for results in found:
                same(results[i], whole[i], what)
            continue
        operation = COMBINE[rule.combine.get(factor, "sum")]
        total = found[0][i]
        for results in found[1:]:
            total = operation(total, results[i])
        wanted = whole[i]
        if view.primitive == "gather" and "FILL" in str(view.params["mode"]):
            inside = _over_result(view, _bounded(view, operands[1])[1])  # the fill goes on after the combination
            total, wanted = (np.where(inside, x, np.zeros((), wanted.dtype)) for x in (total, wanted))
        same(total, wanted, what)


def prove_linear(eqn: Any, view: OpView, rule: OpRule, operands: list[Any], whole: list[Any]) -> None:
    """f(x) = f(x - y) + f(y) in every linear operand, in all of them together where they are jointly so."""
    joint = view.primitive in JOINTLY_LINEAR and len(rule.linear) > 1
    groups = [rule.linear] if joint else [(i,) for i in rule.linear]
    rng = np.random.default_rng(5)
    for group in groups:
        if any(not np.issubdtype(operands[i].dtype, np.inexact) for i in group):
            continue
        left, right = list(operands), list(operands)
        for i in group:
            right[i] = rng.normal(size=operands[i].shape).astype(operands[i].dtype)
            left[i] = operands[i] - right[i]
        params = dict(eqn.params)
        parts = zip(run(eqn, left, params), run(eqn, right, params), whole, strict=True)
        for a, b, wanted in parts:
            same(np.asarray(a + b).astype(wanted.dtype), wanted, (view.primitive, "linear", group))


# ------------------------------------------------------------------------------------------- operands


def random_operands(eqn: Any, seed: int = 0) -> list[Any]:
    """Operands within the primitive's domain; indices a little out of range where the mode allows it."""
    rng = np.random.default_rng(seed)
    view = view_of(eqn)
    made = [_random(a, rng) for a in view.operands]
    if view.primitive.startswith(("gather", "scatter")):
        numbers = view.params["dimension_numbers"]
        name = "start_index_map" if view.primitive == "gather" else "scatter_dims_to_operand_dims"
        limits = np.array([view.operands[0].shape[d] for d in getattr(numbers, name)])
        safe = "PROMISE" in str(view.params["mode"])
        low, high = (0, limits) if safe else (-1, limits + 1)
        made[1] = rng.integers(low, high, size=view.operands[1].shape).astype(view.operands[1].dtype)
        if safe:
            made[1] = _bounded(view, made[1])[0]
    return [np.asarray(v.val) if hasattr(v, "val") else x for v, x in zip(eqn.invars, made, strict=True)]


def _random(aval: Aval, rng: np.random.Generator) -> Any:
    if aval.dtype.startswith("key"):
        return jax.random.split(jax.random.key(3), aval.shape) if aval.shape else jax.random.key(3)
    if aval.dtype == "bool":
        return rng.integers(0, 2, aval.shape).astype(bool)
    dtype = jnp.dtype(aval.dtype)
    if "int" in aval.dtype:
        return rng.integers(1, 7, aval.shape).astype(dtype)
    return rng.uniform(0.1, 0.9, aval.shape).astype(dtype)
