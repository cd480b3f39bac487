"""What stages hand to each other: activations and gradients of any boundary in packets of one form.

All stages run one program, so a packet has room for what crosses the widest boundary: for each shape and dtype as many
arrays as some boundary has. What a boundary does not fill is zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from meshplan.pipeline._stages_parts import Parts

Kind = tuple[tuple[int, ...], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packets:
    """`kinds[k]`: shape and dtype of array k of a packet; `places[boundary]`: where each crossing value lies."""

    kinds: tuple[Kind, ...]
    places: tuple[Mapping[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Of one packet."""
        return sum(_nbytes(shape, dtype) for shape, dtype in self.kinds)

    def empty(self, *lead: int) -> tuple[Any, ...]:
        """A packet of zeros, or a buffer of packets."""
        return tuple(jnp.zeros((*lead, *shape), dtype) for shape, dtype in self.kinds)

    def fill(self, boundary: int, values: Mapping[int, Any]) -> tuple[Any, ...]:
        """The packet of the values that cross a boundary."""
        packet = list(self.empty())
        for value, place in self.places[boundary].items():
            packet[place] = values[value].astype(packet[place].dtype)
        return tuple(packet)

    def take(self, boundary: int, buffer: Sequence[Any], at: Any) -> dict[int, Any]:
        """The values of a boundary from place `at` of a buffer."""
        return {value: buffer[k][at] for value, k in self.places[boundary].items()}


def make_packets(parts: Parts, inexact: bool) -> Packets:
    """Packets of what crosses, or, `inexact`, of the gradients of what has one."""
    avals = parts.traced.avals
    crossing = [
        [v for v in part.ins if not inexact or jnp.issubdtype(avals[v].dtype, jnp.inexact)]
        for part in parts.parts[1:]
    ]
    most: Counter[Kind] = Counter()
    for values in crossing:
        most |= Counter((avals[v].shape, avals[v].dtype) for v in values)
    kinds = [kind for kind, many in most.items() for _ in range(many)]
    places = []
    for values in crossing:
        free = {kind: [k for k, each in enumerate(kinds) if each == kind] for kind in most}
        places.append({v: free[avals[v].shape, avals[v].dtype].pop(0) for v in values})
    return Packets(kinds=tuple(kinds), places=tuple(places))


def _nbytes(shape: Sequence[int], dtype: Any) -> int:
    total = jnp.dtype(dtype).itemsize
    for size in shape:
        total *= size
    return total
