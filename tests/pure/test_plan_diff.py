"""What differs between two plans, and how repeated layers are shown once."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot

from meshplan.core import MeshShape
from meshplan.plan import OpPlan, diff, families, grouped
from tests._plans import arguments, array, make_plan, spec


def test_equal_plans_have_an_empty_difference() -> None:
    found = diff(make_plan(), make_plan())
    assert found.empty
    assert str(found) == ""


def test_how_a_plan_was_found_is_no_difference() -> None:
    assert diff(make_plan(), make_plan(candidates=(), gap=0.5)).empty


def test_a_spec_that_changes_in_every_layer_stands_once() -> None:
    changed = tuple(replace(a, spec=spec(None, "model")) if a.path.endswith("up") else a for a in arguments())
    found = diff(make_plan(), make_plan(arguments=changed))
    assert [(c.what, c.before, c.after) for c in found.arguments] == snapshot([
        ("state/mu/layers/*/up x 3", "(data, model)", "(None, model)"),
        ("state/params/layers/*/up x 3", "(data, model)", "(None, model)"),
    ])
    assert not found.results, "donated results change with their arguments"
    assert not found.empty


def test_a_spec_that_changes_in_one_layer_names_it() -> None:
    one = "state/params/layers/1/up"
    changed = tuple(replace(a, spec=spec(None, None)) if a.path == one else a for a in arguments())
    found = diff(make_plan(), make_plan(arguments=changed))
    assert [c.what for c in found.arguments] == [one]


def test_the_whole_difference_as_text() -> None:
    before = make_plan()
    gone = tuple(a for a in arguments() if not a.path.endswith("scale"))
    after = make_plan(
        arguments=(*gone, array("batch/mask", (16, 32), spec("data", None), dtype="bool")), machine="h100:1x8",
        mesh=MeshShape((("data", 2), ("model", 4))), peak_bytes=4e6, communication_seconds=2e-3, pins=(),
        collectives=(replace(before.collectives[0], nbytes=131072), replace(before.collectives[0], kind="all-to-all")),
        ops=(before.ops[0], OpPlan(index=9)), notes=(),
    )
    assert str(diff(before, after)) == snapshot("""\
setting:
  machine           tpu-v5e:2x4 -> h100:1x8
  pin batch.tokens  P('data') -> absent
  note              primitive 'sort' has no sharding rule -> absent
predicted, per device and step:
  step           4 ms -> 5 ms (+25.0 %)
  communication  1 ms -> 2 ms (+100.0 %)
  peak memory    5 MB -> 4 MB (-20.0 %)
arguments:
  state/mu/layers/*/scale x 3      float32[64] (None) -> absent
  state/params/layers/*/scale x 3  float32[64] (None) -> absent
  batch/mask                       absent -> bool[16,32] (data, None)
collectives, per device and step:
  all-gather  models/gpt.py:12  197 kB -> 393 kB, 4.97 us -> 6.14 us
  all-to-all  models/gpt.py:12  0 B -> 197 kB, 0 s -> 5.92 us
  all-reduce  models/gpt.py:40  4 B -> 0 B, 0.07 ns -> 0 s
operations: 2 constrained differently\
""")


def test_seconds_of_an_unknown_machine_are_left_out() -> None:
    before = make_plan(machine="measured here")
    after = make_plan(machine="measured here", collectives=before.collectives[:1])
    (change,) = diff(before, after).collectives
    assert (change.seconds_before, change.seconds_after) == (None, 0.0)
    assert "us" not in str(diff(before, after))


def test_a_long_difference_is_cut_and_counted() -> None:
    names = [f"state/{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(50)]
    before = make_plan(arguments=tuple(array(n, (8, 8), spec(None, None)) for n in names))
    after = make_plan(arguments=tuple(array(n, (8, 8), spec("data", None)) for n in names))
    found = diff(before, after)
    assert len(found.arguments) == 50
    assert str(found).splitlines()[-1] == "  and 10 more"


@given(st.lists(st.sampled_from(["a/0/x", "a/1/x", "a/2/y", "b/0/x", "c", "a/1/0/x", "a/0/0/x"]), unique=True))
def test_groups_keep_every_path_once_and_patterns_match_their_members(paths: list[str]) -> None:
    groups = grouped(paths, lambda p: p, lambda p: p[-1])
    assert sorted(p for g in groups for p in g.members) == sorted(paths)
    for g in groups:
        for path in g.members:
            pairs = list(zip(g.pattern.split("/"), path.split("/"), strict=True))
            assert all(a == b or (a == "*" and b.isdigit()) for a, b in pairs)


def test_numbers_that_do_not_vary_stay_in_the_pattern() -> None:
    (group,) = grouped(["opt/1/0/mu/layers/0/up", "opt/1/0/mu/layers/1/up"], lambda p: p, lambda p: 0)
    assert group.label == "opt/1/0/mu/layers/*/up x 2"


def test_moments_stand_beside_their_parameter() -> None:
    groups = grouped(arguments(), lambda a: a.path, lambda a: (a.shape, a.spec, a.used))
    found = families(groups, lambda a: a.shape, lambda a: a.spec)
    assert [(f.group.label, f.mirrors) for f in found] == snapshot([
        ("state/mu/embed", ("params",)),
        ("state/mu/layers/*/up x 3", ("params",)),
        ("state/mu/layers/*/scale x 3", ("params",)),
        ("batch/tokens", ()),
    ])
    split = families(groups, lambda a: a.shape, lambda a: (a.spec, a.path.startswith("state/mu")))
    assert len(split) == 7, "moments that are stored otherwise stand alone"
    first = families(groups, lambda a: a.shape, lambda a: a.spec, lambda a: not a.used)
    assert [f.mirrors for f in first] == [("mu",), ("mu",), ("mu",), ()], "the root whose arrays move stands first"
