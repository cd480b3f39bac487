"""Exact dynamic programming over a graph: one node after another is minimised away.

Bucket elimination (Dechter 1999; for leaves and nodes of degree 2 the reductions RI and RII
of PBQP, Scholz and Eckstein 2002). Removing a node leaves one table, the message, over its
neighbours. A transformer's graph is a ladder, so messages stay pairs; where some table would
grow beyond `most_entries` there is no plan, and other solvers take over.

All tables have their axes in the order of elimination, so they broadcast without transposing.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from meshplan.cost._problem import Floats, Ints
from meshplan.solve._model import Model, Pairs

MOST_ENTRIES = 4_000_000
BLOCK_ENTRIES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Node `scope[0]` goes; the others are its neighbours then, the next to go first.

    `pairs` and `children`: the pair tables (and whether transposed) and the messages of earlier steps
    that it gathers, each with the shape that broadcasts over `scope`.
    """

    scope: tuple[int, ...]
    pairs: tuple[tuple[tuple[int, int], bool, tuple[int, ...]], ...]
    children: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The steps in order, `entries` in the tables of all of them together."""

    steps: tuple[Step, ...]
    entries: int


def plan(model: Model, most_entries: int = MOST_ENTRIES) -> Plan | None:
    """An order of elimination whose tables all have at most `most_entries`, or None."""
    sizes = model.sizes
    near: list[set[int]] = [set() for _ in sizes]
    for u, v in model.pairs:
        near[u].add(v)
        near[v].add(u)
    scopes = _order(sizes, near, most_entries)
    return None if scopes is None else _steps(model, scopes)


def _order(sizes: list[int], near: list[set[int]], most_entries: int) -> list[tuple[int, set[int]]] | None:
    """(node, neighbours when it goes), smallest table first."""

    def entries(v: int) -> int:
        return sizes[v] * math.prod(sizes[w] for w in near[v])

    heap = [(entries(v), v) for v in range(len(sizes))]
    heapq.heapify(heap)
    order: list[tuple[int, set[int]]] = []
    gone = [False] * len(sizes)
    while heap:
        size, v = heapq.heappop(heap)
        if gone[v] or size != entries(v):
            continue
        if size > most_entries:
            return None
        gone[v] = True
        order.append((v, near[v]))
        for w in near[v]:
            near[w] = (near[w] | near[v]) - {v, w}
        for w in near[v]:
            heapq.heappush(heap, (entries(w), w))
    return order


def _steps(model: Model, order: list[tuple[int, set[int]]]) -> Plan:
    place = {v: at for at, (v, _) in enumerate(order)}
    scopes = [tuple(sorted({v} | around, key=place.__getitem__)) for v, around in order]
    pairs: list[list[tuple[tuple[int, int], bool]]] = [[] for _ in order]
    for u, v in model.pairs:
        pairs[min(place[u], place[v])].append(((u, v), place[u] > place[v]))
    children: list[list[int]] = [[] for _ in order]
    for at, scope in enumerate(scopes):
        if len(scope) > 1:
            children[place[scope[1]]].append(at)
    sizes = model.sizes

    def shape(part: tuple[int, ...], scope: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sizes[n] if n in part else 1 for n in scope)

    steps = [
        Step(
            scope=scope,
            pairs=tuple((p, flipped, shape(p, scope)) for p, flipped in pairs[at]),
            children=tuple((c, shape(scopes[c][1:], scope)) for c in children[at]),
        )
        for at, scope in enumerate(scopes)
    ]
    return Plan(steps=tuple(steps), entries=sum(math.prod(sizes[n] for n in s) for s in scopes))


def eliminate(plan: Plan, unary: list[Floats], pairs: Pairs) -> tuple[float, list[Floats]]:
    """The least cost of all choices (inf: none is allowed), and every step's message."""
    messages: list[Floats] = []
    total = 0.0
    for step in plan.steps:
        message = _message(step, unary, pairs, messages)
        if len(step.scope) == 1:
            total += float(message)
        messages.append(message)
    return total, messages


def _message(step: Step, unary: list[Floats], pairs: Pairs, messages: list[Floats]) -> Floats:
    """The step's table minimised over its node; in blocks that stay in the cache where it is large."""
    parts = _parts(step, unary, pairs, messages)
    shape = tuple(max(axis) for axis in zip(*(p.shape for p in parts), strict=True))
    entries = math.prod(shape)
    if entries <= 2 * BLOCK_ENTRIES or len(shape) < 3:
        return _sum(parts).min(axis=0)
    message = np.empty(shape[1:])
    width = max(1, BLOCK_ENTRIES * shape[1] // entries)
    for at in range(0, shape[1], width):
        block = [p[:, at : at + width] if p.shape[1] > 1 else p for p in parts]
        _sum(block).min(axis=0, out=message[at : at + width])
    return message


def _bucket(step: Step, unary: list[Floats], pairs: Pairs, messages: list[Floats]) -> Floats:
    """Everything that involves the step's node, over the step's scope."""
    return _sum(_parts(step, unary, pairs, messages))


def _parts(step: Step, unary: list[Floats], pairs: Pairs, messages: list[Floats]) -> list[Floats]:
    """The step's costs, tables and messages, those of one shape summed, small ones first."""
    by_shape: dict[tuple[int, ...], Floats] = {}
    own = unary[step.scope[0]]
    parts = [((own.size,) + (1,) * (len(step.scope) - 1), own)]
    parts += [(shape, pairs[p].T if flipped else pairs[p]) for p, flipped, shape in step.pairs]
    parts += [(shape, messages[child]) for child, shape in step.children]
    for shape, table in parts:
        table = table.reshape(shape)
        by_shape[shape] = by_shape[shape] + table if shape in by_shape else table
    return sorted(by_shape.values(), key=lambda t: t.size)


def _sum(parts: list[Floats]) -> Floats:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def decode(plan: Plan, unary: list[Floats], pairs: Pairs, messages: list[Floats]) -> Ints:
    """A choice of least cost, the lowest strategy among equals at every node."""
    choice = np.zeros(len(unary), dtype=np.int64)
    for step in reversed(plan.steps):
        v = step.scope[0]
        vector = unary[v]
        for (a, b), _, _ in step.pairs:
            vector = vector + (pairs[a, b][:, choice[b]] if a == v else pairs[a, b][choice[a]])
        for child, _ in step.children:
            others = plan.steps[child].scope[2:]
            vector = vector + messages[child][(slice(None), *(choice[n] for n in others))]
        choice[v] = int(vector.argmin())
    return choice


def min_marginals(
    plan: Plan, unary: list[Floats], pairs: Pairs, messages: list[Floats]
) -> tuple[list[Floats], Pairs]:
    """For every strategy, and every entry of every pair table, the least cost of a choice that uses it."""
    nodes: list[Floats] = [np.zeros(0)] * len(unary)
    edges: Pairs = {}
    down: dict[int, Floats] = {}
    roots = sum(float(m) for s, m in zip(plan.steps, messages, strict=True) if len(s.scope) == 1)
    for at in range(len(plan.steps) - 1, -1, -1):
        step = plan.steps[at]
        belief = _bucket(step, unary, pairs, messages)
        if at in down:
            belief = belief + down.pop(at)
        elif np.isfinite(roots):
            belief = belief + (roots - float(messages[at]))
        nodes[step.scope[0]] = belief.min(axis=tuple(range(1, belief.ndim)))
        for pair, flipped, shape in step.pairs:
            table = belief.min(axis=_absent(shape))
            edges[pair] = table.T if flipped else table
        for child, shape in step.children:
            with np.errstate(invalid="ignore"):
                rest = belief.min(axis=_absent(shape)) - messages[child]
            down[child] = np.where(np.isfinite(rest), rest, np.inf)
    return nodes, edges


def _absent(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a step's table that a part of this shape does not have."""
    return tuple(a for a, extent in enumerate(shape) if extent == 1)
