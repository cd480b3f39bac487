"""A step on a timeline: computation by critical paths, collectives beside it as soon as they may start.

Modelled. Each operation takes its roofline's seconds, memory traffic included, or those of its kernel where the chip's
figures are fitted or were measured; a collective takes those of the best algorithm with its library's fitted figures.
It starts when what it sends is there and holds back what reads its result; collectives over the same links queue.
A loop's body is simulated once: no collective reaches over the end of an iteration, as in XLA's while loops. On CPU
nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from meshplan.core import Axes
from meshplan.cost._combine import SUMS, Emitted, Run
from meshplan.cost._compute import compute_parts, seconds_by_op
from meshplan.cost._compute_fit import read_table
from meshplan.cost._measured import beside_kernels, is_measured, laid_out_seconds, measured_parts
from meshplan.cost._nodes import chain_seconds, op_seconds
from meshplan.cost._order import Moving, list_scheduled
from meshplan.cost._predict import Chosen
from meshplan.machine import link_groups
from meshplan.program import CARRY, Op, runs_of
from meshplan.simulate import DeviceResources, TaskList, Timeline, device_resources, simulate

TOP = 0  # the region of the step itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One turn of a region. `collectives`: what each task of kind "collective" runs. `inner`: loops by their task."""

    trips: float
    timeline: Timeline
    collectives: Mapping[int, Run]
    inner: Mapping[int, Stretch] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """All turns, loops inside included."""
        return self.trips * self.timeline.makespan_seconds

    @property
    def busy_seconds(self) -> float:
        """Time in which something is computed, in all turns."""
        own = self.timeline.compute_seconds() - sum(s.seconds for s in self.inner.values())
        return self.trips * (own + sum(s.busy_seconds for s in self.inner.values()))

    @property
    def exposed_seconds(self) -> float:
        """Time in which collectives run and nothing is computed, in all turns."""
        return self.trips * (self.timeline.exposed_seconds() + sum(s.exposed_seconds for s in self.inner.values()))

    @property
    def collective_seconds(self) -> float:
        """Time in which collectives run, in all turns."""
        own = self.timeline.communication_seconds()
        return self.trips * (own + sum(s.collective_seconds for s in self.inner.values()))

    def exposed_by_run(self) -> Iterator[tuple[Run, float]]:
        """What each collective adds to the step: the exposed seconds of all its turns."""
        exposed = self.timeline.exposed_by_task()
        for task, run in self.collectives.items():
            yield run, self.trips * float(exposed[task])
        for stretch in self.inner.values():
            for run, seconds in stretch.exposed_by_run():
                yield run, self.trips * seconds


def timeline_of(chosen: Chosen) -> Stretch:
    """The step as one device sees it, all being alike."""
    return _Builder(chosen).stretch(TOP)


def _kernels(chosen: Chosen) -> tuple[dict[int, float] | None, float]:
    """(seconds of one execution by operation, seconds a step takes besides), where the chip's figures are measured or
    fitted; None for a roofline."""
    chip, beside = chosen.model.machine.chip, 0.0
    if is_measured(chip):
        parts = measured_parts(chosen)
        beside = beside_kernels(chosen, parts).seconds + laid_out_seconds(chosen)
    elif read_table(chip.name) is not None:
        parts = compute_parts(chosen)
    else:
        return None, 0.0
    found = seconds_by_op(chosen.graph.program, parts)
    return found, beside + found.pop(-1, 0.0)


class _Builder:
    def __init__(self, chosen: Chosen) -> None:
        self.chosen, self.program = chosen, chosen.graph.program
        model = chosen.model
        self.asynchronous = model.machine.chip.platform != "cpu"
        self.device: DeviceResources = device_resources(model.machine)
        self.groups = link_groups(model.machine, model.mesh)
        self.runs: dict[int, list[Run]] = {}
        for run in chosen.runs():
            self.runs.setdefault(self._region(run), []).append(run)
        self.kernels, self.beside = _kernels(chosen)
        self.copying = self._copying()
        self.items: dict[int, list[Op | int]] = {}
        for op in self.program.ops:
            self._place(op)
        self.chains: dict[int, tuple[float, float]] = {}
        self.loops: dict[int, Stretch] = {}

    def _region(self, run: Run) -> int:
        """Where a collective runs: what enters a loop is moved before it, and so less often than the loop turns."""
        regions, region = self.program.regions, run.members[0].region
        while region != TOP and run.count < runs_of(regions, region) * (1 - 1e-9):
            region = regions[region].parent
        return region

    def _place(self, op: Op) -> None:
        """Put the operation in its region's order, and the region in that of the one around it where it begins."""
        region: int = op.region
        fresh = region not in self.items
        self.items.setdefault(region, []).append(op)
        while fresh and region != TOP:
            parent = self.program.regions[region].parent
            fresh = parent not in self.items
            self.items.setdefault(parent, []).append(region)
            region = parent

    def stretch(self, region: int) -> Stretch:
        """One turn of a region on a timeline of its own."""
        runs = self.runs.get(region, [])
        items = self._scheduled(runs, self.items.get(region, []))
        order = {op: at for at, item in enumerate(items) for op in self._ops_of(item)}
        waiting, ready = self._waits(runs, order)
        tasks, inner, collectives = TaskList(), {}, {}
        ids: dict[int, int] = {}
        held = [self.device.compute, *(i for row in self.device.links for i in row)]  # nothing passes a loop

        def start(at: int, after: int) -> None:
            for r in ready.get(at, ()):
                ids[r] = self._collective(tasks, runs[r], after)
                collectives[ids[r]] = runs[r]

        last = -1
        if region == TOP and self.beside:
            last = tasks.add("compute", seconds=self.beside, uses=[self.device.compute], name="beside kernels")
        start(-1, last)
        for at, item in enumerate(items):
            after = [ids[r] for r in waiting.get(at, ()) if r in ids]
            if isinstance(item, int):
                made = self.loops.get(item) or self.stretch(item)
                last = tasks.add("compute", seconds=made.seconds, uses=held, after=after, name="loop")
                inner[last] = made
            else:
                seconds = self._seconds(item)
                if seconds or after or at in ready:
                    last = tasks.add(
                        "compute", seconds=seconds, uses=[self.device.compute], after=after, name=item.primitive,
                        source=item.source,
                    )
            start(at, last)
        trips = self.program.regions[region].trips if region != TOP else 1.0
        done = simulate(tasks.build(), self.device.resources)
        return Stretch(trips=trips, timeline=done, collectives=collectives, inner=inner)

    def _scheduled(self, runs: list[Run], items: list[Op | int]) -> list[Op | int]:
        """The items in the order in which they are computed; the program's where nothing runs beside them."""
        if not self.asynchronous or not runs:
            return items
        order = {op: at for at, item in enumerate(items) for op in self._ops_of(item)}
        before = [
            frozenset(at for v in self._operands(item) if (at := order.get(self.program.values[v].op, n)) < n)
            for n, item in enumerate(items)
        ]
        moving = [self._moving(run, order, len(items)) for run in runs]
        loops = frozenset(n for n, item in enumerate(items) if isinstance(item, int))
        ordered = list_scheduled(before, lambda n: self._item_seconds(items[n]), moving, loops)
        return [items[n] for n in ordered]

    def _operands(self, item: Op | int) -> Iterator[int]:
        for op in self._ops_of(item):
            yield from (v for v in self.program.ops[op].operands if v is not None)

    def _item_seconds(self, item: Op | int) -> float:
        if not isinstance(item, int):
            return self._seconds(item)
        if item not in self.loops:
            self.loops[item] = self.stretch(item)
        return self.loops[item].seconds

    def _moving(self, run: Run, order: Mapping[int, int], count: int) -> Moving:
        made, uses = self._ends(run, order)
        first = min(uses, default=count)
        return Moving(
            made=frozenset(m for m in made if 0 <= m < first), uses=frozenset(uses), seconds=self._run_seconds(run),
            links=tuple(self._links(run.members[0].collective.axes)),
        )

    def _ends(self, run: Run, order: Mapping[int, int]) -> tuple[set[int], set[int]]:
        """(places that make what a collective moves, places that wait for it)."""
        made = {order.get(e.op if e.op >= 0 else self.program.values[e.value].op, -1) for e in run.members}
        uses = {order[op] for e in run.members for op in self._readers(e) if op in order}
        return made, uses - made

    def _ops_of(self, item: Op | int) -> Iterator[int]:
        if isinstance(item, int):
            for inner in self.items.get(item, ()):
                yield from self._ops_of(inner)
        else:
            yield item.index

    def _waits(self, runs: list[Run], order: Mapping[int, int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """(place -> runs that it waits for, place -> runs that start after it)."""
        waiting: dict[int, list[int]] = {}
        ready: dict[int, list[int]] = {}
        for r, run in enumerate(runs):
            made, uses = self._ends(run, order)
            first = min(uses, default=len(order))
            ready.setdefault(max((m for m in made if m < first), default=-1), []).append(r)
            for use in uses:
                waiting.setdefault(use, []).append(r)
        return waiting, ready

    def _readers(self, e: Emitted) -> Iterator[int]:
        """Operations that read what a collective gives, those after a loop with what it carries out."""
        uses = e.uses if e.op < 0 or e.value < 0 else self.program.consumers[e.value]
        for op, _ in uses:
            yield op
            if self.program.ops[op].primitive == CARRY:
                yield from (after for v in self.program.ops[op].results for after, _ in self.program.consumers[v])

    def _collective(self, tasks: TaskList, run: Run, after: int) -> int:
        c = run.members[0].collective
        uses = self._links(c.axes) if self.asynchronous else [self.device.compute, *self._links(c.axes)]
        return tasks.add(
            "collective", seconds=self._run_seconds(run), uses=uses, after=[after] if after >= 0 else [],
            nbytes=run.nbytes, name=c.kind, source=c.source, detail=c.kind,
        )

    def _run_seconds(self, run: Run) -> float:
        c = run.members[0].collective
        return self.chosen.model.rates.fitted_seconds(c.kind, c.axes, run.nbytes)

    def _links(self, axes: Axes) -> list[int]:
        used = {(share.level, share.dim) for a in axes for share in self.groups.get(a, ())}
        return [self.device.links[level][dim] for level, dim in sorted(used)]

    def _copying(self) -> dict[int, float]:
        """Seconds by operation of bringing pieces in order, once it has made them or before it reads them."""
        rates, found = self.chosen.model.rates, dict[int, float]()
        for e in (e for run in self.chosen.runs() for e in run.members if e.laid_out):
            made = self.program.values[e.value].op
            op = made if e.collective.kind in SUMS and made >= 0 else min((o for o, _ in e.uses), default=made)
            seconds = e.laid_out / rates.machine.chip.memory_bytes_per_second + rates.kernel_seconds
            found[op] = found.get(op, 0.0) + seconds
        return found

    def _seconds(self, op: Op) -> float:
        """One execution of an operation with the copies it asks for."""
        return self._computing(op) + self.copying.get(op.index, 0.0)

    def _computing(self, op: Op) -> float:
        """One execution of an operation; a chain's seconds are shared out by the bytes of what its operations make."""
        if self.kernels is not None:
            return self.kernels.get(op.index, 0.0)
        index = self.chosen.graph.node_of_op.get(op.index)
        if index is None:
            return 0.0
        node, choices, rates = self.chosen.graph.nodes[index], self.chosen.choices(index), self.chosen.model.rates
        if node.group is None or node.free:
            return 0.0
        if node.kind != "chain":
            return float(op_seconds(op, node, choices, rates, 1.0)[0])
        if index not in self.chains:
            whole = float(chain_seconds(self.program, node, choices, rates)[0])
            self.chains[index] = whole, sum(self._made(self.program.ops[o]) for o in node.group.ops)
        whole, nbytes = self.chains[index]
        return whole * self._made(op) / nbytes if nbytes else 0.0

    def _made(self, op: Op) -> int:
        return sum(self.program.nbytes(v) for v in op.results)
