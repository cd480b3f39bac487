"""Chakra execution traces back to tasks and resources: our own exactly, those of other tools by its rules.

Other tools' traces name no resources: every device gets a compute engine, a link and a link to
the host, and a node occupies the one of its type. Its seconds are its microseconds; where it has
none, its bytes over the rate that the caller gives. A receive waits for the send of the same
source, destination and tag; collectives of one process group are one task in all its devices'
traces, matched in order. Traces of another schema version are read as far as fields agree.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshplan.core import ProblemError
from meshplan.simulate._chakra import COLLECTIVES, NODE_TYPES, OWN, Message
from meshplan.simulate._task import Resource, Task, TaskKind, Tasks

_KINDS: dict[str, TaskKind] = {**{type_: kind for kind, type_ in NODE_TYPES.items()}, "MEM_STORE_NODE": "host"}
_DETAILS = {number: kind for kind, number in COLLECTIVES.items()}
_NUMBERED = {2: "MEM_LOAD_NODE", 3: "MEM_STORE_NODE", 4: "COMP_NODE", 5: "COMM_SEND_NODE", 6: "COMM_RECV_NODE",
             7: "COMM_COLL_NODE"}
_ENGINES = ("compute", "link", "host")


def read_chakra(text: str) -> list[Message]:
    """The messages of one trace's text, one after the other with any white space between.

    Raises ProblemError with the line where the text is no JSON.
    """
    decoder, found, place = json.JSONDecoder(), [], 0
    while text[place:].strip():
        place += len(text[place:]) - len(text[place:].lstrip())
        try:
            message, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise ProblemError(
                f"line {error.lineno} of the Chakra trace is no JSON ({error.msg}); give the JSON form, as "
                "`chakra_jsonizer` writes it from an .et file."
            ) from error
        found.append(message)
    return found


def from_chakra(
    traces: Mapping[int, Sequence[Message]], *, bytes_per_second: float | None = None
) -> tuple[Tasks, tuple[Resource, ...]]:
    """The tasks and resources of these traces, by device: what `to_chakra` was given, or its likeness.

    `bytes_per_second`: the rate of links and host links for traces of other tools, whose nodes
    may give bytes without microseconds. Raises ProblemError for a trace without metadata or with
    a node that cannot be timed.
    """
    for device, messages in traces.items():
        if not messages or {"id", "type", "name"} & messages[0].keys():
            raise ProblemError(f"the Chakra trace of device {device} does not start with a GlobalMetadata message.")
    if not traces:
        return Tasks.of(()), ()
    first = next(iter(traces.values()))[0]
    if any(each["name"] == OWN + "resource_names" for each in first.get("attr", ())):
        return _own_tasks(traces), _own_resources(_attributes(first))
    return _foreign_tasks(traces, bytes_per_second), tuple(
        Resource(name=kind, kind=kind, device=device, bytes_per_second=None if kind == "compute" else bytes_per_second)
        for device in sorted(traces)
        for kind in _ENGINES
    )


def _attributes(message: Message) -> dict[str, Any]:
    """Attributes by name; integers and doubles, which JSON may hold as strings, as numbers."""
    found = {}
    for each in message.get("attr", ()):
        for form, value in each.items():
            exact = int if "64" in form or "32" in form else float if form.startswith(("double", "float")) else _same
            if form.endswith("List"):
                found[each["name"]] = [exact(x) for x in value.get("values", ())]
            elif form.endswith("Val"):
                found[each["name"]] = exact(value)
    return found


def _same(value: Any) -> Any:
    return value


def _own_resources(facts: Mapping[str, Any]) -> tuple[Resource, ...]:
    columns = ("names", "kinds", "devices", "capacities", "bytes_per_second", "in_order")
    rows = zip(*(facts[f"{OWN}resource_{column}"] for column in columns), strict=True)
    return tuple(
        Resource(name=name, kind=kind, device=device, capacity=capacity, in_order=in_order,
                 bytes_per_second=None if rate != rate else rate)
        for name, kind, device, capacity, rate, in_order in rows
    )


def _own_tasks(traces: Mapping[int, Sequence[Message]]) -> Tasks:
    found: dict[int, Task] = {}
    before: dict[int, set[int]] = defaultdict(set)
    for messages in traces.values():
        for node in messages[1:]:
            facts, number = _attributes(node), int(node.get("id", 0))
            own = {key.removeprefix(OWN): value for key, value in facts.items() if key.startswith(OWN)}
            before[number] |= {*_dependences(node), *own.pop("remote_deps")}
            own.update(uses=tuple(own["uses"]), use_bytes=tuple(own["use_bytes"]))
            found[number] = Task(id=number, name=node.get("name", ""), **own)
    # The same task stands in the traces of all its devices, each with the dependences of that device as its own.
    rows = [found[number] for number in sorted(found)]
    return Tasks.of(replace(task, after=tuple(sorted(before[task.id]))) for task in rows)


def _dependences(node: Message) -> list[int]:
    return [int(before) for field in ("ctrlDeps", "dataDeps") for before in node.get(field, ())]


def _foreign_tasks(traces: Mapping[int, Sequence[Message]], bytes_per_second: float | None) -> Tasks:
    devices = sorted(traces)
    places: dict[tuple[Any, ...], int] = {}
    names: dict[tuple[int, int], int] = {}  # (device, node id) -> task
    rows: list[tuple[int, Message, dict[str, Any], str]] = []
    users: dict[int, list[int]] = defaultdict(list)
    for device in devices:
        turns: Counter[str] = Counter()
        for node in traces[device][1:]:
            facts, type_ = _attributes(node), _NUMBERED.get(node.get("type", 0), node.get("type", ""))
            if type_ not in _KINDS:
                raise ProblemError(f"node {node.get('id', 0)} of device {device} is a {type_ or 'node without type'}; "
                                   f"only {', '.join(sorted(_KINDS))} can be simulated.")
            key: tuple[Any, ...] = (device, node.get("id", 0))
            if type_ == "COMM_COLL_NODE" and facts.get("pg_name"):
                key = ("group", facts["pg_name"], turns[facts["pg_name"]])
                turns[facts["pg_name"]] += 1
            if key not in places:
                places[key] = len(rows)
                rows.append((device, node, facts, type_))
            names[device, int(node.get("id", 0))] = places[key]
            users[places[key]].append(device)
    after: dict[int, set[int]] = defaultdict(set)
    for device in devices:
        for node in traces[device][1:]:
            missing = [before for before in _dependences(node) if (device, before) not in names]
            if missing:
                raise ProblemError(f"node {node.get('id', 0)} of device {device} depends on node {missing[0]}, "
                                   "which its trace does not hold; give the whole trace.")
            after[names[device, int(node.get("id", 0))]] |= {names[device, d] for d in _dependences(node)}
    _match(rows, after)
    return Tasks.of(
        _foreign_task(place, row, [devices.index(d) for d in users[place]], sorted(after[place]), bytes_per_second)
        for place, row in enumerate(rows)
    )


def _match(rows: Sequence[tuple[int, Message, dict[str, Any], str]], after: dict[int, set[int]]) -> None:
    """Let every receive come after its send; equal keys are matched in order."""
    sends: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, (_, _, facts, type_) in enumerate(rows):
        if type_ == "COMM_SEND_NODE":
            sends[tuple(facts.get(key, 0) for key in ("comm_src", "comm_dst", "comm_tag"))].append(place)
    for place, (device, node, facts, type_) in enumerate(rows):
        if type_ == "COMM_RECV_NODE":
            key = tuple(facts.get(key, 0) for key in ("comm_src", "comm_dst", "comm_tag"))
            if not sends[key]:
                raise ProblemError(f"receive {node.get('id', 0)} of device {device} has no send from device {key[0]} "
                                   f"to {key[1]} with tag {key[2]}; give the traces of all devices.")
            after[place].add(sends[key].pop(0))


def _foreign_task(
    place: int, row: tuple[int, Message, dict[str, Any], str], users: Sequence[int], after: Sequence[int],
    bytes_per_second: float | None,
) -> Task:
    device, node, facts, type_ = row
    kind = _KINDS[type_]
    nbytes = int(facts.get("comm_size") or facts.get("tensor_size") or 0)
    micros = int(node.get("durationMicros", 0))
    engine = _ENGINES.index(kind) if kind in _ENGINES else _ENGINES.index("link")
    # A receive takes no time of its own: the bytes travel with the send.
    moves = nbytes and not micros and kind not in ("compute", "receive")
    if moves and bytes_per_second is None:
        raise ProblemError(f"node {node.get('id', 0)} '{node.get('name', '')}' of device {device} moves {nbytes} bytes "
                           "in unknown time; give bytes_per_second=.")
    uses = () if kind == "receive" and not micros else tuple(user * len(_ENGINES) + engine for user in users)
    peers = {"send": facts.get("comm_dst", -1), "receive": facts.get("comm_src", -1)}
    details = {"collective": _DETAILS.get(facts.get("comm_type", 0), ""),
               "host": "store" if type_ == "MEM_STORE_NODE" else "load"}
    return Task(
        id=place, kind=kind, seconds=micros * 1e-6, uses=uses, use_bytes=(nbytes,) * len(uses) if moves else (),
        after=tuple(after), device=device, nbytes=nbytes, name=node.get("name", ""), detail=details.get(kind, ""),
        peer=peers.get(kind, -1),
    )
