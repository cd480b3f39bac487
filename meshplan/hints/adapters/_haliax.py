"""haliax: a `NamedArray` boxes an array with named axes."""

from __future__ import annotations

import sys
from typing import Any

from meshplan.hints.adapters._box import Box


def open_box(node: Any) -> Box | None:
    """The box of a `NamedArray`; its axes' names are those of the dims."""
    haliax = sys.modules.get("haliax")
    if haliax is None or not isinstance(node, haliax.NamedArray):
        return None
    return Box(tuple(axis.name for axis in node.axes))
