"""Rules written as text, and the sentences a user reads where the text cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.custom_partitioning import SdyShardingRule

from meshplan.core import SpecError
from meshplan.rules import Aval, OpRule, OpView, parse_rule, rule_for


def _view(operands: list[tuple[int, ...]], results: list[tuple[int, ...]], primitive: str = "my_kernel") -> OpView:
    made = [tuple(Aval(shape, "float32", 4) for shape in shapes) for shapes in (operands, results)]
    return OpView(primitive, made[0], made[1], {})


_MATMUL = _view([(4, 6), (6, 8)], [(4, 8)])


def test_a_declared_reduction_is_a_reduced_factor() -> None:
    for rule in (
        parse_rule("i j, j k -> i k", reduction_factors=("j",))(_MATMUL),
        parse_rule("i j, j k -> i k reduction={j}")(_MATMUL),
    ):
        assert rule.sizes == (4, 6, 8)
        assert rule.operands == (((0,), (1,)), ((1,), (2,)))
        assert rule.results == (((0,), (2,)),)
        assert rule.combine == {1: "sum"}
        assert rule.reduced_factors() == (1,)


def test_a_factor_of_no_result_stays_whole_unless_it_is_declared_a_reduction() -> None:
    rule = parse_rule("i j, j k -> i k")(_MATMUL)
    assert rule.operands == (((0,), ()), ((), (1,)))
    assert "factor j" in rule.whole
    assert rule.combine == {}


def test_a_reduction_may_combine_by_another_operation() -> None:
    rule = parse_rule("i j -> i", reduction_factors=("j",), combine={"j": "max"})(_view([(4, 6)], [(4,)]))
    assert rule.combine == {1: "max"}


def test_compound_dims_are_major_to_minor() -> None:
    view = _view([(2, 24)], [(2, 4, 6)])
    for text in ("b (h d) -> b h d", "b (h d) -> b h d {h=4}"):
        rule = parse_rule(text)(view)
        assert rule.operands == (((0,), (1, 2)),)
        assert rule.results == (((0,), (1,), (2,)),)
        assert rule.sizes == (2, 4, 6)


def test_leading_dims_are_written_as_an_ellipsis() -> None:
    rule = parse_rule("... i, ...1 i -> ... i, ...1")(_view([(2, 3, 4), (5, 4)], [(2, 3, 4), (5,)]))
    assert rule.operands == (((0,), (1,), (2,)), ((3,), (2,)))
    assert rule.results == (((0,), (1,), (2,)), ((3,),))
    assert parse_rule("... -> ...")(_view([()], [()])).sizes == ()


def test_factors_that_need_replication_or_permutation_stay_whole_with_what_is_minor_to_them() -> None:
    view = _view([(24, 4)], [(24, 4)])
    rule = parse_rule("(a b) c -> (a b) c {a=6, b=4} need_replication={a} permutation={c}")(view)
    assert rule.operands == (((), ()),)
    assert "need replication" in rule.whole
    assert "permutation factor c" in rule.whole
    assert parse_rule("(a b) c -> (a b) c {a=6, b=4} need_replication={b}")(view).operands == (((0,), (1,)),)


def test_factors_of_size_one_are_none() -> None:
    rule = parse_rule("i j -> j i")(_view([(1, 3)], [(3, 1)]))
    assert rule.sizes == (3,)
    assert rule.operands == (((), (0,)),)


def test_a_rule_of_the_users_goes_before_the_table() -> None:
    def mine(view: OpView) -> OpRule:
        return OpRule(sizes=(), operands=(((),),), results=(((),),), whole="mine")

    view = _view([(4,)], [(4,)], "exp")
    for extra, sizes in (({}, (4,)), ({"exp": mine}, ()), ({"exp": "i -> i"}, (4,)), ({"other": mine}, (4,))):
        rule = rule_for(view, extra)
        assert rule is not None
        assert rule.sizes == sizes


_BAD: list[tuple[str, dict[str, Any], str]] = [
    ("i j", {}, "one '->' must stand between operands and results"),
    ("i -> i -> i", {}, "one '->' must stand between operands and results"),
    ("i & j -> i", {}, "unknown character '&'"),
    ("i ... -> i", {}, "'...' must come first"),
    ("(a (b c)) -> a", {}, "brackets within brackets"),
    ("(a -> a", {}, "a bracket is never closed"),
    ("a) -> a", {}, "brackets must open before they close"),
    ("(a) -> a", {}, "hold at least two factors"),
    ("(a b, c) -> a", {}, "a comma within brackets"),
    ("(h d) -> (h d)", {}, "factor 'd' is only used in brackets; give its size, d=..."),
    ("heads -> heads", {"reduction_factors": ("head",)}, "factor 'head' is declared but not used. Nearest: heads."),
    ("i j -> i", {"reduction_factors": ("j",), "need_replication_factors": ("j",)}, "declared twice"),
    ("i j -> i", {"reduction_factors": ("i",)}, "declared a reduction, but a result carries it"),
    ("i j -> i", {"combine": {"j": "max"}}, "not among the reduction factors"),
    ("i -> i {i}", {}, "'i' in braces is no size; write {h=4}"),
]


@pytest.mark.parametrize(("text", "arguments", "sentence"), _BAD, ids=[sentence for _, _, sentence in _BAD])
def test_a_text_that_cannot_be_says_why(text: str, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_rule(text, **arguments)
    assert sentence in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("i j -> i j", "my_kernel has 2 operands, the rule writes 1"),
        ("i j, j k -> i k, i", "my_kernel has 1 results, the rule writes 2"),
        ("i, j k -> i k", "operand 0 has 2 dims (4, 6), the rule writes 1"),
        ("... a b c, j k -> a k", "operand 0 has 2 dims (4, 6), the rule writes 3 or more"),
        ("i j, i k -> i k", "factor 'i' is 4 elsewhere and 6 in operand 1 (6, 8)"),
        ("i (a b), j k -> i k {a=4, b=2}", "(a b) makes 8, the dim of operand 0 is 6"),
    ],
)
def test_a_text_that_does_not_fit_the_operation_says_where(text: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        rule_for(_MATMUL, {"my_kernel": text})
    assert sentence in str(caught.value)


@settings(max_examples=60)
@given(st.data())
def test_a_text_reads_as_in_jax(data: st.DataObject) -> None:
    """Random rules, written down, parsed by us and built in JAX's own form: the same mappings."""
    names = st.lists(st.sampled_from(["a", "b", "c1", "d_e", "f"]), unique=True, min_size=1, max_size=4)
    values = [data.draw(names) for _ in range(data.draw(st.integers(2, 4)))]
    text = ", ".join(" ".join(v) for v in values[:-1]) + " -> " + " ".join(values[-1])
    theirs = SdyShardingRule(tuple(_mapping(v) for v in values[:-1]), (_mapping(values[-1]),))
    ours = parse_rule(text)
    assert [[d[0] for d in v] for v in ours.operands] == [list(v) for v in theirs.operand_mappings]
    assert [[d[0] for d in v] for v in ours.results] == [list(v) for v in theirs.result_mappings]
    sizes = {name: int(n) for name, n in zip(["a", "b", "c1", "d_e", "f"], np.array([2, 3, 4, 5, 6]), strict=True)}
    shapes = [tuple(sizes[c] for c in v) for v in values]
    rule = ours(_view(shapes[:-1], shapes[-1:]))
    kept = {f for d in rule.results[0] for f in d}
    assert all(f in kept for dims in rule.operands for d in dims for f in d)


def _mapping(names: list[str]) -> Any:
    from jax.experimental.custom_partitioning import ArrayMapping

    return ArrayMapping(*names)
