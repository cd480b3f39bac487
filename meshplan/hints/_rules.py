"""Tables from names of dims to mesh axes, read as flax reads them: a row a rule, the first that is free wins.

`(("batch", "data"), ("embed", "model"), ("embed", "data"))`: of several rows for one name the first whose axes
no other dim of the array has taken is used (flax.linen.logical_to_mesh_axes, MaxText's `logical_axis_rules`). A dim
that no row gives axes is whole; one whose row says `P.UNCONSTRAINED` is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from jax.sharding import PartitionSpec

from meshplan.core import Axes, PinError

DimNames = tuple[str | None, ...]
Row = tuple[str, Axes | None]  # None: any axes
Claim = tuple[str, tuple[int, ...]]  # an axis and the dims that want it


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What a table makes of the names of one array.

    `dims[d]`: the axes that the table gives dim d, none where it names none, None where any may split it.
    `rows[d]`: the number of the row (from 1) that won, 0 for none. `passed[d]`: rows passed over since an axis was
    taken. `unused[d]`: fallbacks not needed. `contested`: axes that a dim lost without a row to fall back on; then
    `choices` are the ways to share them out.
    """

    names: DimNames
    dims: tuple[Axes | None, ...]
    rows: tuple[int, ...]
    passed: tuple[tuple[int, ...], ...]
    unused: tuple[tuple[int, ...], ...]
    contested: tuple[Claim, ...] = ()
    choices: tuple[tuple[Axes | None, ...], ...] = ()


def read_rules(table: Iterable[Any]) -> tuple[Row, ...]:
    """Rows of a table: (name of a dim, axis, axes, None or `P.UNCONSTRAINED`). Raises `PinError` for another form."""
    rows = []
    for n, row in enumerate(table, 1):
        if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != 2 or not isinstance(row[0], str):
            raise PinError(f"row {n} of the rules is {row!r}; write (name of a dim, axis, axes or None).")
        name, axes = row
        if not _are_axes(axes):
            raise PinError(f"row {n} of the rules gives '{name}' {axes!r}; give an axis, a tuple of axes, or None.")
        if axes is PartitionSpec.UNCONSTRAINED:
            rows.append((name, None))
        else:
            rows.append((name, () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)))
    return tuple(rows)


def is_rules(table: Any) -> bool:
    """Whether this is a table of names and axes: a sequence of pairs, none of whose second entries is a spec."""
    if not isinstance(table, Sequence) or isinstance(table, str) or not table:
        return False
    return all(
        isinstance(row, Sequence) and len(row) == 2 and not isinstance(row[1], PartitionSpec) and _are_axes(row[1])
        for row in table
    )


def _are_axes(axes: Any) -> bool:
    if axes is None or axes is PartitionSpec.UNCONSTRAINED or isinstance(axes, str):
        return True
    return isinstance(axes, (list, tuple)) and all(isinstance(a, str) for a in axes)


def resolve(names: DimNames, rows: Sequence[Row]) -> Resolved:
    """The table on one array whose dims have these names."""
    dims: list[Axes | None] = [()] * len(names)
    won, taken = [0] * len(names), {}
    passed: list[list[int]] = [[] for _ in names]
    unused: list[list[int]] = [[] for _ in names]
    for n, (name, axes) in enumerate(rows, 1):
        if name not in names:
            continue
        d = names.index(name)
        if won[d]:
            unused[d].append(n)
        elif any(a in taken for a in axes or ()):
            passed[d].append(n)
        else:
            dims[d], won[d] = axes, n
            taken.update(dict.fromkeys(axes or (), d))
    losers = [d for d in range(len(names)) if passed[d] and not won[d]]
    found = Resolved(
        names=names, dims=tuple(dims), rows=tuple(won), passed=tuple(map(tuple, passed)),
        unused=tuple(map(tuple, unused)),
    )
    return _shared_out(found, rows, losers) if losers else found


def _shared_out(found: Resolved, rows: Sequence[Row], losers: Sequence[int]) -> Resolved:
    """With every way to give each contested axis to one of the dims that want it, the table's own way first."""
    wanted = {d: rows[found.rows[d] - 1][1] for d in range(len(found.names)) if found.rows[d]}
    wanted |= {d: rows[found.passed[d][0] - 1][1] for d in losers}
    claims: dict[str, list[int]] = {}
    for d, axes in sorted(wanted.items()):
        for a in axes or ():
            claims.setdefault(a, []).append(d)
    contested = tuple((a, tuple(ds)) for a, ds in claims.items() if len(ds) > 1)
    choices = [found.dims]
    for owners in product(*(ds for _, ds in contested)):
        owner = dict(zip((a for a, _ in contested), owners, strict=True))
        dims = list(found.dims)
        for d, axes in wanted.items():
            dims[d] = None if axes is None else tuple(a for a in axes if owner.get(a, d) == d)
        choices.append(tuple(dims))
    return Resolved(
        names=found.names, dims=found.dims, rows=found.rows, passed=found.passed, unused=found.unused,
        contested=contested, choices=tuple(dict.fromkeys(choices)),
    )


def row_text(rows: Sequence[Row], n: int) -> str:
    """`row 2, embed -> model`."""
    name, axes = rows[n - 1]
    return f"row {n}, {name} -> {'any' if axes is None else '+'.join(axes) or 'None'}"
