"""Every rule, by execution: shards cut by the rule, run, combined by the rule, against the whole."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from meshplan.rules import coverage
from tests._proof import equation, prove, random_operands, registered, view_of
from tests._rule_cases import ALL, UNPROVED, Case


def _traced(case: Case) -> Any:
    if case.name not in registered():
        pytest.skip(f"this jax has no {case.name}")
    return equation(case.name, case.fn, *case.args)


@pytest.mark.parametrize("case", ALL, ids=[f"{c.name}-{i}" for i, c in enumerate(ALL)])
def test_shards_cut_and_combined_by_the_rule_give_the_whole(case: Case) -> None:
    eqn = _traced(case)
    rule = prove(eqn, list(case.args) if case.exact else random_operands(eqn, seed=1), most_counts=2)
    if case.factors is not None:
        assert (len(rule.sizes), len(rule.halos)) == (case.factors, case.halos)
    carried = {f for dims in (*rule.operands, *rule.results) for d in dims for f in d}
    splittable = sum(n > 1 for a in (*view_of(eqn).operands, *view_of(eqn).results) for n in a.shape)
    assert rule.whole or carried or not splittable, "dims stay whole without a reason"
    if rule.anchor and not case.name.startswith(("gather", "scatter")):
        assert rule.flops > 0


def test_every_covered_primitive_has_a_proof_or_a_reason() -> None:
    covered = {row.primitive for row in coverage() if row.kind == "covered"}
    proved = Counter(case.name for case in ALL if case.name in registered())
    print(f"{len(covered)} covered, {len(covered & proved.keys())} proved by {proved.total()} cases")
    for name in sorted(covered - proved.keys()):
        print(f"  not proved: {name}: {UNPROVED.get(name, 'NO REASON')}")
    assert sorted(covered - proved.keys() - UNPROVED.keys()) == []
    assert sorted(proved.keys() & UNPROVED.keys()) == []
