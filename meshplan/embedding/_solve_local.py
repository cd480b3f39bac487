"""Moves that lighten the devices that bind: another device, another option, an exchange of two tables."""

from __future__ import annotations

import numpy as np

from meshplan.embedding._cost import MEMORY
from meshplan.embedding._solve import State

_TABLES_TRIED = 24
_GAIN = 1 - 1e-9


def improve(state: State, *, sweeps: int, effort: int) -> State:
    """The state after moves that each cost less, until none is found; `sweeps` over all tables as well.

    `effort`: options tried in all.
    """
    for _ in range(sweeps):
        before = state.cost
        effort -= _relieve(state, effort)
        state = state.fresh()
        effort -= _sweep(state, effort)
        state = state.fresh()
        if state.cost >= before * _GAIN or effort <= 0:
            break
    _relieve(state, effort)
    return state.fresh()


def _sweep(state: State, effort: int) -> int:
    """Every table taken out and put where it costs least; the options tried."""
    start = state.tried
    for table in range(len(state.choices)):
        if state.tried - start > effort:
            break
        _again(state, table)
    return state.tried - start


def _again(state: State, table: int) -> bool:
    before, old = state.cost, state.take(table)
    new = state.best_choice(table)
    state.put(table, new)
    if new != old and state.cost < before * _GAIN:
        return True
    state.take(table)
    state.put(table, old)
    return False


def _relieve(state: State, effort: int) -> int:
    start = state.tried
    while state.tried - start < effort:
        if not any(_relieve_device(state, *spot) for spot in _spots(state)):
            break
    return state.tried - start


def _spots(state: State) -> list[tuple[int, int]]:
    """(resource, device) of the largest loads, those first that cost most above the mean."""
    p = state.problem
    above = (state.peaks - state.loads.mean(axis=1)) * p.rates
    order = [r for r in np.argsort(-above, kind="stable").tolist() if above[r] > 0]
    if state.overflow > 0:
        order.insert(0, MEMORY)
    return [(r, int(np.argmax(state.loads[r]))) for r in order]


def _load(state: State, table: int, resource: int) -> float:
    choice = state.choices[table]
    assert choice is not None
    return float(np.max(state.problem.options[table][choice[0]].unit[resource]))


def _relieve_device(state: State, resource: int, device: int) -> bool:
    tables = sorted(state.on[device], key=lambda t: (-_load(state, t, resource), t))[:_TABLES_TRIED]
    if any(_again(state, table) for table in tables):
        return True
    return any(_exchange(state, table, device) for table in tables[: _TABLES_TRIED // 2])


def _exchange(state: State, table: int, device: int) -> bool:
    """The table, whole on the device, changes places with a whole table of another device, where that pays."""
    mine = state.choices[table]
    assert mine is not None
    option = state.problem.options[table][mine[0]]
    if option.pieces != 1 or option.unit.ndim == 2:
        return False
    others = np.flatnonzero((state.places >= 0) & (state.places != device))
    if not len(others):
        return False
    # The peaks after each exchange: those of the devices that stay as they are, and of the two that change.
    units, places = state.units[:, others], state.places[others]
    change = option.unit[:, None] - units
    rest = _peaks_without(state.loads, device, places)
    here = state.loads[:, device][:, None] - change
    there = state.loads[:, places] + change
    after = state._linear(np.maximum(np.maximum(here, there), rest), state.common)
    state.tried += 1
    other = int(others[int(np.argmin(after))])
    before, theirs = state.cost, state.choices[other]
    assert theirs is not None
    state.take(table)
    state.take(other)
    state.put(table, (mine[0], theirs[1]))
    state.put(other, (theirs[0], mine[1]))
    if state.cost < before * _GAIN:
        return True
    state.take(table)
    state.take(other)
    state.put(table, mine)
    state.put(other, theirs)
    return False


def _peaks_without(loads: np.ndarray, device: int, places: np.ndarray) -> np.ndarray:
    """Largest loads [6, places] of the devices other than `device` and each of `places`."""
    kept = loads.copy()
    kept[:, device] = 0.0
    order = np.argsort(-kept, axis=1, kind="stable")
    first, second = order[:, :1], order[:, 1:2] if loads.shape[1] > 1 else order[:, :1]
    top = np.take_along_axis(kept, first, axis=1)
    next_top = np.take_along_axis(kept, second, axis=1)
    return np.where(places[None, :] == first, next_top, top)
