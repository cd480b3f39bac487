"""Seconds of one kernel on one chip: the longer of its arithmetic and its memory traffic, over local shapes.

Everything is an array over strategies: of one node's, or the single one of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from meshplan.cost._compute_fit import ComputeFit
from meshplan.cost._compute_fuse import LANES, RENAMES, SUMS, Kernel, relaid, stands_alone, takes_every_other
from meshplan.cost._compute_tiles import Local, filled, matrix_flops
from meshplan.cost._nodes import op_flops
from meshplan.cost._problem import Floats
from meshplan.cost._rates import Rates
from meshplan.program import CARRY, SLICE, STACK, Leaf, Op, Program
from meshplan.rules import Dims
from meshplan.strategy import Choices, Graph, Node

# Operations of which only what they take is read, or what they put is written.
PARTS = frozenset({SLICE, "dynamic_slice", "gather", "slice"})
MOVES = frozenset({
    "broadcast_in_dim", "concatenate", "dynamic_slice", "iota", "pad", "rev", "slice", "split", "transpose", SLICE,
}) | RENAMES  # fmt: skip
# Functions that a vector unit computes as a series of so many multiplications and additions.
SERIES = 8.0
SERIES_OF = frozenset({"cos", "erf", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "sin", "tanh"})


class Sizes:
    """Local dims of what operations read and make, by the strategies of their nodes."""

    def __init__(self, graph: Graph, choices: Callable[[int], Choices]) -> None:
        self.graph, self.program, self._choices = graph, graph.program, choices

    def node(self, op: Op) -> tuple[Node, Choices] | None:
        index = self.graph.node_of_op.get(op.index)
        return None if index is None else (self.graph.nodes[index], self._choices(index))

    def operand(self, op: Op, k: int) -> Local:
        """Dims of operand k on one device."""
        shape, found = op.view.operands[k].shape, self.node(op)
        if found is None:
            return _whole(shape)
        node, choices = found
        if node.group is None:
            dims = node.values.get(op.results[0], ()) if op.primitive != STACK else op.rule.operands[0]
            dims = ((), *dims) if op.primitive == SLICE else dims
        else:
            dims = node.group.operands.get((op.index, k), ())
        return _cut(shape, dims, choices)

    def leaf(self, leaf: Leaf) -> Local:
        """Dims of an argument as it is stored, or of a result where it is made."""
        made = self.program.values[leaf.value].op if leaf.value is not None else -1
        if made >= 0:
            return self.result(self.program.ops[made], leaf.value)  # type: ignore[arg-type]
        for i, index in self.graph.node_of_arg.items():
            if self.program.args[i] is leaf:
                return _cut(leaf.aval.shape, self.graph.nodes[index].arguments[i], self._choices(index))
        return _whole(leaf.aval.shape)

    def result(self, op: Op, value: int) -> Local:
        """Dims of a result on one device."""
        shape, found = self.program.values[value].aval.shape, self.node(op)
        if found is None:
            return _whole(shape)
        node, choices = found
        dims = node.values.get(value, ()) if node.group is None else node.group.results.get(value, ())
        return _cut(shape, dims, choices)


def _whole(shape: tuple[int, ...]) -> Local:
    return tuple(np.array([float(n)]) for n in shape)


def _cut(shape: tuple[int, ...], dims: Dims, choices: Choices) -> Local:
    if len(dims) != len(shape):
        return _whole(shape)
    return tuple(n / choices.shards((d,)) for n, d in zip(shape, dims, strict=True))


def _fill_readers(op: Op, program: Program) -> Iterator[tuple[int, tuple[int, int]]]:
    """Arrays of one scalar that an operation with a kernel of its own reads, and where."""
    for k, v in enumerate(op.operands if stands_alone(op) else ()):
        made = program.values[v].op if v is not None else -1
        if v is not None and made >= 0 and program.ops[made].primitive == "broadcast_in_dim":
            if program.ops[made].view.operands[0].size == 1:
                yield v, (op.index, k)


class KernelPricer:
    """Seconds of kernels on one chip."""

    def __init__(self, program: Program, rates: Rates, fit: ComputeFit) -> None:
        self.program, self.rates, self.fit = program, rates, fit
        self.leaves = {leaf.value for leaf in program.results}
        tables = [op.view.operands[0].shape for op in program.ops if op.primitive.startswith(("gather", "scatter"))]
        self.tables = {shape for shape in tables if len(shape) > 1}  # of these whole rows are read or written
        broken = [program.ops[i].view for i in relaid(program, rates.mesh.devices > 1)] if fit.matrix > 1 else []
        split = [a.shape for view in broken for a in (view.operands[0], view.results[0])]
        self.fills = {v: at for op in program.ops for v, at in _fill_readers(op, program)}
        self.split = {s for s in split if 2 * s[-1] < LANES}

    def seconds(self, kernel: Kernel, ops: Iterable[int], sizes: Sizes) -> Floats:
        """(strategies,) of one execution, of these of its operations."""
        fit, named = self.fit, set(ops)
        whole = self.passing(self.nbytes(kernel, named, sizes))
        if kernel.product < 0:
            if fit.fast_bytes and kernel.writes and kernel.writes.keys() <= self.fills.keys() - self.leaves:
                return np.where(self._filled_bytes(kernel, sizes) <= fit.fast_bytes, fit.kernel_seconds, whole)
            return whole
        memory = whole - fit.kernel_seconds
        if kernel.product not in named:
            return memory
        arithmetic = self.arithmetic(self.program.ops[kernel.product], sizes)
        if fit.exposed_bytes:
            everything = self.nbytes(kernel, named, sizes, fast=0.0)
            arithmetic = arithmetic + self.passing(np.minimum(everything, fit.exposed_bytes)) - fit.kernel_seconds
        if math.isfinite(fit.vector_per_second):
            arithmetic = arithmetic + self.vector(kernel, named, sizes) / fit.vector_per_second
        spread = [self._operand(self.program.ops[o], 0, sizes) for o in kernel.spread & named]
        return np.maximum(memory, arithmetic) + fit.kernel_seconds + sum(spread) / fit.spread_per_second

    def passing(self, nbytes: Floats) -> Floats:
        """Of a kernel that moves so many bytes and computes nothing else."""
        rate = self.rates.machine.chip.memory_bytes_per_second * self.fit.memory_efficiency
        return nbytes / rate + self.fit.kernel_seconds

    def vector(self, kernel: Kernel, ops: set[int], sizes: Sizes) -> Floats | float:
        """Elements that the operations beside a product make, those of long series counted `SERIES` times."""
        total: Floats | float = 0.0
        for o in ops - {kernel.product}:
            op = self.program.ops[o]
            if op.primitive not in MOVES:
                times = SERIES if op.primitive in SERIES_OF else 1.0
                summed = op.primitive.startswith(SUMS)
                made = [self._operand(op, 0, sizes)] if summed else [self._result(op, v, sizes) for v in op.results]
                total = total + times * sum(made)
        return total

    def _extra(self, kernel: Kernel) -> float:
        """Bytes that an element counts more where nothing is fused, or where dims are exchanged."""
        if kernel.product >= 0 or kernel.alone:
            return 0.0
        names = [n for o in kernel.ops if (n := self.program.ops[o].primitive) not in RENAMES]
        if "transpose" in names and all(n in MOVES for n in names):
            return self.fit.transpose_bytes
        return self.fit.alone_bytes if len(names) == 1 and names[0] != STACK else 0.0

    def _filled_bytes(self, kernel: Kernel, sizes: Sizes) -> Floats:
        """Of arrays of one scalar, which are kept on the chip if they are not too large."""
        values, ops = self.program.values, self.program.ops
        written = (self._written(ops[o], v, sizes) * values[v].aval.itemsize for v, o in kernel.writes.items())
        return sum(written, np.zeros(1))

    def arithmetic(self, op: Op, sizes: Sizes) -> Floats:
        """Of a product, with its dims filled up to the matrix unit."""
        fit, peak = self.fit, self.rates.machine.chip.flops_for(op.view.operands[0].dtype)
        found = sizes.node(op)
        if fit.matrix > 1:
            left, right, out = sizes.operand(op, 0), sizes.operand(op, 1), sizes.result(op, op.results[0])
            flops = matrix_flops(op.view, left, right, out, fit)
        elif found is None or found[0].group is None:
            flops = np.array([op.rule.flops])
        else:
            flops = op_flops(op, *found, self.rates.emission)
        conv = op.primitive == "conv_general_dilated"
        return flops / (peak * (fit.convolution_efficiency if conv else fit.product_efficiency))

    def nbytes(self, kernel: Kernel, ops: set[int], sizes: Sizes, fast: float | None = None) -> Floats:
        """Bytes that these operations of the kernel move; elements that are written count `element_bytes` at least.

        `fast`: up to how many bytes an array is kept on the chip, by default the fit's.
        """
        fit, program = self.fit, self.program
        fast = fit.fast_bytes if fast is None else fast
        narrow: Floats | float = 0.0
        wide: Floats | float = 0.0
        elements: Floats | float = 0.0
        for places in kernel.reads.values():
            at = [(program.ops[o], k) for o, k in places if o in ops]
            if at:
                read = self._read(at, sizes)
                narrow = narrow + (np.where(read > fast, read, 0.0) if kernel.product >= 0 else read)
        for value, o in kernel.writes.items():
            if o in ops:
                written = self._written(program.ops[o], value, sizes)
                itemsize = program.values[value].aval.itemsize
                if itemsize < fit.element_bytes:
                    kept = written * itemsize <= (fast if value not in self.leaves else 0.0)
                    narrow = narrow + np.where(kept, 0.0, written * itemsize)
                else:
                    wide = wide + written * itemsize
        if fit.element_bytes:
            elements = self._elements(kernel, ops, sizes)
        moved = narrow + np.maximum(wide, fit.element_bytes * elements) + self._extra(kernel) * elements
        return np.atleast_1d(np.asarray(moved, dtype=np.float64))

    def elements(self, shape: tuple[int, ...], local: Local) -> Floats:
        """Elements with the filling of tiles; rows that are looked up lie along the lanes, however short."""
        return filled(local, self.fit, by_rows=shape in self.tables, split=shape in self.split)

    def by_rows(self, local: Local) -> Floats:
        """Elements of rows that are looked up, with the filling of tiles."""
        return filled(local, self.fit, by_rows=True)

    def _operand(self, op: Op, k: int, sizes: Sizes) -> Floats:
        return self.elements(op.view.operands[k].shape, sizes.operand(op, k))

    def _result(self, op: Op, value: int, sizes: Sizes) -> Floats:
        return self.elements(self.program.values[value].aval.shape, sizes.result(op, value))

    def _read(self, at: list[tuple[Op, int]], sizes: Sizes) -> Floats:
        """Bytes that are read of one value at several places: the parts that are taken, at most the whole."""
        op, k = at[0]
        whole = self._operand(op, k, sizes)
        taken = np.minimum(whole, sum(self._taken(o, i, sizes, whole) for o, i in at))
        return taken * op.view.operands[k].itemsize

    def _taken(self, op: Op, k: int, sizes: Sizes, whole: Floats) -> Floats:
        """Elements that an operation reads; one that takes every other one passes over all."""
        if takes_every_other(op):
            return whole
        if op.primitive in PARTS and k == 0:
            return np.minimum(whole, self._result(op, op.results[0], sizes))
        return whole * 0.0 if op.primitive == "dynamic_update_slice" and k == 0 else whole

    def _written(self, op: Op, value: int, sizes: Sizes) -> Floats:
        if op.primitive == STACK:
            return self._operand(op, 0, sizes)
        if value in self.fills:  # made as it is read: nothing is moved
            reader, k = self.fills[value]
            return self._operand(self.program.ops[reader], k, sizes)
        if op.primitive == "dynamic_update_slice":
            return self._operand(op, 1, sizes)
        return self._result(op, value, sizes)

    def _elements(self, kernel: Kernel, ops: set[int], sizes: Sizes) -> Floats | float:
        """Of the largest array that the kernel goes over; of a product, what it makes."""
        most: Floats | float = 0.0
        for o in ops & kernel.after if kernel.product >= 0 else ops:
            op = self.program.ops[o]
            if op.primitive in RENAMES or op.primitive == CARRY:
                continue
            for v in op.results:
                most = np.maximum(most, self._written(op, v, sizes))
            if op.primitive.startswith(SUMS):
                most = np.maximum(most, self._operand(op, 0, sizes))
        return most

    def relaid(self, shape: tuple[int, ...], local: Local, itemsize: int) -> Floats:
        """Seconds of bringing a table into rows from where it lies close, or back; 0 where its rows lie close."""
        close, rows = filled(local, self.fit), self.elements(shape, local)
        return np.where(rows > close, self.passing((close + rows) * itemsize + rows * self.fit.relaid_bytes), 0.0)
