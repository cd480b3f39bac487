"""The form in which every adapter answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """An object of a framework around one value; `names` of the value's dims where it carries some."""

    names: tuple[str | None, ...] | None


def box_of(metadata: object) -> Box:
    """From a framework's sharding names: a sequence (or `PartitionSpec`) of names, None, or tuples of names.

    A dim with several names gets none: no single one is right.
    """
    if metadata is None or isinstance(metadata, str) or not isinstance(metadata, Iterable):
        return Box(None)
    return Box(tuple(entry if isinstance(entry, str) else None for entry in metadata))
