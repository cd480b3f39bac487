"""What one shard does of an operation that runs on shards, where that is more than the operation itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from meshplan.core import Axes, MeshShape
from meshplan.program import Op

Bind = Callable[[Sequence[Any], dict[str, Any]], Sequence[Any]]  # the equation on these operands, parameters exchanged
Split = Mapping[int, Axes]  # the axes that split each factor that is split
Form = Callable[[Op, Split, MeshShape, Sequence[Any], Bind], Sequence[Any]]


def itself(op: Op, split: Split, mesh: MeshShape, parts: Sequence[Any], bind: Bind) -> Sequence[Any]:
    """A shard's part is the operation on the operands' parts."""
    return bind(parts, {})


def the_users(op: Op, split: Split, mesh: MeshShape, parts: Sequence[Any], bind: Bind) -> Sequence[Any]:
    """A shard's part is what the user's function makes of its operands."""
    assert op.rule.on_shards is not None
    return jax.tree.leaves(op.rule.on_shards(*parts))


def ffi_call(op: Op, split: Split, mesh: MeshShape, parts: Sequence[Any], bind: Bind) -> Sequence[Any]:
    """The same call, told of a shard's results."""
    avals = []
    for dims, aval in zip(op.rule.results, op.view.params["result_avals"], strict=True):
        parted = (math.prod(mesh.size(split.get(f, ())) for f in entry) for entry in dims)
        avals.append(aval.update(shape=tuple(n // p for n, p in zip(aval.shape, parted, strict=True))))
    return bind(parts, {"result_avals": tuple(avals)})


def convolution(op: Op, split: Split, mesh: MeshShape, parts: Sequence[Any], bind: Bind) -> Sequence[Any]:
    """Split groups: a shard has fewer of them."""
    numbers = op.view.params["dimension_numbers"]
    outputs = op.rule.operands[1][numbers.rhs_spec[0]]
    changes: dict[str, Any] = {}
    for name, dim in (("feature_group_count", numbers.lhs_spec[1]), ("batch_group_count", numbers.lhs_spec[0])):
        if op.view.params[name] > 1:  # the factors of groups are in the lhs and in the outputs
            groups = set(op.rule.operands[0][dim]) & set(outputs)
            changes[name] = op.view.params[name] // math.prod(mesh.size(split.get(f, ())) for f in groups)
    return bind(parts, changes)


def ragged_dot(op: Op, split: Split, mesh: MeshShape, parts: Sequence[Any], bind: Bind) -> Sequence[Any]:
    """Split rows: a shard counts which of its rows belong to which group. Split groups: it rolls the rows of its own
    groups to the front, where `ragged_dot` expects them, and leaves zeros for the others."""
    spec = op.view.params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), _ = spec.dot_dimension_numbers
    (rows,) = spec.lhs_ragged_dimensions
    lhs, rhs, sizes, *others = parts
    if own := _axes(op.rule.operands[0][rows], split):
        count = lhs.shape[rows]
        ends = jnp.cumsum(sizes, -1)
        begins = ends - sizes
        first = _index(own, sizes) * count
        sizes = jnp.clip(ends - first, 0, count) - jnp.clip(begins - first, 0, count)
    contracted = rows in lhs_contract
    groups = _axes(op.rule.results[0][0], split) if contracted else _axes(
        tuple(f for d in spec.rhs_group_dimensions for f in op.rule.operands[1][d]), split
    )
    if not groups:
        return bind([lhs, rhs, sizes, *others], {})
    count = sizes.shape[-1] // mesh.size(groups)
    first = _index(groups, sizes) * count
    before = jnp.where(jnp.arange(sizes.shape[-1]) < first, sizes, 0).sum(-1, dtype=sizes.dtype)
    mine = jax.lax.dynamic_slice_in_dim(sizes, first, count, -1)
    lhs = jnp.roll(lhs, -before, rows)
    if contracted:
        rhs = jnp.roll(rhs, -before, rhs_contract[list(lhs_contract).index(rows)])
        return bind([lhs, rhs, mine, *others], {})
    (found,) = bind([lhs, rhs, mine, *others], {})
    place = next(d for d, f in enumerate(op.rule.results[0]) if f == op.rule.operands[0][rows] and f)
    return [jnp.roll(found, before, place)]


def scatter_one(op: Op, split: Split, mesh: MeshShape, parts: Sequence[Any], bind: Bind) -> Sequence[Any]:
    """One slice written into split dims: the shard that has the place writes, the others drop it.

    A dim that the slice fills has its place at 0 on every shard.
    """
    numbers = op.view.params["dimension_numbers"]
    operand, indices, updates = parts
    shape, heights = op.view.operands[0].shape, _heights(op)
    for component, d in enumerate(numbers.scatter_dims_to_operand_dims):
        at = indices[..., component]
        if "CLIP" in str(op.view.params["mode"]):
            at = jnp.clip(at, 0, shape[d] - heights[d])
        if heights[d] < shape[d] and (axes := _axes(op.rule.operands[0][d], split)):
            outside = (at < 0) | (at >= shape[d])
            at = jnp.where(outside, shape[d], at - _index(axes, at) * operand.shape[d])
        indices = indices.at[..., component].set(at)
    return bind([operand, indices, updates], {"mode": jax.lax.GatherScatterMode.FILL_OR_DROP})


def _heights(op: Op) -> list[int]:
    """Rows of every dim of a scatter's operand that one slice fills."""
    numbers, updates = op.view.params["dimension_numbers"], op.view.operands[2].shape
    hidden = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = iter(numbers.update_window_dims)
    return [1 if d in hidden else updates[next(windows)] for d in range(len(op.view.operands[0].shape))]


def _axes(factors: Sequence[int], split: Split) -> Axes:
    return tuple(a for f in factors for a in split.get(f, ()))


def _index(axes: Axes, like: Any) -> Any:
    """The shard's number along these axes, outermost first."""
    return jax.lax.axis_index(axes).astype(like.dtype)


FORMS: Mapping[str, Form] = MappingProxyType({
    "conv_general_dilated": convolution, "ffi_call": ffi_call, "ragged_dot_general": ragged_dot,
    "scatter": scatter_one,
    **{f"scatter{dash}{n}": scatter_one for dash in "-_" for n in ("add", "sub", "mul", "min", "max")},
})  # fmt: skip
