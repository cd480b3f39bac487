"""Random numbers: what one shard can make without the others.

Threefry counts: bit i is a function of the key and of i alone (JAX's default,
`jax_threefry_partitionable`), so every shard makes its own part of the bits. Other generators
(`rbg`, `unsafe_rbg`) hand the whole shape to the device's generator, whose answer for a part is not a
part of its answer.
"""

from __future__ import annotations

from types import MappingProxyType

from meshplan.rules._elementwise import elementwise
from meshplan.rules._rule import FactorBuilder, OpRule, OpView, RuleFn
from meshplan.rules._shape import made_here, scalars

_STATEFUL = "the generator's answer for a part of the shape is not a part of its answer for the whole"


def _counts(dtype: str) -> bool:
    """The key's generator is a function of the key and the position: `key<fry>`."""
    return "fry" in dtype


def new_dims(view: OpView) -> OpRule:
    """`random_bits`, `random_split`: dims of the keys pass; new dims are factors of the result alone where legal."""
    keys, result = view.operands[0], view.results[0]
    legal = _counts(keys.dtype)
    builder = FactorBuilder()
    passed = builder.dims(keys.shape)
    made = builder.dims(result.shape[len(keys.shape) :]) if legal else [()] * (len(result.shape) - len(keys.shape))
    return builder.rule(
        [passed], [passed + made], flops=20.0 * result.size, whole="" if legal else _STATEFUL
    )


def leading_dims(view: OpView) -> OpRule:
    """`random_wrap`, `random_unwrap`: the words of a key, trailing dims on one side, stay whole."""
    operand, result = view.operands[0].shape, view.results[0].shape
    builder = FactorBuilder()
    common = builder.dims(min(operand, result, key=len))
    return builder.rule(
        [common + [()] * (len(operand) - len(common))], [common + [()] * (len(result) - len(common))],
        whole="the words of one key stay together",
    )  # fmt: skip


def _whole_made(view: OpView) -> OpRule:
    """`rng_bit_generator`, `rng_uniform`: nothing can be split."""
    builder = FactorBuilder()
    results = [[()] * len(r.shape) for r in view.results]
    return builder.rule(scalars(view, 0), results, whole=_STATEFUL)


_WORDS = "threefry2x32 threefry4x32 philox2x32 philox4x32 random_seed random_fold_in random_clone random_gamma"

RULES: MappingProxyType[str, RuleFn] = MappingProxyType({
    **{name: elementwise(flops_per_element=20.0) for name in _WORDS.split()},
    "iota_2x32_shape": made_here,
    "random_bits": new_dims,
    "random_split": new_dims,
    "random_wrap": leading_dims,
    "random_unwrap": leading_dims,
    "rng_bit_generator": _whole_made,
    "rng_uniform": _whole_made,
})  # fmt: skip
