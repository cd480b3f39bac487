"""Convolutions: batch, output features, input features (reduced), groups of features."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from meshplan.rules._rule import FactorBuilder, OpRule, OpView, RuleFn
from meshplan.rules._window import WINDOW, Entry, Windows, halo_of


def conv_general_dilated(view: OpView) -> OpRule:
    """Groups, where there are any, are the major factor of the dims they divide.

    `feature_group_count` G: lhs features (g, i), rhs outputs (g, o), result features (g, o).
    `batch_group_count` G: lhs batch (g, n), rhs outputs (g, o), result features (g, o).
    Splitting g needs a convolution with G / n groups per shard. Spatial dims split without an exchange
    where windows do not overlap the borders (patches, 1 x 1 windows), else with a halo.
    """
    lhs, rhs, out = view.operands[0].shape, view.operands[1].shape, view.results[0].shape
    numbers, params = view.params["dimension_numbers"], view.params
    builder = FactorBuilder()
    right: list[Entry] = [()] * len(rhs)
    found = Windows(builder, [()] * len(lhs), [()] * len(out))
    _set_channels(view, builder, found.operand, right, found.result)
    met = 1
    for i, (d, w, o) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)):
        halo = halo_of(
            lhs[d], out[o], window=rhs[w], stride=params["window_strides"][i], low=params["padding"][i][0],
            dilation=params["lhs_dilation"][i], spread=params["rhs_dilation"][i],
        )  # fmt: skip
        met *= taps(
            lhs[d], rhs[w], out[o], stride=params["window_strides"][i], low=params["padding"][i][0],
            hole=params["lhs_dilation"][i], spread=params["rhs_dilation"][i],
        )  # fmt: skip
        steps = params["window_strides"][i] > 1 or params["rhs_dilation"][i] > 1
        # where windows step over rows, no convolution of a shard alone has the padding of the whole
        found.place(halo, d, o, alone=not steps or tuple(params["padding"][i]) == (0, 0))
    flops = 2.0 * out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * rhs[numbers.rhs_spec[1]] * met
    return builder.rule(
        [found.operand, right], [found.result], flops=flops, anchor=True, linear=(0, 1),
        whole=WINDOW if found.crossed else "", halos=found.halos,
    )  # fmt: skip


def taps(inputs: int, kernel: int, outputs: int, *, stride: int, low: int, hole: int, spread: int) -> int:
    """Pairs of an output position and a kernel element that meet an input element, along one dim.

    Padding and the holes of a dilated input meet none: a strided convolution's gradient multiplies mostly zeros,
    and compilers leave them out.
    """
    at = np.arange(outputs)[:, None] * stride - low + np.arange(kernel)[None, :] * spread
    return int(np.count_nonzero((at >= 0) & (at <= (inputs - 1) * hole) & (at % hole == 0)))


def _set_channels(
    view: OpView, builder: FactorBuilder, left: list[Entry], right: list[Entry], result: list[Entry]
) -> None:
    """Fills in batch and feature dims."""
    lhs, rhs = view.operands[0].shape, view.operands[1].shape
    numbers = view.params["dimension_numbers"]
    (lhs_batch, lhs_feature), (rhs_out, rhs_in) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    out_batch, out_feature = numbers.out_spec[:2]
    groups, batch_groups = view.params["feature_group_count"], view.params["batch_group_count"]
    group = builder.new(max(groups, batch_groups))
    inputs, outputs = builder.new(rhs[rhs_in]), builder.new(rhs[rhs_out] // max(groups, batch_groups))
    batch = builder.new(lhs[lhs_batch] // batch_groups)
    left[lhs_batch] = (group if batch_groups > 1 else ()) + batch
    left[lhs_feature] = (group if groups > 1 else ()) + inputs
    right[rhs_in] = inputs
    right[rhs_out] = result[out_feature] = group + outputs
    result[out_batch] = batch


RULES: MappingProxyType[str, RuleFn] = MappingProxyType({"conv_general_dilated": conv_general_dilated})
