"""The TPU compiler's own estimate of a step's compute, by kind of operation.

A scheduled TPU module gives `estimated_cycles` for its instructions (fusions, and what is not fused). They are summed
with the runs of the loops around them. Collectives carry none, nor do asynchronous copies between
memories, which run beside the computation. A fusion of a collective with what scatters its sum is
left out all the same; one of a collective with a product is the product's, beside which the collective runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from meshplan.lower._hlo_cost import cycles_of, tally
from meshplan.lower._hlo_parse import Computation, Instruction, Module, op_name, parse_module

CycleKind = Literal[
    "product", "scatter", "gather", "sort", "window", "reduce", "update", "slice", "move", "elementwise", "other"
]  # fmt: skip
_COLLECTIVE = re.compile(r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-|send|recv|partition-id")
_PRODUCTS = frozenset({"convolution", "dot"})
# Of all that a fusion holds, the first of these names it.
_OPCODES: tuple[tuple[CycleKind, frozenset[str]], ...] = (
    ("product", frozenset({"convolution", "dot", "triangular-solve", "cholesky", "fft"})),
    ("scatter", frozenset({"scatter"})),
    ("gather", frozenset({"gather"})),
    ("sort", frozenset({"sort", "topk"})),
    ("window", frozenset({"reduce-window", "select-and-scatter"})),
    ("reduce", frozenset({"reduce"})),
    ("update", frozenset({"dynamic-update-slice"})),
    ("slice", frozenset({"dynamic-slice"})),
)  # fmt: skip
_MOVES = frozenset({
    "bitcast", "broadcast", "concatenate", "constant", "copy", "iota", "pad", "parameter", "reshape", "reverse",
    "slice", "transpose", "tuple", "get-tuple-element",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleItem:
    """An instruction with an estimate: cycles of one execution, executions per step. `holds`: opcodes fused in it."""

    kind: CycleKind
    cycles: float
    count: float
    name: str
    source: str
    op_name: str
    holds: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleCount:
    """Cycles of a step on one device without collectives, in all and by kind; `items` most expensive first."""

    cycles: float
    by_kind: Mapping[str, float]
    items: tuple[CycleItem, ...]

    def seconds(self, clock_hertz: float) -> float:
        """At the clock of the chip, see `Chip.clock_hertz`."""
        return self.cycles / clock_hertz


def count_cycles(text: str | Module) -> CycleCount | None:
    """Cycles of an optimised TPU module (`compiled.as_text()`); None where it has no estimates (other back ends)."""
    module = parse_module(text) if isinstance(text, str) else text
    held: dict[str, frozenset[str]] = {}

    def leaf(i: Instruction, c: Computation) -> list[tuple[Instruction, float, frozenset[str]]]:
        cycles = cycles_of(i)
        if cycles is None or c.name in module.fusions:
            return []
        holds = _holds(module, i, held)
        alone = any(map(_COLLECTIVE.match, holds)) and not holds & _PRODUCTS
        return [] if alone else [(i, cycles, holds)]

    pairs = tally(module, leaf, lambda item: item[1])
    every = (i for c in module.computations.values() for i in c.instructions)
    if not pairs and all(cycles_of(i) is None for i in every):
        return None
    merged: dict[str, tuple[Instruction, float, frozenset[str], float]] = {}
    for (i, cycles, holds), runs in pairs:
        merged[i.name] = (i, cycles, holds, runs + (merged[i.name][3] if i.name in merged else 0.0))
    items = [
        CycleItem(
            kind=_kind(holds), cycles=cycles, count=runs, name=i.name, source=module.source(i), op_name=op_name(i),
            holds=holds,
        )
        for i, cycles, holds, runs in merged.values()
    ]
    items.sort(key=lambda item: (-item.cycles * item.count, item.name))
    by_kind: dict[str, float] = {}
    for item in items:
        by_kind[item.kind] = by_kind.get(item.kind, 0.0) + item.cycles * item.count
    return CycleCount(cycles=sum(by_kind.values()), by_kind=by_kind, items=tuple(items))


def _holds(module: Module, i: Instruction, known: dict[str, frozenset[str]]) -> frozenset[str]:
    """Opcodes of an instruction, or of all that is fused in it; a kernel's by its target."""
    if i.opcode == "custom-call":
        return frozenset({re.sub(r'.*custom_call_target="([^"]*)".*', r"\1", i.attributes)})
    if i.opcode not in ("fusion", "call", "async-start"):
        return frozenset({i.opcode})
    found: set[str] = set()
    for name in (*i.computations("calls"), *i.computations("to_apply")):
        if name not in known:
            inner = (_holds(module, j, known) for j in module.computations[name].instructions)
            known[name] = frozenset().union(*inner)
        found |= known[name]
    return frozenset(found)


def _kind(holds: frozenset[str]) -> CycleKind:
    for kind, opcodes in _OPCODES:
        if holds & opcodes:
            return kind
    if any(h.startswith("ragged_dot") or "ragged" in h.lower() for h in holds):
        return "product"
    return "move" if holds <= _MOVES else "elementwise"
