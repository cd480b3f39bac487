"""Which links each axis of a mesh uses.

The rule. Devices are numbered row-major over the machine's dims, mesh axes cover that order
row-major too (the last axis is innermost). An axis whose inner neighbours number `s` (the
product of the axes after it) and whose size is `a` covers the numbers s to s*a; a link dim
covers its own range in the same way. Where the two ranges overlap, the axis uses that dim,
with `size` = the factor that both share and `stride` = the devices of the dim that are
skipped from one member of a group to the next.

- Different axes use one level at different times, so each has the level's whole rate.
- On a torus, groups of one axis run at once: with stride t, t groups are interleaved on the
  same links and each has 1/t of them. A group is a closed ring where the dim is closed and
  the axis reaches the dim's outer end; otherwise it is a line (an axis of 2 in a dim of 4).
- An axis over several dims of a torus uses the links of all of them at once: an axis of 16
  on a 4x4 slice has twice the rate of an axis of 4.
- An axis that does not divide into whole factors of the dims (4 in nodes of 6) has some
  group on every dim that it touches: it is priced as one line over the outermost of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshplan.core import MachineError, MeshError, MeshShape
from meshplan.machine._dims import LinkDim
from meshplan.machine._machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShare:
    """The part of one link dim that one axis uses.

    `level` and `dim` index `Machine.levels` and its dims (outermost first). `closed`: the group
    is a ring. `stride`: groups interleaved on the same links. `whole`: the sizes divide; where
    they do not, the share stands for the entire axis.
    """

    level: int
    dim: int
    size: int
    stride: int
    closed: bool
    whole: bool = True


@dataclass(frozen=True, slots=True)
class _Range:
    """A link dim as a range [low, high) of multiplicative strides in the device order."""

    level: int
    dim: int
    link: LinkDim
    low: int
    high: int

    def touched_by(self, inner: int, size: int) -> bool:
        """Whether some group of `size` devices, `inner` apart, has members at several places of this dim.

        A place is number // low mod (high // low). It is the same for a whole group where groups
        nest in a place (inner * size divides low), or where a step comes back to the same place
        (high divides inner); otherwise some group has a step from one place to another.
        """
        return size > 1 and self.low % (inner * size) != 0 and inner % self.high != 0


def _ranges(machine: Machine) -> list[_Range]:
    """Link dims of more than one device, outermost first."""
    found, low = [], 1
    levels = machine.levels
    for level_index in reversed(range(len(levels))):
        level = levels[level_index]
        for dim_index in reversed(range(len(level.dims))):
            link = level.dims[dim_index]
            found.append(_Range(level_index, dim_index, link, low, low * link.size))
            low *= link.size
    return found[::-1]


def _check_mesh(machine: Machine, mesh: MeshShape) -> None:
    if mesh.devices != machine.devices:
        raise MeshError(
            f"mesh {mesh} has {mesh.devices} devices, machine '{machine.name}' has {machine.devices}; "
            "give the mesh axes sizes that multiply to the machine's devices."
        )


def _axis_shares(ranges: list[_Range], inner: int, size: int) -> tuple[LinkShare, ...]:
    touched = [r for r in ranges if r.touched_by(inner, size)]
    shares, whole = [], True
    for r in touched:
        low, high = max(inner, r.low), min(inner * size, r.high)
        if high <= low or high % low or low % r.low or r.high % high:
            whole = False
            break
        closed = r.link.closed and high == r.high
        shares.append(LinkShare(level=r.level, dim=r.dim, size=high // low, stride=low // r.low, closed=closed))
    if whole:
        return tuple(shares)
    first = touched[0]
    stride = max(1, math.ceil(inner / first.low))
    return (LinkShare(level=first.level, dim=first.dim, size=size, stride=stride, closed=False, whole=False),)


def link_groups(machine: Machine, mesh: MeshShape) -> dict[str, tuple[LinkShare, ...]]:
    """For each axis the link dims it uses, outermost first; () for an axis of size 1.

    Raises MeshError where mesh and machine have different numbers of devices. The rule is at
    the top of this module.
    """
    _check_mesh(machine, mesh)
    ranges, inner = _ranges(machine), 1
    found: dict[str, tuple[LinkShare, ...]] = {}
    for name, size in reversed(mesh.axes):
        found[name] = _axis_shares(ranges, inner, size) if size > 1 else ()
        inner *= size
    return {name: found[name] for name in mesh.names}


def axis_levels(machine: Machine, mesh: MeshShape) -> dict[str, tuple[tuple[int, int], ...]]:
    """For each axis (level, size in that level), outermost first; levels index `Machine.levels`.

    An axis that does not divide into whole factors is all on the outermost level it touches.
    """
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for name, shares in link_groups(machine, mesh).items():
        sizes: dict[int, int] = {}
        for share in shares:
            sizes[share.level] = sizes.get(share.level, 1) * share.size
        found[name] = tuple(sizes.items())
    return found


def spans_levels(machine: Machine, mesh: MeshShape, axis: str) -> bool:
    """Whether some group of the axis uses links of more than one level."""
    if axis not in mesh.names:
        raise MeshError(f"axis '{axis}' is not in the mesh {mesh}; its axes are {', '.join(mesh.names)}.")
    _check_mesh(machine, mesh)
    inner = math.prod(mesh.sizes[mesh.names.index(axis) + 1 :])
    return _touches_several(_ranges(machine), inner, mesh.size(axis))


def _touches_several(ranges: list[_Range], inner: int, size: int) -> bool:
    return len({r.level for r in ranges if r.touched_by(inner, size)}) > 1


def legal_mesh_shapes(machine: Machine, max_axes: int = 3) -> list[tuple[int, ...]]:
    """Every ordered factorisation of the devices into 1 to `max_axes` factors above 1 in which no axis mixes levels.

    Fewer axes first, then larger outer axes last; (1,) for one device. Raises MachineError where
    the machine has more levels than `max_axes`.
    """
    if machine.devices == 1:
        return [(1,)]
    if len(machine.levels) > max_axes:
        names = ", ".join(level.name for level in machine.levels)
        raise MachineError(
            f"machine '{machine.name}' has {len(machine.levels)} levels of links ({names}) and max_axes is {max_axes}; "
            "each level needs an axis of its own: raise max_axes."
        )
    ranges = _ranges(machine)
    shapes = [s for n in range(1, max_axes + 1) for s in _factorisations(machine.devices, n)]
    return [s for s in shapes if not _mixes(ranges, s)]


def _factorisations(n: int, factors: int) -> list[tuple[int, ...]]:
    """Ordered, each factor above 1, smaller first factors first."""
    if factors == 1:
        return [(n,)] if n > 1 else []
    heads = [d for d in range(2, n // 2 + 1) if n % d == 0]
    return [(head, *tail) for head in heads for tail in _factorisations(n // head, factors - 1)]


def _mixes(ranges: list[_Range], shape: tuple[int, ...]) -> bool:
    inner = 1
    for size in reversed(shape):
        if _touches_several(ranges, inner, size):
            return True
        inner *= size
    return False
