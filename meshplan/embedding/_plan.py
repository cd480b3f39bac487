"""Choose groups and placements: every (replicas, shards) that divides the machine, the cheapest that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from meshplan.core import ArgumentError, MemoryLimitError, format_bytes, format_seconds, nearest
from meshplan.embedding._cost import Feature, Group, Pricing, make_group, options
from meshplan.embedding._plan_data import Considered, EmbeddingPlan, Split
from meshplan.embedding._plan_make import make_plan
from meshplan.embedding._plan_split import split_features
from meshplan.embedding._solve import (
    Placed,
    Placing,
    as_placed,
    least_memory,
    lower_bound,
    make_placing,
    row_wise,
    solve,
    table_wise,
)
from meshplan.embedding._table import Collection, Groups, Table
from meshplan.machine import Machine

Method = Literal["search", "table-wise", "row-wise"]
METHODS: tuple[Method, ...] = ("search", "table-wise", "row-wise")


def plan(
    tables: Collection | Sequence[Table], machine: Machine, batch: int, *, groups: Groups | None = None,
    memory_limit: int | None = None, near: bool = True, sync_every: int = 1, hot_rows: bool = False,
    pricing: Pricing | None = None, method: Method = "search",
) -> EmbeddingPlan:  # fmt: skip
    """Where every table lies, and in how many replicas, so that a step of `batch` samples (of all devices) is shortest.

    `groups` fixes replicas and shards; without it every pair that multiplies to the machine's devices is looked at,
    with replicas `near` each other or not and averaged every `sync_every` steps. `memory_limit`: bytes of a device,
    by default the chip's. `hot_rows`: tables of a known Zipf law may be split (see `Split`). `method`: "table-wise"
    and "row-wise" are the plain placements that "search" is never worse than.

    Raises ArgumentError for no tables, a batch or groups that do not divide over the devices, and an unknown method;
    MemoryLimitError, with the numbers, where nothing fits. The model is at the top of `_cost.py`.
    """
    collection = tables if isinstance(tables, Collection) else Collection(tables=tuple(tables))
    pricing = pricing or Pricing()
    limit = machine.memory_bytes if memory_limit is None else memory_limit
    _check(collection, machine, batch, groups, limit, method)
    tried = [groups] if groups is not None else _all_groups(machine.devices, near, sync_every)
    local = batch // machine.devices
    found: list[tuple[Placing, Placed, tuple[Feature, ...], tuple[Split, ...]]] = []
    considered: list[Considered] = []
    needs: list[tuple[float, Groups]] = []
    for each in tried:
        group = make_group(machine, each, local)
        best = None
        for features, splits in _variants(collection, group, pricing, hot_rows):
            problem = _problem(group, features, pricing, limit)
            least = least_memory(problem)
            if not splits:
                needs.append((least + pricing.reserved_bytes, each))
            if least > problem.limit:
                continue
            ahead = min((f[1].seconds for f in found), default=float("inf"))
            if lower_bound(problem) >= ahead:
                best = best or Considered(
                    replicas=each.replicas, shards=each.shards, seconds=None, why="cannot be better: "
                    f"at least {format_seconds(lower_bound(problem) + pricing.dense_seconds)}",
                )  # fmt: skip
                continue
            placed = _placed(problem, method)
            if placed is None or placed.overflow > 0:
                continue
            if best is None or best.seconds is None or placed.seconds < best.seconds:
                best = Considered(replicas=each.replicas, shards=each.shards, seconds=placed.seconds)
            found.append((problem, placed, features, splits))
        considered.append(best or _out(each, needs, limit))
    if not found:
        raise _too_large(collection, machine, limit, needs, pricing)
    chosen = min(found, key=lambda f: f[1].seconds)
    considered = [
        c if c.seconds is None else replace(c, seconds=c.seconds + pricing.dense_seconds) for c in considered
    ]
    return make_plan(
        machine=machine, batch=batch, pricing=pricing, problem=chosen[0], placed=chosen[1], features=chosen[2],
        splits=chosen[3], considered=tuple(considered), limit=limit,
    )


def _problem(group: Group, features: Sequence[Feature], pricing: Pricing, limit: int) -> Placing:
    found = [options(f, group, pricing) for f in features]
    for feature, ways in zip(features, found, strict=True):
        if not ways:
            t = feature.table
            raise ArgumentError(
                f"table {t.name!r}: none of the schemes {', '.join(pricing.schemes)} fits {t.rows} rows of {t.dim} "
                f"columns on {group.devices} devices; admit 'table' or 'data'."
            )
    return make_placing(group, found, float(limit - pricing.reserved_bytes))


def _placed(problem: Placing, method: Method) -> Placed | None:
    if method == "search":
        return solve(problem)
    state = table_wise(problem) if method == "table-wise" else row_wise(problem)
    return None if state is None else as_placed(state)


def _variants(
    collection: Collection, group: Group, pricing: Pricing, hot_rows: bool
) -> list[tuple[tuple[Feature, ...], tuple[Split, ...]]]:
    plain = tuple(Feature(table=t) for t in collection.tables)
    found: list[tuple[tuple[Feature, ...], tuple[Split, ...]]] = [(plain, ())]
    if hot_rows:
        split = split_features(plain, group, pricing)
        if split[1]:
            found.append(split)
    return found


def _all_groups(devices: int, near: bool, sync_every: int) -> list[Groups]:
    return [
        Groups(replicas=m, shards=devices // m, near=near, sync_every=sync_every)
        for m in range(1, devices + 1)
        if devices % m == 0
    ]


def _check(
    collection: Collection, machine: Machine, batch: int, groups: Groups | None, limit: int, method: str
) -> None:
    if not collection.tables:
        raise ArgumentError("there are no tables to plan; give at least one Table.")
    if method not in METHODS:
        raise ArgumentError(f"method {method!r} is unknown. {nearest(method, METHODS)}")
    if batch < 1 or batch % machine.devices:
        raise ArgumentError(
            f"a batch of {batch} samples does not divide over the {machine.devices} devices of '{machine.name}'; "
            "give a positive multiple of them."
        )
    if limit <= 0:
        raise ArgumentError(f"memory_limit is {limit} bytes; give the positive number of bytes that a device may use.")
    if groups is None:
        return
    if groups.replicas < 1 or groups.shards < 1 or groups.devices != machine.devices:
        raise ArgumentError(
            f"groups of {groups.replicas} replicas x {groups.shards} shards are {groups.devices} devices, "
            f"'{machine.name}' has {machine.devices}; give two positive numbers with that product."
        )
    if groups.sync_every < 1:
        raise ArgumentError(f"sync_every is {groups.sync_every}; replicas are averaged every 1 or more steps.")


def _out(groups: Groups, needs: list[tuple[float, Groups]], limit: int) -> Considered:
    least = next(n for n, g in needs if g == groups)
    why = (
        f"does not fit: at least {format_bytes(least)} of {format_bytes(limit)} a device" if least > limit
        else f"no placement found in {format_bytes(limit)} a device"
    )  # fmt: skip
    return Considered(replicas=groups.replicas, shards=groups.shards, seconds=None, why=why)


def _too_large(
    collection: Collection, machine: Machine, limit: int, needs: list[tuple[float, Groups]], pricing: Pricing
) -> MemoryLimitError:
    least, groups = min(needs, key=lambda n: n[0])
    total = sum(t.nbytes for t in collection.tables)
    sums = sum(pricing.sum_bytes(t.rows, t.dim) for t in collection.tables)
    largest = max(collection.tables, key=lambda t: t.nbytes)
    there = limit * machine.devices
    most = (
        f"with {groups.replicas} replicas of {groups.shards} shards the fullest device needs at least "
        f"{format_bytes(least)} for rows, sums, ids and buffers"
        if least > limit
        else f"no placement was found for {groups.replicas} replicas of {groups.shards} shards"
    )
    advice = "" if groups.replicas == 1 else "one replica (Groups(replicas=1, ...)), "
    return MemoryLimitError(
        f"the tables do not fit '{machine.name}': {len(collection.tables)} tables take {format_bytes(total)} and "
        f"{format_bytes(sums)} of optimizer sums, {machine.devices} devices have {format_bytes(there)} "
        f"({format_bytes(limit)} each), and {most}. The largest table is {largest.name!r}, "
        f"{largest.rows} x {largest.dim}, {format_bytes(largest.nbytes)}. Take {advice}more devices, a smaller dtype, "
        "fewer rows, a smaller batch, or all schemes."
    )
