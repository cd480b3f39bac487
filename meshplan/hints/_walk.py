"""A pytree seen from the inside: every leaf with the objects that enclose it.

JAX's key paths carry keys alone. Names of dims come from the classes of the enclosing
objects, so the tree is opened one level at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.tree_util import keystr, tree_flatten_with_path

from meshplan.core import ArgumentError
from meshplan.hints.adapters import Box, Written, open_box

DimNames = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class LeafView:
    """One leaf: `owners[i]` is the object that holds entry `keys[i]`; `box_names` and `written` (mesh axes) from a
    framework's box."""

    leaf: Any
    owners: tuple[Any, ...]
    keys: tuple[str, ...]
    box_names: DimNames | None
    written: Written | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self.leaf, "shape", ()))


def walk(tree: Any) -> Iterator[LeafView]:
    """Leaves in `jax.tree.flatten` order. Boxes that only wrap a value leave no entry in `keys`."""
    return _walk(tree, (), (), Box(None))


def _walk(node: Any, owners: tuple[Any, ...], keys: tuple[str, ...], outer: Box) -> Iterator[LeafView]:
    entries, _ = tree_flatten_with_path(node, is_leaf=lambda other: other is not node)
    box = open_box(node)
    for path, child in entries:
        if not path:
            yield LeafView(node, owners, keys, outer.names, outer.written)
        elif child is node:
            raise ArgumentError(f"The pytree holds itself at {'/'.join(keys) or 'its root'}: cut the cycle.")
        elif box is not None:
            yield from _walk(child, owners, keys, Box(box.names or outer.names, box.written or outer.written))
        else:
            yield from _walk(child, (*owners, node), (*keys, keystr(path, simple=True, separator="/")), outer)
