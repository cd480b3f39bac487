"""Equal names get equal axes: where the user's names bind.

A name binds where it was written: at the values that `mp.dims` tags, and for a parameter
named by `mp.params` in the products that use it. How a parameter is *stored* stays free
(fully sharded storage splits dims that no product splits), and so do lookups in a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshplan.rules import Dims
from meshplan.strategy._classes import value_dims
from meshplan.strategy._graph import Edge, Graph

Place = tuple[int, int]  # (node, factor)


def bound_places(graph: Graph) -> dict[str, tuple[Place, ...]]:
    """For each name the factors that must be split alike."""
    outgoing: dict[int, list[Edge]] = {}
    for e in graph.edges:
        outgoing.setdefault(e.source, []).append(e)
    found: dict[str, dict[Place, None]] = {}

    def bind(node: int, dims: Dims, names: Sequence[str | None]) -> None:
        for name, factors in zip(names, dims, strict=False):
            if name and len(factors) == 1:
                found.setdefault(name, {})[node, factors[0]] = None

    arguments = {leaf.value for leaf in graph.program.args}
    for value, names in graph.program.names.items():
        if value in arguments:
            node = graph.owner.get(value)
            if node is not None:
                for at, dims in products_of(graph, outgoing, node, value):
                    bind(at, dims, names)
            continue
        made = graph.program.values[value].op
        node = graph.node_of_op.get(made)
        dims = value_dims(graph, node, value) if node is not None else None
        if node is not None and dims is not None and len(dims) == len(names):
            bind(node, dims, names)
    return {name: tuple(places) for name, places in sorted(found.items())}


def products_of(
    graph: Graph, outgoing: Mapping[int, Sequence[Edge]], node: int, value: int
) -> list[tuple[int, Dims]]:
    """(node, dims of the argument there) of the dots that read an argument, conversions and slices seen through."""
    out: list[tuple[int, Dims]] = []
    stack: list[tuple[int, Dims]] = [(node, ())]
    start = graph.nodes[node]
    whole = start.values.get(value) or next(iter(start.arguments.values()), ())
    stack = [(node, whole)]
    seen: set[int] = set()
    while stack:
        at, dims = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        for e in outgoing.get(at, ()):
            # follow the same array only: each of its dims arrives as one dim, or the scanned one is gone
            if e.have not in (dims, dims[1:]) or e.stored:
                continue
            target = graph.nodes[e.target]
            want = e.want if e.have == dims else ((), *e.want)
            if target.kind == "anchor":
                if all(graph.program.ops[o].primitive == "dot_general" for o, _ in e.uses):
                    out.append((e.target, want))
            elif target.kind in ("view", "crossing") or _only_converts(graph, e.target):
                stack.append((e.target, want))
    return out


def _only_converts(graph: Graph, node: int) -> bool:
    group = graph.nodes[node].group
    return group is not None and all(
        graph.program.ops[o].primitive in ("convert_element_type", "copy", "name") for o in group.ops
    )
