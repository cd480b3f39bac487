"""What a choice of strategies comes to: collectives, FLOPs, memory over time, seconds.

The linear model of the solver prices edges one by one; here equal moves of one value are
made once, as the compiled program makes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.core import Axes, Collective, CollectiveKind, Spec
from meshplan.cost._emission import runs_on_shards
from meshplan.cost._model import TRAFFIC, MeshModel, copy_span
from meshplan.cost._nodes import compute_seconds, op_flops
from meshplan.cost._rates import COMBINED_BYTES, SMALL_BYTES
from meshplan.cost._reshard import Step
from meshplan.program import Op
from meshplan.rules import Dims
from meshplan.strategy import Choices, Edge, Node, Reduction

SUMS = ("all-reduce", "reduce-scatter")


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


@dataclass(frozen=True, slots=True)
class Emitted:
    """A collective and where it runs. `combines`: the compiler may merge it with its like in the same region."""

    collective: Collective
    region: int
    combines: bool


def combined_runs(found: Sequence[Collective]) -> int:
    """How many collectives a compiler makes of these reductions of one dtype in one region over one group of axes.

    One that is large enough goes alone, the others by bytes; small ones alone end up in two (measured: those
    that are ready before and after the longest wait).
    """
    alone = sum(c.nbytes >= COMBINED_BYTES for c in found)
    rest = [c for c in found if c.nbytes < COMBINED_BYTES]
    by_bytes = math.ceil(sum(c.nbytes for c in rest) / COMBINED_BYTES)
    return alone + min(len(rest), max(by_bytes, 2 if all(c.nbytes < SMALL_BYTES for c in found) else 1))


class Chosen:
    """A model together with one strategy for each class."""

    def __init__(self, model: MeshModel, choice: Sequence[int]) -> None:
        self.model, self.choice = model, tuple(choice)
        self.graph = model.space.graph
        self._one: dict[int, Choices] = {}
        self._specs: dict[tuple[int, Dims, tuple[int, ...]], Spec] = {}

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
        return rates.path(self.source_spec(edge), self.target_spec(edge), room)

    # collectives

    def collectives(self) -> Iterator[Emitted]:
        """Every collective of a step."""
        for i, node in enumerate(self.graph.nodes):
            if not node.free:
                yield from self._reductions(i, node)
        done: set[object] = set()
        for edge in self.graph.edges:
            yield from self._moves(edge, done)

    def communication_seconds(self, emitted: Sequence[Emitted]) -> float:
        """Bytes at the links' rates, and a latency for each collective that is left after combining."""
        rates, total = self.model.rates, 0.0
        together: dict[tuple[CollectiveKind, Axes, str, int], list[Collective]] = {}
        for e in emitted:
            c = e.collective
            latency, per_byte = rates.collective(c.kind, c.axes)
            total += per_byte * c.total_bytes
            if e.combines:
                together.setdefault((c.kind, c.axes, c.dtype, e.region), []).append(c)
            else:
                total += latency * c.count
        for (kind, axes, _, _), found in together.items():
            total += rates.collective(kind, axes)[0] * combined_runs(found) * max(c.count for c in found)
        return total

    def small_shares(self) -> dict[tuple[Axes, str], float]:
        """By axes and dtype, the latency that is left for each small reduction after combining (see `Shares`)."""
        together: dict[tuple[Axes, str, int], list[Collective]] = {}
        for e in self.collectives():
            if e.combines:
                c = e.collective
                together.setdefault((c.axes, c.dtype, e.region), []).append(c)
        borne: dict[tuple[Axes, str], list[float]] = {}
        for (axes, dtype, _), found in together.items():
            small = [c for c in found if c.nbytes < SMALL_BYTES]
            if small:
                runs = combined_runs(found) - combined_runs([c for c in found if c.nbytes >= SMALL_BYTES])
                count = max(c.count for c in small)
                sums = borne.setdefault((axes, dtype), [0.0, 0.0])
                sums[0] += runs * count
                sums[1] += len(small) * count
        return {key: runs / many for key, (runs, many) in borne.items() if runs}

    def _reductions(self, i: int, node: Node) -> Iterator[Emitted]:
        emission = self.model.rates.emission
        for r in node.inner:
            dtype = self.graph.program.values[r.value].aval.dtype
            local = self.graph.program.nbytes(r.value) / self.choices(i).shards(r.dims)[0]
            nbytes = local * emission.bytes_factor(dtype, sums=True)
            for axes in self.sum_groups(i, r):
                found = self._collective("all-reduce", axes, nbytes, node.count, r.value, r.op)
                yield Emitted(found, node.region, nbytes < SMALL_BYTES)
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
                yield Emitted(found, node.region, False)

    def _moves(self, edge: Edge, done: set[object]) -> Iterator[Emitted]:
        target = self.graph.nodes[edge.target]
        at = self.graph.program.values[edge.value].op
        sums, moves = self.model.wire_bytes(edge)
        for step in self.path(edge):
            dtype = self.graph.program.values[edge.value].aval.dtype
            kind = self.model.rates.emission.kind(step, dtype)
            place = (edge.value, step.kind, step.axes, step.after, target.region, target.scope, edge.stored)
            if kind is None or place in done or self.model.mesh.size(step.axes) == 1:
                continue
            done.add(place)
            nbytes = (sums if step.reduces else moves) * step.fraction
            use = edge.uses[0][0] if edge.uses else at
            combines = step.reduces and (nbytes < SMALL_BYTES or not self.model.waits(edge))
            for axes in self._parts_of_sum(edge, step):
                found = self._collective(kind, axes, nbytes, edge.count, edge.value, at if step.reduces else use)
                yield Emitted(found, target.region, combines)

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
        """(FLOPs, seconds of them at the peak rate of their dtypes), of what decides for itself: dots, convolutions.

        Elementwise chains are bound by memory, and audits do not count theirs either.
        """
        total = seconds = 0.0
        chip = self.model.machine.chip
        for i, node in enumerate(self.graph.nodes):
            if node.group is not None and node.kind != "chain":
                for op in node.group.ops:
                    rule = self.graph.program.ops[op].rule
                    if rule.flops:
                        count = op_flops(self.graph.program.ops[op], node, self.choices(i))[0] * node.count
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
        found = list(self.collectives())
        flops, arithmetic = self.flops()
        held, usage = self.memory()
        peak = int(np.argmax(usage))
        live = sorted((h for h in held if h.first <= peak <= h.last), key=lambda h: (-h.nbytes, h.first))
        arguments = sum(
            self.graph.program.args[i].aval.nbytes / self.choices(n).shards(self.graph.nodes[n].arguments[i])[0]
            for i, n in self.graph.node_of_arg.items()
        )
        return Prediction(
            collectives=tuple(e.collective for e in found), flops=flops, compute_seconds=arithmetic,
            traffic_seconds=max(0.0, self.roofline_seconds() - arithmetic),
            communication_seconds=self.communication_seconds(found), argument_bytes=arguments,
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
