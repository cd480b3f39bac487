"""Operations on eight devices compute what one device computes, cut in every way that the rules allow."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from meshplan.cost import Emission, runs_on_shards
from tests._emission import ONE, TWO, by_kind, compiled, emitted, operations
from tests._micro import Micro, micros
from tests._proof import equation, is_key, random_operands, same

MICROS = {m.name: m for m in micros()}
ON_SHARDS = [m for m in MICROS.values() if runs_on_shards(m.program()[1].view)]
# What the compiler of the CPU leaves to chance: signs of vectors, and the order of eigenvalues that are pairs.
UP_TO_SIGN = {"eig", "eigh", "svd"}


def operands(micro: Micro) -> list[Any]:
    """Random values for the arguments, from those that suit the operation."""
    _, op = micro.program()
    eqn = equation(micro.primitive, micro.fn, *micro.args)
    values = dict(zip(op.operands, random_operands(eqn), strict=True))
    rng = np.random.default_rng(1)
    out = []
    for i, a in enumerate(micro.args):
        found = values.get(i)
        out.append(rng.integers(0, 3, a.shape).astype(a.dtype) if found is None else found)
    return out


def check_values(case: Any, values: list[Any], wanted: list[Any]) -> None:
    found = compiled(case, jax.devices())(*values)
    for got, whole in zip(found, wanted, strict=True):
        got, whole = (x if is_key(x) else np.asarray(x) for x in (got, whole))
        if case.name.split(":")[0] in UP_TO_SIGN and np.issubdtype(whole.dtype, np.inexact):
            got, whole = np.abs(got), np.abs(whole)
        same(got, whole, case.name)


@pytest.mark.parametrize("micro", MICROS.values(), ids=MICROS)
def test_an_operation_on_eight_devices_computes_what_one_computes(micro: Micro):
    values = operands(micro)
    wanted = [x if is_key(x) else np.asarray(x) for x in jax.tree.leaves(jax.jit(micro.fn)(*values))]
    for case in operations(ONE, [micro]):
        check_values(case, values, wanted)


@pytest.mark.parametrize("micro", ON_SHARDS, ids=lambda m: m.name)
def test_an_operation_on_shards_moves_only_its_sums_and_computes_the_same(micro: Micro):
    values = operands(micro)
    wanted = [np.asarray(x) for x in jax.tree.leaves(jax.jit(micro.fn)(*values))]
    for case in operations(TWO, [micro]):
        if case.expected is not None:
            assert by_kind(emitted(case, jax.devices())) == case.expected(Emission("cpu")), case.name
            check_values(case, values, wanted)
