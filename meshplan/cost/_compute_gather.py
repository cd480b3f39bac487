"""What XLA:TPU computes beside a lookup that fills in for rows that are not there, seen in compiled modules.

A mask over the indices is spread over the rows and selects between what was looked up and the filling: a kernel of its
own where a scatter or another kernel that nothing is fused with reads the rows. Lookups of one shape by the same
indices share the mask: it is spread as the smallest of them is sharded, and gathered and copied for larger ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshplan.cost._compute_fuse import RENAMES, stands_alone
from meshplan.cost._compute_loops import Around
from meshplan.cost._compute_price import KernelPricer, Sizes
from meshplan.program import Op, Program

MASK_BYTES = 1.0  # an element of a mask


def masked_lookups(program: Program, pricer: KernelPricer, sizes: Sizes) -> Iterator[Around]:
    """The selections and the copies of masks; nothing for chips whose compiler is not known to do so."""
    fit = pricer.fit
    if not fit.element_bytes:
        return
    alike: dict[tuple[int, tuple[int, ...]], list[Op]] = {}
    for op in program.ops:
        if op.primitive == "gather" and "FILL" in str(op.view.params["mode"]) and op.view.results[0].size > 1:
            alike.setdefault((_indices(program, op), op.view.results[0].shape), []).append(op)
    for group in alike.values():
        elements = [pricer.by_rows(sizes.result(op, op.results[0])) for op in group]
        least = np.min(elements, axis=0)
        for op, n in zip(group, elements, strict=True):
            if _selected_alone(program, op):
                itemsize = op.view.results[0].itemsize
                written = itemsize + (fit.element_bytes if itemsize < fit.element_bytes else 0.0)
                yield Around("elementwise", op, pricer.passing(n * (itemsize + written)), op.count)
            copied = n * (2 * MASK_BYTES + fit.element_bytes + fit.alone_bytes)
            if np.any(n > least):
                yield Around("move", op, np.where(n > least, pricer.passing(copied), 0.0), op.count)


def _indices(program: Program, op: Op) -> int:
    """The value from which a lookup's indices are only named and shaped anew."""
    value = op.operands[1]
    while value is not None and program.values[value].op >= 0:
        made = program.ops[program.values[value].op]
        if made.primitive not in RENAMES | {"broadcast_in_dim"}:
            break
        value = made.operands[0]
    return -1 - op.index if value is None else value


def _selected_alone(program: Program, op: Op) -> bool:
    """Whether no kernel that reads the rows can select among them as it reads."""
    names, readers = {op.results[0]}, []
    for later in program.ops[op.index + 1 :]:
        if not names.isdisjoint(v for v in later.operands if v is not None):
            if later.primitive in RENAMES:
                names.update(later.results)
            else:
                readers.append(later)
    return not readers or any(map(stands_alone, readers))
