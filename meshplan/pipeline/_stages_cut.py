"""Layers of a traced loss: where it is narrow enough to be cut, what a layer weighs, what crosses a boundary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from meshplan.core import ArgumentError
from meshplan.pipeline._cut import cut_layers
from meshplan.pipeline._stages_units import Traced, Unit

HEAVY = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "scan", "while", "cond"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layers:
    """The layers of a loss, layer i of the active units `bounds[i] .. bounds[i + 1] - 1`.

    `flops` [L] of one micro-batch's forward; `crossing_bytes` [L - 1] over the boundary after each layer but the
    last; `param_bytes` [L]: of the parameters that a layer is the first to use.
    """

    traced: Traced
    active: tuple[Unit, ...]
    bounds: tuple[int, ...]
    flops: tuple[float, ...]
    crossing_bytes: tuple[float, ...]
    param_bytes: tuple[float, ...]

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def describe(self) -> tuple[str, ...]:
        """A line for each layer: its FLOPs, what crosses after it and the source of its first and last unit."""
        lines = []
        for k in range(self.count):
            inside = self.active[self.bounds[k] : self.bounds[k + 1]]
            sources = list(dict.fromkeys(u.source for u in inside if u.source))
            crossing = f"{self.crossing_bytes[k]:.0f} bytes cross" if k < self.count - 1 else "ends in the loss"
            lines.append(
                f"layer {k}: {self.flops[k]:.3g} FLOPs, {crossing}, {' to '.join(sources[:1] + sources[1:][-1:])}"
            )
        return tuple(lines)


def find_layers(traced: Traced, at_least: int = 1) -> Layers:
    """Layers between the boundaries where fewest bytes cross.

    A boundary lies between two units that compute (products, convolutions, loops), where fewest bytes cross between
    them, and is kept where no boundary beside it is narrower: between the blocks of a model, not inside them. Where
    that gives fewer than `at_least` layers, every boundary between two such units counts.
    """
    active = tuple(unit for unit in traced.units if any(traced.active[v] for v in unit.outs))
    crossing = [nbytes(traced, crossing_values(traced, active, at)) for at in range(len(active) + 1)]
    heavy = [k for k, unit in enumerate(active) if _is_heavy(unit)]
    gaps = [
        min(range(a + 1, b + 1), key=lambda at: (crossing[at], at)) for a, b in pairwise(heavy)
    ]
    kept = _narrow(gaps, crossing)
    if len(kept) + 1 < at_least:
        kept = gaps
    bounds = (0, *kept, len(active))
    new = _new_bytes(traced, active)
    pairs = list(pairwise(bounds))
    return Layers(
        traced=traced, active=active, bounds=bounds, crossing_bytes=tuple(float(crossing[at]) for at in kept),
        flops=tuple(sum(unit.flops for unit in active[a:b]) for a, b in pairs),
        param_bytes=tuple(float(sum(new[a:b])) for a, b in pairs),
    )


def stage_bounds(layers: Layers, parts: int, bounds: Sequence[int] | None = None) -> tuple[int, ...]:
    """The layers where each of the parts begins, and their number: `bounds` checked, or the most even cut.

    Raises ArgumentError where there is no boundary, or fewer layers than parts.
    """
    if parts > layers.count:
        if layers.count == 1:
            raise ArgumentError(
                f"the loss cannot be cut into {parts} parts: it has no boundary between two pieces of work that its "
                "activations cross; give a model of several layers, or one stage."
            )
        raise ArgumentError(
            f"the loss has {layers.count} layers and cannot be cut into {parts} parts (stages times chunks): each "
            f"needs one layer or more; give at most {layers.count}, or a deeper model."
        )
    if bounds is None:
        return cut_layers(
            parts, forward_seconds=layers.flops, backward_seconds=[2 * f for f in layers.flops],
            crossing_bytes=layers.crossing_bytes,
        ).bounds
    found = tuple(bounds)
    rising = all(a < b for a, b in pairwise(found))
    if len(found) != parts + 1 or found[0] != 0 or found[-1] != layers.count or not rising:
        raise ArgumentError(
            f"bounds={found} do not cut {layers.count} layers into {parts} parts; give {parts + 1} rising numbers "
            f"from 0 to {layers.count}."
        )
    return found


def crossing_values(traced: Traced, active: Sequence[Unit], at: int) -> tuple[int, ...]:
    """The activations computed before unit `at` that a later unit, or the result, needs; in order."""
    made = {v for unit in active[:at] for v in unit.outs if traced.active[v]}
    later = {a for unit in active[at:] for a in unit.ins if isinstance(a, int)}
    later |= {x for unit in active[at:] if unit.trip for x in unit.trip.xs}
    later |= {a for a in traced.results if isinstance(a, int)}
    return tuple(sorted(made & later))


def nbytes(traced: Traced, values: Sequence[int]) -> int:
    """Bytes of the values together."""
    return sum(math.prod(traced.avals[v].shape) * np.dtype(traced.avals[v].dtype).itemsize for v in values)


def _is_heavy(unit: Unit) -> bool:
    return unit.trip is not None or (unit.eqn is not None and _does_heavy(unit.eqn))


def _does_heavy(eqn: object) -> bool:
    from meshplan.core import _jax
    from meshplan.pipeline._stages_units import inner_jaxprs

    if eqn.primitive.name in HEAVY:  # type: ignore[attr-defined]
        return True
    return any(_does_heavy(e) for body in inner_jaxprs(eqn) for e in _jax.open_jaxpr(body)[0].eqns)


def _narrow(gaps: Sequence[int], crossing: Sequence[float]) -> list[int]:
    """The gaps where no fewer bytes cross at the nearest gap beside that differs."""
    kept = []
    values = [crossing[at] for at in gaps]
    for k, value in enumerate(values):
        before = next((v for v in reversed(values[:k]) if v != value), math.inf)
        after = next((v for v in values[k + 1 :] if v != value), math.inf)
        if value < before and value < after:
            kept.append(gaps[k])
    return kept


def _new_bytes(traced: Traced, active: Sequence[Unit]) -> list[float]:
    """Bytes of the parameters that each active unit is the first to use, a trip's rows of what is stacked for it."""
    makers = {v: unit for unit in traced.units for v in unit.outs}
    seen: set[int] = set()
    found = []
    for unit in active:
        fresh = 0.0
        stack = [a for a in unit.ins if isinstance(a, int)]
        for x in unit.trip.xs if unit.trip else ():
            if x < traced.leaves:
                fresh += nbytes(traced, [x]) / traced.avals[x].shape[0]
            else:
                stack.append(x)
        while stack:
            value = stack.pop()
            if value in seen or traced.active[value]:
                continue
            seen.add(value)
            if value < traced.leaves:
                fresh += nbytes(traced, [value])
            elif value in makers:
                stack += [a for a in makers[value].ins if isinstance(a, int)]
        found.append(fresh)
    return found
