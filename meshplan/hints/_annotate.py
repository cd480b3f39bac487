"""A plan's specs in the frameworks' own annotations."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshplan.hints.adapters import annotate, open_box


def annotated(tree: Any, specs: Any) -> Any:
    """`tree` with its boxes saying `specs` (such as `plan.in_specs[0]`) in their framework's own words.

    nnx Variables carry them as `out_sharding` (`nnx.get_partition_spec`, `nnx.get_named_sharding`), linen boxes
    become `nn.Partitioned` (`nn.get_partition_spec`, `nn.get_sharding`). Arrays without a box stay as they are, and so
    do `NamedArray`s of haliax, whose form is a mapping: `axis_mapping`. The values are those of `tree`, not copies.
    """

    def write(node: Any, spec: Any) -> Any:
        if open_box(node) is None:
            return node
        (found,) = jax.tree.leaves(spec, is_leaf=lambda x: isinstance(x, PartitionSpec))
        made = annotate(node, tuple(found))
        return node if made is None else made

    return jax.tree.map(write, tree, specs, is_leaf=lambda node: open_box(node) is not None)


def axis_mapping(rules: Any) -> dict[str, Any]:
    """`plan.logical_axis_rules()` as haliax's mapping from its axes to mesh axes; names that stay whole left out."""
    return {name: axes for name, axes in rules if axes is not None}
