"""flax.nnx: a `Variable` boxes an array; its `out_sharding` (`with_partitioning`) names the dims.

Modules themselves are pytrees and keep their classes, inside optax states too. After
`nnx.split` the classes are gone, and the metadata of the Variables is all that is left.
"""

from __future__ import annotations

import sys
from typing import Any

from meshplan.hints.adapters._box import Box, box_of

_KEYS = ("out_sharding", "sharding_names", "sharding")


def open_box(node: Any) -> Box | None:
    """The box of a `Variable` of any collection (Param, BatchStat, an optimizer's OptState)."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(node, nnx.Variable):
        return None
    metadata = node.get_metadata()
    return box_of(next((metadata[key] for key in _KEYS if metadata.get(key) is not None), None))
