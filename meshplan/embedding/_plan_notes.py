"""Why a table is kept as it is, and what a reader of the plan should know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshplan.core import format_bytes, format_seconds
from meshplan.embedding._cost import (
    COMMON_MEMORY,
    GATHERED,
    IDS,
    MEMORY,
    OUT,
    READ,
    WEIGHTS,
    WRITE,
    Feature,
    Option,
    Pricing,
)
from meshplan.embedding._plan_data import Split
from meshplan.embedding._plan_split import best_split
from meshplan.embedding._solve import Placing, State

_NOTED = 5


def why(problem: Placing, table: int, chosen: Option) -> str:
    """The chosen option beside the best of the other schemes: use of the average and of the busiest device."""
    others = [o for o in problem.options[table] if o.scheme != chosen.scheme]
    if not others:
        return "the only scheme"
    fits = [o for o in others if o.peak[MEMORY] + o.common[COMMON_MEMORY] <= problem.limit]
    if not fits:
        return f"no other scheme fits: {others[0].scheme} takes {format_bytes(others[0].peak[MEMORY])} on a device"
    best = min(fits, key=lambda o: _mean(problem, o) + peak_seconds(problem, o))
    return f"{_use(problem, chosen)}; as {best.scheme} {_use(problem, best)}"


def _use(problem: Placing, option: Option) -> str:
    mean, peak = format_seconds(_mean(problem, option)), format_seconds(peak_seconds(problem, option))
    return f"{mean} on average, {peak} at most"


def _mean(problem: Placing, option: Option) -> float:
    n = problem.devices
    return float(problem.rates @ option.totals(n) / n + problem.gather_rate * option.common[GATHERED])


def peak_seconds(problem: Placing, option: Option) -> float:
    """What an option takes of the device that bears most of it, alone there."""
    return float(problem.rates @ option.peak + problem.gather_rate * option.common[GATHERED])


def plan_notes(
    problem: Placing, state: State, features: Sequence[Feature], splits: Sequence[Split], chosen: Sequence[Option],
    pricing: Pricing,
) -> tuple[str, ...]:  # fmt: skip
    """Sentences: what binds, what replicas cost, hot rows."""
    return (*_binding(problem, state), *_replicas(problem, state), *_hot(problem, features, splits, chosen, pricing))


def _binding(problem: Placing, state: State) -> list[str]:
    names = {IDS: "ids received", OUT: "rows and sums sent", READ: "rows read", WRITE: "rows updated"}
    above = (state.peaks - state.loads.mean(axis=1)) * problem.rates
    worst = max(names, key=lambda r: above[r])
    if above[worst] <= 0.01 * float(problem.rates @ state.peaks):
        return []
    device = int(np.argmax(state.loads[worst]))
    ratio = state.peaks[worst] / max(float(state.loads[worst].mean()), 1e-300)
    return [f"device {device} of a group has most {names[worst]}, {ratio:.2f} times the mean; the others wait for it."]


def _replicas(problem: Placing, state: State) -> list[str]:
    g = problem.group.groups
    if g.replicas == 1:
        return []
    moved = 2 * (g.replicas - 1) / g.replicas * state.peaks[WEIGHTS]
    every = "every step" if g.sync_every == 1 else f"every {g.sync_every} steps"
    return [f"averaging {g.replicas} replicas moves {format_bytes(moved)} a device, {every}."]


def _hot(
    problem: Placing, features: Sequence[Feature], splits: Sequence[Split], chosen: Sequence[Option], pricing: Pricing
) -> list[str]:
    found = [
        f"table {s.table!r}: its {s.hot_rows:,} hottest rows are on every device and take {100 * s.hot_share:.0f} % of "
        "its ids; the others are sharded."
        for s in splits[:_NOTED]
    ]
    if len(splits) > _NOTED:
        found.append(f"{len(splits) - _NOTED} more tables are split so.")
    if splits:
        return found
    order = sorted(range(len(features)), key=lambda i: -peak_seconds(problem, chosen[i]))
    for i in [i for i in order if features[i].table.zipf][:_NOTED]:
        split = best_split(features[i], problem.group, pricing)
        if split is not None and chosen[i].scheme != "data":
            hot = split[0].table
            found.append(
                f"table {features[i].table.name!r}: its {hot.rows:,} hottest rows ({format_bytes(hot.nbytes)}) take "
                f"{100 * split[2].hot_share:.0f} % of its ids; hot_rows=True prices them on every device."
            )
        elif chosen[i].extra.size and not pricing.hashed:
            share = float(features[i].law.share(0, -(-features[i].table.rows // problem.devices)))
            found.append(
                f"table {features[i].table.name!r}: its first row piece gets {100 * share:.0f} % of the ids, since row "
                "0 is the hottest; number the rows by a hash (Pricing(hashed=True)) to spread them."
            )
    return found
