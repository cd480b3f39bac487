"""Dims in classes: what people call batch, seq, embed, heads, mlp, vocab.

The factors of all nodes are joined where a value passes between them. A class collects the
dims that an operation could split together; names given by the user name classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshplan.rules import Dims
from meshplan.strategy._graph import Graph

Factor = tuple[int, int]  # (node, factor)


@dataclass(frozen=True, slots=True)
class DimClasses:
    """`of[(node, factor)]` is a class number; `names[class]` what the user calls it; `batch`, `sequence`,
    `features`: the classes of the data's first and second dims and of the widest-spread other class, or -1."""

    of: Mapping[Factor, int]
    names: Mapping[int, str]
    batch: int
    sequence: int
    features: int

    def dims(self, node: int, dims: Dims) -> tuple[int, ...]:
        """Class of each dim of a value at a node; -1 for a dim without a factor."""
        return tuple(self.of[node, d[0]] if d else -1 for d in dims)


def dim_classes(graph: Graph) -> DimClasses:
    """Factors joined where a value passes between nodes with the same cut; names and roles by majority."""
    parent: dict[Factor, Factor] = {}

    def find(x: Factor) -> Factor:
        root = x
        while (up := parent.setdefault(root, root)) != root:
            root = up
        while parent[x] != root:
            parent[x], x = root, parent[x]
        return root

    for i, node in enumerate(graph.nodes):
        for f in range(len(node.sizes)):
            find((i, f))
    for e in graph.edges:
        for have, want in zip(e.have, e.want, strict=True):
            if len(have) == len(want):
                for f, g in zip(have, want, strict=True):
                    if graph.nodes[e.source].sizes[f] == graph.nodes[e.target].sizes[g]:
                        parent[find((e.source, f))] = find((e.target, g))
    roots: dict[Factor, int] = {}
    of = {x: roots.setdefault(find(x), len(roots)) for x in sorted(parent)}
    batch, sequence = _data_classes(graph, of)
    names = _names(graph, of)
    by_name = {n: c for c, n in names.items()}
    batch, sequence = by_name.get("batch", batch), by_name.get("seq", sequence)
    return DimClasses(of, names, batch, sequence, by_name.get("embed", _features(of, {batch, sequence})))


def _data_classes(graph: Graph, of: Mapping[Factor, int]) -> tuple[int, int]:
    """Classes of dims 0 and 1 of the arguments that are not carried to the next step.

    Dim 1 is a sequence in token ids and in arrays of more than two dims; [batch, features] has none.
    """
    votes: list[dict[int, int]] = [{}, {}]
    for i, leaf in enumerate(graph.program.args):
        if leaf.pair < 0:
            node = graph.node_of_arg[i]
            sequences = len(leaf.aval.shape) > 2 or leaf.aval.dtype.startswith(("int", "uint"))
            for d, factors in enumerate(graph.nodes[node].arguments[i][: 1 + sequences]):
                if factors:
                    c = of[node, factors[0]]
                    votes[d][c] = votes[d].get(c, 0) + leaf.aval.size
    first = max(votes[0], key=lambda c: votes[0][c], default=-1)
    votes[1].pop(first, None)
    return first, max(votes[1], key=lambda c: votes[1][c], default=-1)


def _features(of: Mapping[Factor, int], known: set[int]) -> int:
    sizes: dict[int, int] = {}
    for c in of.values():
        if c not in known:
            sizes[c] = sizes.get(c, 0) + 1
    return max(sizes, key=lambda c: (sizes[c], -c), default=-1)


def _names(graph: Graph, of: Mapping[Factor, int]) -> dict[int, str]:
    """The most frequent name of each class."""
    votes: dict[int, dict[str, int]] = {}
    for value, names in graph.program.names.items():
        node = graph.owner.get(value)
        made = graph.program.values[value].op
        if node is None and made >= 0:
            node = graph.node_of_op.get(made)
        if node is None:
            continue
        dims = value_dims(graph, node, value)
        for name, factors in zip(names, dims or (), strict=False):
            if name and len(factors) == 1:
                count = votes.setdefault(of[node, factors[0]], {})
                count[name] = count.get(name, 0) + 1
    taken: dict[int, str] = {}
    for c, count in sorted(votes.items()):
        taken[c] = max(sorted(count), key=lambda n: count[n])
    return taken


def value_dims(graph: Graph, node: int, value: int) -> Dims | None:
    """Dims of a value in the factors of the node that makes or stores it."""
    about = graph.nodes[node]
    if about.group is not None and value in about.group.results:
        return about.group.results[value]
    if value in about.values:
        return about.values[value]
    return next((d for i, d in about.arguments.items() if graph.program.args[i].value == value), None)
