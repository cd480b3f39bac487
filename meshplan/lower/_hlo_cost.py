"""Sums over a compiled module: every instruction weighted by how often a step runs it.

Loops count by their number of runs (once where the module does not tell it, see `unknown_loops`),
fusions, calls and asynchronous wrappers are followed where they are called, and of a conditional's
branches the dearest counts (which one runs is not known before it runs).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from meshplan.lower._hlo_loops import trip_count
from meshplan.lower._hlo_parse import Array, Computation, Instruction, Module, parse_module

T = TypeVar("T")
Tally = list[tuple[T, float]]


def tally(
    module: Module,
    leaf: Callable[[Instruction, Computation], Iterable[T]],
    weight: Callable[[T], float],
    settle: Callable[[Tally[T]], Tally[T]] = lambda items: items,
) -> Tally[T]:
    """What `leaf` finds in each instruction, with the number of times a step runs it.

    `weight` ranks the branches of a conditional; `settle` sees the items of one run of each
    computation that is not fused, before they are multiplied by the runs.
    """
    known: dict[str, Tally[T]] = {}

    def visit(name: str) -> Tally[T]:
        if name not in known:
            computation = module.computations[name]
            items = [pair for i in computation.instructions for pair in run(i, computation)]
            known[name] = items if name in module.fusions else settle(items)
        return known[name]

    def run(i: Instruction, computation: Computation) -> Tally[T]:
        items: Tally[T] = [(item, 1.0) for item in leaf(i, computation)]
        if i.opcode == "while":
            runs = trip_count(module, i, computation)
            times = 1 if runs is None else runs
            inner = [*visit(i.computations("body")[0]), *visit(i.computations("condition")[0])]
            return items + [(item, n * times) for item, n in inner]
        if i.opcode == "conditional":
            branches = [visit(b) for key in _BRANCHES for b in i.computations(key)]
            return items + max(branches, key=lambda b: sum(weight(t) * n for t, n in b), default=[])
        for key in _CALLEES.get(i.opcode, ()):
            for callee in i.computations(key):
                items += visit(callee)
        return items

    return visit(module.entry)


_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_CALLEES = {
    "fusion": ("calls",), "call": ("to_apply",), "async-start": ("calls",), "custom-call": ("called_computations",),
}


def flops(text: str | Module) -> float:
    """Floating-point operations of one device in a step: dots and convolutions, 2 per multiply and add.

    Convolutions count the taps that meet an input element, so that the convolutions into which the TPU
    compiler turns dots count as those dots. Matrix products in library calls are read from their contracting dims.
    Dots agree between back ends. Of a real convolution the CPU module has the exact figure; GPU and TPU modules hold
    what these compilers made of it (explicit padding, recomputation), which can be several times as much.
    """
    return sum(flops_by_dtype(text).values())


def flops_by_dtype(text: str | Module) -> dict[str, float]:
    """As `flops`, by the type of the left operand in XLA's spelling ("bf16", "f32")."""
    module = parse_module(text) if isinstance(text, str) else text

    sums: dict[str, float] = {}
    for (dtype, each), n in tally(module, products, lambda item: item[1]):
        sums[dtype] = sums.get(dtype, 0.0) + each * n
    return sums


def products(i: Instruction, c: Computation) -> list[tuple[str, float]]:
    """(XLA's type of the left operand, FLOPs) where the instruction itself is a product; fusions are not opened."""
    if i.opcode == "dot":
        return [(_array(i.operands[0], c).dtype, _dot_flops(i, c, "lhs_contracting_dims"))]
    if i.opcode == "convolution" or (i.opcode == "custom-call" and "__cudnn$conv" in i.attributes):
        return [(_array(i.operands[0], c).dtype, _convolution_flops(i, c))]
    if i.opcode == "custom-call" and "ragged_dot_tiling=" in i.attributes:  # the TPU's kernel: ..., rows, groups
        rows = _array(i.operands[-2], c)
        return [(rows.dtype, 2.0 * next(i.shape.arrays()).size * rows.dims[-1])]
    if i.opcode == "custom-call" and _LIBRARY_PRODUCT.search(i.attributes):
        return [(_array(i.operands[0], c).dtype, _dot_flops(i, c, "lhs_contracting_dimensions"))]
    return []


_LIBRARY_PRODUCT = re.compile(r'target="__(cublas|onednn)\$(gemm|matmul|lt\$matmul)')


def _array(name: str, c: Computation) -> Array:
    return next(c.by_name[name].shape.arrays())


def _dot_flops(i: Instruction, c: Computation, key: str) -> float:
    found = re.search(rf'{key}"?[=:][{{\[]([^}}\]]*)', i.attributes)
    lhs = _array(i.operands[0], c)
    dims = [int(d) for d in re.findall(r"\d+", found.group(1))] if found else [len(lhs.dims) - 1]
    return 2.0 * next(i.shape.arrays()).size * math.prod(lhs.dims[d] for d in dims)


def _convolution_flops(i: Instruction, c: Computation) -> float:
    found = re.search(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)", i.attributes)
    lhs, rhs, out = _array(i.operands[0], c), _array(i.operands[1], c), next(i.shape.arrays())
    # cuDNN's gradients keep the window and labels of the forward convolution, whose part their result plays
    if "__cudnn$convBackwardFilter" in i.attributes:
        rhs, out = out, rhs
    elif "__cudnn$convBackwardInput" in i.attributes:
        lhs, out = out, lhs
    if not found:
        return 0.0
    lhs_labels, rhs_labels, out_labels = found.groups()
    window = _window(i.attributes)
    taps = 1
    for d, label in enumerate(sorted(s for s in out_labels if s.isdigit())):
        taps *= _taps(
            lhs.dims[lhs_labels.index(label)], rhs.dims[rhs_labels.index(label)], out.dims[out_labels.index(label)],
            {k: v[d] for k, v in window.items()},
        )
    batch, features = out.dims[out_labels.index("b")], out.dims[out_labels.index("f")]
    return 2.0 * batch * features * rhs.dims[rhs_labels.index("i")] * taps


def _window(attributes: str) -> dict[str, list[str]]:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = (field.split("=") for field in found.group(1).split()) if found else ()
    return {key: value.split("x") for key, value in fields}


def _taps(inputs: int, kernel: int, outputs: int, window: dict[str, str]) -> int:
    """Pairs of an output position and a kernel element that meet an input element, along one dim."""
    low = int(window.get("pad", "0_0").split("_")[0])
    stride, hole = int(window.get("stride", "1")), int(window.get("lhs_dilate", "1"))
    spread = int(window.get("rhs_dilate", "1"))
    # Output o and kernel element k meet input o * stride + offset[k], where that is a multiple of the hole in range.
    offset = np.arange(kernel, dtype=np.int64) * spread - low
    common = math.gcd(stride, hole)
    period = hole // common
    first = -(np.minimum(offset, 0) // stride)
    last = np.minimum(outputs - 1, ((inputs - 1) * hole - offset) // stride)
    residue = -(offset // common) * pow(stride // common, -1, period) % period
    first = first + (residue - first) % period
    met = np.where(offset % common == 0, (last - first) // period + 1, 0)
    return int(np.maximum(met, 0).sum())


def cycles_of(i: Instruction) -> float | None:
    """The TPU compiler's estimate of one run of an instruction; None where it gives none."""
    found = re.search(r'"estimated_cycles":"?(\d+)', i.attributes)
    return float(found.group(1)) if found else None


def estimated_cycles(text: str | Module) -> float | None:
    """The TPU compiler's own estimate of a step's compute cycles; None on other back ends.

    Sum of `estimated_cycles` of the instructions that are not fused. Collectives carry none.
    """
    module = parse_module(text) if isinstance(text, str) else text
    found: list[str] = []

    def leaf(i: Instruction, c: Computation) -> list[float]:
        cycles = cycles_of(i)
        if cycles is None or c.name in module.fusions:
            return []
        found.append(i.name)
        return [cycles]

    total = sum(cycles * n for cycles, n in tally(module, leaf, float))
    return total if found else None
