"""What meshplan knows of each framework: which objects merely box an array, and the names they carry.

A framework is looked up only where the program has imported it already.
"""

from __future__ import annotations

from typing import Any

from meshplan.hints.adapters import _linen, _nnx
from meshplan.hints.adapters._box import Box as Box

_ADAPTERS = (_nnx, _linen)


def open_box(node: Any) -> Box | None:
    """The box that `node` is, or None for arrays, containers and modules."""
    for adapter in _ADAPTERS:
        box = adapter.open_box(node)
        if box is not None:
            return box
    return None
