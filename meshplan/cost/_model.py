"""Every cost of a strategy graph over one mesh, class by class of tied nodes.

`MeshModel` is what the search asks: the strategies of each class, what they cost, what moving
a value between two classes costs, what is held in memory. `problem` turns it into arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from meshplan.core import MeshShape, Spec
from meshplan.cost._emission import Emission
from meshplan.cost._liveness import Liveness, liveness
from meshplan.cost._needed import urgent_ops
from meshplan.cost._nodes import node_seconds
from meshplan.cost._problem import FORBIDDEN, Floats, Problem
from meshplan.cost._rates import Rates, Shares
from meshplan.machine import Machine
from meshplan.program import Program
from meshplan.rules import Aval, Dims
from meshplan.strategy import Choices, Edge, Graph, Node, Ties, enumerate_choices

Index = npt.NDArray[np.int64]
Keep = Callable[[int, Node, Choices], npt.NDArray[np.bool_]]
# Resharded copies below this many bytes, and this part of the limit, are not worth a memory row's entry.
SMALL_COPY, SMALL_PART = 1 << 20, 1e-3


# What memory traffic beyond arithmetic counts in the search. Plans are ranked by arithmetic and
# communication, as audits price compiled modules; how much traffic fusion and overlap leave exposed is
# not known when planning, so that it only decides between plans that are close.
TRAFFIC = 0.1


@dataclass(frozen=True, slots=True)
class Space:
    """What is known before any mesh: the graph, its ties, when values live.

    `held[node]`: values that take memory of their own there, with their dims; a result in a
    donated argument's place takes none. `urgent`: operations that lead to a product (see `urgent_ops`).
    `edges`: those of tied nodes, gathered.
    """

    graph: Graph
    ties: Ties
    live: Liveness
    held: tuple[dict[int, Dims], ...]
    urgent: frozenset[int]
    edges: tuple[TiedEdge, ...]

    @classmethod
    def of(cls, graph: Graph, ties: Ties) -> Space:
        """With what each node holds: values it makes, arguments it stores, results that are made of literals."""
        program = graph.program
        aliased = {leaf.value for leaf in program.results if leaf.pair >= 0}
        held = [_held(graph, n, aliased) for n in graph.nodes]
        for e in graph.edges:
            if graph.nodes[e.source].free and graph.nodes[e.target].kind == "result":
                held[e.target][e.value] = e.want  # made of literals, but it leaves the step
        return cls(graph, ties, liveness(graph), tuple(held), urgent_ops(graph), tie_edges(graph, ties))


@dataclass(frozen=True, slots=True)
class TiedEdge:
    """Edges between two classes that look alike: the first of them, and all of them."""

    source: int
    target: int
    first: Edge
    members: tuple[Edge, ...]


class MeshModel:
    """The strategies of every class over one mesh and what they cost.

    `keep(class, node, choices)` says which strategies to consider. `traffic` weighs memory traffic, see `node_seconds`.
    `whole`: a model of the same space, machine and mesh with all strategies, whose prices are taken over.
    `rates`: prices of the same machine and mesh to go on with.
    """

    def __init__(
        self, space: Space, machine: Machine, mesh: MeshShape, keep: Keep | None = None, traffic: float = TRAFFIC,
        whole: MeshModel | None = None, rates: Rates | None = None,
    ) -> None:
        self.space, self.machine, self.mesh, self.traffic = space, machine, mesh, traffic
        self.rates = whole.rates if whole else rates or Rates(machine, mesh)
        nodes = [space.graph.nodes[i] for i in space.ties.first]
        self.choices: list[Choices] = whole.choices if whole else [enumerate_choices(n, mesh) for n in nodes]
        self.whole, self.kept = whole, [np.ones(len(c), bool) for c in self.choices]
        if keep is not None:
            self.kept = [keep(i, n, c) for i, (n, c) in enumerate(zip(nodes, self.choices, strict=True))]
            self.choices = [c.take(kept) for c, kept in zip(self.choices, self.kept, strict=True)]
        self.edges = space.edges
        self._specs: dict[tuple[Any, ...], tuple[list[Spec], Index]] = {}

    def node(self, c: int) -> Node:
        """The first member of a class; the others cost the same."""
        return self.space.graph.nodes[self.space.ties.first[c]]

    # specs

    def specs(self, c: int, dims: Dims, partial: tuple[int, ...] = ()) -> tuple[list[Spec], Index]:
        """Distinct specs of an array at a class and which one each strategy gives it; remembered.

        A restricted model has those of the whole, so that prices between them are known.
        """
        key = (c, dims, partial)
        if key not in self._specs:
            if self.whole is not None:
                found, index = self.whole.specs(c, dims, partial)
                self._specs[key] = found, index[self.kept[c]]
            else:
                self._specs[key] = self.choices[c].specs(dims, partial, self.node(c).kind == "sum")
        return self._specs[key]

    def source_specs(self, edge: TiedEdge) -> tuple[list[Spec], Index]:
        """Specs in which the edge's value is left, by the strategies of its source; may be unreduced."""
        node = self.space.graph.nodes[edge.first.source]
        reduction = node.partial.get(edge.first.value)
        return self.specs(edge.source, edge.first.have, reduction.factors if reduction else ())

    def target_specs(self, edge: TiedEdge) -> tuple[list[Spec], Index]:
        """Specs in which the edge's value is wanted, by the strategies of its target."""
        return self.specs(edge.target, edge.first.want)

    def wire_bytes(self, edge: Edge, last: bool = True) -> tuple[float, float]:
        """Bytes of the edge's whole value as the back end sends it: while it is summed, and when it is moved.

        Moves are made after a narrowing conversion that follows, sums before it (measured); some back ends so narrow
        only the `last` one. A widening conversion of what is moved may come after the move.
        """
        program = self.space.graph.program
        aval, summed = program.values[edge.value].aval, program.values[self.summed(edge)].aval
        emission = self.rates.emission
        into_dot = bool(edge.uses) and all(program.ops[o].primitive == "dot_general" for o, _ in edge.uses)
        moved = (narrowed(program, edge, emission) if last or not emission.narrows_last else None) or aval
        before = widened_from(program, edge.value) if emission.widens_after else None
        moved = before if before is not None and before.itemsize < moved.itemsize else moved
        sums = summed.nbytes * emission.bytes_factor(summed.dtype, sums=True)
        return sums, moved.nbytes * emission.bytes_factor(moved.dtype, into_dot)

    def summed(self, edge: Edge) -> int:
        """The value that is summed where the edge's value is left unreduced: it may be converted after that."""
        reduction = self.space.graph.nodes[edge.source].partial.get(edge.value)
        return reduction.value if reduction else edge.value

    def waits(self, edge: Edge) -> bool:
        """Whether the program needs the value at once: not where it is only put away, stacked or stored."""
        return not edge.stored and any(op in self.space.urgent for op, _ in edge.uses)

    def needed_at_once(self, value: int) -> bool:
        """The same of a sum that is completed inside a node."""
        return any(op in self.space.urgent for op, _ in self.space.graph.program.consumers[value])

    # arrays

    def node_costs(self, shares: Shares | None = None) -> list[Floats]:
        """For each class (strategies,) seconds per step of all its members and of the edges between them."""
        space = self.space
        costs = []
        for c, members in enumerate(space.ties.members):
            seconds = node_seconds(
                space.graph.program, self.node(c), self.choices[c], self.rates, self.traffic, shares,
                waits=self.needed_at_once,
            )  # fmt: skip
            costs.append(seconds * len(members))
        for edge in self.edges:
            if edge.source == edge.target:
                costs[edge.source] = costs[edge.source] + np.diagonal(self.edge_table(edge, shares))
        return costs

    def edge_table(self, edge: TiedEdge, shares: Shares | None = None) -> Floats:
        """(strategies of source, strategies of target) seconds per step of all members."""
        (sources, i), (targets, j) = self.source_specs(edge), self.target_specs(edge)
        if self.node(edge.source).free:
            return np.zeros((len(i), len(j)))
        program = self.space.graph.program
        aval, summed = program.values[edge.first.value].aval, program.values[self.summed(edge.first)].aval
        small = self.rates.table(
            sources, targets, *self.wire_bytes(edge.first), waits=self.waits(edge.first),
            dtype=self.rates.emission.dtype(summed.dtype, sums=True), shares=shares, room=self.rates.room(aval.shape),
        )
        runs = edge.first.count * len(edge.members)
        if edge.first.trips > 1:
            alone = np.array([[only_summed(s, t) for t in targets] for s in sources])
            runs = runs / np.where(alone, edge.first.trips, 1.0)
        small = np.where(small >= FORBIDDEN, FORBIDDEN, small * runs)
        return small[np.ix_(i, j)]

    def copy_table(self, edge: TiedEdge, least: float) -> Floats | None:
        """Local bytes of the resharded copy that a member of the edge makes; None below `least` bytes or if none."""
        nbytes = self.space.graph.program.nbytes(edge.first.value)
        if nbytes < least or self.node(edge.source).free or edge.first.stored:
            return None
        (sources, i), (targets, j) = self.source_specs(edge), self.target_specs(edge)
        local = np.array([nbytes / t.shards(self.mesh) for t in targets])
        small = np.array([[0.0 if s == t else b for t, b in zip(targets, local, strict=True)] for s in sources])
        return small[np.ix_(i, j)] if small.any() else None

    def usage(self, c: int) -> Floats:
        """(strategies,) local bytes of all that one member of the class holds, live together or not."""
        program = self.space.graph.program
        total = np.zeros(len(self.choices[c]))
        for v, dims in self.space.held[self.space.ties.first[c]].items():
            total += program.nbytes(v) / self.choices[c].shards(dims)
        return total

    def problem(self, rows: Sequence[int], limit: float, shares: Shares | None = None) -> Problem:
        """The arrays, with a memory row for each of the positions `rows` and `limit` bytes for all.

        `shares`: latencies that small reductions were found to bear (`Chosen.small_shares`); none at first.
        """
        pairs: dict[tuple[int, int], Floats] = {}
        edge_usages, edge_rows, edge_weights = {}, {}, {}
        for edge in self.edges:
            if edge.source != edge.target:
                key = (edge.source, edge.target)
                table = self.edge_table(edge, shares)
                pairs[key] = pairs[key] + table if key in pairs else table
        index = {key: k for k, key in enumerate(pairs)}
        if rows:
            copies = self._copy_rows(rows, min(SMALL_COPY, SMALL_PART * limit))
            for key, (table, which, weights) in copies.items():
                e = index[key]
                edge_usages[e], edge_rows[e], edge_weights[e] = table, which, weights
        usages, node_rows, weights = self._usage_rows(rows)
        return Problem(
            node_costs=tuple(self.node_costs(shares)), edges=tuple(pairs), edge_costs=tuple(pairs.values()),
            usages=tuple(usages), rows=tuple(node_rows), row_weights=tuple(weights),
            limits=np.full(len(rows), float(limit)),
            edge_usages=edge_usages, edge_rows=edge_rows, edge_row_weights=edge_weights,
        )

    def _usage_rows(self, rows: Sequence[int]) -> tuple[list[Floats], list[Index], list[Floats]]:
        space, program = self.space, self.space.graph.program
        usages, which, weights = [], [], []
        for c, members in enumerate(space.ties.members):
            whole = sum(program.nbytes(v) for v in space.held[members[0]])
            live = np.zeros(len(rows))
            for m in members:
                for v in space.held[m]:
                    first, last = space.live.span[v]
                    live += [program.nbytes(v) if first <= r <= last else 0 for r in rows]
            used = np.flatnonzero(live)
            usages.append(self.usage(c))
            which.append(used.astype(np.int64))
            weights.append(live[used] / whole if whole else live[used])
        return usages, which, weights

    def _copy_rows(self, rows: Sequence[int], least: float) -> Mapping[tuple[int, int], tuple[Floats, Index, Floats]]:
        out: dict[tuple[int, int], tuple[Floats, Index, Floats]] = {}
        for edge in self.edges:
            key = (edge.source, edge.target)
            if edge.source == edge.target or key in out:
                continue  # one copy between two classes at a time: the largest comes first
            table = self.copy_table(edge, least)
            if table is None:
                continue
            live = np.zeros(len(rows))
            for e in edge.members:
                first, last = copy_span(e)
                live += [first <= r <= last for r in rows]
            used = np.flatnonzero(live)
            if len(used):
                out[key] = (table, used.astype(np.int64), live[used])
        return out


def tie_edges(graph: Graph, ties: Ties) -> tuple[TiedEdge, ...]:
    """Edges of tied nodes gathered, in a fixed order, the largest values first."""
    class_of = ties.class_of
    found: dict[Any, list[Edge]] = {}
    for e in graph.edges:
        source = graph.nodes[e.source]
        ordinal = list(source.values).index(e.value) if e.value in source.values else -1
        key = (
            class_of[e.source], class_of[e.target], ordinal, e.have, e.want, e.count, e.trips, e.stored,
            graph.program.values[e.value].aval,
        )
        found.setdefault(key, []).append(e)
    edges = [TiedEdge(key[0], key[1], members[0], tuple(members)) for key, members in found.items()]
    return tuple(sorted(edges, key=lambda t: -graph.program.nbytes(t.first.value)))


def only_summed(source: Spec, target: Spec) -> bool:
    """Whether the way between the specs is one all-reduce and nothing else."""
    return bool(source.unreduced) and not target.unreduced and source.dims == target.dims


def narrowed(program: Program, edge: Edge, emission: Emission) -> Aval | None:
    """What the value is converted to where it arrives, if every use converts it to something smaller.

    Some back ends drop a conversion that is undone for some of its uses: these read what was there before. Not where a
    rematerialised block reads it, which keeps what it starts from.
    """
    results = []
    for op, _ in edge.uses:
        if program.ops[op].primitive != "convert_element_type":
            return None
        results.append(program.ops[op].view.results[0])
        again = _read_by(program, program.ops[op].results[0])
        kept = any(program.ops[use].scope != program.ops[op].scope for use in again)
        undone = [program.ops[use].primitive == "convert_element_type" for use in again]
        if emission.drops_conversions and not kept and any(undone) and not all(undone):
            return None
    widest = max(results, key=lambda a: a.itemsize, default=None)
    return widest if widest is not None and widest.itemsize < program.values[edge.value].aval.itemsize else None


def widened_from(program: Program, value: int) -> Aval | None:
    """What a value was converted from, if to something larger; under whatever names it has."""
    at = program.values[value].op
    while at >= 0 and program.ops[at].primitive == "name":
        of = program.ops[at].operands[0]
        at = program.values[of].op if of is not None else -1
    if at < 0 or program.ops[at].primitive != "convert_element_type":
        return None
    before = program.ops[at].view.operands[0]
    return before if before.itemsize < program.values[value].aval.itemsize else None


def _read_by(program: Program, value: int) -> list[int]:
    """The operations that read a value, whatever names it has."""
    found: list[int] = []
    for use, _ in program.consumers[value]:
        op = program.ops[use]
        found += _read_by(program, op.results[0]) if op.primitive == "name" else [use]
    return found


def copy_span(edge: Edge) -> tuple[int, int]:
    """Positions between which the resharded copy of an edge is held."""
    if not edge.uses:
        return (-1, -2)
    return min(o for o, _ in edge.uses), max(o for o, _ in edge.uses)


def _held(graph: Graph, node: Node, aliased: set[int | None]) -> dict[int, Dims]:
    if node.free:
        return {}
    held = {v: d for v, d in (node.values | node.kept).items() if v not in aliased}
    for i, dims in node.arguments.items():
        value = graph.program.args[i].value
        if value is not None:
            held[value] = dims
    return held
