"""equinox: a Module's leaves may be anything; numbers of Python among them are settings, not arrays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def is_module(node: Any) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(node, equinox.Module)


def is_setting(leaf: Any, owners: Sequence[Any]) -> bool:
    """Whether a leaf is a number of Python inside a Module (a rate of dropout, a switch): `eqx.filter_jit` keeps it."""
    return isinstance(leaf, (bool, int, float, complex)) and any(is_module(owner) for owner in owners)
