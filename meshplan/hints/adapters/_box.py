"""The form in which every adapter answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshplan.core import MeshShape

Entries = tuple[Any, ...]  # of a PartitionSpec: None, an axis, or a tuple of axes per dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Axes that a framework's annotation gives the dims of an array, over `mesh` where it names one."""

    entries: Entries
    mesh: MeshShape | None = None


@dataclass(frozen=True, slots=True)
class Box:
    """An object of a framework around one value; `names` of the value's dims where it carries some.

    `written`: the axes themselves, where the box says which mesh axes its names stand for.
    """

    names: tuple[str | None, ...] | None
    written: Written | None = None


def box_of(metadata: object) -> Box:
    """From a framework's sharding names: a sequence (or `PartitionSpec`) of names, None, or tuples of names.

    A dim with several names gets none: no single one is right.
    """
    entries = entries_of(metadata)
    return Box(None) if entries is None else Box(tuple(e if isinstance(e, str) else None for e in entries))


def entries_of(metadata: object) -> Entries | None:
    """The entries of a sequence of names or a `PartitionSpec`, of a `NamedSharding` those of its spec; else None."""
    metadata = getattr(metadata, "spec", metadata)
    return None if isinstance(metadata, str) or not isinstance(metadata, Iterable) else tuple(metadata)


def mesh_of(mesh: Any) -> MeshShape | None:
    """A jax mesh in our form; None for none, and for one without axes."""
    return MeshShape.of(dict(mesh.shape)) if getattr(mesh, "shape", None) else None


def renamed(entries: Entries, rules: Sequence[tuple[str, Any]]) -> Entries:
    """Every name by itself exchanged for its axes, as flax.nnx does: the last of several rules for a name counts."""
    axes = dict(rules)
    return tuple(axes.get(e, e) if isinstance(e, str) else e for e in entries)
