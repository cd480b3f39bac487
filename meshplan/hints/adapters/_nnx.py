"""flax.nnx: a `Variable` boxes an array; its `out_sharding` (`with_partitioning`) names the dims.

Modules themselves are pytrees and keep their classes, inside optax states too. After
`nnx.split` the classes are gone, and the metadata of the Variables is all that is left.
With `sharding_rules` or a `mesh` in the metadata the names stand for mesh axes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from meshplan.hints.adapters._box import Box, Entries, Written, box_of, entries_of, mesh_of, renamed

_KEYS = ("out_sharding", "sharding_names", "sharding")


def open_box(node: Any) -> Box | None:
    """The box of a `Variable` of any collection (Param, BatchStat, an optimizer's OptState)."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(node, nnx.Variable):
        return None
    metadata = node.get_metadata()
    stated = next((metadata[key] for key in _KEYS if metadata.get(key) is not None), None)
    entries, rules = entries_of(stated), metadata.get("sharding_rules")
    mesh = mesh_of(metadata.get("mesh") or getattr(stated, "mesh", None))
    if entries is None or not (rules or mesh):
        return box_of(stated)
    written = Written(entries=renamed(entries, rules or ()), mesh=mesh)
    return Box(box_of(stated).names if rules else None, written)


def annotate(node: Any, entries: Entries) -> Any:
    """A copy of a Variable whose metadata says these axes, as `nnx.get_partition_spec` reads it; None for others."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(node, nnx.Variable):
        return None
    copy = node.copy()
    for key in (*_KEYS, "sharding_rules", "mesh"):
        if copy.get_metadata().get(key) is not None:
            copy.set_metadata(**{key: None if key != "sharding_rules" else ()})
    copy.set_metadata(out_sharding=entries, eager_sharding=False)
    return copy


def state_depths(owners: Sequence[Any], keys: Sequence[str]) -> tuple[int, ...]:
    """Where in a leaf's path the parameter's own path may begin, less one: anywhere below `opt_state` of an nnx State.

    `nnx.split` of an `nnx.Optimizer` leaves plain nested states without the classes of optax.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or "opt_state" not in keys or not any(isinstance(o, nnx.State) for o in owners):
        return ()
    return tuple(range(list(keys).index("opt_state") + 1, len(keys) - 1))
