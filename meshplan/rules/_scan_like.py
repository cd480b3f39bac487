"""Operations along a dim whose elements depend on each other: cumulative, sorting, windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType

from meshplan.rules._rule import FactorBuilder, Halo, OpRule, OpView, RuleFn
from meshplan.rules._shape import scalars
from meshplan.rules._window import WINDOW, halo_of, same_rank

_OVERLAP = "a row belongs to several windows, whose choices need rows of other shards"


def _log2(n: int) -> float:
    return math.ceil(math.log2(max(n, 2)))


def cumulative(linear: bool = False) -> RuleFn:
    """`cumsum` and kin: the accumulated dim stays whole, all others pass."""

    def rule(view: OpView) -> OpRule:
        builder = FactorBuilder()
        factors = builder.dims(view.operands[0].shape, whole={int(view.params["axis"])})
        return builder.rule(
            [factors], [factors], flops=view.operands[0].size, linear=(0,) if linear else (),
            whole="every element of the accumulated dim depends on those before it",
        )  # fmt: skip

    return rule


def sort(view: OpView) -> OpRule:
    """n operands sorted together along `dimension`, which stays whole."""
    dim = int(view.params["dimension"])
    shape = view.operands[0].shape
    builder = FactorBuilder()
    factors = builder.dims(shape, whole={dim})
    flops = view.operands[0].size * _log2(shape[dim] if shape else 1)
    return builder.rule(
        [factors] * len(view.operands), [factors] * len(view.results), flops=flops, anchor=True,
        whole="XLA gathers the sorted dim",
    )  # fmt: skip


def top_k(view: OpView) -> OpRule:
    """Values and positions of the largest elements along one dim (the last, or `axis`), which stays whole."""
    shape = view.operands[0].shape
    axis = view.params.get("axis", view.params.get("reduction_dimension", -1))
    dim = int(axis) % len(shape)
    builder = FactorBuilder()
    factors = builder.dims(shape, whole={dim})
    flops = view.operands[0].size * _log2(view.results[0].shape[dim])
    return builder.rule(
        [factors], [factors] * len(view.results), flops=flops, anchor=True, whole="XLA gathers the dim of a top_k"
    )


def _halo_of_dim(view: OpView, shape: Sequence[int], out: Sequence[int], d: int) -> Halo:
    """How rows of dim d are read by its window, from `shape` (unpooled) into `out` (pooled)."""
    params, ones = view.params, (1,) * len(shape)
    return halo_of(
        shape[d], out[d], window=params["window_dimensions"][d], stride=params["window_strides"][d],
        low=params["padding"][d][0], dilation=(params.get("base_dilation") or ones)[d],
        spread=(params.get("window_dilation") or ones)[d],
    )  # fmt: skip


def reduce_window(linear: bool = False, arrays: int = 0) -> RuleFn:
    """Pooling. `arrays`: how many operands are pooled, 0 for as many as there are results; then initial values."""

    def rule(view: OpView) -> OpRule:
        shape, out = view.operands[0].shape, view.results[0].shape
        builder = FactorBuilder()
        found = same_rank(shape, out, [_halo_of_dim(view, shape, out, d) for d in range(len(shape))], builder)
        count, made = arrays or len(view.results), len(view.results)
        flops = view.results[0].size * math.prod(view.params["window_dimensions"]) * made
        return builder.rule(
            [found.operand] * count + scalars(view, count), [found.result] * made, flops=flops,
            linear=(0,) if linear else (), whole=WINDOW if found.crossed else "",
            halos=found.copied(range(count), range(made)),
        )  # fmt: skip

    return rule


def _select_and_scatter(linear: tuple[int, ...]) -> RuleFn:
    """The gradient of max pooling: `source` is pooled, `operand` and the result are not."""

    def rule(view: OpView) -> OpRule:
        big, small = view.results[0].shape, min((a.shape for a in view.operands if a.shape), key=math.prod)
        builder = FactorBuilder()
        found = same_rank(big, small, [_halo_of_dim(view, big, small, d) for d in range(len(big))], builder)
        entries = [(found.operand if a.shape == big else found.result) if a.shape else () for a in view.operands]
        return builder.rule(
            entries, [found.operand], flops=math.prod(small) * math.prod(view.params["window_dimensions"]),
            linear=linear, whole=_OVERLAP if found.crossed else "",
        )  # fmt: skip

    return rule


RULES: MappingProxyType[str, RuleFn] = MappingProxyType({
    "cumsum": cumulative(linear=True),
    **{name: cumulative() for name in ("cumprod", "cummax", "cummin", "cumlogsumexp")},
    "sort": sort,
    "top_k": top_k,
    "approx_top_k": top_k,
    "reduce_window": reduce_window(),
    "reduce_window_sum": reduce_window(linear=True),
    "reduce_window_max": reduce_window(),
    "reduce_window_min": reduce_window(),
    "select_and_scatter": _select_and_scatter(()),
    "select_and_scatter_add": _select_and_scatter((0,)),
    "select_and_gather_add": reduce_window(linear=True, arrays=2),
})  # fmt: skip
