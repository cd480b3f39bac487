"""From measured seconds to figures: fits with figures that are never negative, robust against a few wild measurements.

Pure: numbers in, figures out. A kind's seconds are linear in its work; the fit makes the relative errors small,
those of small and of large work alike, and gives less weight to what does not fit (iteratively reweighted least
squares towards least absolute deviations, Holland and Welsch 1977, over nonnegative least squares, Lawson and
Hanson 1974).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshplan.core import CollectiveKind, MachineError
from meshplan.machine._chip import KernelFigures, KernelKind
from meshplan.machine._dims import AlgorithmName, LinkAlgorithm

ROUNDS = 30
# A relative error below this is noise: what fits better is given no more weight.
FITS = 0.02
ALGORITHM_OF: Mapping[CollectiveKind, AlgorithmName] = {
    "all-reduce": "ring", "all-gather": "ring", "reduce-scatter": "ring", "all-to-all": "pairwise",
    "collective-permute": "send",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one kernel does on one device."""

    flops: float = 0.0
    elements: float = 0.0
    nbytes: float = 0.0
    batches: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSample:
    """Measured seconds of one kernel; of a call with all its kernels where the kind is about calls."""

    kind: KernelKind
    name: str = ""
    dtype: str = ""
    work: Work
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """A collective's measured seconds: groups of `size` devices, all groups at once; `nbytes`: the larger buffer."""

    kind: CollectiveKind
    size: int
    nbytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Figures of the links that all devices share, and of each kind of collective on them."""

    bytes_per_second: float
    latency_seconds: float
    algorithms: tuple[LinkAlgorithm, ...]


def fit_linear(features: npt.ArrayLike, seconds: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """(k,) coefficients >= 0 with features (n, k) @ coefficients near seconds (n,), all > 0, by relative error.

    Raises MachineError where there are no samples or one is not positive.
    """
    from scipy.optimize import nnls

    a, t = np.asarray(features, float), np.asarray(seconds, float)
    if not len(t) or not np.all(np.isfinite(t)) or np.min(t) <= 0:
        raise MachineError(f"{len(t)} measured times, the least {min(t, default=0):g} s: all must be positive.")
    rows = a / t[:, None]
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    rows = rows / scale
    weights = np.ones(len(t))
    found = np.zeros(a.shape[1])
    for _ in range(ROUNDS):
        found, _ = nnls(rows * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(rows @ found - 1), FITS))
    return found / scale


def alone(samples: Sequence[KernelSample]) -> list[KernelSample]:
    """The samples with what is no part of the kernel taken out.

    Of a first touch of memory the call and the kernel that touches it, of started kernels the call. What is left is
    at least a twentieth of what was measured. Of the three samples of each size of "apart" ("product n", "sum n" and
    "both n") one is made: how much longer both take together, after so many seconds of computation.
    """
    known = fit_kernels([s for s in samples if s.kind in ("dispatch", "map") and s.name in ("", "cold")], "")
    call = next(k for k in known if k.kind == "dispatch")
    copy = next(k for k in reversed(known) if k.kind == "map")
    apart = {s.name: s.seconds for s in samples if s.kind == "apart"}
    out = []
    for s in samples:
        seconds = s.seconds
        if s.kind == "apart":
            name, _, size = s.name.partition(" ")
            if name == "both":
                product = apart[f"product {size}"]
                seconds -= product + apart[f"sum {size}"]
                out.append(replace(s, name="", work=Work(batches=product), seconds=max(seconds, s.seconds / 20)))
            continue
        if s.kind in ("first-touch", "kernel"):
            seconds -= call.seconds(batches=1)
        if s.kind == "first-touch":
            seconds -= copy.seconds(nbytes=2 * s.work.nbytes)
        out.append(replace(s, seconds=max(seconds, s.seconds / 20)))
    return out


def fit_kernels(samples: Sequence[KernelSample], source: str) -> tuple[KernelFigures, ...]:
    """One set of figures for each kind, name and dtype, in the order in which they first occur."""
    together: dict[tuple[KernelKind, str, str], list[KernelSample]] = {}
    for s in samples:
        together.setdefault((s.kind, s.name, s.dtype), []).append(s)
    return tuple(_kernel(*key, found, source) for key, found in together.items())


def _kernel(
    kind: KernelKind, name: str, dtype: str, samples: Sequence[KernelSample], source: str
) -> KernelFigures:
    fields = ("batches", "flops", "elements", "nbytes")
    columns = [1.0 * np.array([getattr(s.work, f) for s in samples]) for f in fields]
    # a kernel of one size only says nothing of what it takes without any work
    constant = np.full(len(samples), 1.0 if len(samples) > 1 or not any(c.any() for c in columns) else 0.0)
    found = fit_linear(np.stack([constant, *columns], axis=1), [s.seconds for s in samples])
    fixed, batch, *slowness = (float(x) for x in found)
    flops, elements, nbytes = (1 / s if s > 0 else math.inf for s in slowness)
    return KernelFigures(
        kind=kind, name=name, dtype=dtype, fixed_seconds=fixed, seconds_per_batch=batch, flops_per_second=flops,
        elements_per_second=elements, bytes_per_second=nbytes, source=source,
    )


def fit_links(samples: Sequence[CollectiveSample], source: str) -> LinkFit:
    """Seconds of each kind: fixed + steps * latency + moved bytes / (rate * efficiency) + own piece / own rate.

    The latency is the median of what the kinds show (one that has one step in groups of any size shows none), the rate
    the best of them; the rest is the kind's own. Steps and moved bytes are those of `meshplan.machine._legs` on a
    switch.
    """
    kinds: dict[CollectiveKind, list[CollectiveSample]] = {}
    for s in samples:
        kinds.setdefault(s.kind, []).append(s)
    found: dict[CollectiveKind, tuple[float, float, float, float]]
    found = {kind: _fit_kind(kind, of_kind, None) for kind, of_kind in kinds.items()}
    many = [x[1] for kind, x in found.items() if kind != "collective-permute"]
    latency = float(np.median(many)) if many else 0.0
    found = {kind: _fit_kind(kind, of_kind, latency) for kind, of_kind in kinds.items()}
    rates = {kind: 1 / max(x[2], 1e-15) for kind, x in found.items()}
    rate = max(rates.values())
    algorithms: list[LinkAlgorithm] = []
    for kind, (fixed, _, _, own) in found.items():
        algorithms.append(LinkAlgorithm(
            name=ALGORITHM_OF[kind], kind=kind, efficiency=min(1.0, rates[kind] / rate), fixed_seconds=fixed,
            own_bytes_per_second=1 / own if own > 0 else math.inf, source=source,
        ))  # fmt: skip
    return LinkFit(bytes_per_second=rate, latency_seconds=latency, algorithms=tuple(algorithms))


def _fit_kind(
    kind: CollectiveKind, samples: Sequence[CollectiveSample], latency: float | None
) -> tuple[float, float, float, float]:
    """(fixed seconds, seconds per step, seconds per moved byte, seconds per byte of the own piece)."""
    steps, moved, own = (np.array(x) for x in zip(*(_steps(s) for s in samples), strict=True))
    seconds = np.array([s.seconds for s in samples])
    constant = np.ones(len(samples))
    if latency is None:
        fixed, step, move, keep = fit_linear(np.stack([constant, steps, moved, own], axis=1), seconds)
        return float(fixed), float(step), float(move), float(keep)
    # the latency is given: what it leaves of each time is fitted, at least a tenth of it
    left = np.maximum(seconds - latency * steps, 0.1 * seconds)
    fixed, move, keep = fit_linear(np.stack([constant, moved, own], axis=1), left)
    return float(fixed), latency, float(move), float(keep)


def _steps(s: CollectiveSample) -> tuple[float, float, float]:
    """(messages after each other, bytes a device sends, bytes of the piece that it keeps)."""
    twice = 2.0 if s.kind == "all-reduce" else 1.0
    if s.kind == "collective-permute":
        return 1.0, s.nbytes, 0.0
    return twice * (s.size - 1), twice * (s.size - 1) / s.size * s.nbytes, s.nbytes / s.size
