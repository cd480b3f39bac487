"""Tasks as Chakra execution traces: a DAG of COMP, COLL, SEND, RECV and MEM nodes per device.

The schema is MLCommons' `et_def.proto`, version 0.0.4 (arXiv 2305.14516). Its Python package is
on no registry (it installs from the repository only), so messages are written in protobuf's own
JSON form: 64-bit integers as strings, enums by name, lowerCamelCase fields. That is what the
schema's `chakra_jsonizer` writes and what `google.protobuf.json_format` reads back.

Attributes that other tools know: is_cpu_op, comm_type, comm_size, comm_src, comm_dst, comm_tag,
tensor_size. Chakra has no resources, no seconds below a microsecond, no memory held between nodes and no
dependence across devices but send and receive; those are attributes that start with "meshplan.",
which other tools pass over. A collective-permute is a SEND: Chakra has no collective for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshplan.simulate._check import alone_seconds
from meshplan.simulate._task import TASK_KINDS, Resource, Task, TaskKind, Tasks

Message = dict[str, Any]
VERSION = "0.0.4"
OWN = "meshplan."
COLLECTIVES = {"all-reduce": 0, "all-gather": 2, "all-to-all": 6, "reduce-scatter": 7}
NODE_TYPES: dict[TaskKind, str] = {
    "compute": "COMP_NODE", "collective": "COMM_COLL_NODE", "send": "COMM_SEND_NODE", "receive": "COMM_RECV_NODE",
    "host": "MEM_LOAD_NODE",
}


def to_chakra(tasks: Tasks, resources: Sequence[Resource]) -> dict[int, list[Message]]:
    """For each device its trace: the GlobalMetadata message, then one Node message per task.

    A task that runs on several devices (its own, and those whose resources it occupies) is a node
    in each of their traces, with one id. Raises ProblemError as `simulate` does.
    """
    seconds = alone_seconds(tasks, resources)
    owners = sorted({*np.unique(tasks.device).tolist(), *(r.device for r in resources if r.device >= 0)})
    traces = {}
    for device in owners:
        here = tasks.on_device(device, resources)
        nodes = [
            _node(tasks, tasks.task(place), float(seconds[place]), device, here)
            for place in np.flatnonzero(here).tolist()
        ]
        traces[device] = [_metadata(device, resources), *nodes]
    return traces


def chakra_text(messages: Sequence[Message]) -> str:
    """One trace as text, a message a line: the form of `chakra_jsonizer`, whose messages follow each other."""
    return "".join(json.dumps(message, separators=(",", ":")) + "\n" for message in messages)


def attribute(name: str, value: Any, form: str) -> Message:
    """An AttributeProto; `form` is its oneof field, as "int64Val" or "doubleList"."""
    exact = (lambda x: str(int(x))) if "64" in form else _number if form.startswith("double") else (lambda x: x)
    content = {"values": [exact(each) for each in value]} if form.endswith("List") else exact(value)
    return {"name": name, form: content}


def _number(value: float) -> float | str:
    """A double as protobuf's JSON form has it; JSON itself knows no infinity."""
    if np.isfinite(value):
        return float(value)
    return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _metadata(device: int, resources: Sequence[Resource]) -> Message:
    rates = [float("nan") if r.bytes_per_second is None else r.bytes_per_second for r in resources]
    columns = [
        ("device", device, "int64Val"),
        ("resource_names", [r.name for r in resources], "stringList"),
        ("resource_kinds", [r.kind for r in resources], "stringList"),
        ("resource_devices", [r.device for r in resources], "int64List"),
        ("resource_capacities", [r.capacity for r in resources], "doubleList"),
        ("resource_bytes_per_second", rates, "doubleList"),
        ("resource_in_order", [r.in_order for r in resources], "boolList"),
    ]
    return {"version": VERSION, "attr": [attribute(OWN + name, value, form) for name, value, form in columns]}


def _node(tasks: Tasks, task: Task, seconds: float, device: int, here: np.ndarray) -> Message:
    permute = task.kind == "collective" and task.detail == "collective-permute"
    kind = "MEM_STORE_NODE" if task.detail == "store" and task.kind == "host" else NODE_TYPES[task.kind]
    return {
        "id": str(task.id), "name": task.name, "type": NODE_TYPES["send"] if permute else kind,
        "dataDeps": [str(before) for before in task.after if here[before]],
        "durationMicros": str(round(seconds * 1e6)),
        "attr": _attributes(tasks, task, permute, device) + _own_attributes(task, here),
    }


def _attributes(tasks: Tasks, task: Task, permute: bool, device: int) -> list[Message]:
    found = [attribute("is_cpu_op", False, "boolVal")]
    if task.kind == "host":
        return [*found, attribute("tensor_size", task.nbytes, "uint64Val")]
    if task.kind == "compute":
        return found
    found.append(attribute("comm_size", task.nbytes, "int64Val"))
    if task.kind == "collective" and not permute:
        return [*found, attribute("comm_type", COLLECTIVES.get(task.detail, 0), "int64Val")]
    ends = (task.peer, task.device) if task.kind == "receive" else (task.device, task.peer)
    named = zip(("comm_src", "comm_dst", "comm_tag"), (*ends, _tag(tasks, task)), strict=True)
    return found + [attribute(name, max(value, 0), "int32Val") for name, value in named]


def _tag(tasks: Tasks, task: Task) -> int:
    """The id of the send: what a receive and its send have in common."""
    sends = [before for before in task.after if TASK_KINDS[tasks.kind[before]] == "send"]
    return sends[0] if task.kind == "receive" and sends else task.id


def _own_attributes(task: Task, here: np.ndarray) -> list[Message]:
    remote = [before for before in task.after if not here[before]]
    columns = [
        ("kind", task.kind, "stringVal"), ("seconds", task.seconds, "doubleVal"), ("uses", task.uses, "int64List"),
        ("use_bytes", task.use_bytes, "doubleList"), ("remote_deps", remote, "uint64List"),
        ("device", task.device, "int64Val"), ("peer", task.peer, "int64Val"), ("nbytes", task.nbytes, "int64Val"),
        ("allocates", task.allocates, "int64Val"), ("frees", task.frees, "int64Val"),
        ("source", task.source, "stringVal"), ("detail", task.detail, "stringVal"),
    ]
    return [attribute(OWN + name, value, form) for name, value, form in columns]
