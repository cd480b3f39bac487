"""Seconds of a step on a chip that was measured (`meshplan calibrate`): each kernel by the figures of its kind.

Where `Chip.kernels` holds figures, this takes the place of the roofline. A product takes what products took in
calibration; elementwise operations the longer of their memory traffic and their arithmetic, primitive by primitive; a
reduction what its elements take besides. On CPU no elementwise operation is fused with a product, so those that
`_compute_fuse.py` puts there are kernels of their own. What a step takes beside its kernels is counted too: the call,
the first touch of the memory for its temporaries, the turns of its loops, and that devices wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from meshplan.cost._compute_fuse import SUMS, Kernel, fuse
from meshplan.cost._compute_price import MOVES, Sizes
from meshplan.cost._predict import Chosen
from meshplan.cost._problem import Floats
from meshplan.machine import Chip, KernelFigures
from meshplan.program import STACK, Op, Program, runs_of

# Larger blocks a C library gives back to the system each time (glibc's DEFAULT_MMAP_THRESHOLD_MAX on 64 bits).
LARGE_BLOCK = 32 << 20
# Primitives that take as long as one that was measured.
LIKE = {
    "exp2": "exp", "expm1": "exp", "log1p": "log", "erfc": "erf", "erf_inv": "erf", "cos": "sin", "tan": "sin",
    "cbrt": "rsqrt", "rem": "div", "integer_pow": "mul", "select_and_gather_add": "select_n", "clamp": "select_n",
}  # fmt: skip
MEASURED = frozenset({"exp", "log", "tanh", "logistic", "erf", "sin", "rsqrt", "sqrt", "div", "pow", "select_n"})
NO_ARITHMETIC = MOVES | frozenset({"convert_element_type", STACK, "dynamic_update_slice"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPart:
    """One kernel of a step: seconds of one execution, executions per step, the operation it is named by."""

    kind: str
    seconds: float
    count: float
    op: int
    ops: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideKernels:
    """Seconds a step takes beside kernels and collectives."""

    dispatch_seconds: float
    first_touch_seconds: float
    loop_seconds: float
    apart_seconds: float

    @property
    def seconds(self) -> float:
        return self.dispatch_seconds + self.first_touch_seconds + self.loop_seconds + self.apart_seconds


def is_measured(chip: Chip) -> bool:
    """Whether the chip's figures suffice: those of products and of elementwise operations."""
    return chip.kernel("matmul") is not None and chip.kernel("map") is not None


def measured_parts(chosen: Chosen) -> list[MeasuredPart]:
    """The kernels of a step in the program's order, at measured figures.

    Only for a chip of which `is_measured` holds.
    """
    pricer = _Pricer(chosen)
    moved = frozenset(e.value for e in chosen.emitted() if e.value >= 0 and e.uses)
    parts = []
    for kernel in fuse(pricer.program, moved):
        named = kernel.product if kernel.product >= 0 else max(kernel.ops)
        parts.append(MeasuredPart(
            kind=_kind(pricer.program, kernel), seconds=pricer.seconds(kernel), count=pricer.program.ops[named].count,
            op=named, ops=tuple(sorted(kernel.ops)),
        ))  # fmt: skip
    return parts


def _kind(program: Program, kernel: Kernel) -> str:
    names = [program.ops[o].primitive for o in kernel.ops]
    if kernel.product >= 0:
        return program.ops[kernel.product].primitive
    return names[0] if kernel.alone else "reduce" if any(n.startswith(SUMS) for n in names) else "map"


def beside_kernels(chosen: Chosen, parts: Iterable[MeasuredPart]) -> BesideKernels:
    """What the call, fresh memory and loops of the step take on a measured chip. `parts`: its kernels."""
    chip, program = chosen.model.machine.chip, chosen.graph.program
    call, start = chip.kernel("dispatch"), chip.kernel("kernel")
    prediction = chosen.predict()
    fresh = max(0.0, prediction.peak_bytes - prediction.argument_bytes)
    touch = chip.kernel("first-touch", "large" if fresh > LARGE_BLOCK else "")
    turns = sum(runs_of(program.regions, i) for i, r in enumerate(program.regions) if i and r.kind != "cond")
    apart = chip.kernel("apart") if chosen.runs() else None
    computed = sum(part.seconds * part.count for part in parts)
    return BesideKernels(
        dispatch_seconds=call.seconds(batches=len(program.args)) if call else 0.0,
        first_touch_seconds=touch.seconds(nbytes=fresh, runs=0) if touch else 0.0,
        apart_seconds=apart.seconds(batches=computed, runs=sum(r.count for r in chosen.runs())) if apart else 0.0,
        loop_seconds=turns * start.seconds(batches=1, runs=0) if start else 0.0,
    )


def measured_step_seconds(chosen: Chosen) -> float:
    """Kernels, collectives and what is beside them, one after the other: as on CPU, where nothing overlaps."""
    rates, parts = chosen.model.rates, measured_parts(chosen)
    total = sum(part.seconds * part.count for part in parts) + beside_kernels(chosen, parts).seconds
    for run in chosen.runs():
        c = run.members[0].collective
        total += run.count * rates.fitted_seconds(c.kind, c.axes, run.nbytes)
    return total + laid_out_seconds(chosen)


def laid_out_seconds(chosen: Chosen) -> float:
    """What is gathered along another dim than the first arrives in pieces that are put in order (CPU; measured: twice
    the time of a gather along the first)."""
    chip, program, mesh = chosen.model.machine.chip, chosen.graph.program, chosen.model.mesh
    figures = chip.kernel("transpose")
    if figures is None or chip.platform != "cpu":
        return 0.0
    total, done = 0.0, set()
    for edge in chosen.graph.edges:
        before = chosen.source_spec(edge) if not chosen.graph.nodes[edge.source].free else None
        for step in chosen.path(edge) if before is not None else ():
            assert before is not None
            place = (edge.value, step.axes, step.after, chosen.graph.nodes[edge.target].region)
            if step.kind == "all-gather" and place not in done:
                done.add(place)
                aval = program.values[edge.value].aval
                local = before.local_shape(aval.shape, mesh)
                dim = next(d for d, (a, b) in enumerate(zip(before.dims, step.after.dims, strict=True)) if a != b)
                if math.prod(local[:dim]) > 1:
                    nbytes = math.prod(step.after.local_shape(aval.shape, mesh)) * aval.itemsize
                    total += edge.count * figures.seconds(nbytes=2 * nbytes)
            before = step.after
    return total


class _Pricer:
    """Seconds of kernels by the chosen strategies."""

    def __init__(self, chosen: Chosen) -> None:
        self.program, self.chip = chosen.graph.program, chosen.model.machine.chip
        self.sizes = Sizes(chosen.graph, lambda node: chosen.choices(node))
        leaves = (*self.program.args, *self.program.results)
        self.far = {leaf.value for leaf in leaves}
        self.start_seconds = self._figures("kernel").seconds(batches=1, runs=0)

    def seconds(self, kernel: Kernel) -> float:
        """One execution."""
        ops = [self.program.ops[o] for o in sorted(kernel.ops)]
        if kernel.alone:
            return self._alone(ops[0], kernel)
        total = 0.0
        if kernel.product >= 0:
            at = self.program.ops[kernel.product]
            total += self._convolution(at) if at.primitive == "conv_general_dilated" else self._dot(at)
        return total + sum(self._map(kernel, made, cone) for made, cone in self._cones(kernel, ops))

    def _cones(self, kernel: Kernel, ops: Sequence[Op]) -> list[tuple[int, list[Op]]]:
        """(value that is written, operations that make it): a kernel of its own for each value that leaves the kernel,
        that a product in it reads or that is summed; what it reads of the others is read from memory.
        """
        ends = set(kernel.writes)
        for op in ops:
            if op.index == kernel.product:
                ends |= {v for v in op.operands if v is not None}
            if op.primitive.startswith(SUMS):
                ends |= set(op.results)
        made = {v: op for op in ops for v in op.results if op.index != kernel.product}
        cones = []
        for end in sorted(e for e in ends if e in made):
            cone, stack = {}, [end]
            while stack:
                op = made[stack.pop()]
                cone[op.index] = op
                stack += [v for v in op.operands if v in made and v not in ends and made[v].index not in cone]
            cones.append((end, [cone[o] for o in sorted(cone)]))
        return cones

    # products

    def _dot(self, op: Op) -> float:
        left, right = _local(self.sizes.operand(op, 0)), _local(self.sizes.operand(op, 1))
        (over_left, over_right), (batch_left, batch_right) = op.view.params["dimension_numbers"]
        b, k = math.prod(left[d] for d in batch_left), math.prod(left[d] for d in over_left)
        m, n = math.prod(left) / (b * k), math.prod(right) / (b * k)
        moved = op.view.operands[0].itemsize * b * (m * k + k * n + m * n)
        figures = self._figures("matmul", "", op.view.operands[0].dtype)
        total = self.start_seconds + figures.seconds(flops=2 * b * m * n * k, nbytes=moved, batches=b)
        for i, (local, over, batch) in enumerate(((left, over_left, batch_left), (right, over_right, batch_right))):
            if _copied(local, over, batch):
                total += self._figures("transpose").seconds(nbytes=2 * self._operand(op.index, i))
        return total

    def _convolution(self, op: Op) -> float:
        left, right = _local(self.sizes.operand(op, 0)), _local(self.sizes.operand(op, 1))
        out, numbers = _local(self.sizes.result(op, op.results[0])), op.view.params["dimension_numbers"]
        window = math.prod(right[d] for d in numbers.rhs_spec[2:])
        positions = math.prod(out[d] for d in numbers.out_spec[2:])
        flops = 2 * math.prod(out) * window * right[numbers.rhs_spec[1]]
        nbytes = op.view.operands[0].itemsize * (math.prod(left) + math.prod(right) + math.prod(out))
        name = "kernel-gradient" if window > positions else ""
        return self.start_seconds + self._figures("convolution", name).seconds(flops=flops, nbytes=nbytes)

    # the rest

    def _map(self, kernel: Kernel, end: int, ops: Sequence[Op]) -> float:
        """One kernel: the longer of its traffic and its arithmetic, then its sums and its exchanges of dims."""
        inside = {v for op in ops for v in op.results}
        read: dict[int, tuple[int, int]] = {}
        for op in ops:
            for k, v in enumerate(op.operands):
                if v is not None and v not in inside and not self.program.values[v].constant:
                    read.setdefault(v, (op.index, k))
        moved = sum(self._read(*at) / self._rate(v) for v, at in read.items())
        moved += self._written(ops[-1], end) / self._rate(end)
        arithmetic = sum(self._arithmetic(op) for op in ops)
        after = sum(self._reduction(op) + self._transposition(op) for op in ops)
        return self.start_seconds + self._figures("map").fixed_seconds + max(moved, arithmetic) + after

    def _rate(self, value: int) -> float:
        """Bytes per second: arguments and results are beyond the caches, what lies between is not."""
        return self._figures("map", "cold" if value in self.far else "").bytes_per_second

    def _transposition(self, op: Op) -> float:
        if op.primitive != "transpose":
            return 0.0
        return self._figures("transpose").seconds(nbytes=2 * self._operand(op.index, 0), runs=0)

    def _arithmetic(self, op: Op) -> float:
        name = op.primitive
        if name in NO_ARITHMETIC or name.startswith(SUMS):
            return 0.0
        name = LIKE.get(name, name)
        figures = self._figures("map", name if name in MEASURED else "mul")
        times = max(1, int(op.view.params["y"]).bit_length()) if op.primitive == "integer_pow" else 1
        return figures.seconds(elements=times * self._size(op), runs=0)

    def _reduction(self, op: Op) -> float:
        if not op.primitive.startswith(SUMS):
            return 0.0
        local = _local(self.sizes.operand(op, 0))
        axes = op.view.params.get("axes", ())
        minor = bool(axes) and max(axes) == len(local) - 1
        name = "minor" if minor else "major"
        name = "argmax" if op.primitive.startswith("arg") else "cumsum" if op.primitive.startswith("cum") else name
        return self._figures("reduce", name).seconds(elements=math.prod(local), runs=0)

    def _alone(self, op: Op, kernel: Kernel) -> float:
        name = op.primitive
        if name == "gather" or name.startswith("scatter"):
            kind: Literal["gather", "scatter"] = "gather" if name == "gather" else "scatter"
            k, rows = 2 if kind == "scatter" else 0, math.prod(_local(self.sizes.operand(op, 1))[:-1])
            moved = self._operand(op.index, k) if kind == "scatter" else self._made(op)
            copied = self._made(op) if kind == "scatter" else 0.0
            return self._figures(kind).seconds(batches=rows, nbytes=2 * moved) + copied / self._figures(
                "map"
            ).bytes_per_second
        if name in ("sort", "top_k", "approx_top_k"):
            elements = math.prod(_local(self.sizes.operand(op, 0)))
            return self._figures("reduce", "sort").seconds(elements=elements)
        return self._map(kernel, op.results[0], [op])

    # sizes

    def _figures(self, kind: str, name: str = "", dtype: str = "float32") -> KernelFigures:
        found = self.chip.kernel(kind, name, dtype)  # type: ignore[arg-type]
        return found if found is not None else KernelFigures(kind=kind)  # type: ignore[arg-type]

    def _read(self, o: int, k: int) -> float:
        op = self.program.ops[o]
        if op.primitive in ("dynamic_slice", "slice", "region.slice") and k == 0:
            return self._made(op)
        if op.primitive == "dynamic_update_slice" and k == 0:
            return 0.0
        return self._operand(o, k)

    def _written(self, op: Op, value: int) -> float:
        if op.primitive in (STACK, "dynamic_update_slice"):
            return self._operand(op.index, 0 if op.primitive == STACK else 1)
        return _whole(self.sizes.result(op, value)) * self.program.values[value].aval.itemsize

    def _operand(self, o: int, k: int) -> float:
        op = self.program.ops[o]
        return _whole(self.sizes.operand(op, k)) * op.view.operands[k].itemsize

    def _made(self, op: Op) -> float:
        return sum(self._written(op, v) for v in op.results)

    def _size(self, op: Op) -> float:
        return max((_whole(self.sizes.result(op, v)) for v in op.results), default=0.0)


def _local(sizes: Sequence[Floats]) -> list[float]:
    """Of the one strategy that is chosen."""
    return [float(n[0]) for n in sizes]


def _whole(sizes: Sequence[Floats]) -> float:
    return math.prod(_local(sizes))


def _copied(local: Sequence[float], over: Iterable[int], batch: Iterable[int]) -> bool:
    """Whether a product's operand is transposed first: its dims do not lie as batch, then rows and columns in a piece.

    Dims of one element lie anywhere.
    """
    named = dict.fromkeys(batch, "batch") | dict.fromkeys(over, "summed")
    roles = [named.get(d, "free") for d, n in enumerate(local) if n > 1]
    roles = [r for i, r in enumerate(roles) if not i or roles[i - 1] != r]
    return len(roles) > len(set(roles)) or ("batch" in roles and roles[0] != "batch")
