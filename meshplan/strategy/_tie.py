"""Nodes that must decide alike: the repeated layers of an unrolled model.

Two nodes are tied when they look the same from inside (same operations, shapes, wiring)
and their neighbourhoods look the same `radius` edges far. Layers far from both ends then
share their decisions, and their costs add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshplan.strategy._graph import Edge, Graph, Node


@dataclass(frozen=True, slots=True)
class Ties:
    """`class_of[node]`, the first node of each class, and the members of each."""

    class_of: tuple[int, ...]
    first: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]


def tie(graph: Graph, marks: Mapping[int, Any], radius: int = 2) -> Ties:
    """Classes of nodes. `marks[node]` keeps nodes apart that the user treats differently (pins, names)."""
    colours = _intern([(_inside(graph, n), marks.get(i)) for i, n in enumerate(graph.nodes)])
    outgoing: list[list[tuple[Any, int]]] = [[] for _ in graph.nodes]
    incoming: list[list[tuple[Any, int]]] = [[] for _ in graph.nodes]
    for e in graph.edges:
        label = _label(graph, e)
        outgoing[e.source].append((label, e.target))
        incoming[e.target].append((label, e.source))
    for _ in range(radius):
        around = [
            (
                colours[i],
                tuple(sorted((label, colours[j]) for label, j in outgoing[i])),
                tuple(sorted((label, colours[j]) for label, j in incoming[i])),
            )
            for i in range(len(graph.nodes))
        ]
        colours = _intern(around)
    members: dict[int, list[int]] = {}
    for node, colour in enumerate(colours):
        members.setdefault(colour, []).append(node)
    ordered = sorted(members.values())
    class_of = [0] * len(colours)
    for c, nodes in enumerate(ordered):
        for node in nodes:
            class_of[node] = c
    return Ties(tuple(class_of), tuple(nodes[0] for nodes in ordered), tuple(tuple(nodes) for nodes in ordered))


def _intern(things: list[Any]) -> list[int]:
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(t, len(numbers)) for t in things]


def _inside(graph: Graph, node: Node) -> Any:
    """What one node is, without naming any value, operation or argument."""
    about = (
        node.kind, node.sizes, tuple(sorted(node.whole)), node.count, node.scope > 0, node.free,
        tuple(node.values.values()), tuple(node.arguments.values()), tuple(r.trips for r in node.inner),
    )
    if node.group is None:
        return about
    local = {op: i for i, op in enumerate(node.group.ops)}
    wiring = []
    for op_index in node.group.ops:
        op = graph.program.ops[op_index]
        operands = tuple(
            -1 if v is None else local.get(graph.program.values[v].op, -2) for v in op.operands
        )
        wiring.append((id(op.view), operands))
    return (*about, tuple(wiring))


def _label(graph: Graph, edge: Edge) -> Any:
    source = graph.nodes[edge.source]
    ordinal = list(source.values).index(edge.value) if edge.value in source.values else -1
    return (ordinal, edge.have, edge.want, edge.count, edge.trips, edge.stored, graph.program.nbytes(edge.value))
