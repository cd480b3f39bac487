"""Filling up: arrays lie in tiles, and a matrix unit multiplies whole blocks.

Measured on programs compiled for TPU: tiles are 8 x 128. The last dim lies along the 128 lanes if it fills half of
them, else the one that fills them best, as in matrices, and along the sublanes any dim that fills them. The dim that a
product sums over is filled up to 128, of its two others the one for which that costs less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshplan.cost._problem import Floats
from meshplan.rules import OpView

if TYPE_CHECKING:
    from meshplan.cost._compute_fit import ComputeFit

Local = tuple[Floats, ...]  # local sizes of an array's dims, each an array over strategies
# Channels of an image below which a convolution gathers its window's taps into one dim (measured: 3 channels).
FEW_CHANNELS = 8


def up(n: Floats, to: int) -> Floats:
    """The next multiple."""
    return np.ceil(n / to) * to


def product(sizes: Sequence[Floats]) -> Floats:
    return math.prod(sizes, start=np.ones(1))


def filled(local: Local, fit: ComputeFit, by_rows: bool = False, split: bool = False) -> Floats:
    """Elements of an array with the filling of its tiles. `by_rows`: the last dim lies along the lanes in any case.

    `split`: its last two dims are parts of one, of which the first does not lie along the lanes.
    """
    lanes, sublanes = fit.tiles
    if lanes == 1:
        return product(local)
    dims = [d for d in local if np.any(d > 1)]
    if not dims:
        return np.ones(1)
    if len(dims) == 1:
        return up(dims[0], lanes)
    *others, last = dims
    if by_rows:
        return up(last, lanes) * product(others)
    if len(others) == 1:
        one = others[0]
        return np.minimum(up(one, sublanes) * up(last, lanes), up(one, lanes) * up(last, sublanes))
    rest = product(others)
    whole = np.any([n % sublanes == 0 for n in others], axis=0)  # one of them can lie along the sublanes
    rows = np.where(whole, rest, rest / others[-1] * up(others[-1], sublanes))
    along = (*others[:-1], last) if split else dims
    fills = np.min([up(n, lanes) / n for n in along], axis=0)
    return np.where(up(last, lanes) <= 2 * last, up(last, lanes) * rows, rest * last * fills)


def matrix_flops(view: OpView, left: Local, right: Local, out: Local, fit: ComputeFit) -> Floats:
    """FLOPs of a dot or convolution on one device, what filling up adds included."""
    many, rows, columns, summed = _dims(view, left, right, out, fit)
    n, m = fit.matrix, fit.tiles[1]
    free = np.minimum(up(rows, m) * up(columns, n), up(rows, n) * up(columns, m))
    return 2.0 * many * free * summed


def _dims(
    view: OpView, left: Local, right: Local, out: Local, fit: ComputeFit
) -> tuple[Floats, Floats, Floats, Floats]:
    """(products side by side, rows, columns, elements that each sum goes over, filled up)."""
    if view.primitive == "dot_general":
        (over_left, over_right), (batch_left, batch_right) = view.params["dimension_numbers"]
        rows = product([n for d, n in enumerate(left) if d not in (*over_left, *batch_left)])
        columns = product([n for d, n in enumerate(right) if d not in (*over_right, *batch_right)])
        summed = product([left[d] for d in over_left])
        return product([left[d] for d in batch_left]), rows, columns, up(summed, fit.matrix)
    numbers = view.params["dimension_numbers"]
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    positions = product([out[d] for d in numbers.out_spec[2:]])
    channels, taps = right[numbers.rhs_spec[1]], product([right[d] for d in numbers.rhs_spec[2:]])
    # a gradient of weights: the window is the image, what is summed over lies close
    whole = bool(np.all(taps > positions)) or bool(np.all(channels <= FEW_CHANNELS))
    summed = up(channels * taps, fit.matrix) if whole else up(channels, fit.matrix) * taps
    groups = view.params["feature_group_count"] * view.params["batch_group_count"]
    if groups > 1:  # groups share a block of the matrix unit
        summed = up(channels, fit.matrix) * taps
    # features stay where they are, along the lanes
    return np.ones(1), batch * positions, features if whole else up(features, fit.matrix), summed
