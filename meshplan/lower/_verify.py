"""A plan against one device: the planned function computes what the step computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

FLOOR_ULPS = 8.0  # float32 roundings of the largest value
# A leaf may differ by so many times what one rounding of the arguments does to it on one device.
NOISE_TIMES = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafCheck:
    """One result leaf. `relative_error` is the norm of the difference over the norm of the one-device result.

    `absolute_error` is the largest difference of one entry; at most `floor` it is rounding of the
    largest values that the step works with, and the leaf agrees whatever its own size (a gradient
    that is zero but for rounding). `noise`: by how much the one-device result itself differs where its arguments are
    rounded otherwise, looked at for leaves over their tolerance: what Adam makes of such a gradient is all noise.
    """

    path: str
    relative_error: float
    absolute_error: float
    tolerance: float
    floor: float = 0.0
    noise: float = 0.0

    @property
    def ok(self) -> bool:
        within = self.relative_error <= self.tolerance or self.absolute_error <= self.floor
        return within or self.is_noise

    @property
    def is_noise(self) -> bool:
        """Whether the leaf is over its tolerance by no more than rounding does to it on one device."""
        over = self.relative_error > self.tolerance and self.absolute_error > self.floor
        return over and self.relative_error <= NOISE_TIMES * self.noise


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
        """The leaf whose error is largest against its tolerance, those that are all rounding last."""

        def badness(leaf: LeafCheck) -> tuple[bool, bool, float]:
            ratio = leaf.relative_error / leaf.tolerance
            return not leaf.ok, ratio <= 1, ratio

        return max(self.leaves, key=badness)

    def __str__(self) -> str:
        bad = [leaf for leaf in self.leaves if not leaf.ok]
        head = f"{len(self.leaves)} result leaves on {self.devices} devices against one device: "
        noisy = [leaf for leaf in self.leaves if leaf.is_noise]
        if not bad:
            text = head + f"all agree; worst {self.worst.path} at {self.worst.relative_error:.2g}"
            said = (f"{n.path}: {n.relative_error:.2g}, on one device {n.noise:.2g} by rounding alone" for n in noisy)
            return "\n  ".join((text, *said))
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
        a, b = _wide(a), _wide(b)
        relative = _relative(a, b)
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            relative = float("inf")
        absolute = float(np.max(np.abs(a - b), initial=0.0))
        out.append(LeafCheck(
            path=path, relative_error=relative, absolute_error=absolute, tolerance=allowed, floor=floor
        ))
    return tuple(out)


def with_noise(
    checks: Sequence[LeafCheck], reference: Sequence[Any], again: Callable[[int], Sequence[Any]], draws: int = 2
) -> tuple[LeafCheck, ...]:
    """The checks, those over their tolerance with their noise. `again(seed)`: the leaves of one device, its arguments
    rounded otherwise; not called where all agree."""
    if all(c.ok for c in checks):
        return tuple(checks)
    noise = np.zeros(len(checks))
    for seed in range(draws):
        for i, (x, y) in enumerate(zip(again(seed), reference, strict=True)):
            a, b = _host(x), _host(y)
            if not checks[i].ok and a.dtype.kind not in "iub":
                noise[i] = max(noise[i], _relative(_wide(a), _wide(b)) if b.any() else 0.0)
    return tuple(replace(c, noise=float(n)) for c, n in zip(checks, noise, strict=True))


def _wide(a: np.ndarray) -> np.ndarray:
    """In double precision."""
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    """Norm of the difference over that of b, or alone where b is zero."""
    difference, size = float(np.linalg.norm((a - b).ravel())), float(np.linalg.norm(b.ravel()))
    return difference / size if size > 0 else difference


def rounded_otherwise(tree: Any, seed: int) -> Any:
    """Every float array with each entry one rounding away, up or down by a fixed draw."""
    rng = np.random.default_rng(seed)

    def move(x: Any) -> Any:
        if not hasattr(x, "dtype") or not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
            return x
        signs = rng.choice(np.array([-1, 1], np.int8), size=x.shape)
        moved = x * (1 + signs.astype(x.dtype) * jax.numpy.finfo(x.dtype).eps)
        return jax.device_put(moved.astype(x.dtype), x.sharding)

    return jax.tree.map(move, tree)


def _largest(leaves: Sequence[Any]) -> float:
    """The largest finite entry of the floating leaves."""
    top = 0.0
    for x in leaves:
        a = _host(x)
        if a.dtype.kind not in "iub" and a.size:
            b = np.abs(_wide(a))
            top = max(top, float(np.max(b, where=np.isfinite(b), initial=0.0)))
    return top


def _host(x: Any) -> np.ndarray:
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)
