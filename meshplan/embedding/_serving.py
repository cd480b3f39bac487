"""Tables on servers for inference: balanced by capacity, load or network (arXiv 2011.02084), latency by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshplan.core import ArgumentError, MemoryLimitError, format_bytes, format_seconds, nearest
from meshplan.embedding._cost import largest_over_mean
from meshplan.embedding._serving_queue import Floats, Sizes, draw, latencies
from meshplan.embedding._table import Collection, Placement, Table, place
from meshplan.machine import Machine

Balance = Literal["capacity", "load", "network"]
BALANCES: tuple[Balance, ...] = ("capacity", "load", "network")
_WARM = 0.1  # of the queries come first and are not counted: the servers start empty


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """Which server keeps which rows, and how long queries take.

    By server: `memory_bytes`; `lookup_seconds` and `network_seconds` of a mean query; `utilisation`, the part of the
    time that its busier stage is at work. `latency`: seconds, "mean", "p50", "p95", "p99" over the simulated queries.
    `most_queries_per_second`: at which the busiest server never rests. `imbalance`: largest over mean of "memory",
    "lookups" and "network". `compared`: the p99 of every balance that was tried.
    """

    machine: str
    balance: str
    queries_per_second: float
    samples: int
    placements: tuple[Placement, ...]
    memory_bytes: tuple[int, ...]
    lookup_seconds: tuple[float, ...]
    network_seconds: tuple[float, ...]
    utilisation: tuple[float, ...]
    latency: dict[str, float]
    most_queries_per_second: float
    imbalance: dict[str, float]
    compared: dict[str, float]
    notes: tuple[str, ...]

    @property
    def servers(self) -> int:
        return len(self.memory_bytes)

    def __str__(self) -> str:
        times = ", ".join(f"{k} {format_seconds(v)}" for k, v in self.latency.items())
        lines = [
            f"{len(self.placements)} tables on {self.servers} servers of {self.machine}, balanced by {self.balance}",
            f"{self.queries_per_second:.4g} queries/s of {self.samples} samples (at most "
            f"{self.most_queries_per_second:.4g}): {times}",
            "imbalance, largest over mean: " + ", ".join(f"{k} {v:.2f}" for k, v in self.imbalance.items()),
        ]
        lines += [
            f"  server {k}: {format_bytes(m)}, rows {format_seconds(a)}, network {format_seconds(b)} a query, "
            f"busy {100 * u:.0f} %"
            for k, (m, a, b, u) in enumerate(
                zip(self.memory_bytes, self.lookup_seconds, self.network_seconds, self.utilisation, strict=True)
            )
        ]
        if len(self.compared) > 1:
            lines.append("p99 by balance: " + ", ".join(f"{k} {format_seconds(v)}" for k, v in self.compared.items()))
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Rows [low, high) of a table: bytes kept, bytes read and bytes sent and received for a mean query."""

    table: int
    nbytes: float
    read: float
    sent: float


def serve(
    tables: Collection | Sequence[Table], machine: Machine, *, queries_per_second: float, samples: int = 1,
    balance: Balance | Literal["best"] = "best", memory_limit: int | None = None, sizes: Sizes = "constant",
    fixed_seconds: float = 0.0, queries: int = 20_000, seed: int = 0,
) -> ServingPlan:  # fmt: skip
    """Where tables lie for inference, each server a device of the machine, and the latency of queries of `samples`.

    `balance`: tables, the largest first, go to the server with the fewest bytes ("capacity"), the least time to read
    rows ("load") or the fewest bytes over the network ("network"), as in arXiv 2011.02084; "best" takes the one with
    the least p99. A table larger than a server is cut by rows. `sizes`: all queries alike, or exponential in size.
    `fixed_seconds` is added to every query. Poisson arrivals, simulated with `seed` (see `_serving_queue`).
    Raises ArgumentError for no tables, arguments that cannot be and servers that cannot keep up; MemoryLimitError
    where tables do not fit.
    """
    collection = tables if isinstance(tables, Collection) else Collection(tables=tuple(tables))
    limit = machine.memory_bytes if memory_limit is None else memory_limit
    _check(collection, balance, queries_per_second, samples, queries, limit)
    pieces = _pieces(collection, machine, samples, limit)
    gaps, factors = draw(queries, queries_per_second, sizes, seed)
    tried = {}
    for each in BALANCES if balance == "best" else (balance,):
        homes = _homes(pieces, machine, each, limit, collection)
        stages = _stages(pieces, homes, machine)
        wait = 2 * max((d.latency_seconds for d in machine.dims if d.size > 1), default=0.0)  # there and back
        busiest = float(stages.max()) * queries_per_second
        if busiest < 1:
            taken = latencies(gaps, factors, stages, fixed_seconds + wait)[int(_WARM * queries) :]
        else:
            taken = np.full(1, np.inf)
        tried[each] = homes, stages, taken
    compared = {k: float(np.percentile(v[2], 99)) for k, v in tried.items() if np.isfinite(v[2][0])}
    if not compared:
        most = max(1 / float(v[1].max()) for v in tried.values())
        raise ArgumentError(
            f"{queries_per_second:g} queries/s are more than the busiest of {machine.devices} servers can answer "
            f"({most:.4g}); give more servers, fewer samples a query or fewer queries."
        )
    chosen = min(compared, key=lambda k: compared[k])
    homes, stages, taken = tried[chosen]
    return _plan(collection, machine, chosen, queries_per_second, samples, pieces, homes, stages, taken, compared)


def _plan(
    collection: Collection, machine: Machine, balance: str, rate: float, samples: int, pieces: list[_Piece],
    homes: list[int], stages: Floats, taken: Floats, compared: dict[str, float],
) -> ServingPlan:  # fmt: skip
    memory = np.bincount(homes, [p.nbytes for p in pieces], machine.devices)
    by_table: dict[int, list[int]] = {}
    for piece, home in zip(pieces, homes, strict=True):
        by_table.setdefault(piece.table, []).append(home)
    placements = tuple(
        place(t, "row" if len(by_table[i]) > 1 else "table", by_table[i]) for i, t in enumerate(collection.tables)
    )
    cut = [t.name for i, t in enumerate(collection.tables) if len(by_table[i]) > 1]
    notes = [f"table {n!r} is larger than a server and cut by rows; its ids are taken to be hashed." for n in cut]
    loads = {"memory": memory, "lookups": stages[:, 0], "network": stages[:, 1]}
    return ServingPlan(
        machine=machine.name, balance=balance, queries_per_second=rate, samples=samples, placements=placements,
        memory_bytes=tuple(int(np.ceil(m)) for m in memory), lookup_seconds=tuple(stages[:, 0].tolist()),
        network_seconds=tuple(stages[:, 1].tolist()), utilisation=tuple((stages.max(axis=1) * rate).tolist()),
        latency={"mean": float(taken.mean())} | {f"p{q}": float(np.percentile(taken, q)) for q in (50, 95, 99)},
        most_queries_per_second=1 / float(stages.max()), compared=compared, notes=tuple(notes),
        imbalance=largest_over_mean(loads),
    )  # fmt: skip


def _pieces(collection: Collection, machine: Machine, samples: int, limit: int) -> list[_Piece]:
    found = []
    for number, t in enumerate(collection.tables):
        row = t.dim * np.dtype(t.dtype).itemsize
        cuts = -(-t.nbytes // limit)
        if cuts > machine.devices:
            raise _no_room(collection, machine, limit)
        high = -(-t.rows // cuts)
        ids = samples * t.hotness
        for k in range(cuts):
            rows = min((k + 1) * high, t.rows) - k * high
            here = ids * rows / t.rows
            back = samples if t.pooling != "none" and t.bag > cuts else here
            found.append(_Piece(table=number, nbytes=rows * row, read=here * row, sent=here * 4 + back * row))
    return found


def _homes(
    pieces: list[_Piece], machine: Machine, balance: Balance, limit: int, collection: Collection
) -> list[int]:
    """The server of each piece: pieces of most weight first, each where there is least of it and room; those of one
    table on different servers."""
    weight = np.array([{"capacity": p.nbytes, "load": p.read, "network": p.sent}[balance] for p in pieces])
    size = np.array([p.nbytes for p in pieces])
    for order in (np.lexsort((-size, -weight)), np.argsort(-size, kind="stable")):
        held, total = np.zeros(machine.devices), np.zeros(machine.devices)
        homes, on = [-1] * len(pieces), [set() for _ in range(machine.devices)]
        for i in order.tolist():
            p = pieces[i]
            free = [d for d in range(machine.devices) if held[d] + p.nbytes <= limit and p.table not in on[d]]
            if not free:
                break
            home = min(free, key=lambda d: (total[d], held[d], d))
            homes[i] = home
            held[home] += p.nbytes
            total[home] += weight[i]
            on[home].add(p.table)
        if -1 not in homes:
            return homes
    raise _no_room(collection, machine, limit)


def _stages(pieces: list[_Piece], homes: list[int], machine: Machine) -> Floats:
    """Seconds of a mean query at each server, [servers, 2]: rows read, and bytes over its link."""
    read = np.bincount(homes, [p.read for p in pieces], machine.devices) / machine.chip.memory_bytes_per_second
    if machine.devices == 1:
        return np.stack([read, np.zeros(1)], axis=1)
    link = min(d.bytes_per_second for d in machine.dims if d.size > 1)
    return np.stack([read, np.bincount(homes, [p.sent for p in pieces], machine.devices) / link], axis=1)


def _no_room(collection: Collection, machine: Machine, limit: int) -> MemoryLimitError:
    largest = max(collection.tables, key=lambda t: t.nbytes)
    total = sum(t.nbytes for t in collection.tables)
    return MemoryLimitError(
        f"{len(collection.tables)} tables of {format_bytes(total)} do not fit {machine.devices} servers of "
        f"{format_bytes(limit)} ({format_bytes(limit * machine.devices)}); the largest is {largest.name!r}, "
        f"{format_bytes(largest.nbytes)}. Take more servers, a smaller dtype or fewer rows."
    )


def _check(
    collection: Collection, balance: str, rate: float, samples: int, queries: int, limit: int
) -> None:
    if not collection.tables:
        raise ArgumentError("there are no tables to serve; give at least one Table.")
    if balance not in (*BALANCES, "best"):
        raise ArgumentError(f"balance {balance!r} is unknown. {nearest(balance, (*BALANCES, 'best'))}")
    for name, value in (("queries_per_second", rate), ("samples", samples), ("memory_limit", limit)):
        if not value > 0:
            raise ArgumentError(f"{name} is {value}; give a positive number.")
    if queries < 100:
        raise ArgumentError(f"{queries} simulated queries have no 99th percentile; give at least 100.")
