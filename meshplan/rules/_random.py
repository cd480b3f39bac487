"""Random numbers: what one shard can make without the others.

Threefry and Philox count: bit i is a function of the key and of i alone (JAX's default,
`jax_threefry_partitionable`), so every shard makes its own part of the bits. Other generators
(`rbg`, `unsafe_rbg`) hand the whole shape to the device's generator, whose answer for a part is not a
part of its answer; with an array of keys they use the first key for all (measured), so not even
the keys may be split.
"""

from __future__ import annotations

from types import MappingProxyType

from meshplan.rules._elementwise import elementwise, whole_rule
from meshplan.rules._rule import FactorBuilder, OpRule, OpView, RuleFn
from meshplan.rules._shape import made_here

_STATEFUL = "the generator's answer for a part of the shape is not a part of its answer for the whole"


_COUNTING = frozenset({"key<fry>", "key<fry4>", "key<phx2>", "key<phx4>"})  # dtypes of keys whose generator counts
_FLOPS_PER_WORD = 20.0  # a Threefry-2x32 block: 20 rounds for two words, an addition, a rotation and an xor each


def new_dims(legal: frozenset[str]) -> RuleFn:
    """`random_bits`, `random_split`: dims of the keys pass, new dims are factors of the result alone.

    `legal`: dtypes of the keys for which a shard's answer is a part of the whole answer.
    """

    def rule(view: OpView) -> OpRule:
        keys, result = view.operands[0], view.results[0]
        if keys.dtype not in legal:
            return whole_rule(view, _STATEFUL)
        builder = FactorBuilder()
        passed = builder.dims(keys.shape)
        made = builder.dims(result.shape[len(keys.shape) :])
        return builder.rule([passed], [passed + made], flops=_FLOPS_PER_WORD * result.size)

    return rule


def _gamma(view: OpView) -> OpRule | None:
    """Every element has a key of its own."""
    if view.operands[0].dtype not in _COUNTING:
        return whole_rule(view, _STATEFUL)
    return elementwise(flops_per_element=_FLOPS_PER_WORD)(view)


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
    return whole_rule(view, _STATEFUL)


_WORDS = "threefry2x32 threefry4x32 philox2x32 philox4x32 random_seed random_fold_in random_clone"

RULES: MappingProxyType[str, RuleFn] = MappingProxyType({
    **{name: elementwise(flops_per_element=_FLOPS_PER_WORD) for name in _WORDS.split()},
    "iota_2x32_shape": made_here,
    "random_gamma": _gamma,
    "random_bits": new_dims(_COUNTING),
    "random_split": new_dims(_COUNTING | {"key<rbg>"}),
    "random_wrap": leading_dims,
    "random_unwrap": leading_dims,
    "rng_bit_generator": _whole_made,
    "rng_uniform": _whole_made,
})  # fmt: skip
