"""What a choice of strategies comes to: collectives, FLOPs, memory over time, seconds.

The linear model of the solver prices edges one by one; here equal moves of one value are
made once, as the compiled program makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshplan.core import Axes, Collective, CollectiveKind, Spec
from meshplan.cost._combine import SUMS, Emitted, Run, runs
from meshplan.cost._emission import runs_on_shards
from meshplan.cost._model import TRAFFIC, MeshModel, copy_span
from meshplan.cost._nodes import compute_seconds, op_flops
from meshplan.cost._reshard import Step, laid_out_elements
from meshplan.cost._tiles import lies
from meshplan.program import Op
from meshplan.rules import Dims
from meshplan.strategy import Choices, Edge, Node, Reduction


@dataclass(frozen=True, slots=True)
class Held:
    """Something in memory: `nbytes` on each device from position `first` to `last`. `what` names it."""

    what: str
    nbytes: float
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Per device and step. `peak_bytes` counts arguments, results and temporaries; `at_peak` the largest.

    `compute_seconds`: FLOPs at the peak rates. `traffic_seconds`: what memory traffic adds to them in a roofline,
    as if nothing hid it.
    """

    collectives: tuple[Collective, ...]
    flops: float
    compute_seconds: float
    traffic_seconds: float
    communication_seconds: float
    argument_bytes: float
    peak_bytes: float
    peak_position: int
    at_peak: tuple[Held, ...]

    @property
    def step_seconds(self) -> float:
        """Arithmetic and communication one after the other, memory traffic hidden: as `Audit.seconds`."""
        return self.compute_seconds + self.communication_seconds

    @property
    def score(self) -> float:
        """What the search makes least."""
        return self.step_seconds + TRAFFIC * self.traffic_seconds


class Chosen:
    """A model together with one strategy for each class."""

    def __init__(self, model: MeshModel, choice: Sequence[int]) -> None:
        self.model, self.choice = model, tuple(choice)
        self.graph = model.space.graph
        self._one: dict[int, Choices] = {}
        self._specs: dict[tuple[int, Dims, tuple[int, ...]], Spec] = {}
        self._emitted: list[Emitted] | None = None
        self._runs: list[Run] | None = None

    def choices(self, node: int) -> Choices:
        """The chosen strategy alone."""
        c = self.model.space.ties.class_of[node]
        if c not in self._one:
            self._one[c] = self.model.choices[c].take(np.array([self.choice[c]]))
        return self._one[c]

    def spec(self, node: int, dims: Dims, partial: tuple[int, ...] = ()) -> Spec:
        """Of an array at a node; `partial`: factors summed away whose axes leave it unreduced."""
        c = self.model.space.ties.class_of[node]
        key = (c, dims, partial)
        if key not in self._specs:
            unreduced = self.graph.nodes[node].kind == "sum"
            self._specs[key] = self.choices(node).specs(dims, partial, unreduced)[0][0]
        return self._specs[key]

    def source_spec(self, edge: Edge) -> Spec:
        """The spec in which the edge's value is left."""
        reduction = self.graph.nodes[edge.source].partial.get(edge.value)
        return self.spec(edge.source, edge.have, reduction.factors if reduction else ())

    def target_spec(self, edge: Edge) -> Spec:
        """The spec in which the edge's value is wanted."""
        return self.spec(edge.target, edge.want)

    def path(self, edge: Edge) -> tuple[Step, ...]:
        """The steps along the edge; none for a value made of literals, which any device makes as wanted."""
        if self.graph.nodes[edge.source].free:
            return ()
        rates = self.model.rates
        room = rates.room(self.graph.program.values[edge.value].aval.shape)
        source, target = self.source_spec(edge), self.target_spec(edge)
        path = rates.path(source, target, room)
        if sum(step.reduces for step in path) < 2 or not self.sums_shards(self.model.summed(edge)):
            return path
        whole = Step("all-reduce", source.unreduced, 1 / source.shards(self.model.mesh), source.reduced())
        return (whole, *rates.path(source.reduced(), target, room))

    def sums_shards(self, value: int) -> bool:
        """Whether the value is a sum, or an addition of sums, that lower/ takes over shards: over all axes at once."""
        made = self.graph.program.values[value].op
        if made < 0:
            return False
        op = self.graph.program.ops[made]
        added = self.graph.node_of_op.get(made, -1)
        if added >= 0 and self.graph.nodes[added].kind == "sum":
            return any(v is not None and v != value and self.sums_shards(v) for v in op.operands)
        return runs_on_shards(op.view)

    # collectives

    def emitted(self) -> list[Emitted]:
        """Every collective of a step; remembered."""
        if self._emitted is None:
            self._emitted = self._collectives()
        return self._emitted

    def _collectives(self) -> list[Emitted]:
        found = [e for i, node in enumerate(self.graph.nodes) if not node.free for e in self._reductions(i, node)]
        done: dict[object, list[int]] = {}
        for edge in self.graph.edges:
            for place, made in self._moves(edge):
                known = done.get(place)
                if known is None:
                    done[place] = list(range(len(found), len(found) + len(made)))
                    found += made
                else:  # the same move of the same value: made once
                    for i in known:
                        waits = found[i].waits or self.model.waits(edge)
                        found[i] = replace(found[i], uses=found[i].uses + edge.uses, waits=waits)
        return found

    def runs(self) -> list[Run]:
        """What is left of the collectives after combining; remembered."""
        if self._runs is None:
            self._runs = runs(self.graph.program, self.emitted(), self.model.rates.emission.combined_bytes)
        return self._runs

    def communication_seconds(self, left: Sequence[Run]) -> float:
        """Bytes at the links' rates, and a latency for each of these runs of collectives."""
        rates, total = self.model.rates, 0.0
        for run in left:
            c = run.members[0].collective
            latency, per_byte = rates.collective(c.kind, c.axes)
            total += latency * run.count + per_byte * sum(e.collective.total_bytes for e in run.members)
        return total

    def small_shares(self) -> dict[tuple[Axes, str, bool], float]:
        """The part of a latency that each small reduction bears after combining (see `Shares`)."""
        borne: dict[tuple[Axes, str, bool], list[float]] = {}
        for run in self.runs():
            for e, share in run.shares() if run.members[0].sums else ():
                sums = borne.setdefault((e.collective.axes, e.collective.dtype, e.waits), [0.0, 0.0])
                sums[0] += share * e.collective.count
                sums[1] += e.collective.count
        return {key: shared / many for key, (shared, many) in borne.items()}

    def _reductions(self, i: int, node: Node) -> Iterator[Emitted]:
        emission = self.model.rates.emission
        for r in node.inner:
            dtype = self.graph.program.values[r.value].aval.dtype
            local = self.graph.program.nbytes(r.value) / self.choices(i).shards(r.dims)[0]
            nbytes = local * emission.bytes_factor(dtype, sums=True)
            for axes in self.sum_groups(i, r):
                kind = "reduce-scatter" if self._scattered_after(r.value, axes) else "all-reduce"
                found = self._collective(kind, axes, nbytes, node.count / r.trips, r.value, r.op)
                waits = self.model.needed_at_once(r.value)
                yield Emitted(
                    collective=found, region=self._region(node.region, r.trips), combine=r.combine, waits=waits,
                    value=r.value, op=r.op,
                )
        for index in node.group.ops if node.group is not None else ():
            yield from self._extras(i, node, self.graph.program.ops[index])

    def sum_groups(self, i: int, r: Reduction) -> list[Axes]:
        """The axes of each collective that completes a sum: one for all its factors, or one for each that is split."""
        op = self.graph.program.ops[r.op]
        joined = self.model.rates.emission.joins_sums or runs_on_shards(op.view)
        names, found = self.model.mesh.names, []
        for factors in [r.factors] if joined else [(f,) for f in r.factors]:
            over = self.choices(i).over(factors)[0]
            axes = tuple(n for n, used in zip(names, over, strict=True) if used)
            if self.model.mesh.size(axes) > 1:
                found.append(axes)
        return found

    def _extras(self, i: int, node: Node, op: Op) -> Iterator[Emitted]:
        """What the back end brings for an operation besides its sums."""
        assert node.group is not None
        for extra in self.model.rates.emission.extras(op.view, op.rule):
            dims = node.group.operands[op.index, extra.operand]
            axes = self.spec(i, dims).dims[extra.dim]
            value = op.operands[extra.operand]
            if value is not None and self.model.mesh.size(axes) > 1:
                others = tuple(d for k, d in enumerate(dims) if k != extra.dim)
                nbytes = self.graph.program.nbytes(value) / self.choices(i).shards(others)[0]
                found = self._collective(extra.kind, axes, nbytes, node.count, value, op.index)
                yield Emitted(collective=found, region=node.region)

    def _moves(self, edge: Edge) -> Iterator[tuple[object, list[Emitted]]]:
        """The collectives of each step along the edge, and what makes the step another."""
        target = self.graph.nodes[edge.target]
        program, summed = self.graph.program, self.model.summed(edge)
        path = self.path(edge)
        last = max((k for k, step in enumerate(path) if step.kind != "slice"), default=0)
        trips = edge.trips if len(path) == 1 and path[0].kind == "all-reduce" else 1.0
        before, aval = self.source_spec(edge) if path else Spec(()), program.values[edge.value].aval
        for k, step in enumerate(path):
            laid_out = 0
            if self.model.rates.emission.lays_out:
                laid_out = aval.itemsize * laid_out_elements(aval.shape, before, step.after, self.model.mesh)
            before = step.after
            sums, moves = self.model.wire_bytes(edge, k == last)
            value = summed if step.reduces else edge.value
            piece = step.after.local_shape(program.values[edge.value].aval.shape, self.model.mesh)
            how = lies(program, self.graph.nodes[edge.source]) if step.kind == "reduce-scatter" else "close"
            kind = self.model.rates.emission.kind(step, program.values[value].aval.dtype, piece, how)
            if kind is None or self.model.mesh.size(step.axes) == 1:
                continue
            if trips > 1 and self._scattered_after(value, step.axes):
                kind = "reduce-scatter"
            nbytes = (sums if step.reduces else moves) * step.fraction
            at = edge.uses[0][0] if edge.uses and not step.reduces else program.values[value].op
            made = [
                Emitted(
                    collective=self._collective(kind, axes, nbytes, edge.count / trips, value, at),
                    region=self._region(target.region, trips), combine=self._combine(kind, step, target),
                    waits=self.model.waits(edge), value=edge.value, uses=edge.uses, laid_out=laid_out,
                )
                for axes in self._parts_of_sum(edge, step)
            ]  # fmt: skip
            yield (edge.value, step.kind, step.axes, step.after, target.region, target.scope, edge.stored), made

    def _combine(self, kind: CollectiveKind, step: Step, target: Node) -> str:
        """How the collective of a step combines; a rematerialised block is no one place with what is around it."""
        if step.reduces:
            return "sum"
        return f"{kind} in {target.scope}" if kind in self.model.rates.emission.combined_moves else ""

    def _scattered_after(self, summed: int, axes: Axes) -> bool:
        """Whether a sum completed after its loop is scattered: what it is added to was zero, and is only used split."""
        graph, emission = self.graph, self.model.rates.emission
        carry = graph.carries.get(summed)
        if carry is None or not emission.scatters(graph.program.values[summed].aval.dtype):
            return False
        made = graph.program.ops[graph.program.values[carry].op]
        init = made.operands[0]
        zero = init is None or (init in graph.owner and graph.nodes[graph.owner[init]].free)
        outside = [e for e in graph.edges if e.value == carry and e.source == graph.owner.get(carry)]
        outside = [e for e in outside if graph.nodes[e.target].region != made.region]
        return zero and bool(outside) and all(
            {a for step in self.path(e) if step.kind == "slice" for a in step.axes} >= set(axes) for e in outside
        )

    def _region(self, region: int, trips: float) -> int:
        """Where a sum of the region is completed: around it where that is left until its loop is over."""
        return self.graph.program.regions[region].parent if trips > 1 else region

    def _parts_of_sum(self, edge: Edge, step: Step) -> list[Axes]:
        """The step's axes, apart where the back end completes a sum over them one factor at a time."""
        reduction = self.graph.nodes[edge.source].partial.get(edge.value)
        if step.kind != "all-reduce" or reduction is None or len(step.axes) == 1:
            return [step.axes]
        parts = [tuple(a for a in step.axes if a in axes) for axes in self.sum_groups(edge.source, reduction)]
        return [axes for axes in parts if axes] or [step.axes]

    def _collective(
        self, kind: CollectiveKind, axes: Axes, nbytes: float, count: float, value: int, op: int
    ) -> Collective:
        program, rates = self.graph.program, self.model.rates
        about = program.ops[op] if op >= 0 else None
        return Collective(
            kind=kind, nbytes=round(nbytes), group_size=self.model.mesh.size(axes), count=count, axes=axes,
            dtype=rates.emission.dtype(program.values[value].aval.dtype, sums=kind in SUMS),
            source=about.source if about else "",
            op_name=" ".join(filter(None, (about.primitive if about else "", program.values[value].path))),
        )

    # compute and memory

    def flops(self) -> tuple[float, float]:
        """(FLOPs, seconds of them at the peak rate of their dtypes), of products: dots, convolutions, linear algebra.

        What goes over each element a few times is bound by memory, and audits do not count it either.
        """
        total = seconds = 0.0
        chip, emission = self.model.machine.chip, self.model.rates.emission
        for i, node in enumerate(self.graph.nodes):
            if node.group is not None and node.kind != "chain":
                for op in node.group.ops:
                    rule = self.graph.program.ops[op].rule
                    if rule.flops:
                        count = op_flops(self.graph.program.ops[op], node, self.choices(i), emission)[0] * node.count
                        total += count
                        seconds += count / chip.flops_for(self.graph.program.ops[op].view.operands[0].dtype)
        return total, seconds

    def roofline_seconds(self) -> float:
        """Computation with all its memory traffic, without the sums inside nodes."""
        program, rates = self.graph.program, self.model.rates
        return sum(
            float(compute_seconds(program, self.model.node(c), self.choices(members[0]), rates)[0]) * len(members)
            for c, members in enumerate(self.model.space.ties.members)
        )

    def held(self) -> list[Held]:
        """Everything that takes memory, with its time."""
        space, program = self.model.space, self.graph.program
        out = []
        for i in range(len(self.graph.nodes)):
            for v, dims in space.held[i].items():
                nbytes = program.nbytes(v) / self.choices(i).shards(dims)[0]
                out.append(Held(describe(program, v), nbytes, *space.live.span[v]))
        copies: dict[object, Held] = {}
        for edge in self.graph.edges:
            if edge.stored or not edge.uses or self.graph.nodes[edge.source].free:
                continue
            source, target = self.source_spec(edge), self.target_spec(edge)
            if source != target:
                nbytes = program.nbytes(edge.value) / target.shards(self.model.mesh)
                first, last = copy_span(edge)
                node = self.graph.nodes[edge.target]
                key = (edge.value, target, node.region, node.scope)
                if key in copies:
                    first, last = min(first, copies[key].first), max(last, copies[key].last)
                copies[key] = Held(f"{describe(program, edge.value)} as {target}", nbytes, first, last)
        return out + list(copies.values())

    def memory(self) -> tuple[list[Held], np.ndarray]:
        """(what is held, bytes at each position)."""
        held = self.held()
        change = np.zeros(self.model.space.live.end + 2)
        for h in held:
            change[h.first] += h.nbytes
            change[h.last + 1] -= h.nbytes
        return held, np.cumsum(change)

    def predict(self) -> Prediction:
        """All of it together."""
        left = self.runs()
        flops, arithmetic = self.flops()
        held, usage = self.memory()
        peak = int(np.argmax(usage))
        live = sorted((h for h in held if h.first <= peak <= h.last), key=lambda h: (-h.nbytes, h.first))
        arguments = sum(
            self.graph.program.args[i].aval.nbytes / self.choices(n).shards(self.graph.nodes[n].arguments[i])[0]
            for i, n in self.graph.node_of_arg.items()
        )
        return Prediction(
            collectives=tuple(e.collective for e in self.emitted()), flops=flops, compute_seconds=arithmetic,
            traffic_seconds=max(0.0, self.roofline_seconds() - arithmetic),
            communication_seconds=self.communication_seconds(left), argument_bytes=arguments,
            peak_bytes=float(usage[peak]), peak_position=peak, at_peak=tuple(live[:12]),
        )


def describe(program: object, value: int) -> str:
    """A value as a person would find it: argument path, or primitive, shape and source line."""
    v = program.values[value]  # type: ignore[attr-defined]
    shape = f"{v.aval.dtype}[{','.join(map(str, v.aval.shape))}]"
    if v.op < 0:
        return f"{v.path or 'constant'} {shape}"
    op = program.ops[v.op]  # type: ignore[attr-defined]
    return f"{op.primitive} {shape} {op.source}".strip()
