"""From a chosen strategy per class to the specs of every argument, result and operation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from meshplan.core import Spec
from meshplan.cost import Chosen, Step
from meshplan.plan._data import ArrayPlan, OpPlan, Path
from meshplan.program import Program
from meshplan.strategy import Edge, Graph


def fingerprint(program: Program) -> str:
    """A hash of the operations and shapes of a program: equal programs, equal plans."""
    digest = hashlib.sha256()
    for leaf in (*program.args, *program.results):
        digest.update(f"{leaf.path}{leaf.aval.shape}{leaf.aval.dtype};".encode())
    for op in program.ops:
        avals = [(a.shape, a.dtype) for a in (*op.view.operands, *op.view.results)]
        digest.update(f"{op.primitive}{op.key}{avals}\n".encode())
    return digest.hexdigest()[:16]


class Extractor:
    def __init__(self, chosen: Chosen) -> None:
        self.chosen = chosen
        self.graph: Graph = chosen.graph
        self.program = self.graph.program
        self.arriving = {e.target: e for e in self.graph.edges if self.graph.nodes[e.target].kind == "view"}
        self.uses: dict[tuple[int, int], Path] = {}
        self.moves: dict[int, Path] = {}
        self.kept: dict[int, Path] = {}  # what enters rematerialised blocks already moved
        for edge in self.graph.edges:
            self.follow(edge)

    def follow(self, edge: Edge) -> None:
        """Specs that the edge's uses go through, from where the value was made."""
        if self.graph.nodes[edge.target].kind == "view":
            return  # its own edges tell the whole way
        chain = [edge]
        while self.graph.nodes[chain[0].source].kind == "view":
            chain.insert(0, self.arriving[chain[0].source])
        parts = [settled(self.chosen.source_spec(part), self.chosen.path(part)) for part in chain]
        if self.graph.nodes[edge.target].scope and len(chain) > 1 and not self.graph.nodes[chain[0].target].scope:
            before = parts.pop(0)
            if before:
                self.kept[edge.value] = tuple(before)
        whole: list[Spec] = [spec for part in parts for spec in part]
        if not whole:
            return
        for use in edge.uses:
            self.uses[use] = tuple(whole)
        if edge.stored:
            for j, leaf in enumerate(self.program.results):
                if leaf.value == edge.value and self.target_of(j) == edge.target:
                    self.moves[j] = tuple(whole)

    def target_of(self, j: int) -> int:
        leaf = self.program.results[j]
        return self.graph.node_of_arg[leaf.pair] if leaf.pair >= 0 else self.graph.result_nodes.get(j, -1)

    def result_path(self, op_index: int, value: int) -> Path:
        """The spec a result is left in; unreduced ones are stated summed, the back end delays the sum itself."""
        index = self.graph.node_of_op.get(op_index)
        if index is None or self.program.values[value].aval.size <= 1:
            return ()
        node = self.graph.nodes[index]
        if node.free:
            return ()
        dims = node.group.results[value] if node.group is not None else node.values.get(value)
        if dims is None:
            return ()
        leaving = node.leaving.get(value, value)
        reduction = node.partial.get(leaving)
        spec = self.chosen.spec(index, dims, reduction.factors if reduction else ())
        left = spec if leaving == value else self.chosen.spec(index, node.values[leaving])
        if spec.unreduced and self.is_mixed(leaving, left):
            return ()
        return (spec.reduced(),)

    def is_mixed(self, value: int, spec: Spec) -> bool:
        """Whether the value's sum is scattered over some axes and completed over others."""
        paths = [self.uses.get(use, ()) for use in self.program.consumers[value]]
        return any(p and p[0] != spec.reduced() for p in paths)

    def operations(self) -> tuple[OpPlan, ...]:
        by_op: dict[int, list[tuple[int, Path]]] = {}
        for (op, k), path in sorted(self.uses.items()):
            by_op.setdefault(op, []).append((k, path))
        out = []
        for op in self.program.ops:
            results = tuple(self.result_path(op.index, v) for v in op.results)
            uses = tuple(by_op.get(op.index, ()))
            if uses or any(results):
                out.append(OpPlan(index=op.index, results=results, uses=uses))
        return tuple(out)

    def arguments(self, names: Mapping[int, tuple[str, ...]], pinned: frozenset[int]) -> tuple[ArrayPlan, ...]:
        out = []
        for i, leaf in enumerate(self.program.args):
            node = self.graph.node_of_arg[i]
            spec = self.chosen.spec(node, self.graph.nodes[node].arguments[i])
            used = {p[-1]: None for use in self.program.consumers[leaf.value] if (p := self.uses.get(use))}  # type: ignore[index]
            out.append(ArrayPlan(
                path=leaf.path, shape=leaf.aval.shape, dtype=leaf.aval.dtype, spec=spec, used=tuple(used),
                dims=names.get(i, ()), pair=leaf.pair, pinned=i in pinned,
            ))
        return tuple(out)

    def results(self) -> tuple[ArrayPlan, ...]:
        out = []
        for j, leaf in enumerate(self.program.results):
            out.append(ArrayPlan(
                path=leaf.path, shape=leaf.aval.shape, dtype=leaf.aval.dtype, spec=self.result_spec(j), pair=leaf.pair,
                moves=self.moves.get(j, ()),
            ))
        return tuple(out)

    def result_spec(self, j: int) -> Spec:
        leaf = self.program.results[j]
        if leaf.pair >= 0:
            node = self.graph.node_of_arg[leaf.pair]
            return self.chosen.spec(node, self.graph.nodes[node].arguments[leaf.pair])
        if j in self.graph.result_nodes:
            node = self.graph.result_nodes[j]
            edge = next(e for e in self.graph.edges if e.target == node)
            return self.chosen.target_spec(edge)
        return Spec.replicated(len(leaf.aval.shape))


def made_specs(arguments: Sequence[ArrayPlan], ops: Sequence[OpPlan], program: Program) -> dict[int, Spec]:
    """The spec that each value is in where it was made, as far as the plan states one."""
    found = {leaf.value: a.spec for leaf, a in zip(program.args, arguments, strict=True) if leaf.value is not None}
    for planned in ops:
        results = program.ops[planned.index].results
        found |= {v: path[-1] for v, path in zip(results, planned.results, strict=True) if path}
    return found


def settled(source: Spec, steps: tuple[Step, ...]) -> list[Spec]:
    """The specs of a path as constraints: a sum is stated complete before it is split, which every
    back end turns into a reduce-scatter if it has one; where other axes only reduce, at once."""
    if not source.unreduced or not steps:
        return [s.after for s in steps]
    reducing = [s for s in steps if s.kind in ("reduce-scatter", "all-reduce")]
    rest = [s.after for s in steps[len(reducing) :]]
    kinds = {s.kind for s in reducing}
    if not reducing or reducing[-1].after.unreduced:  # stays unreduced, moved or not: nothing can be stated yet
        return []
    last = reducing[-1].after
    if kinds == {"reduce-scatter"}:
        return [source.reduced(), last, *rest]
    return [last, *rest]
