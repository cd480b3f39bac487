"""optax: states are named tuples whose fields hold trees like the parameters'; some of their leaves are factored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def state_depth(owners: Sequence[Any]) -> int | None:
    """The depth of the innermost optax state among the objects that enclose a leaf, None outside of any.

    optax's states are told by their module; a named tuple inside one (a user's transformation in a chain) counts too.
    """
    found = None
    for depth, owner in enumerate(owners):
        is_tuple = isinstance(owner, tuple) and hasattr(owner, "_fields")
        if is_tuple and (found is not None or type(owner).__module__.partition(".")[0] == "optax"):
            found = depth
    return found


def factored_dims(field: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dims of a parameter that a row or column moment of adafactor keeps, None for any other leaf.

    As `optax.scale_by_factored_rms`: rows are summed over the largest dim, columns over the second largest,
    of equal ones the last being the largest.
    """
    if field not in ("v_row", "v_col") or len(shape) < 2:
        return None
    order = sorted(range(len(shape)), key=lambda d: shape[d])  # stable, as numpy's argsort on these few
    gone = order[-1] if field == "v_row" else order[-2]
    return tuple(d for d in range(len(shape)) if d != gone)
