"""Operations that move elements: broadcast, transpose, slice, pad, concatenate, iota and their kin."""

from __future__ import annotations

from types import MappingProxyType

from meshplan.rules._reshape import reshape
from meshplan.rules._rule import FactorBuilder, Halo, OpRule, OpView, RuleFn
from meshplan.rules._window import halo_of, same_rank

_MOVES_ROWS = "shards would have to exchange rows"


def scalars(view: OpView, start: int) -> list[list[tuple[int, ...]]]:
    """Whole entries for the operands from `start` on."""
    return [[()] * len(a.shape) for a in view.operands[start:]]


def broadcast_in_dim(view: OpView) -> OpRule:
    """New dims are factors of the result alone: every shard makes its own part.

    Linear: a broadcast of unreduced parts sums to the broadcast of the sum.
    """
    result = view.results[0].shape
    builder = FactorBuilder()
    factors = builder.dims(result)
    operand: list[tuple[int, ...]] = []
    if view.operands:
        shape = view.operands[0].shape
        placed = [int(d) for d in view.params["broadcast_dimensions"]]
        operand = [factors[d] if n == result[d] else () for n, d in zip(shape, placed, strict=True)]
    return builder.rule([operand, *scalars(view, 1)][: len(view.operands)], [factors], linear=(0,))


def made_here(view: OpView) -> OpRule:
    """`iota`, `empty`: all dims are factors of the results; every shard makes its own part."""
    builder = FactorBuilder()
    factors = builder.dims(view.results[0].shape)
    return builder.rule(scalars(view, 0), [factors] * len(view.results))


def transpose(view: OpView) -> OpRule:
    builder = FactorBuilder()
    factors = builder.dims(view.operands[0].shape)
    return builder.rule([factors], [[factors[int(d)] for d in view.params["permutation"]]], linear=(0,))


def squeeze(view: OpView) -> OpRule:
    gone = {int(d) for d in view.params["dimensions"]}
    builder = FactorBuilder()
    factors = builder.dims(view.operands[0].shape)
    return builder.rule([factors], [[f for d, f in enumerate(factors) if d not in gone]], linear=(0,))


def expand_dims(view: OpView) -> OpRule:
    new = {int(d) % len(view.results[0].shape) for d in view.params["dimensions"]}
    builder = FactorBuilder()
    factors = builder.dims(view.operands[0].shape)
    left = iter(factors)
    return builder.rule(
        [factors], [[() if d in new else next(left) for d in range(len(view.results[0].shape))]], linear=(0,)
    )


def untouched_dims(view: OpView, touched: set[int], linear: tuple[int, ...], reason: str) -> OpRule:
    """Operand 0 and the results share all dims but the touched ones, which stay whole."""
    builder = FactorBuilder()
    factors = builder.dims(view.operands[0].shape, whole=touched)
    return builder.rule(
        [factors, *scalars(view, 1)], [factors] * len(view.results), linear=linear, whole=reason if touched else ""
    )


def _moved(view: OpView, halos: list[Halo | None], linear: tuple[int, ...], what: str) -> OpRule:
    """Operand 0 and result 0 share all dims; those with a halo split where no block needs another's rows."""
    builder = FactorBuilder()
    found = same_rank(view.operands[0].shape, view.results[0].shape, halos, builder)
    return builder.rule(
        [found.operand, *scalars(view, 1)], [found.result], linear=linear, halos=found.halos,
        whole=f"{what} a split dim: {_MOVES_ROWS}" if found.crossed else "",
    )  # fmt: skip


def rev(view: OpView) -> OpRule:
    touched = {int(d) for d in view.params["dimensions"]}
    shape = view.operands[0].shape
    halos = [halo_of(n, n, reverse=True) if d in touched and n > 1 else None for d, n in enumerate(shape)]
    return _moved(view, halos, (0,), "reversing")


def slice_(view: OpView) -> OpRule:
    """Every s-th row of n: a shard has its own where s divides n and the first lies within s."""
    shape, out = view.operands[0].shape, view.results[0].shape
    starts, strides = view.params["start_indices"], view.params["strides"] or (1,) * len(shape)
    halos = [
        halo_of(n, m, stride=s, low=-first) if n != m else None
        for n, m, first, s in zip(shape, out, starts, strides, strict=True)
    ]
    return _moved(view, halos, (0,), "slicing")


def pad(view: OpView) -> OpRule:
    """Jointly linear in operand and padding value, alone where that is 0."""
    shape, out, config = view.operands[0].shape, view.results[0].shape, view.params["padding_config"]
    halos = [
        halo_of(n, m, low=low, dilation=inside + 1) if low or high or inside else None
        for n, m, (low, high, inside) in zip(shape, out, config, strict=True)
    ]
    value = view.constants[1] if len(view.constants) > 1 else None
    linear = (0,) if value is not None and not value else (0, 1)
    return _moved(view, halos, linear, "padding")


def concatenate(view: OpView) -> OpRule:
    """All dims but the concatenated one are shared by all operands; linear in all of them together."""
    dim = int(view.params["dimension"])
    builder = FactorBuilder()
    factors = builder.dims(view.results[0].shape, whole={dim})
    if len(view.operands) == 1:
        factors[dim] = builder.new(view.results[0].shape[dim])
    return builder.rule(
        [factors] * len(view.operands), [factors], linear=tuple(range(len(view.operands))),
        whole=f"concatenating along a split dim: {_MOVES_ROWS}",
    )  # fmt: skip


def split(view: OpView) -> OpRule:
    axis = int(view.params["axis"])
    return untouched_dims(view, {axis}, (0,), f"splitting a dim over devices into arrays: {_MOVES_ROWS}")


def stack(view: OpView) -> OpRule:
    """The new dim stays whole; linear in all operands together."""
    axis = int(view.params["axis"])
    builder = FactorBuilder()
    factors = builder.dims(view.operands[0].shape)
    count = len(view.operands)
    return builder.rule(
        [factors] * count, [[*factors[:axis], (), *factors[axis:]]], linear=tuple(range(count)),
        whole="every operand is one row of the stacked dim",
    )  # fmt: skip


def unstack(view: OpView) -> OpRule:
    axis = int(view.params["axis"])
    builder = FactorBuilder()
    factors = builder.dims(view.operands[0].shape, whole={axis})
    result = factors[:axis] + factors[axis + 1 :]
    return builder.rule(
        [factors], [result] * len(view.results), linear=(0,), whole="every result is one row of the unstacked dim"
    )


def tile(view: OpView) -> OpRule:
    """Result dim d carries (repetition, operand's dim), major to minor."""
    reps = [int(r) for r in view.params["reps"]]
    shape = view.operands[0].shape
    reps = [1] * (len(shape) - len(reps)) + reps
    builder = FactorBuilder()
    factors = builder.dims(shape)
    lead = len(reps) - len(shape)
    result = [builder.new(r) for r in reps[:lead]]
    result += [builder.new(r) + f for r, f in zip(reps[lead:], factors, strict=True)]
    return builder.rule([factors], [result], linear=(0,))


RULES: MappingProxyType[str, RuleFn] = MappingProxyType({
    "broadcast_in_dim": broadcast_in_dim,
    "iota": made_here,
    "empty": made_here,
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": squeeze,
    "expand_dims": expand_dims,
    "rev": rev,
    "slice": slice_,
    "pad": pad,
    "concatenate": concatenate,
    "split": split,
    "stack": stack,
    "unstack": unstack,
    "tile": tile,
})  # fmt: skip
