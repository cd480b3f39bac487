"""The time of one collective as a latency and a rate: what the planner prices with.

Linear in the bytes, at the links' full rate and by each level's usual algorithm (`meshplan.machine._legs`): the
ring on a switch, all links at once on a torus or a fully connected dim. Over several levels the phases add up
(ASTRA-sim 2.0, arXiv 2303.14006), innermost first:
sum over i of (n_i - 1) a_i + (n_i - 1)/n_i (B / product of n_j, j < i) / W_i, twice that for an all-reduce.
An all-to-all pays each level for the whole buffer; a permute pays the slowest level. A group of one costs nothing.
`collective_time` chooses among all algorithms, with the figures fitted to a collectives library.
"""

from __future__ import annotations

from collections import defaultdict

from meshplan.core import KINDS, ArgumentError, CollectiveKind, MeshError, MeshShape, nearest
from meshplan.machine._dims import Level
from meshplan.machine._legs import legs, members
from meshplan.machine._links import LinkShare, link_groups
from meshplan.machine._machine import Machine

Rate = tuple[float, float]
Stage = tuple[Level, list[LinkShare]]


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
    stages = group_stages(machine, mesh, kind, axes)
    if not stages:
        return 0.0, 0.0
    if kind in ("all-to-all", "collective-permute"):
        usual = [legs(level, shares, kind)[0] for level, shares in stages]
        combine = sum if kind == "all-to-all" else max
        return combine(leg.latency for leg in usual), combine(leg.per_byte for leg in usual)
    latency, per_byte, done = 0.0, 0.0, 1
    for level, shares in stages:
        leg = legs(level, shares, "all-gather")[0]
        latency += leg.latency
        per_byte += leg.per_byte / done
        done *= members(shares)
    return (2 * latency, 2 * per_byte) if kind == "all-reduce" else (latency, per_byte)


def group_stages(machine: Machine, mesh: MeshShape, kind: CollectiveKind, axes: tuple[str, ...]) -> list[Stage]:
    """The levels that a group over the axes runs on, innermost first, and its share of each; raises as above."""
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
    return [(levels[i], by_level[i]) for i in sorted(by_level, reverse=True)]
