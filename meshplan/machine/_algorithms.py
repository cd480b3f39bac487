"""The time of one collective by the best algorithm that the fabric offers, with the figures of its library.

Inside one level the algorithms are those of `meshplan.machine._legs`. A level that lists `algorithms` offers these
alone, at their fitted figures: with efficiency e, own-piece rate C, fixed seconds f and r per root of the bytes,
latency + f + B (per_byte / e + 1 / (n C)) + r sqrt(B). A level that lists none offers all that its links allow, at
full rate.

Over several levels, innermost first, n_1, n_2, ... members, N in all:

- hierarchical (ASTRA-sim 2.0, arXiv 2303.14006): reduce-scatter level by level, all-reduce on the outermost, gather
  back; the phases follow one another, so their seconds add up, and each level out moves 1/n of the bytes. So XLA does
  it between TPU slices.
- flat (NCCL): one algorithm over all levels at once, in pieces that follow one another closely, so the slowest level
  sets the rate. It is offered by switches that list it. Bytes that a device sends over level i, with p the product of
  the n of the levels inside: ring (N-1)/N / p; tree 2/p (two members: 1/p); in-switch (n_1+1)/n_1 inside and a tree
  outside; pairwise (n_i - 1) p / N. Steps of the ring: those of level i that leave the levels inside it.

The least of the offered is taken, so a collective may change its algorithm with its bytes.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from meshplan.core import ArgumentError, CollectiveKind, MeshShape, nearest
from meshplan.machine._collectives import Stage, group_stages
from meshplan.machine._dims import AlgorithmName, Level, LinkAlgorithm
from meshplan.machine._legs import Leg, legs, members, port_rate
from meshplan.machine._links import LinkShare
from meshplan.machine._machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLine:
    """One algorithm for a collective.

    Seconds are latency_seconds + nbytes * seconds_per_byte + sqrt(nbytes) * seconds_per_root_byte.
    `algorithm`: "ring", or "hierarchical(ring, tree)" with one name a level, innermost first. `sent`: for each link
    dim the bytes that a device puts on its links per byte of its larger buffer.
    """

    algorithm: str
    latency_seconds: float
    seconds_per_byte: float
    sent: tuple[tuple[str, float], ...]
    seconds_per_root_byte: float = 0.0

    def seconds(self, nbytes: float) -> float:
        linear = self.latency_seconds + nbytes * self.seconds_per_byte
        return linear + math.sqrt(nbytes) * self.seconds_per_root_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """Seconds of one collective, the algorithm they are of, and the bytes a device sends over each link dim."""

    seconds: float
    algorithm: str
    bytes_by_dim: dict[str, float]


def collective_time(
    machine: Machine, mesh: MeshShape, kind: CollectiveKind, nbytes: float, axes: tuple[str, ...],
    algorithm: str | None = None,
) -> CollectiveTime:
    """Time of one collective of `nbytes` (the larger of a device's buffers) over the axes together.

    By the fastest algorithm that the machine offers, or by the one named ("hierarchical" stands for each of its
    forms). A group of one device takes no time. Raises as `collective_rate`, and ArgumentError for negative bytes
    and for an algorithm that is not offered.
    """
    if nbytes < 0:
        raise ArgumentError(f"a collective of {nbytes:g} bytes cannot be; give at least 0.")
    lines = collective_lines(machine, mesh, kind, axes)
    if not lines:
        return CollectiveTime(seconds=0.0, algorithm="none", bytes_by_dim={})
    names = tuple(dict.fromkeys(line.algorithm for line in lines))
    if algorithm is not None:
        lines = tuple(x for x in lines if algorithm in (x.algorithm, x.algorithm.partition("(")[0]))
        if not lines:
            raise ArgumentError(
                f"machine '{machine.name}' offers no '{algorithm}' for {kind} over {', '.join(axes)}. "
                f"{nearest(algorithm, names)}"
            )
    best = min(lines, key=lambda line: line.seconds(nbytes))
    sent = {name: nbytes * share for name, share in best.sent}
    return CollectiveTime(seconds=best.seconds(nbytes), algorithm=best.algorithm, bytes_by_dim=sent)


def collective_lines(
    machine: Machine, mesh: MeshShape, kind: CollectiveKind, axes: tuple[str, ...]
) -> tuple[CollectiveLine, ...]:
    """Every algorithm that the machine offers for a collective over the axes; () for a group of one device.

    The time of `nbytes` is the least of the lines at `nbytes`. Raises as `collective_rate`.
    """
    stages = group_stages(machine, mesh, kind, axes)
    if len(stages) < 2:
        return tuple(_line(leg.algorithm, [leg]) for level, shares in stages for leg in _fitted(level, shares, kind))
    listed = any(a.kind == kind for level, _ in stages for a in level.dims[0].algorithms)
    if listed and all(level.kind == "switch" for level, _ in stages):
        return tuple(_flat(stages, kind))
    return tuple(_hierarchical(stages, kind))


def _line(algorithm: str, found: Iterable[Leg]) -> CollectiveLine:
    found = list(found)
    sent: dict[str, float] = defaultdict(float)
    for leg in found:
        for name, share in leg.sent:
            sent[name] += share
    return CollectiveLine(
        algorithm=algorithm, latency_seconds=sum(x.latency for x in found),
        seconds_per_byte=sum(x.per_byte for x in found), sent=tuple(sent.items()),
        seconds_per_root_byte=sum(x.per_root for x in found),
    )


def _figures(level: Level, kind: CollectiveKind) -> dict[AlgorithmName, LinkAlgorithm] | None:
    """The level's listed algorithms for the kind; None where it lists none, so that all are offered."""
    return {a.name: a for a in level.dims[0].algorithms if a.kind == kind} or None


def _fitted(level: Level, shares: list[LinkShare], kind: CollectiveKind) -> list[Leg]:
    """The offered algorithms of one level, at their figures."""
    found, figures = legs(level, shares, kind), _figures(level, kind)
    if figures is None:
        return found
    n = members(shares)
    return [
        Leg(
            leg.algorithm, leg.latency + f.fixed_seconds,
            leg.per_byte / f.efficiency + 1 / (n * f.own_bytes_per_second), leg.sent, f.seconds_per_root_byte,
        )
        for leg in found
        if (f := figures.get(leg.algorithm)) is not None
    ]


def _scaled(leg: Leg, part: float) -> Leg:
    """The leg where it gets only a part of the bytes."""
    sent = tuple((name, share * part) for name, share in leg.sent)
    return Leg(leg.algorithm, leg.latency, leg.per_byte * part, sent, leg.per_root * math.sqrt(part))


def _hierarchical(stages: list[Stage], kind: CollectiveKind) -> Iterable[CollectiveLine]:
    if kind == "collective-permute":
        yield from _slowest_send(stages)
        return
    choices: list[list[list[Leg]]] = []
    inside = 1
    for i, (level, shares) in enumerate(stages):
        part = 1.0 if kind == "all-to-all" else 1 / inside
        inside *= members(shares)
        if kind == "all-reduce" and i < len(stages) - 1:
            scatters = {x.algorithm: x for x in _fitted(level, shares, "reduce-scatter")}
            pairs = [[scatters[g.algorithm], g] for g in _fitted(level, shares, "all-gather")
                     if g.algorithm in scatters]
        else:
            pairs = [[x] for x in _fitted(level, shares, kind)]
        choices.append([[_scaled(x, part) for x in pair] for pair in pairs])
    for chosen in itertools.product(*choices):
        names = ", ".join(pair[0].algorithm for pair in chosen)
        yield _line(f"hierarchical({names})", itertools.chain(*chosen))


def _slowest_send(stages: list[Stage]) -> Iterable[CollectiveLine]:
    sends = [_fitted(level, shares, "collective-permute") for level, shares in stages]
    for chosen in itertools.product(*sends):
        yield CollectiveLine(
            algorithm=f"hierarchical({', '.join(x.algorithm for x in chosen)})",
            latency_seconds=max(x.latency for x in chosen), seconds_per_byte=max(x.per_byte for x in chosen),
            sent=tuple(s for x in chosen for s in x.sent), seconds_per_root_byte=max(x.per_root for x in chosen),
        )


def _flat(stages: list[Stage], kind: CollectiveKind) -> Iterable[CollectiveLine]:
    """One algorithm over all levels at once, the slowest of which sets the rate."""
    figures = [_figures(level, kind) for level, _ in stages]
    total = math.prod(members(shares) for _, shares in stages)
    for name, inner in _FLAT[kind].items():
        found = [_flat_figure(f, name if i else inner, kind) for i, f in enumerate(figures)]
        used = [f for f in found if f is not None]
        if len(used) < len(stages):
            continue
        latency, rates, sent, inside = 0.0, [], [], 1
        for (level, shares), figure in zip(stages, used, strict=True):
            n, link = members(shares), level.dims[0]
            share, steps = _flat_part(figure.name, kind, n, inside, total)
            latency += steps * link.latency_seconds
            rates.append(share / (port_rate(link) * figure.efficiency))
            sent.append((link.name, share))
            inside *= n
        yield CollectiveLine(
            algorithm="in-switch" if inner == "in-switch" else name, sent=tuple(sent),
            latency_seconds=latency + max(f.fixed_seconds for f in used),
            seconds_per_byte=max(rates) + 1 / (total * used[0].own_bytes_per_second),
            seconds_per_root_byte=max(f.seconds_per_root_byte for f in used),
        )


# For each kind the algorithms over several levels at once: the part of the outer levels -> that of the innermost.
_FLAT: dict[CollectiveKind, dict[AlgorithmName, AlgorithmName]] = {
    "all-reduce": {"ring": "ring", "tree": "chain", "between-switches": "in-switch"},
    "all-gather": {"ring": "ring"},
    "reduce-scatter": {"ring": "ring"},
    "all-to-all": {"pairwise": "pairwise"},
    "collective-permute": {"send": "send"},
}


def _flat_figure(
    figures: dict[AlgorithmName, LinkAlgorithm] | None, name: AlgorithmName, kind: CollectiveKind
) -> LinkAlgorithm | None:
    """The figures of an algorithm on one level; full rate where the level lists none for the kind."""
    if figures is not None:
        return figures.get(name)
    return None if name == "in-switch" else LinkAlgorithm(name=name, kind=kind)


def _flat_part(name: AlgorithmName, kind: CollectiveKind, n: int, inside: int, total: int) -> tuple[float, int]:
    """(bytes a device sends over this level per byte of its buffer, messages one after another)."""
    if name == "pairwise":
        return (n - 1) * inside / total, n - 1
    if name == "send":
        return 1.0, 1
    if name == "ring":
        twice = 2 if kind == "all-reduce" else 1
        return twice * (total - 1) / total / inside, twice * (n - 1) * (total // (inside * n))
    if name == "in-switch":
        return (n + 1) / n, 2
    if name == "chain":
        return 2.0, 2 * (n - 1)
    return (1.0 if n == 2 else 2.0) / inside, 2 * math.ceil(math.log2(n))
