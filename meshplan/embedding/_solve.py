"""Which option for each table, and on which devices: arrays in, choices out.

The cost of a group is that of its slowest device, phase by phase: sum over resources of a rate times the maximum over
the devices. Greedy starts (longest first, each table where it adds least, several weights between what it adds to the
maxima and what it uses on average) and the two plain placements are improved by moves off the devices that bind:
another device, another option, or an exchange of two tables. Memory above the limit costs more than any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.embedding._cost import (
    COMMON_MEMORY,
    GATHERED,
    GRADS,
    IDS,
    MEMORY,
    OUT,
    READ,
    RECEIVED,
    SENT_GRADS,
    WEIGHTS,
    WRITE,
    Group,
    Option,
    seconds,
)
from meshplan.machine import CollectiveLine

Floats = NDArray[np.float64]
Choice = tuple[int, tuple[int, ...]]
_TYPICAL = 64e6  # bytes at which a collective's seconds per byte are taken where the search needs a rate
_EFFORT = 60_000  # options tried by the local search, at 64 devices
_PENALTY = 1e6  # seconds for exceeding the memory limit by the whole of it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placing:
    """The problem: options of every table on a group, bytes a device may use for tables and buffers.

    `rates` [7]: seconds per byte of each resource where the search takes them as linear.
    """

    group: Group
    options: tuple[tuple[Option, ...], ...]
    limit: float
    rates: Floats
    gather_rate: float
    prices: tuple[Floats, ...] = field(default=())

    @property
    def devices(self) -> int:
        return self.group.devices


def make_placing(group: Group, options: Sequence[Sequence[Option]], limit: float) -> Placing:
    exchange = seconds(group.exchange, _TYPICAL) / _TYPICAL
    sync = seconds(group.sync, _TYPICAL) / _TYPICAL / group.groups.sync_every
    memory = 1 / group.memory_bytes_per_second
    rates = np.zeros(7)
    rates[[IDS, OUT, GRADS, READ, WRITE, WEIGHTS]] = exchange, exchange, exchange, memory, memory, sync
    gather = seconds(group.gather, _TYPICAL) / _TYPICAL
    n = group.devices
    prices = tuple(
        np.array([rates @ o.totals(n) / n + gather * o.common[GATHERED] for o in found]) for found in options
    )
    return Placing(
        group=group, options=tuple(map(tuple, options)), limit=limit, rates=rates, gather_rate=gather, prices=prices
    )


def step_parts(group: Group, peaks: Floats, common: Floats) -> dict[str, float]:
    """Seconds of a step by part, from the largest load of any device [7] and what is common to all [4]."""
    return {name: float(value) for name, value in priced_parts(group, peaks, common, seconds).items()}


def priced_parts(group: Group, peaks: Floats, common: Floats, price: Callable[..., Any]) -> dict[str, Any]:
    """As `step_parts`, of loads [7, ...] and [4, ...] with `price(lines, bytes)` for collectives over such arrays."""
    back = price(group.exchange, np.maximum(peaks[GRADS], common[SENT_GRADS]))
    return {
        "ids": price(group.exchange, peaks[IDS]),
        "lookup": peaks[READ] / group.memory_bytes_per_second,
        "outputs": price(group.exchange, np.maximum(peaks[OUT], common[RECEIVED])),
        "gradients": back + price(group.gather, common[GATHERED]),
        "update": peaks[WRITE] / group.memory_bytes_per_second,
        "sync": price(group.sync, peaks[WEIGHTS]) / group.groups.sync_every,
    }


class State:
    """Loads of the devices while tables are put and taken."""

    def __init__(self, problem: Placing, choices: Sequence[Choice | None] | None = None) -> None:
        self.problem = problem
        self.choices: list[Choice | None] = [None] * len(problem.options)
        self.loads = np.zeros((7, problem.devices))
        self.common = np.zeros(4)
        self.peaks = np.zeros(7)
        self.on: list[set[int]] = [set() for _ in range(problem.devices)]  # tables with a unit there
        self.units = np.zeros((7, len(self.choices)))  # of tables that are whole on one device,
        self.places = np.full(len(self.choices), -1)  # which is this
        self.ahead = 0.0  # bytes that tables still to come take on every device
        self.tried = 0
        for table, choice in enumerate(choices or ()):
            if choice is not None:
                self.put(table, choice)

    def fresh(self) -> State:
        """The same choices with loads added anew, so that nothing is left of what was taken away."""
        return State(self.problem, self.choices)

    def put(self, table: int, choice: Choice) -> None:
        self._add(table, choice, 1.0)
        self.choices[table] = choice
        option = self.problem.options[table][choice[0]]
        for device in self._devices(option, choice):
            self.on[device].add(table)
        if option.pieces == 1 and option.unit.ndim == 1:
            self.places[table], self.units[:, table] = choice[1][0], option.unit

    def take(self, table: int) -> Choice:
        choice = self.choices[table]
        assert choice is not None
        self._add(table, choice, -1.0)
        self.choices[table] = None
        for device in self._devices(self.problem.options[table][choice[0]], choice):
            self.on[device].discard(table)
        self.places[table] = -1
        return choice

    @staticmethod
    def _devices(option: Option, choice: Choice) -> tuple[int, ...]:
        if option.unit.ndim == 1 or not choice[1]:
            return choice[1]
        width = option.unit.shape[1]
        return tuple(range(choice[1][0] * width, (choice[1][0] + 1) * width))

    def _add(self, table: int, choice: Choice, sign: float) -> None:
        option = self.problem.options[table][choice[0]]
        if option.even.any():
            self.loads += sign * option.even[:, None]
        if option.at.size:
            self.loads[:, option.at] += sign * option.extra
        for device in choice[1]:
            if option.unit.ndim == 2:
                width = option.unit.shape[1]
                self.loads[:, device * width : (device + 1) * width] += sign * option.unit
            else:
                self.loads[:, device] += sign * option.unit
        self.common += sign * option.common
        self.peaks = self.loads.max(axis=1)

    @property
    def overflow(self) -> float:
        """Bytes above the limit on the fullest device."""
        return max(0.0, self.peaks[MEMORY] + self.common[COMMON_MEMORY] - self.problem.limit * (1 + 1e-12))

    @property
    def cost(self) -> float:
        """Seconds of a step, with the penalty for memory."""
        parts = step_parts(self.problem.group, self.peaks, self.common)
        return sum(parts.values()) + _PENALTY * self.overflow / max(self.problem.limit, 1.0)

    def best_devices(self, table: int, number: int) -> tuple[float, tuple[int, ...]]:
        """(linear cost afterwards, devices) for an option put where it adds least; the table is not in the loads."""
        p, option = self.problem, self.problem.options[table][number]
        common = self.common + option.common
        self.tried += 1
        loads, peaks = self.loads, self.peaks
        if option.even.any() or option.at.size:
            loads = loads + option.even[:, None]
            if option.at.size:
                loads[:, option.at] += option.extra
            peaks = loads.max(axis=1)
        if not option.pieces:
            return float(self._linear(peaks[:, None], common)[0]), ()
        if option.unit.ndim == 2:
            width = option.unit.shape[1]
            new = (loads.reshape(7, -1, width) + option.unit[:, None, :]).max(axis=2)
        else:
            new = loads + option.unit[:, None]
        after = self._linear(np.maximum(peaks[:, None], new), common)
        order = after + 0.05 * (p.rates @ new)
        if option.pieces == 1:
            device = int(np.argmin(order))
            return float(after[device]), (device,)
        chosen = np.sort(np.argsort(order, kind="stable")[: option.pieces])
        top = np.maximum(peaks, new[:, chosen].max(axis=1))
        return float(self._linear(top[:, None], common)[0]), tuple(chosen.tolist())

    def _linear(self, peaks: Floats, common: Floats) -> Floats:
        p = self.problem
        over = np.maximum(peaks[MEMORY] + common[COMMON_MEMORY] + self.ahead - p.limit * (1 + 1e-12), 0.0)
        received = p.rates[OUT] * np.maximum(common[RECEIVED] - peaks[OUT], 0.0)
        received = received + p.rates[GRADS] * np.maximum(common[SENT_GRADS] - peaks[GRADS], 0.0)
        return p.rates @ peaks + received + p.gather_rate * common[GATHERED] + _PENALTY * over / max(p.limit, 1.0)

    def best_choice(self, table: int, weight: float = 1.0, memory_price: float = 0.0) -> Choice:
        """The option that costs least: `weight` of what it adds to the maxima, the rest of what it uses on average."""
        p, best, found = self.problem, np.inf, (0, ())
        for number, option in enumerate(p.options[table]):
            after, devices = self.best_devices(table, number)
            price = p.prices[table][number]
            if memory_price:
                held = option.totals(p.devices)[MEMORY] / p.devices + option.common[COMMON_MEMORY]
                price += memory_price * held
            cost = weight * after + (1 - weight) * price
            if cost < best:
                best, found = cost, (number, devices)
        return found


def sized_order(problem: Placing) -> list[int]:
    """Tables, those first that take most of the time or of the memory."""
    n = problem.devices
    price = np.array([p.min() for p in problem.prices])
    memory = np.array([min(o.totals(n)[MEMORY] for o in found) for found in problem.options])
    share = np.maximum(price / max(price.sum(), 1e-300), memory / max(memory.sum(), 1e-300))
    return np.argsort(-share, kind="stable").tolist()


def greedy(problem: Placing, weight: float, memory_price: float = 0.0) -> State:
    """Each table in turn where it costs least, with room left for what the later ones take on every device."""
    state, order = State(problem), sized_order(problem)
    cheapest = [problem.options[t][int(np.argmin(problem.prices[t]))].common[COMMON_MEMORY] for t in order]
    ahead = np.concatenate([np.cumsum(cheapest[::-1])[::-1], [0.0]])
    for place, table in enumerate(order):
        state.ahead = float(ahead[place + 1])
        state.put(table, state.best_choice(table, weight, memory_price))
    state.ahead = 0.0
    return state


def table_wise(problem: Placing) -> State | None:
    """Every table whole on one device, the dearest first on the device with least to do that has room; None where the
    scheme is not admitted."""
    numbers = [_number(found, "table") for found in problem.options]
    if None in numbers:
        return None
    units = [found[k] for found, k in zip(problem.options, numbers, strict=True) if k is not None]
    cost = np.array([problem.rates @ o.unit for o in units])
    busy, held = np.zeros(problem.devices), np.zeros(problem.devices)
    common = sum(o.common[COMMON_MEMORY] for o in units)
    chosen: list[Choice | None] = [None] * len(units)
    for table in np.argsort(-cost, kind="stable").tolist():
        room = held + units[table].unit[MEMORY] + common <= problem.limit
        device = int(np.argmin(np.where(room, busy, np.inf))) if room.any() else int(np.argmin(held))
        busy[device] += cost[table]
        held[device] += units[table].unit[MEMORY]
        chosen[table] = (numbers[table] or 0, (device,))
    return State(problem, chosen)


def row_wise(problem: Placing) -> State | None:
    """Every table in equal rows over all devices; those with fewer rows than devices whole, as `table_wise`."""
    numbers = [_number(found, "row") for found in problem.options]
    small = [i for i, k in enumerate(numbers) if k is None]
    whole = [_number(problem.options[i], "table") for i in small]
    if None in whole or len(small) == len(numbers):
        return None
    state = State(problem, [None if k is None else (k, ()) for k in numbers])
    for table, k in zip(small, whole, strict=True):
        if k is not None:
            state.put(table, (k, state.best_devices(table, k)[1]))
    return state


def _number(found: Iterable[Option], scheme: str) -> int | None:
    return next((k for k, option in enumerate(found) if option.scheme == scheme), None)


def leanest(problem: Placing) -> State:
    """Every table by the option that needs least memory in all: where nothing else fits, this may."""
    state, n = State(problem), problem.devices
    for table in sized_order(problem):
        found = problem.options[table]
        need = [o.totals(n)[MEMORY] + n * o.common[COMMON_MEMORY] for o in found]
        number = int(np.argmin(need))
        state.put(table, (number, state.best_devices(table, number)[1]))
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The answer: choices, their seconds, bytes above the limit, and whether no better choice exists."""

    choices: tuple[Choice, ...]
    seconds: float
    overflow: float
    exact: bool = False


def solve(problem: Placing, *, sweeps: int = 2) -> Placed:
    """The best placement found; deterministic. Exact where the tables are few (see `_solve_exact`)."""
    from meshplan.embedding._solve_exact import solve_exact
    from meshplan.embedding._solve_local import improve

    starts = [s for s in (table_wise(problem), row_wise(problem)) if s is not None]
    starts += [greedy(problem, w) for w in (0.1, 0.4)]
    if min(s.overflow for s in starts) > 0:
        starts += [greedy(problem, 0.2, np.sum(problem.rates) * k) for k in (1.0, 10.0)] + [leanest(problem)]
    starts.sort(key=lambda s: s.cost)
    best = improve(starts[0], sweeps=sweeps, effort=_EFFORT * 64 // max(64, problem.devices))
    found = as_placed(best)
    exact = solve_exact(problem, found)
    return replace(exact, exact=True) if exact is not None else found


def as_placed(state: State) -> Placed:
    state = state.fresh()
    assert all(c is not None for c in state.choices)
    parts = step_parts(state.problem.group, state.peaks, state.common)
    return Placed(
        choices=tuple(c for c in state.choices if c is not None), seconds=sum(parts.values()), overflow=state.overflow
    )


def lower_bound(problem: Placing) -> float:
    """Seconds that no placement goes below.

    The larger of two: each resource alone, at its least and spread evenly; and every table by the option that is
    cheapest spread evenly at the collectives' least seconds per byte (a maximum is no less than the mean).
    """
    n, group = problem.devices, problem.group
    peaks, common = np.zeros(7), np.zeros(4)
    rates, gather = problem.rates.copy(), _least_rate(group.gather)
    rates[[IDS, OUT, GRADS]] = _least_rate(group.exchange)
    rates[WEIGHTS] = _least_rate(group.sync) / group.groups.sync_every
    together = 0.0
    for found in problem.options:
        totals = np.array([o.totals(n) for o in found]) / n
        shared = np.array([o.common for o in found])
        peaks += totals.min(axis=0)
        common += shared.min(axis=0)
        together += float((totals @ rates + gather * shared[:, GATHERED]).min())
    return max(sum(step_parts(group, peaks, common).values()), together)


def _least_rate(lines: Sequence[CollectiveLine]) -> float:
    return min((line.seconds_per_byte for line in lines), default=0.0)


def least_memory(problem: Placing) -> float:
    """Bytes that the fullest device needs under any placement, from below."""
    n = problem.devices
    mean = sum(min(o.totals(n)[MEMORY] / n + o.common[COMMON_MEMORY] for o in found) for found in problem.options)
    common = [min(o.common[COMMON_MEMORY] for o in found) for found in problem.options]
    single = max(
        min(o.peak[MEMORY] + o.common[COMMON_MEMORY] - c for o in found)
        for found, c in zip(problem.options, common, strict=True)
    )
    return max(mean, single + sum(common))
