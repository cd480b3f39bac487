"""flax.linen: `nn.Partitioned` and `nn.LogicallyPartitioned` box an array with the names of its dims.

A box with a mesh names its axes; a logical box with rules of its own says what its names stand for.
"""

from __future__ import annotations

import sys
from typing import Any

from meshplan.hints._rules import read_rules, resolve
from meshplan.hints.adapters._box import Box, Entries, Written, box_of, entries_of, mesh_of


def open_box(node: Any) -> Box | None:
    """The box of any `AxisMetadata`."""
    meta = sys.modules.get("flax.core.meta")
    if meta is None or not isinstance(node, meta.AxisMetadata):
        return None
    stated = getattr(node, "names", None)
    box, entries = box_of(stated), entries_of(stated)
    mesh, rules = mesh_of(getattr(node, "mesh", None)), getattr(node, "rules", None)
    if entries is None or not (mesh or rules):
        return box
    if rules is None:
        return Box(None, Written(entries=entries, mesh=mesh)) if not hasattr(node, "rules") else box
    dims = resolve(box.names or (), read_rules(rules)).dims
    return Box(box.names, Written(entries=tuple(axes or None for axes in dims), mesh=mesh))


def annotate(node: Any, entries: Entries) -> Any:
    """The value in an `nn.Partitioned` of these axes, so that `nn.get_partition_spec` gives them; None for others."""
    meta = sys.modules.get("flax.core.meta")
    return meta.Partitioned(node.value, names=entries) if meta and isinstance(node, meta.Partitioned) else None
