"""Where to cut a row of layers into stages: the least time of the slowest stage, then the fewest crossing bytes.

A dynamic programme over the layer boundaries, exact: first the least possible time of the slowest stage, then of all
cuts that reach it the one with the fewest bytes across its boundaries. Chips and memory may differ by stage
(Alpa, arXiv 2201.12023; Whale, 2011.09208: earlier stages hold more micro-batches, so they need more memory).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshplan.core import ArgumentError, MemoryLimitError, format_bytes

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Stage k holds the layers `bounds[k] .. bounds[k + 1] - 1`.

    `seconds` and `nbytes` by stage: of one micro-batch, and of what the stage keeps in memory; `crossing_bytes` by
    boundary, one fewer than stages.
    """

    bounds: tuple[int, ...]
    seconds: tuple[float, ...]
    nbytes: tuple[float, ...]
    crossing_bytes: tuple[float, ...]

    @property
    def slowest_seconds(self) -> float:
        """Of the slowest stage."""
        return max(self.seconds)


def cut_layers(
    stages: int, *, forward_seconds: ArrayLike, backward_seconds: ArrayLike, crossing_bytes: ArrayLike,
    state_bytes: ArrayLike | None = None, activation_bytes: ArrayLike | None = None,
    in_flight: Sequence[int] | None = None, memory_limits: float | Sequence[float] | None = None,
) -> Cut:
    """Cut L layers into stages of one or more layers each.

    `forward_seconds` and `backward_seconds` of one micro-batch: [L], or [stages, L] where the chips differ by stage.
    `crossing_bytes` [L - 1]: what goes over the boundary after each layer but the last. A stage keeps
    `state_bytes` [L] of its layers (weights, gradients, optimizer) and `activation_bytes` [L] as often as
    `in_flight[stage]` says (`Schedule.in_flight_bounds`; by default once), within `memory_limits` bytes, one for
    all stages or one for each. Raises ArgumentError for more stages than layers and for figures of other shapes;
    MemoryLimitError, with the numbers, where no cut fits.
    """
    layers = np.shape(forward_seconds)[-1] if np.ndim(forward_seconds) else 0
    _check_counts(stages, layers)
    seconds = _matrix("forward_seconds", forward_seconds, stages, layers)
    seconds = seconds + _matrix("backward_seconds", backward_seconds, stages, layers)
    crossing = _row("crossing_bytes", crossing_bytes, layers - 1, "boundaries between layers")
    state = _row("state_bytes", np.zeros(layers) if state_bytes is None else state_bytes, layers, "layers")
    kept = np.zeros(layers) if activation_bytes is None else activation_bytes
    kept = _row("activation_bytes", kept, layers, "layers")
    held = _row("in_flight", np.ones(stages) if in_flight is None else in_flight, stages, "stages")
    limits = math.inf if memory_limits is None else memory_limits
    limits = _row("memory_limits", [limits] * stages if isinstance(limits, int | float) else limits, stages, "stages")
    return cut_table(
        spans(seconds), spans(state[None, :] + held[:, None] * kept[None, :]), crossing, limits
    )


def spans(by_layer: ArrayLike) -> Floats:
    """[stages, L] figures of single layers -> [stages, L + 1, L + 1]: of layers i .. j - 1 together; inf for j <= i."""
    ends = np.pad(np.cumsum(np.asarray(by_layer, dtype=np.float64), axis=1), ((0, 0), (1, 0)))
    found = ends[:, None, :] - ends[:, :, None]
    places = np.arange(ends.shape[1])
    return np.where(places[:, None] < places[None, :], found, math.inf)


def cut_table(seconds: Floats, nbytes: Floats, crossing_bytes: Floats, memory_limits: Floats) -> Cut:
    """The best cut where the seconds and bytes of every span of layers on every stage are known.

    `seconds` and `nbytes` [stages, L + 1, L + 1]: of layers i .. j - 1 on a stage, as a planner found them for the
    stage's devices; inf where a span cannot be. `crossing_bytes` [L - 1], `memory_limits` [stages]. Raises
    MemoryLimitError where no cut fits.
    """
    fits = nbytes <= memory_limits[:, None, None]
    allowed = np.where(fits, seconds, math.inf)
    slowest = _least(allowed, np.maximum)[0][-1, -1]
    if math.isinf(slowest):
        raise MemoryLimitError(_what_lacks(nbytes, memory_limits))
    # Entering a stage at boundary i costs what crosses there; nothing crosses before the first layer.
    entry = np.concatenate([[0.0], crossing_bytes, [0.0]])
    across = np.where(allowed <= slowest, entry[None, :, None], math.inf)
    bounds = _trace(_least(across, np.add)[1])
    each = list(enumerate(pairwise(bounds)))
    return Cut(
        bounds=tuple(bounds), seconds=tuple(float(seconds[k, i, j]) for k, (i, j) in each),
        nbytes=tuple(float(nbytes[k, i, j]) for k, (i, j) in each),
        crossing_bytes=tuple(float(crossing_bytes[at - 1]) for at in bounds[1:-1]),
    )


def _least(cost: Floats, combine: np.ufunc) -> tuple[Floats, NDArray[np.int64]]:
    """([k, j] the least combined cost of the first j layers on stages 0 .. k, [k, j] where stage k then begins)."""
    stages, width = cost.shape[:2]
    best = np.full((stages, width), math.inf)
    begin = np.zeros((stages, width), dtype=np.int64)
    before = np.full(width, math.inf)
    before[0] = 0.0
    for stage in range(stages):
        total = combine(before[:, None], cost[stage])
        begin[stage] = np.argmin(total, axis=0)
        best[stage] = before = np.min(total, axis=0)
    return best, begin


def _trace(begin: NDArray[np.int64]) -> list[int]:
    bounds = [begin.shape[1] - 1]
    for row in begin[::-1]:
        bounds.append(int(row[bounds[-1]]))
    return bounds[::-1]


def _what_lacks(nbytes: Floats, limits: Floats) -> str:
    """The stage that is farthest above its limit in the cut that comes nearest to fitting."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(np.isinf(nbytes), math.inf, nbytes / limits[:, None, None])
    bounds = _trace(_least(np.nan_to_num(ratio, nan=0.0, posinf=math.inf), np.maximum)[1])
    over = [float(ratio[k, bounds[k], bounds[k + 1]]) for k in range(len(limits))]
    stage = int(np.argmax(over))
    first, end = bounds[stage], bounds[stage + 1]
    return (
        f"no cut of {nbytes.shape[1] - 1} layers into {len(limits)} stages fits: in the one that comes nearest, stage "
        f"{stage} (layers {first} to {end - 1}) needs {format_bytes(float(nbytes[stage, first, end]))} and has "
        f"{format_bytes(float(limits[stage]))}; take more stages, fewer micro-batches in flight, or rematerialise."
    )


def _check_counts(stages: int, layers: int) -> None:
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise ArgumentError(f"a cut into {stages!r} stages cannot be; give a whole number from 1 on.")
    if stages > layers:
        raise ArgumentError(
            f"{layers} layers cannot be cut into {stages} stages: each needs one layer or more; give at most "
            f"{layers} stages."
        )


def _row(name: str, figures: ArrayLike, count: int, of: str) -> Floats:
    found = np.asarray(figures, dtype=np.float64)
    if found.shape != (count,):
        raise ArgumentError(f"{name} has shape {found.shape} and there are {count} {of}; give one figure for each.")
    if not (found >= 0).all():
        raise ArgumentError(f"{name} has {found[~(found >= 0)][0]:g}; give figures of at least 0.")
    return found


def _matrix(name: str, figures: ArrayLike, stages: int, layers: int) -> Floats:
    """[stages, layers] from figures by layer, or by stage and layer."""
    found = np.asarray(figures, dtype=np.float64)
    if found.shape not in ((layers,), (stages, layers)):
        raise ArgumentError(
            f"{name} has shape {found.shape}; give ({layers},), one figure for each layer, or ({stages}, {layers}), "
            "for each stage and layer."
        )
    _row(name, found.ravel(), found.size, "figures")
    return np.broadcast_to(found, (stages, layers))
