"""The strategy graph: who decides, and which values pass between the decisions.

Nodes are groups of operations, arguments as they are stored, values at the edge of a
region, and *views*: a value as several consumers want it, resharded once for all of them.
Edges carry a value from the spec its producer leaves it in to the spec a consumer wants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from meshplan.program import CARRY, CROSSINGS, SLICE, STACK, Op, Program, runs_of
from meshplan.rules import Dims
from meshplan.strategy._groups import Group, Grouper
from meshplan.strategy._sums import Hoists, find_accumulated, find_sums, reshaped_inside

NodeKind = Literal["anchor", "chain", "sum", "argument", "crossing", "view", "result"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """A sum (or maximum ...) over `factors` inside a node; its result has `dims` and `nbytes` in all.

    `trips`: of the loop after which it is completed once for all, 1 where it is completed at once.
    """

    op: int
    value: int
    dims: Dims
    factors: tuple[int, ...]
    combine: str
    trips: float = 1.0


@dataclass(slots=True, kw_only=True)
class Node:
    """One decision: which mesh axes split which of its factors.

    `values[v]`: dims of the values it leaves behind. `partial[v]`: the reduction after which
    value v is left unreduced. `leaving[v]`: the value left unreduced that v inside is reshaped or converted to.
    `inner`: reductions completed inside. `arguments[i]`: dims of argument leaf i where its stored spec is decided
    here. `kept[v]`: dims of a value inside that takes memory although nothing outside reads it.
    """

    kind: NodeKind
    sizes: tuple[int, ...]
    whole: frozenset[int] = frozenset()
    values: dict[int, Dims] = field(default_factory=dict)
    partial: dict[int, Reduction] = field(default_factory=dict)
    leaving: dict[int, int] = field(default_factory=dict)
    inner: tuple[Reduction, ...] = ()
    arguments: dict[int, Dims] = field(default_factory=dict)
    kept: dict[int, Dims] = field(default_factory=dict)
    group: Group | None = None
    count: float = 1.0
    region: int = 0
    scope: int = 0
    free: bool = False
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Value `value` goes from node `source` (dims in its factors: `have`) to node `target` (`want`).

    `uses` are the operands it becomes: (operation, operand index). `stored` marks the way of a
    result into its donated argument's place. `trips`: as `Reduction`, of the sum that is completed on the way.
    """

    source: int
    target: int
    value: int
    have: Dims
    want: Dims
    count: float
    uses: tuple[tuple[int, int], ...] = ()
    stored: bool = False
    trips: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes and edges, and where to find a value, an operation, an argument or a result among the nodes."""

    program: Program
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    owner: dict[int, int]  # value -> node
    node_of_op: dict[int, int]
    node_of_arg: dict[int, int]
    result_nodes: dict[int, int]  # index of a result leaf -> its node, where it has one
    carries: Mapping[int, int] = field(default_factory=dict)  # a sum completed after a loop -> what it is added to


def build_graph(
    program: Program, merge_sums: bool = True, pinned: frozenset[int] = frozenset(), hoists: Hoists = "none"
) -> Graph:
    """The decisions of a program, before any mesh is known. `merge_sums`: the back end adds partial
    sums before it reduces them. `pinned`: argument leaves whose stored spec is decided apart from their use.
    `hoists`: which sums the back end completes after a loop that only adds them up."""
    sums, between = find_sums(program) if merge_sums else (frozenset[int](), frozenset[int]())
    return _Builder(program, pinned, sums, between, find_accumulated(program, sums, hoists)).build()


def factors_of_shape(shape: Iterable[int]) -> tuple[tuple[int, ...], Dims]:
    """One factor per dim larger than 1."""
    sizes: list[int] = []
    dims: list[tuple[int, ...]] = []
    for n in shape:
        dims.append((len(sizes),) if n > 1 else ())
        if n > 1:
            sizes.append(n)
    return tuple(sizes), tuple(dims)


def kernels(group: Group, program: Program) -> dict[int, int]:
    """Which kernel of a fused chain each operation falls into: one more after every reduction."""
    made: dict[int, int] = {}
    level: dict[int, int] = {}
    for index in group.ops:
        op = program.ops[index]
        level[index] = max((made[v] for v in op.operands if v in made), default=0)
        for v in op.results:
            made[v] = level[index] + (index in group.reduced)
    return level


def kept_inside(program: Program, group: Group, outside: dict[int, Dims]) -> dict[int, Dims]:
    """The largest value of a chain that one of its kernels makes and a later one reads.

    A fused kernel ends at a reduction; what the next kernel needs again is written out (softmax: the
    shifted logits). Compilers write one such value per chain in what was measured.
    """
    level = kernels(group, program)
    crossing = []
    for index in group.ops:
        for v in program.ops[index].results:
            later = any(level.get(use, 0) > level[index] for use, _ in program.consumers[v])
            if later and index not in group.reduced and v not in outside and program.values[v].aval.size > 1:
                crossing.append(v)
    largest = max(crossing, key=lambda v: (program.nbytes(v), v), default=None)
    return {} if largest is None else {largest: group.results[largest]}


class _Builder:
    """Nodes first (arguments, groups and crossings in the program's order), then the edges between them."""

    def __init__(
        self, program: Program, pinned: frozenset[int], sums: frozenset[int], between: frozenset[int],
        carries: Mapping[int, int],
    ) -> None:
        self.program, self.pinned = program, pinned
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.owner: dict[int, int] = {}
        self.node_of_op: dict[int, int] = {}
        self.node_of_arg: dict[int, int] = {}
        self.result_nodes: dict[int, int] = {}
        self.sums, self.between, self.carries = sums, between, carries
        self.crossings: dict[int, tuple[Op, Dims]] = {}  # node -> (operation, dims its operands must have)

    def build(self) -> Graph:
        """The whole graph."""
        groups, group_of = Grouper(self.program, self.sums, self.between).build()
        for i, leaf in enumerate(self.program.args):
            self.add_argument(i, leaf.value)
        done: set[int] = set()
        for op in self.program.ops:
            if op.primitive in CROSSINGS:
                self.add_crossing(op)
            elif group_of[op.index] not in done:
                done.add(group_of[op.index])
                self.add_group(groups[group_of[op.index]])
        self.absorb_arguments()
        self.connect()
        return Graph(
            program=self.program, nodes=tuple(self.nodes), edges=tuple(self.edges), owner=self.owner,
            node_of_op=self.node_of_op, node_of_arg=self.node_of_arg, result_nodes=self.result_nodes,
            carries=self.carries,
        )

    def trips(self, value: int) -> float:
        """Of the loop after which a sum is completed, 1 where that is at once."""
        program, carry = self.program, self.carries.get(value)
        return 1.0 if carry is None else program.regions[program.ops[program.values[carry].op].region].trips

    # nodes

    def add(self, node: Node) -> int:
        """The node's number; it owns the values it leaves behind."""
        self.nodes.append(node)
        index = len(self.nodes) - 1
        for v in node.values:
            self.owner[v] = index
        return index

    def add_argument(self, i: int, value: int | None) -> None:
        """A node for argument leaf i as it is stored."""
        assert value is not None
        sizes, dims = factors_of_shape(self.program.args[i].aval.shape)
        node = Node(kind="argument", sizes=sizes, values={value: dims}, arguments={i: dims})
        self.node_of_arg[i] = self.add(node)

    def add_crossing(self, op: Op) -> None:
        """A node for a value at a region's edge; a piece of a stored stack lives where the stack is stored."""
        operand, result = op.operands[0], op.results[0]
        inner = op.rule.results[0]
        source = self.owner.get(operand) if operand is not None else None
        if op.primitive == SLICE and source is not None and self.nodes[source].kind in ("argument", "crossing"):
            node = self.nodes[source]
            dims = node.values[operand]  # type: ignore[index]
            node.values[result] = dims[1:]
            node.whole |= frozenset(dims[0])
            self.owner[result] = self.node_of_op[op.index] = source
            return
        node = Node(
            kind="crossing", sizes=op.rule.sizes, values={result: inner}, count=op.count, region=op.region,
            scope=op.scope, position=op.index, free=operand is None and op.primitive == STACK,
        )
        index = self.add(node)
        self.node_of_op[op.index] = index
        self.crossings[index] = (op, op.rule.operands[0])

    def add_group(self, group: Group) -> None:
        """A node for a group: what leaves it, which sums it may leave undone, which it completes."""
        program, first = self.program, self.program.ops[group.ops[0]]
        inside = set(group.ops)
        results = {leaf.value for leaf in program.results}
        values, partial, leaving, inner = {}, {}, {}, []
        for index in group.ops:
            op = program.ops[index]
            reduced = group.reduced.get(index)
            for v in op.results:
                outside = any(use not in inside for use, _ in program.consumers[v]) or v in results
                if outside:
                    values[v] = group.results[v]
                if reduced is None:
                    continue
                reduction = Reduction(index, v, group.results[v], reduced[0], reduced[1], self.trips(v))
                way = reshaped_inside(program, v, inside) if reduced[1] == "sum" else []
                if way and program.values[v].aval.size > 1:
                    partial[way[-1]] = reduction
                    leaving.update(dict.fromkeys(way[:-1], way[-1]))
                else:
                    inner.append(reduction)
        kept = kept_inside(program, group, values) if not group.anchor else {}
        # made of literals, but written to memory: what an init function makes is no free copy on every device
        only_left = bool(values) and all(v in results for v in values) and not any(
            use not in inside for v in values for use, _ in program.consumers[v]
        )
        kind: NodeKind = "sum" if group.ops[-1] in self.sums else "anchor" if group.anchor else "chain"
        index = self.add(Node(
            kind=kind, sizes=group.sizes, whole=group.whole, values=values, partial=partial, leaving=leaving,
            inner=tuple(inner), kept=kept, group=group, count=first.count, region=group.region, scope=group.scope,
            free=group.free and not only_left, position=group.ops[-1],
        ))
        for op_index in group.ops:
            self.node_of_op[op_index] = index

    def absorb_arguments(self) -> None:
        """An argument that only one chain reads and writes back (a moment) is stored as that chain wants it."""
        for i, leaf in enumerate(self.program.args):
            if leaf.pair < 0 or leaf.value is None or i in self.pinned:
                continue
            out = self.program.results[leaf.pair].value
            uses = self.program.consumers[leaf.value]
            nodes = {self.node_of_op[use] for use, _ in uses}
            if len(nodes) != 1 or out is None or self.owner.get(out) not in nodes:
                continue
            (index,) = nodes
            node = self.nodes[index]
            if node.kind != "chain" or node.group is None or out in node.partial:
                continue
            wants = {node.group.operands[use] for use in uses} | {node.values[out]}
            own = self.node_of_arg[i]
            if len(wants) == 1 and len(self.nodes[own].values) == 1:
                node.arguments[i] = wants.pop()
                self.nodes[own].kind = "view"
                self.nodes[own].values, self.nodes[own].arguments = {}, {}
                self.node_of_arg[i] = index
                self.owner[leaf.value] = index

    # edges

    def connect(self) -> None:
        """All edges, with views where several consumers share one resharded value."""
        wanted: dict[int, list[Edge]] = {}
        for value, uses in enumerate(self.program.consumers):
            if value in self.owner and self.program.values[value].aval.size > 1:
                wanted[value] = self.uses_of(value, uses)
        for j, leaf in enumerate(self.program.results):
            if leaf.value in self.owner and leaf.aval.size > 1:
                self.add_result(j, wanted.setdefault(leaf.value, []))
        for value, edges in wanted.items():
            self.add_edges(value, [e for e in edges if e.target != self.owner[value] or e.stored])
        self.drop_empty()

    def uses_of(self, value: int, uses: list[tuple[int, int]]) -> list[Edge]:
        """An edge to every node that reads the value, one per way it is wanted; `have` is still open."""
        source = self.owner[value]
        reduction = self.nodes[source].partial.get(value)
        summed = reduction.value if reduction else value
        found: dict[tuple[int, Dims], Edge] = {}
        for op_index, k in uses:
            target = self.node_of_op[op_index]
            op, node = self.program.ops[op_index], self.nodes[target]
            count = op.count
            if target in self.crossings:
                want = self.crossings[target][1]
                if op.primitive == CARRY and k == 0:  # the initial value enters once for each run of the loop
                    regions = self.program.regions
                    count = runs_of(regions, regions[op.region].parent)
            elif op.primitive == SLICE:
                continue  # the piece lives where the stack is stored
            else:
                assert node.group is not None
                want = node.group.operands[op_index, k]
            key = (target, want)
            edge = found.get(key)
            if edge is None:
                found[key] = Edge(
                    source=source, target=target, value=value, have=(), want=want, count=count, uses=((op_index, k),),
                    trips=self.trips(summed),
                )
            else:
                found[key] = replace(edge, uses=(*edge.uses, (op_index, k)))
        return list(found.values())

    def add_result(self, j: int, edges: list[Edge]) -> None:
        """The way of result j into its donated argument's place, or into a node of its own."""
        leaf = self.program.results[j]
        assert leaf.value is not None
        source = self.owner[leaf.value]
        if leaf.pair >= 0:
            target = self.node_of_arg[leaf.pair]
            if target == source and leaf.value != self.program.args[leaf.pair].value:
                return  # absorbed: read and written in one place
            want = self.nodes[target].arguments[leaf.pair]
        else:
            sizes, want = factors_of_shape(leaf.aval.shape)
            target = self.add(Node(kind="result", sizes=sizes, position=len(self.program.ops)))
            self.result_nodes[j] = target
        edges.append(Edge(
            source=source, target=target, value=leaf.value, have=(), want=want, count=1.0, stored=True,
        ))

    def add_edges(self, value: int, edges: list[Edge]) -> None:
        """Close a value's edges; a sum read in several nodes, and anchors of one place, share a view."""
        source = self.owner[value]
        node = self.nodes[source]
        have = self.have(node, value)
        targets = {e.target for e in edges}
        summed = value in node.partial or node.kind == "sum"
        if summed and len(targets) > 1:
            source, have = self.add_view(source, value, have, node.count, node.region, node.scope, edges)
        by_place: dict[tuple[int, int], list[Edge]] = {}
        for e in edges:
            target = self.nodes[e.target]
            if target.kind == "anchor" and not e.stored:
                by_place.setdefault((target.region, target.scope), []).append(e)
        viewed = {id(e) for group in by_place.values() for e in group}
        self.edges += [replace(e, source=source, have=have) for e in edges if id(e) not in viewed]
        if not summed and self.enters_blocks(node, list(by_place)):  # moved once for all and kept, or in each of them
            products = [e for group in by_place.values() for e in group]
            source, have = self.add_view(source, value, have, node.count, node.region, node.scope, products)
        for (region, scope), group in by_place.items():
            start, dims = source, have
            if len(group) > 1:
                start, dims = self.add_view(source, value, have, group[0].count, region, scope, group)
            self.edges += [replace(e, source=start, have=dims) for e in group]

    @staticmethod
    def enters_blocks(node: Node, places: list[tuple[int, int]]) -> bool:
        """Whether a value of the step itself is read by products outside and inside of rematerialised blocks."""
        return (node.region, node.scope) == (0, 0) and all(region == 0 for region, _ in places) and (
            len(places) > 1 and any(scope for _, scope in places)
        )

    def have(self, node: Node, value: int) -> Dims:
        """Dims of a value where it is made or stored."""
        if value in node.values:
            return node.values[value]
        return next(d for i, d in node.arguments.items() if self.program.args[i].value == value)

    def add_view(
        self, source: int, value: int, have: Dims, count: float, region: int, scope: int, edges: list[Edge]
    ) -> tuple[int, Dims]:
        """A new view with the edge into it; returns (node, dims of the value there)."""
        sizes, dims = factors_of_shape(self.program.values[value].aval.shape)
        position = min((e.uses[0][0] for e in edges if e.uses), default=len(self.program.ops))
        view = Node(kind="view", sizes=sizes, count=count, region=region, scope=scope, position=position)
        self.nodes.append(view)
        index = len(self.nodes) - 1
        self.edges.append(Edge(
            source=source, target=index, value=value, have=have, want=dims, count=count,
            uses=tuple(u for e in edges for u in e.uses),
        ))
        return index, dims

    def drop_empty(self) -> None:
        """Forget nodes without factors or edges: scalars and absorbed arguments decide nothing."""
        linked = {i for e in self.edges for i in (e.source, e.target)}
        keep = [
            i for i, n in enumerate(self.nodes)
            if i in linked or n.arguments or (n.group is not None and n.sizes and not n.free)
        ]
        number = {old: new for new, old in enumerate(keep)}
        self.nodes = [self.nodes[i] for i in keep]
        self.edges = [replace(e, source=number[e.source], target=number[e.target]) for e in self.edges]
        self.owner = {v: number[i] for v, i in self.owner.items() if i in number}
        self.node_of_op = {o: number[i] for o, i in self.node_of_op.items() if i in number}
        self.node_of_arg = {a: number[i] for a, i in self.node_of_arg.items()}
        self.result_nodes = {j: number[i] for j, i in self.result_nodes.items()}
