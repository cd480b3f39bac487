"""What meshplan knows of each framework: which objects merely box an array, and the names they carry.

A framework is looked up only where the program has imported it already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshplan.hints.adapters import _haliax, _linen, _nnx, _optax
from meshplan.hints.adapters._box import Box as Box
from meshplan.hints.adapters._box import Entries as Entries
from meshplan.hints.adapters._box import Written as Written
from meshplan.hints.adapters._equinox import is_setting as is_setting
from meshplan.hints.adapters._optax import factored_dims as factored_dims

_BOXES = (_nnx, _linen, _haliax)
_ANNOTATIONS = (_nnx, _linen)


def open_box(node: Any) -> Box | None:
    """The box that `node` is, or None for arrays, containers and modules."""
    for adapter in _BOXES:
        box = adapter.open_box(node)
        if box is not None:
            return box
    return None


def annotate(node: Any, entries: Entries) -> Any | None:
    """The box with these axes in its framework's own annotation; None for what is no box, or one without any."""
    for adapter in _ANNOTATIONS:
        found = adapter.annotate(node, entries)
        if found is not None:
            return found
    return None


def state_depths(owners: Sequence[Any], keys: Sequence[str]) -> tuple[int, ...]:
    """Depths in a leaf's path below which a parameter's own path may follow; none outside of optimizer states."""
    depth = _optax.state_depth(owners)
    return (depth,) if depth is not None else _nnx.state_depths(owners, keys)
