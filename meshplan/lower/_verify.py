"""A plan against one device: the planned function computes what the step computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

FLOOR_ULPS = 8.0  # float32 roundings of the largest value


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafCheck:
    """One result leaf. `relative_error` is the norm of the difference over the norm of the one-device result.

    `absolute_error` is the largest difference of one entry; at most `floor` it is rounding of the
    largest values that the step works with, and the leaf agrees whatever its own size (a gradient
    that is zero but for rounding).
    """

    path: str
    relative_error: float
    absolute_error: float
    tolerance: float
    floor: float = 0.0

    @property
    def ok(self) -> bool:
        return self.relative_error <= self.tolerance or self.absolute_error <= self.floor


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Every result leaf of one planned step beside one device's."""

    leaves: tuple[LeafCheck, ...]
    devices: int

    @property
    def ok(self) -> bool:
        return all(leaf.ok for leaf in self.leaves)

    @property
    def worst(self) -> LeafCheck:
        """The leaf whose error is largest against its tolerance."""
        return max(self.leaves, key=lambda leaf: (not leaf.ok, leaf.relative_error / leaf.tolerance))

    def __str__(self) -> str:
        bad = [leaf for leaf in self.leaves if not leaf.ok]
        head = f"{len(self.leaves)} result leaves on {self.devices} devices against one device: "
        if not bad:
            return head + f"all agree; worst {self.worst.path} at {self.worst.relative_error:.2g}"
        lines = [f"  {b.path}: {b.relative_error:.3g}, allowed {b.tolerance:.3g}" for b in bad[:10]]
        return head + f"{len(bad)} differ\n" + "\n".join(lines)


def compare_leaves(
    planned: Sequence[Any], reference: Sequence[Any], paths: Sequence[str], tolerance: float | None
) -> tuple[LeafCheck, ...]:
    """Norm-wise errors; integers and booleans must be equal. The default tolerance follows the dtype."""
    out = []
    floor = FLOOR_ULPS * float(np.finfo(np.float32).eps) * _largest(reference)
    for x, y, path in zip(planned, reference, paths, strict=True):
        a, b, allowed = _host(x), _host(y), tolerance
        if allowed is None:
            allowed = 2e-2 if np.dtype(b.dtype).itemsize == 2 else 1e-4
        if a.dtype.kind in "iub":
            different = float(np.sum(a != b))
            out.append(LeafCheck(path=path, relative_error=different, absolute_error=different, tolerance=0.5))
            continue
        kind = np.complex128 if a.dtype.kind == "c" else np.float64
        a, b = a.astype(kind), b.astype(kind)
        difference = float(np.linalg.norm((a - b).ravel()))
        size = float(np.linalg.norm(b.ravel()))
        relative = difference / size if size > 0 else difference
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            relative = float("inf")
        absolute = float(np.max(np.abs(a - b), initial=0.0))
        out.append(LeafCheck(
            path=path, relative_error=relative, absolute_error=absolute, tolerance=allowed, floor=floor
        ))
    return tuple(out)


def _largest(leaves: Sequence[Any]) -> float:
    """The largest finite entry of the floating leaves."""
    top = 0.0
    for x in leaves:
        a = _host(x)
        if a.dtype.kind not in "iub" and a.size:
            b = np.abs(a.astype(np.complex128 if a.dtype.kind == "c" else np.float64))
            top = max(top, float(np.max(b, where=np.isfinite(b), initial=0.0)))
    return top


def _host(x: Any) -> np.ndarray:
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)
