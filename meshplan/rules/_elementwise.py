"""Operations that treat every element alike: all dims are factors.

Operands are scalars, or of the result's rank with size 1 where they are broadcast (newer
versions of JAX bind them so); a broadcast dim stays whole and the result's dim is split
all the same.

What `linear` permits. `linear` lists operands i such that f(.., x_i, ..), with the others
fixed and not unreduced, is linear in x_i: an unreduced x_i gives an unreduced result. For
the primitives in `JOINTLY_LINEAR` all listed operands must be unreduced over the same axes
*together* (x + y is not linear in x while y is fixed: y would be counted once per shard); an
operand that is zero on all shards but one counts as unreduced.
Conversions between floating types are linear up to rounding.
"""

from __future__ import annotations

from types import MappingProxyType

from meshplan.rules._rule import FactorBuilder, OpRule, OpView, RuleFn

JOINTLY_LINEAR = frozenset({
    "add", "add_any", "sub", "complex", "select_n", "concatenate", "stack", "pad",
    "dynamic_update_slice", "scatter-add", "scatter_add", "scatter-sub", "scatter_sub",
})  # fmt: skip

_FUNCTIONS = (
    "abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos cosh digamma "
    "eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le le_to "
    "lgamma log log1p log2 logistic lt lt_to max min mulhi ne nextafter not one_minus_square or polygamma polynomial "
    "population_count pow reduce_precision regularized_incomplete_beta rem round rsqrt shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh xor zeta"
).split()
_MOVES = (
    "copy copy_p layout_constraint name pvary relayout reshard sharding_constraint stop_gradient "
    "with_memory_space_constraint xla_metadata_value"
).split()


def is_inexact(dtype: str) -> bool:
    """Floating or complex, judged from the dtype's name."""
    return "float" in dtype or "complex" in dtype


def aligned(shape: tuple[int, ...], like: tuple[int, ...], factors: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Entries of an operand that is broadcast to `like`, whose dims carry `factors`: () where it has size 1."""
    if len(shape) != len(like):
        return [()] * len(shape)
    return [f if size == full else () for size, full, f in zip(shape, like, factors, strict=True)]


def _elementwise(view: OpView, linear: tuple[int, ...], flops_per_element: float) -> OpRule:
    shape = view.results[0].shape
    builder = FactorBuilder()
    factors = builder.dims(shape)
    odd = [a.shape for a in view.operands if a.shape and len(a.shape) != len(shape)]
    if odd or any(r.shape != shape for r in view.results):
        return whole_rule(view, f"{view.primitive} of operands of different ranks")
    operands = [aligned(a.shape, shape, factors) for a in view.operands]
    flops = flops_per_element * view.results[0].size
    return builder.rule(operands, [factors] * len(view.results), linear=linear, flops=flops)


def elementwise(linear: tuple[int, ...] = (), flops_per_element: float = 1.0) -> RuleFn:
    """The rule of an operation that treats every element alike."""

    def rule(view: OpView) -> OpRule:
        return _elementwise(view, linear, flops_per_element)

    return rule


def whole_rule(view: OpView, reason: str = "") -> OpRule:
    """Every dim of every operand and result whole: always legal, never split."""
    return OpRule(
        sizes=(),
        operands=tuple(((),) * len(a.shape) for a in view.operands),
        results=tuple(((),) * len(a.shape) for a in view.results),
        whole=reason or f"no rule is known for {view.primitive}",
    )


def _convert(view: OpView) -> OpRule:
    exact = is_inexact(view.operands[0].dtype) and is_inexact(view.results[0].dtype)
    return _elementwise(view, (0,) if exact else (), 0.0)


def _divide(view: OpView) -> OpRule:
    return _elementwise(view, (0,) if is_inexact(view.results[0].dtype) else (), 1.0)


def _select(view: OpView) -> OpRule:
    """`select_n`: the predicate is a scalar or as the cases; linear in all cases together."""
    return _elementwise(view, tuple(range(1, len(view.operands))), 0.0)


def _bitcast(view: OpView) -> OpRule:
    """A change of width adds or removes a minor dim, which stays whole."""
    operand, result = view.operands[0].shape, view.results[0].shape
    if len(operand) == len(result):
        return _elementwise(view, (), 0.0)
    builder = FactorBuilder()
    common = builder.dims(min(operand, result, key=len))
    return builder.rule(
        [common + [()] * (len(operand) - len(common))],
        [common + [()] * (len(result) - len(common))],
        whole="the dim that a change of width makes or removes stays whole",
    )


def _each_alone(view: OpView) -> OpRule:
    """Result i is operand i: every pair has factors of its own."""
    if [a.shape for a in view.operands] != [a.shape for a in view.results]:
        return whole_rule(view, f"{view.primitive} with results unlike its operands")
    builder = FactorBuilder()
    dims = [builder.dims(a.shape) for a in view.operands]
    return builder.rule(dims, dims, linear=(0,) if len(dims) == 1 else ())


def _second(view: OpView) -> OpRule:
    """`tie`: the result is operand 1; operand 0 is only waited for, whole."""
    builder = FactorBuilder()
    passed = builder.dims(view.operands[1].shape)
    return builder.rule([[()] * len(view.operands[0].shape), passed], [passed], linear=(1,))


RULES: MappingProxyType[str, RuleFn] = MappingProxyType({
    **{name: elementwise() for name in _FUNCTIONS},
    **{name: elementwise((0,), 0.0) for name in _MOVES},
    **{name: elementwise((0,)) for name in ("neg", "conj")},
    **{name: elementwise((0,), 0.0) for name in ("real", "imag")},
    **{name: elementwise((0, 1)) for name in ("add", "add_any", "sub", "mul")},
    "complex": elementwise((0, 1), 0.0),
    "div": _divide,
    "convert_element_type": _convert,
    "select_n": _select,
    "bitcast_convert_type": _bitcast,
    "zeros_like": elementwise(),
    "shard_alike": elementwise((), 0.0),
    "tie": _second,
    "to_edtype": _bitcast,
    "from_edtype": _bitcast,
    "optimization_barrier": _each_alone,
    "device_put": _each_alone,
})  # fmt: skip
