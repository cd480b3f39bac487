"""Proof of factor rules by execution.

`prove(eqn, operands)` runs a traced equation's primitive on the whole operands, then, factor by
factor, on cut operands with the static parameters of one shard, and holds the shards'
results against the same cut of the whole result, or their combination against the whole. Halos are
proved too: a shard runs on its block and the rows that the halo says it needs from others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshplan.core import _jax_primitives
from meshplan.rules import JOINTLY_LINEAR, Aval, Halo, OpRule, OpView, rule_for, with_halos

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip
_CLOSED = ("scatter", "reduce", "select_and", "custom_partitioning", "pallas_call")  # the inside belongs to them
_UNDEFINED = frozenset({"empty"})
_PARTIAL = ("reshape", "conv_general", "reduce_window", "select_and", "slice", "pad", "rev", "scaled_dot")


@functools.lru_cache(maxsize=1)
def registered() -> frozenset[str]:
    """Names of the primitives of the installed jax."""
    return frozenset(_jax_primitives.registered_primitives())


def is_key(x: Any) -> bool:
    return str(x.dtype).startswith("key<")


def equations(fn: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """Every equation of the traced function, those of inner jaxprs in place of their call."""

    def walk(jaxpr: Any) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            inner = [j for value in eqn.params.values() for j in _jaxprs(value)]
            if inner and not eqn.primitive.name.startswith(_CLOSED):
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
                if len(entry) == 1 and not view.primitive.startswith(_PARTIAL):
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


_WINDOWED = ("conv_general", "reduce_window", "select_and", "slice", "pad", "rev")


def window_of(view: OpView, d: int) -> tuple[Halo, int, int]:
    """How dim d of the smaller side is read, from the parameters alone; the operand's dim and the parameters' index."""
    shape, out, params = view.operands[0].shape, view.results[0].shape, view.params
    if view.primitive.startswith("select_and_scatter"):
        shape, out = out, min((a.shape for a in view.operands if a.shape), key=math.prod)
    place: dict[str, Any] = {"operands": ((0, d),), "results": ((0, d),), "size": shape[d], "out": out[d]}
    if view.primitive == "pad":
        low, _, inside = params["padding_config"][d]
        return Halo(**place, low=low, dilation=inside + 1), d, d
    if view.primitive == "slice":
        return Halo(**place, low=-params["start_indices"][d], stride=(params["strides"] or (1,) * len(shape))[d]), d, d
    if view.primitive == "rev":
        return Halo(**place, reverse=True), d, d
    if view.primitive == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        i = numbers.out_spec[2:].index(d)
        o, d = d, numbers.lhs_spec[2 + i]
        place = {"operands": ((0, d),), "results": ((0, o),), "size": shape[d], "out": out[o]}
        window, spread = view.operands[1].shape[numbers.rhs_spec[2 + i]], params["rhs_dilation"][i]
        dilation = params["lhs_dilation"][i]
    else:
        ones = (1,) * len(shape)
        i, window = d, params["window_dimensions"][d]
        spread, dilation = (params.get(k, ones)[d] for k in ("window_dilation", "base_dilation"))
    reach = (window - 1) * spread + 1
    halo = Halo(
        **place, window=reach, stride=params["window_strides"][i], low=params["padding"][i][0], dilation=dilation
    )
    return halo, d, i


def window_params(view: OpView, d: int, index: int, count: int, rows: tuple[int, int]) -> dict[str, Any]:
    """The parameters with which block `index` of `count` runs, holding these rows of the operand."""
    halo, _, i = window_of(view, d)
    first, last = halo.reads(index, count)
    low, high = rows[0] * halo.dilation - first, last - (rows[1] - 1) * halo.dilation
    params = dict(view.params)
    if view.primitive == "rev":
        return params
    if view.primitive == "slice":
        starts, limits = list(params["start_indices"]), list(params["limit_indices"])
        starts[i], limits[i] = -low, last - rows[0] + 1
        return params | {"start_indices": tuple(starts), "limit_indices": tuple(limits)}
    name = "padding_config" if view.primitive == "pad" else "padding"
    if view.primitive.startswith(("reduce_window", "select_and")):
        low, high = max(low, 0), max(high, 0)  # rows that no window reaches are no padding
    pairs = list(params[name])
    pairs[i] = (low, high, *pairs[i][2:])
    return params | {name: tuple(pairs)}


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
    if view.primitive.startswith(_WINDOWED):
        params |= _adapt_window(view, rule, shard)
    return params


def _adapt_window(view: OpView, rule: OpRule, shard: Shard) -> dict[str, Any]:
    """The window's parameters where the split dim is read through one."""
    operand = rule.operands[0]
    for d, entry in enumerate(rule.results[0]):
        spatial = view.primitive != "conv_general_dilated" or d in view.params["dimension_numbers"].out_spec[2:]
        if shard.factor in entry and spatial:
            halo, source, _ = window_of(view, d)
            plain = halo.size == halo.out and (halo.window, halo.low, halo.dilation) == (1, 0, 1)
            if plain or shard.factor not in operand[source]:
                continue
            own = halo.size // shard.count
            block = (shard.index * own, (shard.index + 1) * own)
            changed = window_params(view, d, shard.index, shard.count, block)
            return {k: v for k, v in changed.items() if v is not view.params[k]}
    return {}


def _adapt_conv(params: dict[str, Any], view: OpView, ins: list[tuple[int, ...]]) -> None:
    numbers = params["dimension_numbers"]
    if params["feature_group_count"] > 1:
        params["feature_group_count"] = ins[0][numbers.lhs_spec[1]] // ins[1][numbers.rhs_spec[1]]
    outputs, batch = numbers.rhs_spec[0], numbers.lhs_spec[0]
    if ins[1][outputs] < view.operands[1].shape[outputs] and ins[0][batch] < view.operands[0].shape[batch]:
        params["batch_group_count"] //= view.operands[0].shape[batch] // ins[0][batch]


# what takes the time here is the compiler
_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True, slots=True)
class _Call:
    """A primitive and its parameters, which may not be hashable: equal where their text is."""

    text: str
    primitive: Any = field(compare=False)
    params: Any = field(compare=False)


@functools.lru_cache(maxsize=64)
def _jitted(call: _Call) -> Any:
    return jax.jit(functools.partial(call.primitive.bind, **call.params), compiler_options=_QUICKLY)


@dataclass(frozen=True, slots=True)
class Traced:
    """An equation whose parameters hold shapes: a shard runs `fn` anew instead of the equation."""

    eqn: Any
    fn: Callable[..., Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.eqn, name)


def run(eqn: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    """The primitive on these operands: results as numpy arrays, keys as they are."""
    if isinstance(eqn, Traced):
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(eqn.fn)(*operands))]
    text = f"{eqn.primitive.name} {sorted(params.items(), key=lambda item: item[0])}"
    results = _jitted(_Call(text, eqn.primitive, params))(*operands)
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


def _run_update_part(eqn: Any, view: OpView, rule: OpRule, operands: list[Any], shard: Shard) -> Any:
    """A row written at a position: into the shard that has it, nothing into the others."""
    (d,) = [d for d, e in enumerate(rule.operands[0]) if shard.factor in e]
    size = rule.sizes[shard.factor] // shard.count
    piece = cut(operands[0], rule.operands[0], rule.sizes, shard)
    start = int(operands[2 + d]) - shard.index * size
    if not 0 <= start < size:
        return piece
    starts = [np.asarray(start, x.dtype) if i == d else x for i, x in enumerate(operands[2:])]
    return run(eqn, [piece, operands[1], *starts], dict(view.params))[0]


def _run_ragged_part(eqn: Any, view: OpView, rule: OpRule, operands: list[Any], shard: Shard) -> Any:
    """A shard of the ragged dim counts its own rows of every group; a shard of the groups makes theirs."""
    spec = view.params["ragged_dot_dimension_numbers"]
    pieces = [cut(x, dims, rule.sizes, shard) for x, dims in zip(operands, rule.operands, strict=True)]
    sizes, (ragged,) = pieces[2], spec.lhs_ragged_dimensions
    params = dict(view.params)
    if shard.factor in rule.operands[0][ragged]:
        ends = np.cumsum(sizes, -1)
        rows = pieces[0].shape[ragged]
        inside = [np.clip(x - shard.index * rows, 0, rows) for x in (ends - sizes, ends)]
        return run(eqn, [*pieces[:2], inside[1] - inside[0]], params)[0]
    count = sizes.shape[-1] // shard.count
    first = shard.index * count
    before = sizes[..., :first].sum(-1, keepdims=True)
    own = np.concatenate([before, sizes[..., first : first + count]], -1).astype(sizes.dtype)
    in_rhs = [d for d in spec.rhs_group_dimensions if shard.factor in rule.operands[1][d]]
    if in_rhs:  # an empty group stands for the rows of all groups before
        empty = np.zeros_like(np.take(pieces[1], [0], in_rhs[0]))
        return run(eqn, [pieces[0], np.concatenate([empty, pieces[1]], in_rhs[0]), own], params)[0]
    if any(shard.factor in e for dims in rule.operands for e in dims):
        return run(eqn, pieces, params)[0]
    return run(eqn, [*pieces[:2], own], params)[0][1:]


def _run_bits_part(view: OpView, rule: OpRule, operands: list[Any], shard: Shard) -> Any:
    """New random words of a shard: Threefry at the shard's own positions."""
    from jax.extend.random import threefry2x32_p

    lead = len(view.operands[0].shape)
    shape = view.results[0].shape[lead:]
    flat = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    positions = cut(flat, rule.results[0][lead:], rule.sizes, shard)
    words = np.asarray(jax.random.key_data(operands[0])).reshape(-1, 2)
    made = []
    for first, second in words:
        high, low = threefry2x32_p.bind(first, second, np.zeros_like(positions), positions)
        made.append(high ^ low if view.primitive == "random_bits" else jnp.stack([high, low], -1))
    all_words = jnp.stack(made).reshape(*view.operands[0].shape, *made[0].shape)
    return np.asarray(all_words) if view.primitive == "random_bits" else jax.random.wrap_key_data(all_words)


def run_shard(eqn: Any, view: OpView, rule: OpRule, operands: list[Any], shard: Shard) -> list[Any]:
    """What one shard computes from its parts of the operands."""
    part = _indexed(view, rule, shard)
    if part is not None:
        runner = _run_gather_part if view.primitive == "gather" else _run_scatter_part
        return [runner(eqn, view, rule, operands, shard, part)]
    new = not any(shard.factor in e for dims in rule.operands for e in dims)
    if view.primitive in ("random_bits", "random_split") and new:
        return [_run_bits_part(view, rule, operands, shard)]
    if view.primitive == "ragged_dot_general":
        return [_run_ragged_part(eqn, view, rule, operands, shard)]
    if view.primitive == "dynamic_update_slice" and not any(shard.factor in e for e in rule.operands[1]):
        return [_run_update_part(eqn, view, rule, operands, shard)]
    pieces = [cut(x, dims, rule.sizes, shard) for x, dims in zip(operands, rule.operands, strict=True)]
    if view.primitive.startswith("scatter") and shard.factor in rule.combine and shard.index:
        neutral = {"sum": 0, "mul": 1}.get(rule.combine[shard.factor])
        pieces[0] = pieces[0] if neutral is None else np.full_like(pieces[0], neutral)
    results = run(eqn, pieces, _adapt(view, rule, shard))
    if view.primitive == "iota" and shard.factor in rule.results[0][view.params["dimension"]]:
        dim = view.params["dimension"]
        results = [results[0] + results[0].shape[dim] * shard.index]
    if view.primitive == "iota_2x32_shape":
        flat = np.arange(math.prod(view.results[0].shape), dtype=np.uint32).reshape(view.results[0].shape)
        results = [results[0], cut(flat, rule.results[1], rule.sizes, shard)]  # positions, not the shape's own count
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
    for halo in rule.halos:
        for count in divisors(math.gcd(halo.size, halo.out), most_counts):
            _prove_halo(eqn, view, rule, halo, operands, whole, count)
    prove_linear(eqn, view, rule, operands, whole)
    return rule


def _prove_halo(
    eqn: Any, view: OpView, rule: OpRule, halo: Halo, operands: list[Any], whole: list[Any], count: int
) -> None:
    """Every block of the result from the rows that the halo names; some rows are another block's."""
    extended, halos = with_halos(rule)
    check_shapes(view, extended)
    (factor,) = [f for f, h in halos.items() if h == halo]
    padded = view.primitive == "conv_general_dilated" and any(any(pair) for pair in view.params["padding"])
    alone = halo.received(extended.sizes[factor]) == 0
    assert padded or not alone, (view.primitive, halo, "needs no rows of others: a plain factor")
    for index in range(count):
        rows = halo.rows(index, count)
        pieces = list(operands)
        for i, d in halo.operands:
            pieces[i] = np.take(operands[i], np.arange(*rows), d)
        params = window_params(view, halo.results[0][1], index, count, rows)
        results = run(eqn, pieces, params)
        for i, _ in halo.results:
            wanted = cut(whole[i], extended.results[i], extended.sizes, Shard(factor, count, index))
            same(results[i], wanted, (view.primitive, halo, index, count))


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
