"""The public contest format."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.core import ProblemError
from meshplan.solve import evaluate, evaluate_instance, instance_names, load_instance, solve_instance

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "iopddl"
needs_instances = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the public instances are not at {SHARED}")

SMALL: dict[str, Any] = {
    "name": "small",
    "nodes": {
        "costs": [[15, 5], [10, 20, 0], [0, 1000000000000000000]],
        "usages": [[10, 30], [5, 5, 40], [7, 7]],
        "intervals": [[0, 10], [5, 20], [0, 0]],
    },
    "edges": {"nodes": [[0, 1], [2, 1]], "costs": [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0]]},
    "usage_limit": 45,
}


def write(folder: Path, data: object, name: str = "small.json") -> Path:
    text = json.dumps({"problem": data}).encode()
    path = folder / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


@pytest.mark.parametrize("name", ["small.json", "small.json.gz"])
def test_a_small_instance_is_solved_exactly(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, SMALL, name)
    found = solve_instance(path, 10)
    every = [
        (evaluate_instance(path, c), c) for c in itertools.product(range(2), range(3), range(2))
    ]
    best = min(cost for (cost, peak), _ in every if peak <= 45)
    assert (found["status"], found["feasible"], found["optimal"]) == ("optimal", True, True)
    assert found["cost"] == best and found["peak_usage"] <= 45 and found["gap"] == 0.0
    assert instance_names(tmp_path) == ("small",)


def test_a_node_that_is_never_live_holds_nothing(tmp_path: Path) -> None:
    problem = load_instance(write(tmp_path, SMALL))
    assert problem.rows[2].size == 0 and problem.limits.tolist() == [45.0]
    assert [r.tolist() for r in problem.rows[:2]] == [[0], [0]]


def test_half_open_intervals_that_touch_do_not_overlap(tmp_path: Path) -> None:
    touching = {**SMALL, "nodes": {**SMALL["nodes"], "intervals": [[0, 5], [5, 20], [0, 0]]}}
    problem = load_instance(write(tmp_path, touching))
    assert [r.tolist() for r in problem.rows] == [[0], [1], []]


def test_costs_beyond_64_bits_are_summed_exactly(tmp_path: Path) -> None:
    huge = 10**18
    nodes = {"costs": [[huge + 1]] * 30, "usages": [[1]] * 30, "intervals": [[0, 1]] * 30}
    path = write(tmp_path, {"nodes": nodes, "edges": {"nodes": [], "costs": []}, "usage_limit": 30})
    assert evaluate_instance(path, [0] * 30) == (30 * huge + 30, 30)
    found = solve_instance(path, 5)
    assert not found["feasible"] and found["status"] == "infeasible" and found["cost"] == 30 * huge + 30


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=12), st.integers(0, 2**16))
def test_the_rows_have_the_peak_of_all_times(
    tmp_path_factory: pytest.TempPathFactory, spans: list[Any], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    intervals = [sorted(s) for s in spans]
    usages = rng.integers(0, 9, (len(spans), 2))
    nodes = {"costs": [[0, 0]] * len(spans), "usages": usages.tolist(), "intervals": intervals}
    path = write(tmp_path_factory.mktemp("i"), {"nodes": nodes, "edges": {"nodes": [], "costs": []}, "usage_limit": 9})
    problem = load_instance(path)
    choice = [int(x) for x in rng.integers(0, 2, len(spans))]
    _, rows = evaluate(problem, choice)
    by_time = [
        sum(int(u[s]) for (a, b), u, s in zip(intervals, usages, choice, strict=True) if a <= t < b) for t in range(13)
    ]
    assert rows.max(initial=0.0) == max(by_time) == evaluate_instance(path, choice)[1]
    assert len(problem.limits) <= len(spans)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"nodes": {}}, "no iopddl instance .*It needs problem.nodes.costs"),
        ([1, 2], "no iopddl instance"),
        ({**SMALL, "edges": {"nodes": [[0, 9]], "costs": [[1]]}}, "edge 0 joins nodes 0 and 9"),
        ({**SMALL, "edges": {"nodes": [[0, 1]], "costs": [[1]]}}, r"edge 0 \(0, 1\) has 1 costs; its nodes have 6"),
        ({**SMALL, "edges": {"nodes": [], "costs": [[1]]}}, "0 edges, but 1 edge costs"),
        ({**SMALL, "nodes": {**SMALL["nodes"], "usages": []}}, "3 nodes, but 0 usages and 3 intervals"),
    ],
)
def test_a_malformed_file_is_named_in_a_sentence(tmp_path: Path, data: object, sentence: str) -> None:
    with pytest.raises(ProblemError, match=f"small.json: .*{sentence}"):
        load_instance(write(tmp_path, data))


def test_a_file_that_is_no_json_is_named_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("not json")
    with pytest.raises(ProblemError, match=r"x.json: not readable as JSON or gzip JSON"):
        load_instance(tmp_path / "x.json")
    with pytest.raises(ProblemError, match=r"missing.json: not readable"):
        load_instance(tmp_path / "missing.json")


@needs_instances
def test_instance_b_beats_the_compilers_own_solver() -> None:
    known = json.loads((SHARED / "bounds.json").read_text())["B"]
    found = solve_instance(SHARED / "B.json.gz", 90)
    assert found["feasible"] and found["peak_usage"] <= found["usage_limit"]
    assert known["lower_bound"] <= found["cost"] <= known["xla"]
    assert found["bound"] <= found["cost"]


@needs_instances
def test_every_public_instance_is_listed() -> None:
    assert instance_names(SHARED) == ("A", "B", "C", "D", "G", "K", "L", "M", "S")
