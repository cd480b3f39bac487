"""What one collective costs on the links of one level, algorithm by algorithm.

With `n` devices in the group, `a` seconds per message, `W` bytes per second that a device sends one way over the
links it has, and B the larger buffer of a device; an all-reduce is a reduce-scatter and an all-gather, so twice the
first rows:

| algorithm | kinds | seconds | offered by |
|---|---|---|---|
| ring | gather, scatter, reduce | (n-1) a + (n-1)/n B/W | switch, closed dim (one way round) |
| halving-doubling | the same | log2(n) a + (n-1)/n B/W, n a power of two | switch |
| bidirectional-ring | the same | floor(n/2) a + (n-1)/n B/(2W) | one closed dim |
| line | the same | (n-1) a + (n-1)/n B/W | one open dim of a torus |
| torus | the same | sum of the hops + (n-1)/n B/(sum of the rates of the dims) | several torus dims |
| direct | the same | a + (n-1)/n B / (W (n-1)/(N-1)), N devices in the dim | fully connected |
| tree | all-reduce | 2 ceil(log2 n) a + 2 B/W (two devices: B/W) | switch |
| in-switch | all-reduce | 2 a + (n+1)/n B/W: the switch adds what it reads and sends it to all | where listed |
| pairwise, direct | all-to-all | (n-1) a, a + (n-1)/n B/W | switch, fully connected |
| bisection | all-to-all | hops + the largest over the dims of floor(n/2) ceil(n/2)/n B / rate | torus |
| send | permute | a + B/W to the next device | all |

The tree is double (Sanders, Speck, Traff 2009; NCCL): a device is inner in one half's tree and a leaf in the other's.
Ring, line and torus are those of How to Scale Your Model, Part 3; in-switch is NVLink SHARP as NCCL uses it. Groups
interleaved with stride t on torus links have 1/t of them. Half duplex: what a device receives shares its rate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from meshplan.core import CollectiveKind
from meshplan.machine._dims import AlgorithmName, Level, LinkDim
from meshplan.machine._links import LinkShare


@dataclass(frozen=True, slots=True)
class Leg:
    """One algorithm on one level: seconds = latency + nbytes * per_byte + sqrt(nbytes) * per_root.

    `sent`: for each link dim the bytes that a device sends over it per byte of its buffer.
    """

    algorithm: AlgorithmName
    latency: float
    per_byte: float
    sent: tuple[tuple[str, float], ...]
    per_root: float = 0.0


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of one torus dim that a group runs along."""

    size: int
    stride: int
    closed: bool
    link: LinkDim

    @property
    def one_way(self) -> float:
        """Bytes per second of one link one way, where both directions are in use."""
        return port_rate(self.link)

    @property
    def both_ways(self) -> float:
        """Bytes per second over the links that one of the interleaved groups has of a device."""
        return self.one_way * (2 if self.closed else 1) / self.stride

    @property
    def rate(self) -> float:
        """Bytes per second into one device, all its links in the stretch together.

        Along an open line of half-duplex links each carries all n pieces, those of both directions, where a
        full-duplex one carries at most n-1 one way.
        """
        if not self.closed and self.link.duplex == "half":
            return self.link.bytes_per_second * (self.size - 1) / self.size / self.stride
        return self.both_ways

    @property
    def crossing(self) -> float:
        """Seconds per byte of an all-to-all: half of all bytes cross the middle, each way."""
        return (self.size // 2) * ((self.size + 1) // 2) / self.size / self.both_ways

    @property
    def hops_seconds(self) -> float:
        """A message from the farthest member of the group."""
        hops = self.size // 2 if self.closed else self.size - 1
        return hops * self.stride * self.link.latency_seconds


def members(shares: list[LinkShare]) -> int:
    """Devices of one group within a level."""
    return math.prod(s.size for s in shares)


def port_rate(link: LinkDim) -> float:
    """Bytes per second that a device sends while it receives as many."""
    return link.bytes_per_second / (1 if link.duplex == "full" else 2)


def legs(level: Level, shares: list[LinkShare], kind: CollectiveKind) -> list[Leg]:
    """Every algorithm that the links of the level allow for the kind, the usual one first."""
    if kind == "all-to-all":
        return [_all_to_all(level, shares)]
    if kind == "collective-permute":
        return [_send(level, shares)]
    gathers = _gathers(level, shares)
    if kind != "all-reduce":
        return gathers
    twice = [Leg(g.algorithm, 2 * g.latency, 2 * g.per_byte, _times(g.sent, 2)) for g in gathers]
    return twice + (_reductions(level, shares) if level.kind == "switch" else [])


def _times(sent: tuple[tuple[str, float], ...], factor: float) -> tuple[tuple[str, float], ...]:
    return tuple((name, factor * share) for name, share in sent)


def _gathers(level: Level, shares: list[LinkShare]) -> list[Leg]:
    """All-gather or reduce-scatter."""
    n, link = members(shares), level.dims[0]
    moved = (n - 1) / n
    if level.kind == "switch":
        per_byte, sent = moved / port_rate(link), ((link.name, moved),)
        found = [Leg("ring", (n - 1) * link.latency_seconds, per_byte, sent)]
        if n & (n - 1) == 0:
            found.append(Leg("halving-doubling", (n.bit_length() - 1) * link.latency_seconds, per_byte, sent))
        return found
    if level.kind == "fully-connected":
        used = port_rate(link) * (n - 1) / (link.size - 1)
        return [Leg("direct", link.latency_seconds, moved / used, ((link.name, moved),))]
    dims = torus_parts(level, shares)
    latency = sum(p.hops_seconds for parts in dims for p in parts)
    rates = [min(p.rate for p in parts) for parts in dims]
    sent = tuple((parts[0].link.name, moved * r / sum(rates)) for parts, r in zip(dims, rates, strict=True))
    first = dims[0][0]
    single = len(dims) == len(dims[0]) == 1
    name: AlgorithmName = "torus" if not single else "bidirectional-ring" if first.closed else "line"
    found = [Leg(name, latency, moved / sum(rates), sent)]
    if single and first.closed:
        around = (n - 1) * first.stride * first.link.latency_seconds
        one_way = first.link.bytes_per_second / first.stride  # the other direction is idle, half duplex or not
        found.append(Leg("ring", around, moved / one_way, sent))
    return found


def _reductions(level: Level, shares: list[LinkShare]) -> list[Leg]:
    """All-reduces on a switch that are no reduce-scatter and all-gather."""
    n, link = members(shares), level.dims[0]
    tree = 1.0 if n == 2 else 2.0
    steps = 2 * math.ceil(math.log2(n))
    found = [Leg("tree", steps * link.latency_seconds, tree / port_rate(link), ((link.name, tree),))]
    if any(a.name == "in-switch" for a in link.algorithms):
        read = (n + 1) / n
        found.append(Leg("in-switch", 2 * link.latency_seconds, read / port_rate(link), ((link.name, read),)))
    return found


def _all_to_all(level: Level, shares: list[LinkShare]) -> Leg:
    n = members(shares)
    if level.kind == "switch":
        ring = _gathers(level, shares)[0]
        return Leg("pairwise", ring.latency, ring.per_byte, ring.sent)
    if level.kind == "fully-connected":
        return _gathers(level, shares)[0]
    dims = torus_parts(level, shares)
    latency = sum(p.hops_seconds for parts in dims for p in parts)
    sent = tuple((parts[0].link.name, max(_mean_hops(p) for p in parts)) for parts in dims)
    return Leg("bisection", latency, max(p.crossing for parts in dims for p in parts) if n > 1 else 0.0, sent)


def _mean_hops(part: Part) -> float:
    """Bytes that a device puts on the links of the dim per byte of its buffer, those it passes on included.

    The mean number of hops between two members, every member to every member, itself included.
    """
    n = part.size
    total = (n * n // 4) * n if part.closed else n * (n * n - 1) // 3
    return part.stride * total / (n * n)


def _send(level: Level, shares: list[LinkShare]) -> Leg:
    """Each device to the next along the axis: one link, shared by interleaved groups."""
    link = level.dims[0]
    if level.kind == "switch":
        return Leg("send", link.latency_seconds, 1 / port_rate(link), ((link.name, 1.0),))
    if level.kind == "fully-connected":
        return Leg("send", link.latency_seconds, (link.size - 1) / port_rate(link), ((link.name, 1.0),))
    parts = [p for parts in torus_parts(level, shares) for p in parts]
    latency = max(p.stride * p.link.latency_seconds for p in parts)
    slow = max(parts, key=lambda p: p.stride / p.link.bytes_per_second)
    return Leg("send", latency, slow.stride / slow.link.bytes_per_second, ((slow.link.name, float(slow.stride)),))


def torus_parts(level: Level, shares: list[LinkShare]) -> list[list[Part]]:
    """The stretches of each torus dim in use; those of several axes that adjoin become one."""
    by_dim: dict[int, list[LinkShare]] = defaultdict(list)
    for share in shares:
        by_dim[share.dim].append(share)
    found: list[list[Part]] = []
    for index in sorted(by_dim):
        parts: list[Part] = []
        can_join = False
        for share in sorted(by_dim[index], key=lambda s: s.stride):
            size, stride = share.size, share.stride
            if can_join and share.whole and parts[-1].size * parts[-1].stride == stride:
                size, stride = size * parts[-1].size, parts.pop().stride
            parts.append(Part(size, stride, share.closed, level.dims[index]))
            can_join = share.whole
        found.append(parts)
    return found
