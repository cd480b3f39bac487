"""flax.linen: `nn.Partitioned` and `nn.LogicallyPartitioned` box an array with the names of its dims."""

from __future__ import annotations

import sys
from typing import Any

from meshplan.hints.adapters._box import Box, box_of


def open_box(node: Any) -> Box | None:
    meta = sys.modules.get("flax.core.meta")
    if meta is None or not isinstance(node, meta.AxisMetadata):
        return None
    return box_of(getattr(node, "names", None))
