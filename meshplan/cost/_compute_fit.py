"""What a chip makes of a kernel's arithmetic and traffic: a few fitted figures, or stated defaults.

The figures of TPUs are fitted to the compiler's estimated cycles of small programs (tests/benchmarks/measure_cycles.py)
and lie with them in compute/NAME.json. A chip without a table reaches its peak rates, as a roofline has it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any

from meshplan.cost._rates import KERNEL_SECONDS
from meshplan.machine import Chip


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeFit:
    """Fitted figures of one chip.

    `product_efficiency` and `convolution_efficiency`: parts of the peak FLOP/s that a large one reaches, padding
    counted as work. `memory_efficiency`: part of the peak bytes per second. `kernel_seconds`: of starting a kernel.
    `tiles`: (elements along the lanes, along the sublanes) to which arrays are filled up, and `matrix`, to which
    the dims of a product are; 1 where nothing is. `element_bytes`: what writing an element counts at least, whatever
    its type. `fast_bytes`: arrays up to this size are kept in memory on the chip between two kernels: products
    read them at no cost, and narrow ones are written so. `alone_bytes`: what each element counts more in an
    operation that nothing is fused with, `transpose_bytes` in one that exchanges dims. `vector_per_second`: elements
    that the operations fused with a product go over in a second, beside the product's own time; `exposed_bytes`: of
    the first pieces of its operands and the last of its result, which nothing hides; `spread_per_second`: elements over
    which it spreads the maxima of their rows in a second. `relaid_bytes`: what each element of a table counts more
    where its rows are brought apart. `source` says where the figures are from; `held_out`: median error by kind of
    small programs that they were not fitted to.
    """

    product_efficiency: float = 1.0
    convolution_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    kernel_seconds: float = 0.0
    tiles: tuple[int, int] = (1, 1)
    matrix: int = 1
    element_bytes: float = 0.0
    fast_bytes: float = 0.0
    alone_bytes: float = 0.0
    transpose_bytes: float = 0.0
    vector_per_second: float = math.inf
    exposed_bytes: float = 0.0
    spread_per_second: float = math.inf
    relaid_bytes: float = 0.0
    source: str = "no fit: peak rates"
    held_out: Mapping[str, float] = field(default_factory=dict, hash=False)


def default_fit(platform: str) -> ComputeFit:
    """Peak rates; what starting a kernel takes is stated, not measured."""
    return ComputeFit(kernel_seconds=KERNEL_SECONDS[platform])


def fit_of(chip: Chip) -> ComputeFit:
    """The stored figures of a chip by its name, those of no fit where there are none."""
    table = read_table(chip.name)
    if table is None:
        return default_fit(chip.platform)
    return fit_from(table["fit"], table["source"], table["held_out"])


def fit_from(figures: Mapping[str, Any], source: str, held_out: Mapping[str, float]) -> ComputeFit:
    """From a table's entries; KeyError where one is unknown."""
    known = {f.name for f in fields(ComputeFit)}
    for name in figures:
        if name not in known:
            raise KeyError(f"{name!r} is no figure of a fit; known are {', '.join(sorted(known))}")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in figures.items()}
    return ComputeFit(**values, source=source, held_out=dict(held_out))


@cache
def read_table(chip: str) -> dict[str, Any] | None:
    """The table of a chip, by its name in lower case with dashes; None where none is stored."""
    name = chip.lower().replace(" ", "-") + ".json"
    path = resources.files("meshplan.cost").joinpath("compute", name)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
