"""From the solver's choices to a plan: placements, figures by device, and a reason for every table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshplan.embedding._cost import (
    COMMON_MEMORY,
    GRADS,
    IDS,
    MEMORY,
    OUT,
    READ,
    Feature,
    Floats,
    Option,
    Pricing,
    largest_over_mean,
)
from meshplan.embedding._plan_data import Considered, EmbeddingPlan, Split, TableLine
from meshplan.embedding._plan_notes import peak_seconds, plan_notes, why
from meshplan.embedding._solve import Choice, Placed, Placing, State, lower_bound, step_parts
from meshplan.embedding._table import Placement, Table, place
from meshplan.machine import Machine


def make_plan(
    *, machine: Machine, batch: int, pricing: Pricing, problem: Placing, placed: Placed, features: Sequence[Feature],
    splits: tuple[Split, ...], considered: tuple[Considered, ...], limit: int,
) -> EmbeddingPlan:  # fmt: skip
    tables = tuple(f.table for f in features)
    state = State(problem, placed.choices)
    parts = step_parts(problem.group, state.peaks, state.common)
    even = step_parts(problem.group, state.loads.mean(axis=1), state.common)
    chosen = [found[c[0]] for found, c in zip(problem.options, placed.choices, strict=True)]
    rows = list(zip(tables, chosen, placed.choices, strict=True))
    placements = tuple(_placement(t, o, c, problem.devices) for t, o, c in rows)
    weights, sums = _held(tables, placements, pricing, problem.devices)
    buffers = state.loads[MEMORY] + state.common[COMMON_MEMORY] - weights - sums
    return EmbeddingPlan(
        machine=machine.name, batch=batch, tables=tables, pricing=pricing, groups=problem.group.groups,
        placements=placements, splits=splits, parts={**parts, "dense": pricing.dense_seconds},
        waiting_seconds=sum(parts.values()) - sum(even.values()),
        bound_seconds=lower_bound(problem) + pricing.dense_seconds, exact=placed.exact, memory_limit=int(limit),
        weight_bytes=_whole(weights), sum_bytes=_whole(sums), buffer_bytes=_whole(buffers),
        imbalance=_imbalance(state), considered=considered,
        lines=tuple(_line(problem, i, o, p) for i, (o, p) in enumerate(zip(chosen, placements, strict=True))),
        notes=plan_notes(problem, state, features, splits, chosen, pricing),
    )  # fmt: skip


def _placement(table: Table, option: Option, choice: Choice, devices: int) -> Placement:
    if option.unit.ndim == 2:
        width = option.unit.shape[1]
        return place(table, "row_in_node", range(choice[1][0] * width, (choice[1][0] + 1) * width))
    return place(table, option.scheme, choice[1] or range(devices), columns=option.columns)


def _held(
    tables: Sequence[Table], placements: Sequence[Placement], pricing: Pricing, devices: int
) -> tuple[Floats, Floats]:
    """Bytes of weights and of optimizer sums on each device."""
    weights, sums = np.zeros(devices), np.zeros(devices)
    for table, placement in zip(tables, placements, strict=True):
        entry = np.dtype(table.dtype).itemsize
        for shard in placement.shards:
            rows, columns = shard.shape
            weights[shard.device] += rows * columns * entry
            sums[shard.device] += pricing.sum_bytes(rows, columns)
    return weights, sums


def _whole(values: Floats) -> tuple[int, ...]:
    return tuple(int(np.ceil(v - 1e-6)) for v in values)


def _imbalance(state: State) -> dict[str, float]:
    return largest_over_mean({
        "memory": state.loads[MEMORY] + state.common[COMMON_MEMORY],
        "lookups": state.loads[READ],
        "bytes": state.loads[IDS] + state.loads[OUT] + state.loads[GRADS],
    })


def _line(problem: Placing, table: int, option: Option, placement: Placement) -> TableLine:
    return TableLine(
        table=placement.table, scheme=option.scheme, devices=len({s.device for s in placement.shards}),
        nbytes=int(option.peak[MEMORY] + option.common[COMMON_MEMORY]),
        seconds=peak_seconds(problem, option),
        why=why(problem, table, option),
    )  # fmt: skip
