"""A search whose cost does not grow with the number of devices: few mesh shapes, few strategies at a time.

`Search.best` solves over every mesh shape, with all strategies: a machine of 8,192 chips has up to 79 shapes. Here at
most `MOST_MESHES` are solved, the next one always the nearest to the best so far; and of the strategies those that
differ in one axis at most from an answer known for a mesh near by, of this machine or of a smaller one. That is done
again from what it gives as long as it gains: an axis at a time, as the descent of the exact search. Descent can end
in an answer that a template beats, as the exact search can: so the templates have the last word on the best mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.core import MeshShape, format_bytes
from meshplan.cost import MeshModel, Rates
from meshplan.plan._pins import keep_pinned, pinned_meshes
from meshplan.plan._search import Found, KeepNode, Search, better, lifted, preferred
from meshplan.strategy import TEMPLATES, Choices, Node, template_keep

FIRST_MESHES, MOST_MESHES = 3, 8  # solved wherever they lie; solved at most
MOST_IDLE = 2  # meshes in a row beside the best one that are no better end the search
MOST_ROUNDS, GAIN = 3, 1e-3  # of one mesh, and what part of its score a round must gain for there to be another
PLAIN_TEMPLATES = ("dp", "megatron", "megatron_sp")  # those of few strategies: the others save memory beside them
FAR = 2.5  # a mesh whose first answer is this many times worse than the best is left at that


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """What was found: the fastest answer that fits, else the one of least peak; None where nothing was solved.

    `reason`: why nothing fits, or "". `solves`: problems that were solved for it.
    """

    best: Found | None
    tried: tuple[Found, ...] = ()
    solves: int = 0
    least_bytes: float = 0.0
    reason: str = ""


def best_bounded(search: Search, known: Sequence[Found] = ()) -> Bounded:
    """A good answer on this machine. `known`: answers of the same program on others of the platform.

    Raises `MeshError` where pins name meshes that the machine has not.
    """
    least = least_bytes(search)
    if least > search.limit:
        reason = (
            f"no plan fits {format_bytes(search.limit)} per device: at one time at least {format_bytes(least)} are "
            f"held on each of {search.machine.devices} devices, however they are split"
        )
        return Bounded(best=None, least_bytes=least, reason=reason)
    meshes = pinned_meshes(search.pins, search.graph, search.meshes())
    tried: list[Found] = []
    seen: list[MeshShape] = []
    solves = idle = 0
    while len(seen) < min(MOST_MESHES, len(meshes)) and idle < MOST_IDLE:
        mesh, before = next_mesh(meshes, seen, tried, known), leader(tried)
        seen.append(mesh)
        found, rounds = near(search, mesh, closest(mesh, [*tried, *known]), before)
        solves += rounds
        tried += [found] if found is not None else []
        gained = found is not None and leader(tried) is found
        idle = 0 if gained or len(seen) <= FIRST_MESHES else idle + 1
    tried.sort(key=lambda f: len(f.mesh.axes))
    best = preferred(tried) if tried else None
    if best is not None:
        best, more = beyond_templates(search, best)
        solves += more
    reason = ""
    if best is None:
        reason = f"no mesh shape of {search.machine.name} allows the pins together"
    elif not best.feasible:
        peak = format_bytes(best.prediction.peak_bytes)
        reason = f"no plan found that fits {format_bytes(search.limit)} per device: the least peak found is {peak}"
    return Bounded(best=best, tried=tuple(tried), solves=solves, least_bytes=least, reason=reason)


def least_bytes(search: Search) -> float:
    """Bytes of one device that no plan goes below: every value cut into as many pieces as its dims and devices allow.

    Whatever the mesh: a dim of n is cut into a number of pieces that divides both n and the devices.
    """
    space, devices = search.space, search.machine.devices
    values = search.program.values
    change = np.zeros(space.live.end + 2)
    for held in space.held:
        for v in held:
            pieces = min(devices, math.prod(math.gcd(n, devices) for n in values[v].aval.shape))
            first, last = space.live.span[v]
            change[first] += values[v].aval.nbytes / pieces
            change[last + 1] -= values[v].aval.nbytes / pieces
    return float(np.cumsum(change).max())


def leader(tried: Sequence[Found]) -> Found | None:
    """The best so far by score; of equals the first."""
    best: Found | None = None
    for f in tried:
        best = f if best is None or better(f, best) else best
    return best


def next_mesh(
    meshes: Sequence[MeshShape], seen: Sequence[MeshShape], tried: Sequence[Found], known: Sequence[Found]
) -> MeshShape:
    """The mesh to look at: first some that lie far apart, from the known answers on, then the nearest to the best."""
    left = [m for m in meshes if m not in seen]
    best = leader(tried)
    if not seen:
        return min(left, key=lambda m: min((away(m, f.mesh) for f in known), default=0.0))
    if len(seen) < FIRST_MESHES or best is None:
        return max(left, key=lambda m: min(away(m, s) for s in seen))
    return min(left, key=lambda m: away(m, best.mesh))


def away(a: MeshShape, b: MeshShape) -> float:
    """How far apart two shapes are: over the axes, by name, the logarithm of how often one size fits in the other."""
    one, other = a.to_dict(), b.to_dict()
    names = dict.fromkeys((*one, *other))
    return sum(abs(math.log2(one.get(n, 1) / other.get(n, 1))) for n in names)


def closest(mesh: MeshShape, known: Sequence[Found]) -> list[Found]:
    """The known answer whose mesh is nearest, if there is one."""
    return sorted(known, key=lambda f: away(f.mesh, mesh))[:1]


def near(
    search: Search, mesh: MeshShape, known: Sequence[Found], leading: Found | None
) -> tuple[Found | None, int]:
    """(a good answer over one mesh, None where pins leave no strategy; problems solved for it).

    On a machine's first mesh from strategies of templates too; of all of them where nothing is known.
    """
    best: Found | None = None
    rates = Rates(search.machine, mesh)
    templates = TEMPLATES if not known else PLAIN_TEMPLATES if leading is None else ()
    for turn in range(MOST_ROUNDS):
        starts = [best] if best is not None else known
        keep = strategies_near(search, mesh, starts, templates if best is None else ())
        model = MeshModel(search.space, search.machine, mesh, keep, rates=rates)
        if any(len(c) == 0 for c in model.choices):
            return best, turn
        rows = best.rows if best is not None else ()
        warm = [s for f in starts if f.mesh == mesh and (s := lifted(f, model)) is not None]
        shares = best.chosen.small_shares() if best is not None else None
        found = search.fit(model, warm, rows, exact=False, refine=False, shares=shares)
        if best is not None and not better(found, best):
            return best, turn + 1
        gained = best is None or found.prediction.score < best.prediction.score * (1 - GAIN) or not best.feasible
        best = found
        if not gained or behind(best, leading):
            return best, turn + 1
    return best, MOST_ROUNDS


def beyond_templates(search: Search, best: Found) -> tuple[Found, int]:
    """(the answer, or what the best template of its mesh leads to where that is better; problems solved)."""
    rates, answers, solves = Rates(search.machine, best.mesh), [best], 0
    for name in PLAIN_TEMPLATES:
        model = MeshModel(
            search.space, search.machine, best.mesh, strategies_near(search, best.mesh, [], [name]), rates=rates
        )
        if all(len(c) for c in model.choices):
            answers.append(search.fit(model, [], (), exact=False, refine=False))
            solves += 1
    led = leader(answers)
    if led is None or led is best:
        return best, solves
    found, more = near(search, best.mesh, [led], None)
    return leader([led] if found is None else [led, found]) or led, solves + more


def behind(found: Found, leading: Found | None) -> bool:
    """Whether an answer is so much worse than the best one that its mesh is not worth another round."""
    if leading is None or not leading.feasible:
        return False
    return not found.feasible or found.prediction.score > FAR * leading.prediction.score


def strategies_near(
    search: Search, mesh: MeshShape, starts: Sequence[Found], templates: Sequence[str]
) -> KeepNode:
    """Strategies that a template has, and those that differ from a start's in one axis at most; pins hold."""
    keeps = [template_keep(t, search.graph, search.classes) for t in templates]

    def keep(c: int, about: Node, choices: Choices) -> np.ndarray:
        node = search.space.ties.first[c]
        pinned = keep_pinned(node, choices, search.pins)
        ok = np.zeros(len(choices), bool)
        for template in keeps:
            ok |= template(node, about, choices)
        for found in starts:
            row = moved(found.chosen.model.choices[c].assign[found.chosen.choice[c]], found.mesh, mesh)
            apart = (choices.assign != row).sum(axis=1)
            ok |= apart <= max(1, int(apart.min(initial=1)))  # sizes may not divide as they did: then the nearest
        return ok & pinned if (ok & pinned).any() else pinned

    return keep


def moved(row: np.ndarray, source: MeshShape, target: MeshShape) -> np.ndarray:
    """What each axis of the other mesh splits: as the axis of that name, a new one as the axis before it."""
    at = dict(zip(source.names, row, strict=True))
    out: list[int] = []
    for name in target.names:
        out.append(int(at.get(name, out[-1] if out else row[0])))
    return np.array(out, row.dtype)
