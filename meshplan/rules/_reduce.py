"""Reductions: the reduced dims are reduced factors where partial results combine."""

from __future__ import annotations

from types import MappingProxyType

from meshplan.rules._rule import Combine, FactorBuilder, OpRule, OpView, RuleFn


def reduction(combine: Combine | None, linear: bool = False, whole: str = "") -> RuleFn:
    """The rule of `reduce_*`; `combine=None`: partial results cannot be combined, the reduced dims stay whole."""

    def rule(view: OpView) -> OpRule:
        axes = {int(a) for a in view.params["axes"]}
        shape = view.operands[0].shape
        builder = FactorBuilder()
        factors = builder.dims(shape, whole=() if combine else axes)
        result = [f for d, f in enumerate(factors) if d not in axes]
        combined: dict[int, Combine] = {f: combine for d in axes for f in factors[d] if combine is not None}
        return builder.rule(
            [factors], [result] * len(view.results), combine=combined, flops=view.operands[0].size,
            linear=(0,) if linear else (), whole=whole,
        )  # fmt: skip

    return rule


def _reduce(view: OpView) -> OpRule:
    """`reduce` with any function of n operands and n initial values."""
    axes = {int(a) for a in view.params["dimensions"]}
    count = len(view.operands) // 2
    shape = view.operands[0].shape
    builder = FactorBuilder()
    factors = builder.dims(shape, whole=axes)
    result = [f for d, f in enumerate(factors) if d not in axes]
    operands = [factors] * count + [[()] * len(a.shape) for a in view.operands[count:]]
    return builder.rule(
        operands, [result] * len(view.results), flops=sum(a.size for a in view.operands[:count]),
        whole="partial results of a reduction by a function of the user's cannot be combined across devices",
    )  # fmt: skip


_INDEX = "the position of an extremum is not the combination of its shards' positions"

RULES: MappingProxyType[str, RuleFn] = MappingProxyType({
    "reduce_sum": reduction("sum", linear=True),
    "reduce_prod": reduction("mul"),
    "reduce_max": reduction("max"),
    "reduce_min": reduction("min"),
    "reduce_and": reduction("and"),
    "reduce_or": reduction("or"),
    "reduce_xor": reduction(None, whole="no collective combines by exclusive or"),
    "argmax": reduction(None, whole=_INDEX),
    "argmin": reduction(None, whole=_INDEX),
    "reduce": _reduce,
})  # fmt: skip
