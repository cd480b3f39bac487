"""Plan files: the same plan back, the same bytes, and a sentence for every kind of damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.core import KINDS, Collective, MeshShape, PlanFileError, Spec
from meshplan.plan import (
    ArrayPlan,
    Candidate,
    HeldBytes,
    OpPlan,
    PlanData,
    StepTimeline,
    Wait,
    check_program,
    from_bytes,
    load,
    save,
    to_bytes,
)
from meshplan.program import Leaf
from meshplan.rules import Aval
from tests._plans import make_plan

AXES = ("data", "model", "fsdp")
TEXT = st.text(max_size=12)
NUMBER = st.floats(min_value=0, allow_nan=False, allow_infinity=True)


@st.composite
def specs(draw: st.DrawFn, ndim: int) -> Spec:
    free = list(draw(st.permutations(AXES)))
    dims = []
    for _ in range(ndim):
        take = draw(st.integers(0, min(2, len(free))))
        dims.append(tuple(free[:take]))
        del free[:take]
    return Spec(tuple(dims), tuple(free[: draw(st.integers(0, 1))]))


@st.composite
def arrays(draw: st.DrawFn, others: int) -> ArrayPlan:
    ndim = draw(st.integers(0, 3))
    spec = draw(specs(ndim))
    return ArrayPlan(
        path=draw(TEXT), shape=tuple(draw(st.integers(0, 3)) * 8 for _ in range(ndim)),
        dtype=draw(st.sampled_from(("float32", "bfloat16", "int32"))), spec=spec.reduced(),
        used=tuple(draw(st.lists(specs(ndim), max_size=2))),
        dims=draw(st.sampled_from(((), tuple(f"d{i}" for i in range(ndim))))), pair=draw(st.integers(-1, others - 1)),
        pinned=draw(st.booleans()), moves=tuple(draw(st.lists(specs(ndim), max_size=2))),
    )


@st.composite
def plans(draw: st.DrawFn) -> PlanData:
    n, m = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    path = st.lists(specs(2), max_size=2).map(tuple)
    ops = st.builds(OpPlan, index=st.integers(0, 99), results=st.lists(path, max_size=2).map(tuple),
                    uses=st.lists(st.tuples(st.integers(0, 3), path), max_size=2).map(tuple))  # fmt: skip
    collectives = st.builds(
        Collective, kind=st.sampled_from(KINDS), nbytes=st.integers(0, 2**40), group_size=st.integers(1, 8),
        count=st.floats(0, 1e6), axes=st.sampled_from(((), ("data",), ("model", "fsdp"))), dtype=st.just("float32"),
        source=TEXT, op_name=TEXT,
    )
    held = st.builds(HeldBytes, what=TEXT, nbytes=NUMBER)
    tried = st.builds(Candidate, mesh=st.just(MeshShape((("data", 8),))), step_seconds=NUMBER, peak_bytes=NUMBER,
                      feasible=st.booleans())  # fmt: skip
    return PlanData(
        step=draw(TEXT), fingerprint=draw(TEXT), machine=draw(TEXT),
        mesh=MeshShape(tuple((a, 2) for a in AXES)),
        arguments=tuple(draw(arrays(m)) for _ in range(n)), results=tuple(draw(arrays(n)) for _ in range(m)),
        ops=tuple(draw(st.lists(ops, max_size=3))), collectives=tuple(draw(st.lists(collectives, max_size=3))),
        flops=draw(NUMBER), compute_seconds=draw(NUMBER), communication_seconds=draw(NUMBER),
        argument_bytes=draw(NUMBER), peak_bytes=draw(NUMBER), memory_limit=draw(NUMBER), gap=draw(NUMBER),
        at_peak=tuple(draw(st.lists(held, max_size=2))), candidates=tuple(draw(st.lists(tried, max_size=2))),
        pins=tuple(draw(st.lists(st.tuples(TEXT, TEXT), max_size=2))), notes=tuple(draw(st.lists(TEXT, max_size=2))),
        rules=tuple(draw(st.lists(st.tuples(TEXT, st.sampled_from(((), AXES))), max_size=2))),
        donated=tuple(draw(st.lists(st.integers(0, 3), max_size=2))), workload=draw(TEXT), template=draw(TEXT),
        kept=tuple(draw(st.lists(st.tuples(st.integers(0, 99), path), max_size=2))),
        timeline=draw(st.none() | timelines()),
    )


def timelines() -> st.SearchStrategy[StepTimeline]:
    waits = st.builds(
        Wait, kind=st.sampled_from(KINDS), axes=st.sampled_from(((), AXES)), source=TEXT, runs=st.floats(0, 1e6),
        seconds=st.floats(0, 1e3),
    )
    seconds = st.floats(0, 1e3)
    return st.builds(
        StepTimeline, seconds=seconds, busy_seconds=seconds, exposed_seconds=seconds, hidden_seconds=seconds,
        waits=st.lists(waits, max_size=2).map(tuple),
    )


@settings(max_examples=60)
@given(plans())
def test_a_plan_comes_back_as_it_was(data: PlanData) -> None:
    content = to_bytes(data)
    back = from_bytes(content)
    assert back == data
    assert to_bytes(back) == content


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    save(make_plan(), tmp_path / "a.json")
    save(load(tmp_path / "a.json"), tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_figures_of_numpy_are_stored_as_plain_numbers() -> None:
    figures = {"flops": np.float64(2.5), "peak_bytes": np.float32(8.0), "argument_bytes": np.int64(7)}
    data = make_plan(**figures, gap=np.float64("inf"))
    back = from_bytes(to_bytes(data))
    assert (back.flops, back.peak_bytes, back.argument_bytes, back.gap) == (2.5, 8.0, 7.0, float("inf"))
    assert type(back.flops) is float


def test_fifteen_thousand_operations_take_less_than_a_million_bytes() -> None:
    op = make_plan().ops[0]
    data = make_plan(ops=tuple(replace(op, index=i) for i in range(15_000)))
    content = to_bytes(data)
    assert len(content) < 1_000_000
    assert from_bytes(content) == data


# ------------------------------------------------------------------------------------------------------ writing


def test_a_plan_replaces_an_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    goal = tmp_path / "plan.json"
    goal.write_text("old")
    save(make_plan(), goal)
    assert load(goal) == make_plan()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goal = tmp_path / "plan.json"
    goal.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(PlanFileError, match=r"plan\.json cannot be written: No space left on device\."):
        save(make_plan(), goal)
    assert goal.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        save(make_plan(), tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"cannot be written: the folder .*/no does not exist\. Create it first\."):
        save(make_plan(), tmp_path / "no" / "plan.json")
    with pytest.raises(PlanFileError, match=r"is a folder: give the name of a file\."):
        save(make_plan(), tmp_path)


# ------------------------------------------------------------------------------------------------------ reading


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"plan file .*/x\.json does not exist\. Write one with plan\.save"):
        load(tmp_path / "x.json")
    with pytest.raises(PlanFileError, match=r"is a folder, not a plan file\."):
        load(tmp_path)


def edited(change: Callable[[dict[str, Any]], None]) -> bytes:
    raw = json.loads(to_bytes(make_plan()))
    change(raw)
    return json.dumps(raw).encode()


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: Any) -> None:
        for key in keys[:-1]:
            raw = raw[key]
        raw[keys[-1]] = value

    return change


def test_whole_files_that_are_no_plan() -> None:
    cases = {
        b"": "p.json is empty. Save the plan again.",
        b" \n": "p.json is empty. Save the plan again.",
        to_bytes(make_plan())[:900]: "p.json is damaged: it ends in the middle. Save the plan again.",
        b"[1, 2]": "p.json is not a plan file: it does not begin as one. Give a file from plan.save.",
        b'{"a": 1}': 'p.json is not a plan file: it has no "kind": "meshplan plan". Give a file from plan.save.',
        b'{"kind": "meshplan plan", "format": 7}': (
            "p.json was written by a newer meshplan (format 7, this one reads up to 1): upgrade meshplan, or plan "
            "again."
        ),
        b'{"kind": "meshplan plan"}': (
            "p.json is damaged: field 'format' is 0, formats count from 1. Save the plan again."
        ),
        b'{"kind": "meshplan plan", "format": 1}': "p.json is damaged: field 'step' is missing. Save the plan again.",
    }
    for content, sentence in cases.items():
        with pytest.raises(PlanFileError) as caught:
            from_bytes(content, "p.json")
        assert str(caught.value) == sentence
    twisted = (b'{"kind": "\xff\xfe"}', b'{"kind": "meshplan plan",, }', b"[" * 9999)
    for content in (b"\x1f\x8b\x08\x00binary", b"plan", *twisted):
        with pytest.raises(PlanFileError, match=r"^p\.json is (damaged|not a plan file): .*\.$"):
            from_bytes(content, "p.json")


DAMAGED = {
    "field 'flops' has the wrong type: expected float | str, found array": put("flops", value=[1]),
    "field 'arguments[1].pair' has the wrong type: expected int, found str": put("arguments", 1, 6, value="x"),
    "field 'ops[0].uses[0][1]' has the wrong type: expected int, found null": put("ops", 0, 2, 0, 1, value=None),
    "field 'collectives[0].kind' has the wrong type": put("collectives", 0, 0, value="gather"),
    "field 'arguments[0].spec' points to entry 99 of a table of": put("arguments", 0, 3, value=99),
    "field 'ops[1].results' points to entry -1 of a table of": put("ops", 1, 1, value=[-1]),
    "field 'collectives[1].source' points to entry 50 of a table of 4": put("collectives", 1, 6, value=50),
    "field 'paths[1]' points to entry 77 of a table of": put("paths", 1, value=[77]),
    "field 'specs[0]' names axis 'rows', the mesh is data=2 x model=4": put("specs", 0, value=[[["rows"], []], []]),
    "field 'specs[0]' names axis 'data' twice": put("specs", 0, value=[[["data"], ["data"]], []]),
    "field 'collectives[0].axes' names axis 'z', the mesh is data=2 x model=4": put("collectives", 0, 4, value=["z"]),
    "field 'arguments[0].pair' is 40, there are 15": put("arguments", 0, 6, value=40),
    "field 'arguments[0].spec' splits [510, 64] of state/mu/embed as (model, None) over data=2 x model=4": put(
        "arguments", 0, 1, value=[510, 64]
    ),
    "field 'arguments[0]' has a shape of 3 dims and a spec or names of another number": put(
        "arguments", 0, 1, value=[512, 64, 1]
    ),
    "field 'arguments[0].used' has a spec of another rank than its shape [512, 64]": put("arguments", 0, 4, value=[0]),
    "field 'mesh' is [['data', 0]]: sizes start at 1 and names differ": put("mesh", value=[["data", 0]]),
}


@pytest.mark.parametrize("sentence", DAMAGED)
def test_damage_is_told_by_its_field(sentence: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        from_bytes(edited(DAMAGED[sentence]), "p.json")
    assert str(caught.value).startswith(f"p.json is damaged: {sentence}")
    assert str(caught.value).endswith(". Save the plan again.")


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_gives_a_plan_or_a_plan_file_error(place: int, byte: int) -> None:
    content = bytearray(to_bytes(make_plan()))
    content[place % len(content)] = byte
    try:
        found = from_bytes(bytes(content), "p.json")
    except PlanFileError as error:
        assert "p.json" in str(error)
    else:
        assert isinstance(found, PlanData)


# ------------------------------------------------------------------------------------------- the right program


def leaves(data: PlanData) -> list[Leaf]:
    return [Leaf(i, a.path, Aval(a.shape, a.dtype, 4)) for i, a in enumerate(data.arguments)]


def test_the_planned_program_passes() -> None:
    data = make_plan()
    check_program(data, data.fingerprint, leaves(data))
    assert data.fingerprint == "0123456789abcdef"


def test_another_program_is_told_by_its_first_difference() -> None:
    data = make_plan()
    right = leaves(data)
    again = "Plan again for this program, or pass the arguments that were planned."

    def said(arguments: list[Leaf], fingerprint: str = data.fingerprint) -> str:
        with pytest.raises(PlanFileError) as caught:
            check_program(data, fingerprint, arguments, "p.json")
        return str(caught.value)

    other = [*right[:-1], Leaf(9, "batch/tokens", Aval((64, 32), "int32", 4))]
    assert said(other) == (
        f"p.json is for another program: argument 'batch/tokens' is int32[64, 32], planned was int32[16, 32]. {again}"
    )
    narrow = [Leaf(0, right[0].path, Aval((512, 64), "bfloat16", 2)), *right[1:]]
    assert "argument 'state/mu/embed' is bfloat16[512, 64], planned was float32[512, 64]." in said(narrow)
    more = [*right, Leaf(9, "extra", Aval((), "int32", 4))]
    assert said(more) == f"p.json is for another program: it has no argument 'extra' (int32[]). {again}"
    assert "the step has no argument 'batch/tokens', planned was one." in said(right[:-1])
    assert "the same arguments in another order." in said(right[::-1])
    differ = "the arguments are the same, the operations differ (planned 0123456789abcdef, found feed)"
    assert differ in said(right, "feed")
