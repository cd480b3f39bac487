"""The meshes of a search that have the axes which the user's pins name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from meshplan.core import MeshError, MeshShape
from meshplan.plan._pins import Pins

NamesBySize = Mapping[int, tuple[str, ...]]


def named_meshes(
    shapes: Sequence[Sequence[int]], named: Mapping[str, int | None], names: NamesBySize
) -> list[MeshShape]:
    """Every shape with the axes' names; those that have all the named axes, at their sizes.

    `names[n]` are the search's own names of n axes. Axes of other names take the places of own ones, in their order.
    """
    sized = {axis: size for axis, size in named.items() if size is not None}
    found: dict[MeshShape, None] = {}
    for shape in shapes:
        if len(shape) not in names:
            continue
        own = names[len(shape)]
        if sized.keys() <= set(own):
            found[MeshShape(tuple(zip(own, shape, strict=True)))] = None
            continue
        rest = [n for n in names[max(names)] if n not in sized]
        for at in combinations(range(len(shape)), len(sized)):
            filled = iter(rest if len(shape) - len(sized) != 1 else rest[:1])
            put = dict(zip(at, sized, strict=True))
            axes = [put[k] if k in put else next(filled) for k in range(len(shape))]
            found[MeshShape(tuple(zip(axes, shape, strict=True)))] = None
    return [
        m for m in found
        if named.keys() <= set(m.names) and all(m.size(axis) == size for axis, size in sized.items())
    ]


def own_meshes(pins: Pins, devices: int, machine: str) -> list[MeshShape]:
    """The meshes that the user's shardings were written for, where the search itself has none with their axes.

    Raises `MeshError` where they have another number of devices.
    """
    written: dict[MeshShape, str] = {}
    for pin in pins:
        if pin.mesh is not None and (pin.axes or pin.exact):
            written.setdefault(pin.mesh, pin.where)
    found = [m for m in written if m.devices == devices]
    if written and not found:
        mesh, where = next(iter(written.items()))
        raise MeshError(
            f"{where} is for mesh {mesh}, and no mesh of {machine} ({devices} devices) has those axes at those sizes. "
            f"Fix the mesh: mesh={{...}} with these names, or write it for {devices} devices."
        )
    return found
