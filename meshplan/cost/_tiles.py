"""Which sums the TPU compiler scatters: its arrays lie in tiles of 8 x 128, and a reduce-scatter's pieces must too.

Measured on micro-programs (v5e, jax 0.10.2, about 120 shapes; tests/tpu keeps some): a sum whose piece is no set
of whole tiles becomes an all-reduce, of which every device keeps its slice.
"""

from __future__ import annotations

import math
from typing import Literal

from meshplan.program import Program
from meshplan.strategy import Node

# Which of the last two dims lies along the lanes: the one that fills tiles better, the last, the one before it.
Lies = Literal["close", "rows", "columns"]
SUBLANES, LANES, LANE_BYTES = 8, 128, 512


def lies(program: Program, node: Node) -> Lies:
    """How the sums of a node lie: a product's as they fill tiles best, others as what they are made of (measured).

    An array that is reduced along its last dim has this dim along the sublanes if a product makes it (attention's
    scores), else along the lanes.
    """
    group = node.group
    if group is None or group.anchor or node.kind != "chain":
        return "close"
    reads = [program.ops[op].operands[k] for op, k in group.operands]
    made = {program.values[v].op for v in reads if v is not None and v not in group.results}
    products = any(op >= 0 and program.ops[op].primitive in ("conv_general_dilated", "dot_general") for op in made)
    last = ((group.operands[op, 0][-1:], set(factors)) for op, (factors, _) in group.reduced.items())
    return "columns" if products and any(dims and dims[0] and set(dims[0]) <= along for dims, along in last) else "rows"


def scatters(piece: tuple[int, ...], dim: int, itemsize: int, how: Lies = "close") -> bool:
    """Whether a sum that leaves each device `piece`, cut along `dim`, becomes a reduce-scatter.

    Along the lanes pieces are whole rows of 512 bytes; along the sublanes they are more than half a tile (rows are
    filled up to 8) and more than one tile in all. One dim alone is never scattered.
    """
    if len(piece) < 2:
        return False
    sublane, lane = _minor_dims(piece, how)
    if dim == lane:
        return piece[lane] * itemsize % LANE_BYTES == 0
    if dim == sublane:
        return piece[sublane] > SUBLANES // 2 and _padded(piece, sublane, lane) > SUBLANES * LANES
    return True


def _minor_dims(piece: tuple[int, ...], how: Lies) -> tuple[int, int]:
    """(dim along the sublanes, dim along the lanes), the last two in either order."""
    above, last = len(piece) - 2, len(piece) - 1
    exchanged = how == "columns" or (how == "close" and _padded(piece, last, above) < _padded(piece, above, last))
    return (last, above) if exchanged else (above, last)


def _padded(piece: tuple[int, ...], sublane: int, lane: int) -> int:
    """Elements with the filling of tiles."""
    others = math.prod(n for d, n in enumerate(piece) if d not in (sublane, lane))
    return others * _up(piece[sublane], SUBLANES) * _up(piece[lane], LANES)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to
