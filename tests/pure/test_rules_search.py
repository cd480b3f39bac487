"""No rule lacks a factor that executions show, but for those listed here with the reason."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshplan.rules import rule_for
from tests import _rule_cases as cases
from tests._proof import equation, view_of
from tests._rule_cases import Case
from tests._shardcombine import Found, halos_seen, has_factor, lacking, search

# one elementwise operation stands for all: the rule is the same function
SEARCHED = [
    *cases.SHAPES, *cases.DOTS, *cases.REDUCTIONS, *cases.UNCOMBINED, *cases.CONVOLUTIONS.values(), *cases.WINDOWS,
    *cases.ALONG, *cases.MATRICES, *cases.INDEXED, Case("mul", lax.mul, (jnp.ones((2, 4)), jnp.ones((2, 4)))),
    Case("select_n", lax.select_n, (jnp.ones((2, 4), bool), jnp.ones((2, 4)), jnp.ones((2, 4)))),
]  # fmt: skip

REMAINING = {
    "concatenate": "halo: all rows of the last operand belong to the last shards; XLA moves blocks instead",
    "ragged_dot_general": "not one: where the batch is ragged the sizes of groups do not matter, however they are cut",
}


@pytest.mark.parametrize("case", SEARCHED, ids=[f"{c.name}-{i}" for i, c in enumerate(SEARCHED)])
def test_no_rule_lacks_a_factor_that_executions_show(case: Case) -> None:
    try:
        missing = lacking(case)
    except AttributeError as error:
        pytest.skip(f"this jax has no {case.name}: {error}")
    assert missing == [] or case.name in REMAINING, f"{case.name} also splits so: {missing}"


def test_the_search_finds_what_a_poorer_rule_lacks() -> None:
    """Without these finds, the test above would prove nothing."""
    dot = Case("dot_general", lambda x, y: x @ y, (jnp.ones((4, 6)), jnp.ones((6, 8))))
    _, rule, found = search(dot)
    assert {(f.operands, f.results) for f in found} == {((0, None), (0,)), ((1, 0), ("sum",)), ((None, 1), (1,))}
    poorer = replace(rule, operands=(((), (0,)), ((0,), (2,))), results=(((), (2,)),))
    assert [f for f in found if not has_factor(poorer, f)] == [Found("dot_general", (0, None), (0,))]


def test_the_search_tells_combinations_apart() -> None:
    for fn, name, way in ((jnp.max, "reduce_max", "max"), (jnp.prod, "reduce_prod", "mul")):
        _, _, found = search(Case(name, lambda x, fn=fn: fn(x, 0), (jnp.ones((4, 6)),)))
        assert {f.results for f in found} == {(way,), (0,)}


def test_the_search_sees_halos_and_nothing_where_all_rows_are_needed() -> None:
    conv = cases.CONVOLUTIONS["plain"]
    assert halos_seen(conv)[-1] == (2, 1)
    assert halos_seen(Case("cumsum", lambda x: lax.cumsum(x, 0), (jnp.ones((8, 1)),))) == []
    rule = rule_for(view_of(equation(conv.name, conv.fn, *conv.args)))
    assert rule is not None
    assert lacking(conv) == []
    assert np.any([h.operands == ((0, 2),) for h in rule.halos])
