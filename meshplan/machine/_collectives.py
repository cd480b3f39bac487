"""Closed forms for the time of one collective on the links of a mesh's axes.

All are linear in the bytes: seconds = latency + nbytes * rate. With `n` devices in a group,
`a` seconds per message, `W` bytes per second that a device sends one way, and B the larger
buffer of a device (`meshplan.core.Collective.nbytes`):

- all-gather, reduce-scatter over a switch: (n-1) a + (n-1)/n B/W (ring algorithm); all-reduce twice that.
  Over direct links (fully connected) all pieces travel at once: a + (n-1)/n B / (W (n-1)/(N-1)), N devices in the dim.
  Over a torus: (n-1)/n B / (sum of the rates of the dims used). A line of links has the rate W,
  a closed ring 2W (both ways at once), an interleaved one (stride t) 1/t of it; a per hop, n-1 hops
  along a line, n/2 around a ring (How to Scale Your Model, Part 3).
- over several levels (ASTRA-sim 2.0, arXiv 2303.14006), innermost first:
  sum over i of (n_i - 1) a_i + (n_i - 1)/n_i (B / product of n_j, j < i) / W_i.
- all-to-all over a switch: (n-1) a + (n-1)/n B/W. Over a torus, half of all bytes cross the middle
  of each dim: the largest over the dims of floor(n/2) ceil(n/2)/n B / rate. Over several levels the phases add up.
- collective-permute: a + B/W to the next device, at the slowest level.

A group of one device costs nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from meshplan.core import KINDS, ArgumentError, CollectiveKind, MeshError, MeshShape, nearest
from meshplan.machine._links import LinkShare, link_groups
from meshplan.machine._machine import Level, Machine

Rate = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of one link dim that a group runs along."""

    size: int
    stride: int
    closed: bool
    bytes_per_second: float
    latency_seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second into one device, all its links in the stretch together."""
        return self.bytes_per_second * (2 if self.closed else 1) / self.stride

    @property
    def hops_seconds(self) -> float:
        """A message from the farthest member of the group."""
        hops = self.size // 2 if self.closed else self.size - 1
        return hops * self.stride * self.latency_seconds


def collective_seconds(
    machine: Machine, mesh: MeshShape, kind: CollectiveKind, nbytes: float, axes: tuple[str, ...]
) -> float:
    """Seconds of one collective of `nbytes` (the larger of a device's buffers) over the axes together.

    Raises as `collective_rate`.
    """
    latency, per_byte = collective_rate(machine, mesh, kind, axes)
    return latency + nbytes * per_byte


def collective_rate(machine: Machine, mesh: MeshShape, kind: CollectiveKind, axes: tuple[str, ...]) -> Rate:
    """(latency in seconds, seconds per byte) of a collective over the axes together.

    (0, 0) for a group of one device. Raises MeshError for an axis that is not in the mesh or is
    named twice, and for a mesh of another size than the machine; ArgumentError for an unknown kind.
    """
    if kind not in KINDS:
        raise ArgumentError(f"collective kind '{kind}' is unknown. {nearest(kind, KINDS)}")
    groups = link_groups(machine, mesh)
    for axis in axes:
        if axis not in groups:
            raise MeshError(f"axis '{axis}' is not in the mesh {mesh}. {nearest(axis, mesh.names)}")
    if len(set(axes)) != len(axes):
        raise MeshError(f"axes {axes} of a collective name one axis twice; name each once.")
    by_level: dict[int, list[LinkShare]] = defaultdict(list)
    for axis in axes:
        for share in groups[axis]:
            by_level[share.level].append(share)
    levels = machine.levels
    innermost_first = [(levels[i], by_level[i]) for i in sorted(by_level, reverse=True)]
    if not innermost_first:
        return 0.0, 0.0
    if kind == "all-to-all":
        rates = [_all_to_all(level, shares) for level, shares in innermost_first]
        return sum(r[0] for r in rates), sum(r[1] for r in rates)
    if kind == "collective-permute":
        rates = [_permute(level, shares) for level, shares in innermost_first]
        return max(r[0] for r in rates), max(r[1] for r in rates)
    latency, per_byte, done = 0.0, 0.0, 1
    for level, shares in innermost_first:
        level_latency, level_per_byte = _gather(level, shares)
        latency += level_latency
        per_byte += level_per_byte / done
        done *= math.prod(s.size for s in shares)
    return (2 * latency, 2 * per_byte) if kind == "all-reduce" else (latency, per_byte)


def _gather(level: Level, shares: list[LinkShare]) -> Rate:
    """All-gather or reduce-scatter inside one level."""
    n = math.prod(s.size for s in shares)
    moved, link = (n - 1) / n, level.dims[0]
    if level.kind == "switch":
        return (n - 1) * link.latency_seconds, moved / link.bytes_per_second
    if level.kind == "fully-connected":
        used = link.bytes_per_second * (n - 1) / (link.size - 1)
        return link.latency_seconds, moved / used
    dims = _torus_parts(level, shares)
    latency = sum(p.hops_seconds for parts in dims for p in parts)
    return latency, moved / sum(min(p.rate for p in parts) for parts in dims)


def _all_to_all(level: Level, shares: list[LinkShare]) -> Rate:
    n = math.prod(s.size for s in shares)
    if level.kind in ("switch", "fully-connected"):
        return _gather(level, shares)
    dims = _torus_parts(level, shares)
    latency = sum(p.hops_seconds for parts in dims for p in parts)
    crossing = [(p.size // 2) * ((p.size + 1) // 2) / p.size / p.rate for parts in dims for p in parts]
    return latency, max(crossing) if n > 1 else 0.0


def _permute(level: Level, shares: list[LinkShare]) -> Rate:
    """Each device to the next along the axis: one link, shared by interleaved groups."""
    link = level.dims[0]
    if level.kind == "switch":
        return link.latency_seconds, 1 / link.bytes_per_second
    if level.kind == "fully-connected":
        return link.latency_seconds, (link.size - 1) / link.bytes_per_second
    parts = [p for parts in _torus_parts(level, shares) for p in parts]
    return max(p.stride * p.latency_seconds for p in parts), max(p.stride / p.bytes_per_second for p in parts)


def _torus_parts(level: Level, shares: list[LinkShare]) -> list[list[_Part]]:
    """The stretches of each torus dim in use; those of several axes that adjoin become one."""
    by_dim: dict[int, list[LinkShare]] = defaultdict(list)
    for share in shares:
        by_dim[share.dim].append(share)
    found: list[list[_Part]] = []
    for index in sorted(by_dim):
        link = level.dims[index]
        parts: list[_Part] = []
        can_join = False
        for share in sorted(by_dim[index], key=lambda s: s.stride):
            size, stride = share.size, share.stride
            if can_join and share.whole and parts[-1].size * parts[-1].stride == stride:
                size, stride = size * parts[-1].size, parts.pop().stride
            parts.append(_Part(size, stride, share.closed, link.bytes_per_second, link.latency_seconds))
            can_join = share.whole
        found.append(parts)
    return found
