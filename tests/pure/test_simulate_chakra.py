"""Chakra execution traces out and in: our own exactly, those of other tools by the schema's rules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict, MessageToJson, ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.core import ArgumentError, ProblemError
from meshplan.simulate import (
    TASK_KINDS,
    Resource,
    Task,
    Tasks,
    chakra_text,
    from_chakra,
    load_chakra,
    read_chakra,
    simulate,
    to_chakra,
    write_chakra,
)
from tests._chakra_schema import chakra_schema
from tests._timelines import one_forward_one_backward, pipeline, task_graphs

SCHEMA = chakra_schema()
RESOURCES = (
    Resource(name="compute", kind="compute", device=0, in_order=True),
    Resource(name="compute", kind="compute", device=1, in_order=True),
    Resource(name="link", kind="link", device=0, bytes_per_second=3e9, capacity=2),
    Resource(name="spine", kind="link", bytes_per_second=1e9 / 3, capacity=math.inf),
    Resource(name="host", kind="host", device=1, bytes_per_second=1.5e10),
)


@st.composite
def two_device_tasks(draw: st.DrawFn) -> Tasks:
    """Of every kind, with bytes on the resources that have a rate, on two devices and between them."""
    rows = []
    for task in draw(task_graphs(10, len(RESOURCES))):
        kind = draw(st.sampled_from(TASK_KINDS))
        detail = {"collective": st.sampled_from(["all-reduce", "all-gather", "collective-permute"]),
                  "host": st.sampled_from(["load", "store"])}.get(kind, st.just(""))
        rows.append(Task(
            id=task.id, kind=kind, seconds=draw(st.floats(0, 1)), uses=task.uses, after=task.after,
            use_bytes=tuple(draw(st.integers(0, 10**12)) if RESOURCES[u].bytes_per_second else 0 for u in task.uses),
            device=draw(st.integers(0, 1)), peer=draw(st.integers(-1, 1)), nbytes=draw(st.integers(0, 2**50)),
            allocates=task.allocates, frees=task.frees, name=draw(st.text(max_size=5)), source="a.py:1",
            detail=draw(detail),
        ))
    return Tasks.of(rows)


def assert_equal_tasks(one: Tasks, two: Tasks) -> None:
    assert [one.task(k) for k in range(len(one))] == [two.task(k) for k in range(len(two))]


# ------------------------------------------------------------------------------------------------------ our own traces


@given(two_device_tasks())
@settings(max_examples=80, deadline=None)
def test_tasks_come_back_and_run_the_same(tasks: Tasks) -> None:
    texts = {device: chakra_text(trace) for device, trace in to_chakra(tasks, RESOURCES).items()}
    found, resources = from_chakra({device: read_chakra(text) for device, text in texts.items()})
    assert resources == RESOURCES
    assert_equal_tasks(found, tasks)
    for sharing in ("fifo", "fair"):
        assert simulate(found, resources, sharing=sharing) == simulate(tasks, RESOURCES, sharing=sharing)


@given(two_device_tasks())
@settings(max_examples=40, deadline=None)
def test_messages_are_the_schemas_and_pass_through_protobuf(tasks: Tasks) -> None:
    traces = {}
    for device, (metadata, *nodes) in to_chakra(tasks, RESOURCES).items():
        kinds = [(metadata, SCHEMA.GlobalMetadata), *((node, SCHEMA.Node) for node in nodes)]
        parsed = [ParseDict(message, kind()) for message, kind in kinds]
        assert [node.id for node in parsed[1:]] == [int(node["id"]) for node in nodes]
        # The jsonizer of the schema writes indented messages, one right after the other.
        traces[device] = read_chakra("".join(MessageToJson(message) for message in parsed))
    found, resources = from_chakra(traces)
    assert resources == RESOURCES
    assert_equal_tasks(found, tasks)


def test_a_pipeline_runs_the_same_from_files_of_both_forms(tmp_path: Path) -> None:
    tasks, engines = pipeline(one_forward_one_backward(3, 4), forward=1e-3, backward=2e-3)
    for name, binary in (("text", False), ("proto", True)):
        paths = write_chakra(tasks, engines, tmp_path / name, binary=binary, schema=SCHEMA)
        assert [path.name for path in paths] == [f"{name}.{k}.{'et' if binary else 'json'}" for k in range(3)]
        found, resources = load_chakra(tmp_path / name, schema=SCHEMA)
        assert simulate(found, resources) == simulate(tasks, engines)
        assert_equal_tasks(found, tasks)


def test_nodes_say_what_other_tools_read() -> None:
    tasks = Tasks.of([
        Task(id=0, kind="compute", seconds=5e-6, uses=(0,)),
        Task(id=1, kind="collective", uses=(2,), use_bytes=(3e4,), after=(0,), nbytes=64, detail="reduce-scatter"),
        Task(id=2, kind="send", after=(1,), peer=1, nbytes=8),
        Task(id=3, kind="receive", after=(2,), device=1, peer=0, nbytes=8),
        Task(id=4, kind="host", device=1, after=(3,), nbytes=16, detail="store"),
    ])
    traces = to_chakra(tasks, RESOURCES)
    nodes = {int(node["id"]): (node, plain(node)) for trace in traces.values() for node in trace[1:]}
    types = ["COMP_NODE", "COMM_COLL_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE", "MEM_STORE_NODE"]
    assert [nodes[k][0]["type"] for k in range(5)] == types
    assert [nodes[k][0]["dataDeps"] for k in range(5)] == [[], ["0"], ["1"], [], ["3"]]
    assert [nodes[k][0]["durationMicros"] for k in range(2)] == ["5", "10"]
    assert [nodes[1][1][name] for name in ("comm_type", "comm_size", "is_cpu_op")] == ["7", "64", False]
    ends = [tuple(nodes[k][1][f"comm_{end}"] for end in ("src", "dst", "tag")) for k in (2, 3)]
    assert ends == [(0, 1, 2), (0, 1, 2)]
    assert nodes[4][1]["tensor_size"] == "16"
    assert [len(trace) for trace in traces.values()] == [4, 3]


def plain(node: dict[str, Any]) -> dict[str, Any]:
    return {a["name"]: next(v for k, v in a.items() if k.endswith(("Val", "List"))) for a in node["attr"]}


# ---------------------------------------------------------------------------------------------- traces of other tools


def foreign(*nodes: dict[str, Any]) -> list[dict[str, Any]]:
    """As the schema's own generator writes them: through protobuf, default values left out."""
    first = MessageToDict(ParseDict({"version": "0.0.4"}, SCHEMA.GlobalMetadata()))
    return [first, *(MessageToDict(ParseDict(node, SCHEMA.Node())) for node in nodes)]


def node(id_: int, type_: str, *deps: int, micros: int = 0, **attributes: tuple[str, Any]) -> dict[str, Any]:
    attr = [{"name": name, form: value} for name, (form, value) in attributes.items()]
    return {"id": id_, "name": f"n{id_}", "type": type_, "dataDeps": list(deps), "durationMicros": micros, "attr": attr}


def size(nbytes: int) -> tuple[str, int]:
    return ("int64Val", nbytes)


def test_two_dependent_compute_nodes_take_the_sum() -> None:
    trace = foreign(node(0, "COMP_NODE", micros=5), node(1, "COMP_NODE", 0, micros=7))
    assert simulate(*from_chakra({0: trace})).makespan_seconds == pytest.approx(12e-6)


def test_a_collective_without_time_takes_its_bytes_over_the_given_rate() -> None:
    trace = foreign(node(0, "COMM_COLL_NODE", comm_type=("int64Val", 2), comm_size=size(1000)))
    tasks, resources = from_chakra({0: trace}, bytes_per_second=100.0)
    assert simulate(tasks, resources).makespan_seconds == 10
    assert tasks.task(0).detail == "all-gather"
    with pytest.raises(ProblemError, match=r"node 0 'n0' of device 0 moves 1000 bytes in unknown time; give b"):
        from_chakra({0: trace})


def test_a_receive_waits_for_its_send_on_the_other_device() -> None:
    ends: dict[str, Any] = {"comm_src": ("int32Val", 0), "comm_dst": ("int32Val", 1), "comm_tag": ("int32Val", 4)}
    traces = {
        0: foreign(node(0, "COMP_NODE", micros=10), node(1, "COMM_SEND_NODE", 0, micros=5, **ends)),
        1: foreign(node(0, "COMM_RECV_NODE", **ends), node(1, "COMP_NODE", 0, micros=3)),
    }
    found = simulate(*from_chakra(traces))
    assert found.makespan_seconds == pytest.approx(18e-6)
    with pytest.raises(ProblemError, match="receive 0 of device 1 has no send from device 0 to 1 with tag 4"):
        from_chakra({1: traces[1]})


def test_collectives_of_one_group_are_one_task_of_all_its_devices() -> None:
    group: dict[str, Any] = {"pg_name": ("stringVal", "dp"), "comm_size": size(8)}
    traces = {
        device: foreign(
            node(0, "COMP_NODE", micros=10 * (device + 1)), node(1, "COMM_COLL_NODE", 0, micros=4, **group),
            node(2, "COMM_COLL_NODE", 1, micros=4, **group),
        )
        for device in range(2)
    }
    tasks, resources = from_chakra(traces)
    found = simulate(tasks, resources)
    assert len(tasks) == 4 and found.makespan_seconds == pytest.approx(28e-6)
    assert [found.exposed_seconds(device) for device in range(2)] == [pytest.approx(8e-6)] * 2


def test_load_and_store_occupy_the_link_to_the_host() -> None:
    trace = foreign(node(0, "MEM_LOAD_NODE", tensor_size=("uint64Val", 50)), node(1, "MEM_STORE_NODE", micros=3))
    tasks, resources = from_chakra({0: trace}, bytes_per_second=10.0)
    assert [resources[u].kind for k in range(2) for u in tasks.task(k).uses] == ["host", "host"]
    assert [tasks.task(k).detail for k in range(2)] == ["load", "store"]
    assert simulate(tasks, resources).makespan_seconds == pytest.approx(5 + 3e-6)


# -------------------------------------------------------------------------------------------------------------- errors


def test_a_damaged_trace_is_refused_with_its_place() -> None:
    text = chakra_text(foreign(node(0, "COMP_NODE")))
    with pytest.raises(ProblemError, match="line 3 of the Chakra trace is no JSON"):
        read_chakra(text + '{"id": ')
    with pytest.raises(ProblemError, match="device 0 does not start with a GlobalMetadata"):
        from_chakra({0: [json.loads(line) for line in text.splitlines()[1:]]})
    with pytest.raises(ProblemError, match="node 0 of device 0 is a node without type"):
        from_chakra({0: foreign({"name": "x"})})
    with pytest.raises(ProblemError, match="node 1 of device 0 depends on node 7, which its trace does not hold"):
        from_chakra({0: foreign(node(0, "COMP_NODE"), node(1, "COMP_NODE", 7))})


def test_files_that_are_not_there_or_cut_off_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"there is no .*x\.DEVICE\.json or"):
        load_chakra(tmp_path / "x")
    tasks, engines = pipeline(one_forward_one_backward(1, 1), forward=1, backward=1)
    (path,) = write_chakra(tasks, engines, tmp_path / "x", binary=True, schema=SCHEMA)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ProblemError, match="ends in the middle of a message"):
        load_chakra(tmp_path / "x", schema=SCHEMA)
    write_chakra(tasks, engines, tmp_path / "x")
    with pytest.raises(ProblemError, match=r"there are \.json and .et traces"):
        load_chakra(tmp_path / "x", schema=SCHEMA)


def test_binary_traces_without_the_schemas_package_say_what_to_do(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "chakra", None)
    with pytest.raises(ArgumentError, match=r"need the schema's Python module.*or use the JSON form"):
        write_chakra(Tasks.of(()), RESOURCES, tmp_path / "x", binary=True)
