"""Seconds that a device computes for: fused kernels, each the longer of its arithmetic and its memory traffic.

Beside the figures that the search minimises (`_nodes.py`), this is what a step is expected to take. Kernels are
those of `_compute_fuse.py`; local shapes are filled up to the chip's tiles, the dims of products to its matrix unit;
what a chip reaches of its peak rates is fitted (`_compute_fit.py`). Everything is an array over strategies; a plan is
one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from meshplan.cost._combine import SUMS as SUMMING
from meshplan.cost._compute_fit import ComputeFit, fit_of
from meshplan.cost._compute_fuse import SUMS, Kernel, fuse
from meshplan.cost._compute_gather import masked_lookups
from meshplan.cost._compute_loops import Around, around_loops
from meshplan.cost._compute_price import MOVES, KernelPricer, Sizes
from meshplan.cost._measured import MeasuredPart
from meshplan.cost._predict import Chosen
from meshplan.program import STACK, Program
from meshplan.strategy import Graph

PartKind = Literal["product", "convolution", "reduce", "cumulative", "elementwise", "move", "update", "alone"]

@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePart:
    """One kernel of a step on one device: seconds of one execution, executions per step, the operation that names it.

    `op` is -1 for what no operation asks for. `estimated`: whether XLA:TPU estimates cycles of its like.
    """

    kind: PartKind
    seconds: float
    count: float
    op: int
    ops: tuple[int, ...]
    estimated: bool = True


@dataclass(frozen=True, slots=True)
class Pricing:
    """A chosen plan with its kernels, which do not depend on the chip's figures."""

    chosen: Chosen
    kernels: tuple[Kernel, ...]
    moved: frozenset[int]

    @classmethod
    def of(cls, chosen: Chosen) -> Pricing:
        """Kernels end where a collective moves a value; one that is put off until a loop is over moves none inside."""
        graph, program = chosen.graph, chosen.graph.program
        moved = set()
        for e in chosen.emitted():
            if e.value < 0 or not e.uses:
                continue
            value, owner = e.value, graph.owner.get(e.value)
            partial = graph.nodes[owner].partial.get(value) if owner is not None else None
            if partial is not None and e.collective.kind in SUMMING:
                value = partial.value  # conversions after it are made of the sum
            made = program.values[value].op
            if made < 0 or program.ops[made].region == e.region:
                moved.add(value)
        rates = chosen.model.rates
        tiled = rates.machine.chip.platform == "tpu"
        kernels = fuse(program, frozenset(moved), tiled=tiled, held=rates.mesh.devices > 1)
        return cls(chosen, tuple(kernels), frozenset(moved))


def modelled_compute_seconds(chosen: Chosen) -> float:
    """Seconds of computation in a step on one device, without collectives; modelled."""
    return sum(part.seconds * part.count for part in compute_parts(chosen))


def seconds_by_op(program: Program, parts: Iterable[ComputePart | MeasuredPart]) -> dict[int, float]:
    """Seconds of one execution by operation: those of a kernel at its product, else at its last operation.

    At -1 the seconds a step of what no operation asks for.
    """
    found: dict[int, float] = {}
    for part in parts:
        runs = program.ops[part.op].count if part.op >= 0 else 1.0
        found[part.op] = found.get(part.op, 0.0) + part.seconds * part.count / runs
    return found


def compute_parts(chosen: Chosen) -> list[ComputePart]:
    """The kernels of a step with their seconds, in the program's order."""
    return price_parts(Pricing.of(chosen), fit_of(chosen.model.machine.chip))


def price_parts(pricing: Pricing, fit: ComputeFit) -> list[ComputePart]:
    """As `compute_parts`, with these figures of the chip."""
    chosen, graph = pricing.chosen, pricing.chosen.graph
    sizes = Sizes(graph, chosen.choices)
    pricer = KernelPricer(graph.program, chosen.model.rates, fit)
    parts = []
    for kernel in pricing.kernels:
        named = kernel.product if kernel.product >= 0 else max(kernel.ops)
        kind = kind_of(graph.program, kernel)
        parts.append(ComputePart(
            kind=kind, seconds=float(pricer.seconds(kernel, kernel.ops, sizes)[0]), op=named,
            count=graph.program.ops[named].count, ops=tuple(sorted(kernel.ops)), estimated=kind != "alone",
        ))
    parts += map(_around, around_loops(graph.program, pricing.moved, pricer, sizes))
    parts += map(_around, masked_lookups(graph.program, pricer, sizes))
    return parts + _tables(graph, pricer, sizes)


def _around(a: Around) -> ComputePart:
    return ComputePart(kind=a.kind, seconds=float(a.seconds[0]), count=a.count, op=a.op.index, ops=(a.op.index,))


def _tables(graph: Graph, pricer: KernelPricer, sizes: Sizes) -> list[ComputePart]:
    """Tables with short rows lie close among the arguments and results, and by rows where they are looked up."""
    parts = []
    for leaves in (graph.program.args, graph.program.results):
        for leaf in leaves:
            if leaf.aval.shape in pricer.tables and leaf.value is not None:
                seconds = float(pricer.relaid(leaf.aval.shape, sizes.leaf(leaf), leaf.aval.itemsize)[0])
                if seconds:
                    parts.append(ComputePart(kind="move", seconds=seconds, count=1.0, op=-1, ops=()))
    return parts


def kind_of(program: Program, kernel: Kernel) -> PartKind:
    """What a kernel is called in comparisons with compiled modules."""
    names = [program.ops[o].primitive for o in kernel.ops]
    if kernel.alone:
        return "alone"
    if kernel.product >= 0:
        return "convolution" if program.ops[kernel.product].primitive == "conv_general_dilated" else "product"
    if any(n.startswith("cum") for n in names):
        return "cumulative"
    if any(n.startswith(SUMS) for n in names):
        return "reduce"
    if any(n in (STACK, "dynamic_update_slice") for n in names):
        return "update"
    return "move" if all(n in MOVES for n in names) else "elementwise"
