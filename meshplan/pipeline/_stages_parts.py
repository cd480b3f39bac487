"""The parts of a cut loss: which weights each takes, what crosses into and out of it, and how it is run.

Part q takes the activations that cross boundary q - 1 and gives those that cross boundary q, the last part the loss
and what goes with it. A value of the parameters alone, or of the batch alone, is computed in every part that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import jax.numpy as jnp

from meshplan.core import _jax
from meshplan.pipeline._stages_cut import Layers, crossing_values
from meshplan.pipeline._stages_units import Atom, Traced, Unit

# What may be done to a row of stacked parameters as well as to all of them.
BY_ROW = frozenset({"convert_element_type", "copy", "neg"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """What a part takes of parameter `leaf`: all of it, or some `rows` of its first dim, in rising order."""

    leaf: int
    rows: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """The active units of one part. `ins` and `outs`: ids of the activations that cross into it and out of it; the
    last part's `outs` are the loss's results."""

    units: tuple[Unit, ...]
    ins: tuple[int, ...]
    outs: tuple[Atom, ...]
    weights: tuple[Weight, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """A loss cut into parts; `makers[id]`: the unit that makes a value."""

    traced: Traced
    parts: tuple[Part, ...]
    makers: Mapping[int, Unit]

    def run(self, at: int, weights: Sequence[Any], batch: Sequence[Any], ins: Sequence[Any]) -> list[Any]:
        """The `outs` of part `at`. `weights`: an array for each of its weights, rows stacked; `batch`: the leaves of
        one micro-batch; `ins`: the activations that cross into it."""
        part = self.parts[at]
        given = {weight.leaf: (weight.rows, array) for weight, array in zip(part.weights, weights, strict=True)}
        run = _Run(parts=self, weights=given, env=dict(zip(part.ins, ins, strict=True)))
        run.env.update({self.traced.leaves + k: leaf for k, leaf in enumerate(batch)})
        for scan, units in groupby(part.units, key=lambda unit: unit.trip.scan if unit.trip else None):
            if scan is None:
                for unit in units:
                    run.unit(unit)
            else:
                run.trips(list(units))
        return [run.value(atom) for atom in part.outs]


def make_parts(layers: Layers, bounds: Sequence[int]) -> Parts:
    """The parts between the layer boundaries `bounds`."""
    traced = layers.traced
    cuts = [layers.bounds[b] for b in bounds]
    crossing = [crossing_values(traced, layers.active, at) for at in cuts[1:-1]]
    makers = {v: unit for unit in traced.units for v in unit.outs}
    found = []
    for k, (a, b) in enumerate(pairwise(cuts)):
        units = layers.active[a:b]
        last = k == len(cuts) - 2
        outs = traced.results if last else crossing[k]
        weights = _weights(traced, makers, units, outs if last else ())
        found.append(Part(units=units, ins=crossing[k - 1] if k else (), outs=outs, weights=weights))
    return Parts(traced=traced, parts=tuple(found), makers=makers)


def _weights(
    traced: Traced, makers: Mapping[int, Unit], units: Sequence[Unit], results: Sequence[Atom]
) -> tuple[Weight, ...]:
    """What the units need of the parameters, directly or through values of the parameters alone."""
    whole: set[int] = set()
    rows: dict[int, set[int]] = {}
    seen: set[int] = set()

    def need(value: Atom) -> None:
        stack = [value]
        while stack:
            each = stack.pop()
            if not isinstance(each, int) or each in seen or traced.active[each]:
                continue
            seen.add(each)
            if each < traced.leaves:
                whole.add(each)
            elif each in makers:
                unit = makers[each]
                stack += [*unit.ins, *(unit.trip.xs if unit.trip else ())]

    for unit in units:
        for atom in unit.ins:
            need(atom)
        for x in unit.trip.xs if unit.trip else ():
            leaf = stacked_leaf(traced, makers, x)
            if leaf is None:
                need(x)
            elif unit.trip is not None:
                rows.setdefault(leaf, set()).add(unit.trip.index)
    for atom in results:
        need(atom)
    # Rows of what is there whole are taken from it.
    found = {leaf: Weight(leaf=leaf, rows=tuple(sorted(taken))) for leaf, taken in rows.items()}
    found |= {leaf: Weight(leaf=leaf) for leaf in whole}
    return tuple(found[leaf] for leaf in sorted(found))


def stacked_leaf(traced: Traced, makers: Mapping[int, Unit], value: int) -> int | None:
    """The parameter whose rows, taken one by one, give the rows of the value; None where there is none."""
    while value >= traced.leaves:
        unit = makers.get(value)
        if unit is None or unit.eqn is None or unit.eqn.primitive.name not in BY_ROW:
            return None
        operand = unit.ins[0]
        if not isinstance(operand, int):
            return None
        value = operand
    return value


@dataclass(slots=True, kw_only=True, eq=False)
class _Run:
    """One run of a part. `weights` by leaf: (its rows, if not all of it; the array); `env`: the values so far."""

    parts: Parts
    weights: Mapping[int, tuple[tuple[int, ...] | None, Any]]
    env: dict[int, Any]

    def value(self, atom: Atom) -> Any:
        """The array of an atom; a value of the parameters or of the batch alone is computed when first asked for."""
        if not isinstance(atom, int):
            return atom
        if atom not in self.env:
            if atom < self.parts.traced.leaves:
                self.env[atom] = self.weights[atom][1]
            else:
                self.unit(self.parts.makers[atom])
        return self.env[atom]

    def unit(self, unit: Unit) -> None:
        """Run one unit on its own."""
        if unit.trip is not None:
            self.trips([unit])
            return
        args = [self.value(atom) for atom in unit.ins]
        if unit.stack:
            outs = [jnp.stack(args)]
        elif unit.eqn is None:
            outs = [jnp.asarray(args[0])]
        else:
            outs = _jax.bind(unit.eqn, args, {})
        self.env.update(zip(unit.outs, outs, strict=True))

    def trips(self, units: list[Unit]) -> None:
        """Run consecutive trips of one scan as one shorter scan."""
        first, eqn = units[0], units[0].eqn
        trip = first.trip
        assert trip is not None
        order = sorted(units, key=lambda unit: unit.trip.index if unit.trip else 0)
        rows = [unit.trip.index for unit in order if unit.trip]
        stacks = [self.rows(x, rows) for x in trip.xs]
        start = [self.value(atom) for atom in first.ins]
        outs = _jax.bind(eqn, [*start, *stacks], {"length": len(units)})
        carried = outs[: trip.carry]
        self.env.update(zip(units[-1].outs, carried, strict=False))
        for k, stack in enumerate(outs[trip.carry :], trip.carry):
            self.env.update({unit.outs[k]: stack[place] for place, unit in enumerate(order)})

    def rows(self, value: int, rows: Sequence[int]) -> Any:
        """The rows of a stacked value."""
        traced, makers = self.parts.traced, self.parts.makers
        leaf = stacked_leaf(traced, makers, value)
        held, stack = self.weights[leaf] if leaf is not None and leaf in self.weights else (None, None)
        if held is None or stack is None:
            return self.value(value)[jnp.asarray(rows)]
        if list(held) != list(rows):
            stack = stack[jnp.asarray([held.index(row) for row in rows])]
        chain = []
        while value != leaf:
            chain.append(makers[value].eqn)
            value = makers[value].ins[0]
        for eqn in reversed(chain):
            (stack,) = _jax.bind(eqn, [stack], {})
        return stack


def run_whole(parts: Parts, leaves: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
    """The loss's results by running part after part on one device: what the parts are checked against."""
    ins: list[Any] = []
    for at, part in enumerate(parts.parts):
        weights = [leaves[w.leaf] if w.rows is None else leaves[w.leaf][jnp.asarray(w.rows)] for w in part.weights]
        ins = parts.run(at, weights, batch, ins)
    return ins
