"""Operations along a dim whose elements depend on each other: cumulative, sorting, windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType

from meshplan.rules._conv import pointwise
from meshplan.rules._rule import FactorBuilder, OpRule, OpView, RuleFn
from meshplan.rules._shape import scalars

_WINDOW = "dims with a window stay whole: shards would exchange the rows at their borders"


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


def _free_dims(view: OpView, shape: Sequence[int], out: Sequence[int]) -> set[int]:
    """Dims over which the window does not reach."""
    params = view.params
    ones = (1,) * len(shape)
    dilation = params.get("base_dilation", ones)
    return {
        d
        for d in range(len(shape))
        if dilation[d] == 1
        and pointwise(
            shape[d], out[d], params["window_dimensions"][d], params["window_strides"][d], params["padding"][d]
        )
    }


def reduce_window(linear: bool = False) -> RuleFn:
    """Pooling: dims without a window pass, dims with one stay whole. Also for n operands with initial values."""

    def rule(view: OpView) -> OpRule:
        shape, out = view.operands[0].shape, view.results[0].shape
        builder = FactorBuilder()
        windowed = set(range(len(shape))) - _free_dims(view, shape, out)
        factors = builder.dims(shape, whole=windowed)
        count = len(view.results)
        flops = view.results[0].size * math.prod(view.params["window_dimensions"]) * count
        return builder.rule(
            [factors] * count + scalars(view, count), [factors] * len(view.results), flops=flops,
            linear=(0,) if linear else (), whole=_WINDOW if windowed else "",
        )  # fmt: skip

    return rule


def _select_and(linear: tuple[int, ...]) -> RuleFn:
    """The gradients of max pooling. Operands `source` (pooled shape) or `tangents` (unpooled shape), and `operand`."""

    def rule(view: OpView) -> OpRule:
        shapes = [a.shape for a in view.operands] + [a.shape for a in view.results]
        big, small = max(shapes, key=math.prod), min((s for s in shapes if s), key=math.prod)
        builder = FactorBuilder()
        windowed = set(range(len(big))) - _free_dims(view, big, small)
        factors = builder.dims(big, whole=windowed)
        entries = [factors if a.shape else [] for a in view.operands]
        flops = math.prod(small) * math.prod(view.params["window_dimensions"])
        return builder.rule(
            entries, [factors], flops=flops, linear=linear, whole=_WINDOW if windowed else ""
        )

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
    "select_and_scatter": _select_and(()),
    "select_and_scatter_add": _select_and((0,)),
    "select_and_gather_add": _select_and((0,)),
})  # fmt: skip
