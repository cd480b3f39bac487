"""How axes of a mesh split the dims of one array.

`Spec` is the canonical form: one tuple of axis names per dim (never shorter than the
array's rank) and the axes over which the value still has to be summed. JAX's
`PartitionSpec` has several spellings of one sharding (`P('a')`, `P('a', None)`,
`P(('a',))`); it appears only at the edge of the package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Names and sizes of the mesh axes, slowest varying (outermost) first."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: dict[str, int]) -> MeshShape:
        return cls(tuple((str(k), int(v)) for k, v in sizes.items()))

    @property
    def names(self) -> Axes:
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    def size(self, axes: str | Sequence[str]) -> int:
        """Product of the sizes of the named axes; 1 for none."""
        wanted = (axes,) if isinstance(axes, str) else axes
        table = dict(self.axes)
        return math.prod(table[a] for a in wanted)

    def to_dict(self) -> dict[str, int]:
        return dict(self.axes)

    def __str__(self) -> str:
        return " x ".join(f"{n}={s}" for n, s in self.axes) or "1 device"


@dataclass(frozen=True, slots=True)
class Spec:
    """`dims[d]` are the axes that split dim d, outermost first; `unreduced` still wait for a sum."""

    dims: tuple[Axes, ...]
    unreduced: Axes = ()

    @classmethod
    def replicated(cls, ndim: int) -> Spec:
        return cls(((),) * ndim)

    @classmethod
    def of(cls, spec: PartitionSpec | Sequence[object] | None, ndim: int) -> Spec:
        """From a `PartitionSpec` (or its entries) for an array of rank `ndim`."""
        entries = tuple(spec) if spec is not None else ()
        dims: list[Axes] = []
        for entry in entries[:ndim]:
            if entry is None:
                dims.append(())
            elif isinstance(entry, str):
                dims.append((entry,))
            else:
                dims.append(tuple(str(a) for a in entry))  # type: ignore[union-attr]
        dims += [()] * (ndim - len(dims))
        return cls(tuple(dims))

    @property
    def axes(self) -> Axes:
        """All axes that split some dim, in order of the dims."""
        return tuple(a for dim in self.dims for a in dim)

    @property
    def is_replicated(self) -> bool:
        return not self.unreduced and not any(self.dims)

    def partition_spec(self) -> PartitionSpec:
        """JAX's form, trailing unsplit dims dropped: `P('data')`, not `P('data', None)`."""
        entries: list[str | Axes | None] = [None if not d else d[0] if len(d) == 1 else d for d in self.dims]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def shards(self, mesh: MeshShape) -> int:
        """Into how many different pieces the array is cut."""
        return mesh.size(self.axes)

    def local_shape(self, shape: Sequence[int], mesh: MeshShape) -> tuple[int, ...]:
        """Shape of one device's piece. Dims must divide (`meshplan.core.check_spec` says so in words)."""
        return tuple(n // mesh.size(axes) for n, axes in zip(shape, self.dims, strict=True))

    def reduced(self) -> Spec:
        return Spec(self.dims)

    def __iter__(self) -> Iterator[Axes]:
        return iter(self.dims)

    def __str__(self) -> str:
        body = ", ".join("None" if not d else "+".join(d) for d in self.dims)
        tail = f" unreduced({'+'.join(self.unreduced)})" if self.unreduced else ""
        return f"({body}){tail}"


def local_bytes(nbytes: int, spec: Spec, mesh: MeshShape) -> float:
    """Bytes on one device of an array of `nbytes` in all, cut by `spec`."""
    return nbytes / spec.shards(mesh)
