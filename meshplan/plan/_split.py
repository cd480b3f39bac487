"""Which device holds which piece of an array."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from meshplan.core import MeshShape, Spec

Grid = tuple[tuple[tuple[int, ...], ...], ...]


def split_grid(spec: Spec, mesh: MeshShape, rows: int, columns: int) -> Grid:
    """`grid[r][c]`: devices that hold piece r of dim `rows` and piece c of dim `columns` (-1: no such dim).

    Devices count row-major over the mesh, as in `Plan.mesh()`. Pieces of further split dims fall
    together; a device stands once, replicas stand in one cell.
    """
    row_axes, column_axes = (spec.dims[d] if d >= 0 else () for d in (rows, columns))
    grid: list[list[list[int]]] = [[[] for _ in range(mesh.size(column_axes))] for _ in range(mesh.size(row_axes))]
    for device, place in enumerate(itertools.product(*(range(n) for n in mesh.sizes))):
        at = dict(zip(mesh.names, place, strict=True))
        grid[_piece(row_axes, at, mesh)][_piece(column_axes, at, mesh)].append(device)
    return tuple(tuple(tuple(cell) for cell in row) for row in grid)


def _piece(axes: Iterable[str], at: dict[str, int], mesh: MeshShape) -> int:
    """Which piece of a dim split by these axes, outermost first."""
    piece = 0
    for axis in axes:
        piece = piece * mesh.size(axis) + at[axis]
    return piece


def picture_dims(spec: Spec, shape: tuple[int, ...]) -> tuple[int, int]:
    """(dim down, dim across) to draw: the split ones first, then the longest; -1 where there is none."""
    order = sorted(range(len(shape)), key=lambda d: (not spec.dims[d], -shape[d], d))[:2]
    if not order:
        return -1, -1
    if len(order) == 1:
        return -1, order[0]
    return min(order), max(order)


def ranges(devices: Iterable[int]) -> str:
    """`0-3 8 12`: runs of three and more are shortened."""
    out: list[str] = []
    for _, group in itertools.groupby(enumerate(sorted(devices)), lambda pair: pair[1] - pair[0]):
        run = [d for _, d in group]
        out += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(d) for d in run]
    return " ".join(out)


def copies(spec: Spec, mesh: MeshShape) -> int:
    """How many devices hold the same piece."""
    return math.prod(mesh.sizes) // spec.shards(mesh)
