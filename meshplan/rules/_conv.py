"""Convolutions: batch, output features, input features (reduced), groups of features."""

from __future__ import annotations

import math
from types import MappingProxyType

from meshplan.rules._rule import FactorBuilder, OpRule, OpView, RuleFn

Entry = tuple[int, ...]
_SPATIAL = "spatial dims with a window stay whole: shards would exchange the rows at their borders"


def pointwise(size: int, out: int, window: int, stride: int, padding: tuple[int, int]) -> bool:
    """A window of one element at stride 1 without padding: output row i is made of input row i alone."""
    return window == 1 and stride == 1 and tuple(padding) == (0, 0) and size == out


def conv_general_dilated(view: OpView) -> OpRule:
    """Groups, where there are any, are the major factor of the dims they divide.

    `feature_group_count` G: lhs features (g, i), rhs outputs (g, o), result features (g, o).
    `batch_group_count` G: lhs batch (g, n), rhs outputs (g, o), result features (g, o).
    Splitting g needs a convolution with G / n groups per shard. For features in groups of several
    channels XLA has no such partitioning (measured: it gathers both operands), so g stays whole;
    it gathers the lhs there even where only the batch is split.
    """
    lhs, rhs, out = view.operands[0].shape, view.operands[1].shape, view.results[0].shape
    numbers = view.params["dimension_numbers"]
    builder = FactorBuilder()
    left, right, result = [()] * len(lhs), [()] * len(rhs), [()] * len(out)
    reason = _set_channels(view, builder, left, right, result)
    spatial_whole = _set_spatial(view, builder, left, result)
    whole = "; ".join(r for r in (reason, _SPATIAL if spatial_whole else "") if r)
    rhs_out = numbers.rhs_spec[0]
    flops = 2.0 * math.prod(out) * math.prod(n for d, n in enumerate(rhs) if d != rhs_out)
    return builder.rule([left, right], [result], flops=flops, anchor=True, linear=(0, 1), whole=whole)


def _set_channels(
    view: OpView, builder: FactorBuilder, left: list[Entry], right: list[Entry], result: list[Entry]
) -> str:
    """Fills in batch and feature dims; the reason why groups stay whole, if they do."""
    lhs, rhs = view.operands[0].shape, view.operands[1].shape
    numbers = view.params["dimension_numbers"]
    (lhs_batch, lhs_feature), (rhs_out, rhs_in) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    out_batch, out_feature = numbers.out_spec[:2]
    groups, batch_groups = view.params["feature_group_count"], view.params["batch_group_count"]
    if groups == 1 and batch_groups == 1:
        left[lhs_batch] = result[out_batch] = builder.new(lhs[lhs_batch])
        right[rhs_out] = result[out_feature] = builder.new(rhs[rhs_out])
        left[lhs_feature] = right[rhs_in] = builder.new(rhs[rhs_in])
        return ""
    if groups > 1:
        left[lhs_batch] = result[out_batch] = builder.new(lhs[lhs_batch])
        if rhs[rhs_in] > 1:
            return "XLA gathers both operands of a convolution whose feature groups hold several channels"
        group = builder.new(groups)
        left[lhs_feature] = group
        right[rhs_out] = result[out_feature] = group + builder.new(rhs[rhs_out] // groups)
        return ""
    left[lhs_feature] = right[rhs_in] = builder.new(rhs[rhs_in])
    group = builder.new(batch_groups)
    left[lhs_batch] = group + builder.new(lhs[lhs_batch] // batch_groups)
    right[rhs_out] = result[out_feature] = group + builder.new(rhs[rhs_out] // batch_groups)
    result[out_batch] = left[lhs_batch][len(group) :]
    return ""


def _set_spatial(view: OpView, builder: FactorBuilder, left: list[Entry], result: list[Entry]) -> bool:
    """Fills in spatial dims without a window; True where one with a window stays whole."""
    lhs, rhs, out = view.operands[0].shape, view.operands[1].shape, view.results[0].shape
    numbers, params = view.params["dimension_numbers"], view.params
    stay = False
    for i, (d, w, o) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)):
        plain = pointwise(lhs[d], out[o], rhs[w], params["window_strides"][i], params["padding"][i])
        if plain and params["lhs_dilation"][i] == 1:
            left[d] = result[o] = builder.new(lhs[d])
        else:
            stay |= lhs[d] > 1 or out[o] > 1
    return stay


RULES: MappingProxyType[str, RuleFn] = MappingProxyType({"conv_general_dilated": conv_general_dilated})
