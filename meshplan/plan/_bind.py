"""Equal names get equal axes: the search's answer made to agree with the user's names."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np

from meshplan.core import Axes
from meshplan.cost import Chosen
from meshplan.strategy import Choices

Place = tuple[int, int]
MOST_TRIES = 3


def keep_named(
    nodes: Container[int], choices: Choices, places: Mapping[str, Sequence[Place]], axes_of: Mapping[str, Axes]
) -> np.ndarray:
    """Which strategies of tied nodes split every factor that is named at one of them as the name is."""
    ok = np.ones(len(choices), bool)
    for name, axes in axes_of.items():
        wanted = np.array([a in axes for a in choices.mesh.names])
        for at, factor in places[name]:
            if at in nodes:
                ok &= ((choices.assign == factor) == wanted).all(axis=1)
    return ok


def axes_in_use(chosen: Chosen, places: Mapping[str, Sequence[Place]]) -> dict[str, list[Axes]]:
    """For each name the axes it is split by where it is bound, the most frequent (by work there) first."""
    out: dict[str, list[Axes]] = {}
    for name, bound in places.items():
        weight: dict[Axes, float] = {}
        for node, factor in bound:
            axes = chosen.spec(node, ((factor,),)).dims[0]
            about = chosen.graph.nodes[node]
            size = float(np.prod(about.sizes, dtype=float)) * about.count
            weight[axes] = weight.get(axes, 0.0) + size
        out[name] = sorted(weight, key=lambda a: (-weight[a], a))
    return out


def settle_names(
    chosen: Chosen, places: Mapping[str, Sequence[Place]],
    solve: Callable[[Mapping[str, Axes]], tuple[Chosen, float] | None],
) -> Chosen | None:
    """The answer solved again with every name at one set of axes; None where the names agree already.

    `solve` gives the best answer (and its seconds) for axes by name, None where there is none. The
    axes in most use are tried for all names, then the second choice of a name at a time.
    """
    used = axes_in_use(chosen, places)
    undecided = [n for n, axes in used.items() if len(axes) > 1]
    if not undecided:
        return None
    settled = {n: axes[0] for n, axes in used.items()}
    best = solve(settled)
    for name in undecided[:MOST_TRIES]:
        other = {**settled, name: used[name][1]}
        found = solve(other)
        if found is not None and (best is None or found[1] < best[1]):
            best, settled = found, other
    return best[0] if best is not None else None
