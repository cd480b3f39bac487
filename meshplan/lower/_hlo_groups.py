"""Which devices take part in a collective, and which mesh axes they span.

XLA prints groups of devices in four ways: listed, `{{0,4},{1,5}}`; as a reshaped and
transposed range, `[4,2]<=[2,4]T(1,0)`; as axes of a mesh,
`mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'a','b':(2)2}` (a part of an axis is
written `(size before it)size`); and not at all, `{}`, which means every device. Ids are positions in
the flattened mesh.
"""

from __future__ import annotations

import itertools
import math
import re

import numpy as np

from meshplan.core import Axes, MeshShape
from meshplan.lower._hlo_parse import balanced

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]*)\](?:<=\[([\d,]*)\])?(?:T\(([\d,]*)\))?")


def parse_groups(attributes: str, devices: int) -> Groups:
    """Groups of an instruction's attributes; for a permute the sets of devices joined by its pairs."""
    pairs = re.search(r"source_target_pairs=(\{)", attributes)
    if pairs:
        return _joined(_lists(attributes[pairs.start(1):balanced(attributes, pairs.start(1))]))
    found = re.search(r"replica_groups=(\{|\[|mesh\[)", attributes)
    if not found:
        return (tuple(range(devices)),)
    text = attributes[found.start(1):]
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("["):
        iota = _IOTA.match(text)
        assert iota is not None
        return _rows(_range(iota.group(2), iota.group(3)).reshape(_ints(iota.group(1))))
    listed = _lists(text[:balanced(text, 0)])
    return listed or (tuple(range(devices)),)


def parse_slice_groups(attributes: str, devices_per_slice: int) -> Groups:
    """Groups of a transfer between TPU slices, whose module is that of one slice.

    Written as slices, counted from one, times devices of a slice, `"{1,2}x{0:7}"`, or as sets of
    slice * 100000 + device.
    """
    found = re.search(r'_xla_megascale_target=("[^"]*"|\{)', attributes)
    if not found:
        return ()
    if found.group(1) == "{":
        sets = _lists(attributes[found.start(1):balanced(attributes, found.start(1))])
        return tuple(tuple((i // 100000 - 1) * devices_per_slice + i % 100000 for i in group) for group in sets)
    return tuple(
        tuple((s - 1) * devices_per_slice + device for s in _listed(slices))
        for slices, members in re.findall(r"\{([^}]*)\}x\{([^}]*)\}", found.group(1))
        for device in _listed(members)
    )


def _listed(text: str) -> list[int]:
    """`1,2,5:7` is 1, 2, 5, 6, 7."""
    ends = [[int(n) for n in part.split(":")] for part in text.split(",")]
    return [n for end in ends for n in range(end[0], end[-1] + 1)]


def _ints(text: str | None) -> tuple[int, ...]:
    return tuple(int(n) for n in (text or "").split(",") if n)


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in ids.reshape(-1, ids.shape[-1]))


def _lists(text: str) -> Groups:
    return tuple(_ints(group) for group in re.findall(r"\{([\d,]+)\}", text.replace(" ", "")))


def _range(dims: str | None, order: str | None) -> np.ndarray:
    shape = _ints(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_ints(order)) if order else ids


def _mesh_groups(text: str) -> Groups:
    sizes = [(name, int(n)) for name, n in re.findall(r"'([^']+)'=(\d+)", text[:balanced(text, 4)])]
    rest = text[balanced(text, 4):]
    explicit = re.match(r",?\s*device_ids=\(([^{]*)\)\s*\{", rest)
    if explicit and (iota := _IOTA.match(explicit.group(1).strip())):
        ids = _range(iota.group(2) or iota.group(1), iota.group(3)).reshape(-1)
    elif explicit:
        ids = np.array(_ints(explicit.group(1).replace(" ", "")))
    else:
        ids = np.arange(math.prod(n for _, n in sizes))
    opened = rest.index("{")
    named = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", rest[opened:balanced(rest, opened)])
    # Each axis is cut into (before, taken, after), so that a part of an axis is a dim of its own.
    cuts = {name: sorted((int(b or 1), int(t or 0)) for n, b, t in named if n == name) for name, _ in sizes}
    shape: list[int] = []
    where: dict[tuple[str, int], int] = {}
    for name, size in sizes:
        at = 1
        for before, taken in cuts[name]:
            if before > at:
                shape.append(before // at)
            where[name, before] = len(shape)
            shape.append(taken or size)
            at = before * (taken or size)
        if size > at:
            shape.append(size // at)
    group_dims = [where[n, int(b or 1)] for n, b, _ in named]
    others = [d for d in range(len(shape)) if d not in group_dims]
    width = math.prod(shape[d] for d in group_dims)
    return _rows(ids.reshape(shape).transpose(others + group_dims).reshape(-1, width))


def _joined(pairs: Groups) -> Groups:
    """Connected sets of devices; a device that only sends to itself is its own set."""
    owner: dict[int, int] = {}

    def find(i: int) -> int:
        while owner.setdefault(i, i) != i:
            i = owner[i]
        return i

    for a, b in pairs:
        owner[find(a)] = find(b)
    sets: dict[int, list[int]] = {}
    for i in sorted(owner):
        sets.setdefault(find(i), []).append(i)
    return tuple(tuple(s) for s in sets.values())


def group_size(groups: Groups) -> int:
    """Devices in the largest group."""
    return max((len(g) for g in groups), default=1)


def infer_axes(groups: Groups, mesh_shape: MeshShape) -> Axes | None:
    """The mesh axes whose groups these are, in mesh order; None where no set of axes fits.

    Ids are positions in the flattened mesh, as XLA numbers partitions. The groups may be those of a part of
    the mesh (a TPU slice), each of them whole. Axes of size 1 never occur.
    """
    wanted = {frozenset(g) for g in groups if len(g) > 1}
    if not wanted:
        return None
    for axes, found in _axis_groups(mesh_shape):
        if wanted <= {frozenset(g) for g in found}:
            return axes
    return None


def spanning_axes(groups: Groups, mesh_shape: MeshShape) -> Axes:
    """The fewest devices' worth of mesh axes whose groups hold every one of these groups.

    What a permute between two splits, or a group over part of an axis, has to cross at most.
    """
    if group_size(groups) <= 1:
        return ()
    best: Axes = mesh_shape.names
    for axes, found in _axis_groups(mesh_shape):
        sets = [frozenset(g) for g in found]
        covers = all(any(set(g) <= s for s in sets) for g in groups if len(g) > 1)
        if covers and mesh_shape.size(axes) < mesh_shape.size(best):
            best = axes
    return tuple(a for a in best if mesh_shape.size(a) > 1)


def _axis_groups(mesh_shape: MeshShape) -> list[tuple[Axes, Groups]]:
    names = [n for n, size in mesh_shape.axes if size > 1]
    ids = np.arange(mesh_shape.devices).reshape(mesh_shape.sizes)
    table = []
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            inner = [mesh_shape.names.index(a) for a in axes]
            outer = [d for d in range(ids.ndim) if d not in inner]
            table.append((axes, _rows(ids.transpose(outer + inner).reshape(-1, mesh_shape.size(axes)))))
    return table
