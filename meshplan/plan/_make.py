"""From a search's answer to `PlanData`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshplan.core import Axes
from meshplan.plan._advice import gathered_again_notes, kept_notes, micro_batch_notes
from meshplan.plan._collide import collision_notes
from meshplan.plan._data import Candidate, HeldBytes, PlanData
from meshplan.plan._extract import Extractor, fingerprint, made_specs
from meshplan.plan._pins import stated_pins
from meshplan.plan._search import Found, Search
from meshplan.plan._step_timeline import step_timeline
from meshplan.rules import Dims
from meshplan.strategy import DimClasses

Votes = dict[str, dict[Axes, float]]


def plan_data(
    search: Search, found: Found, tried: Sequence[Found], *, step: str, pins: Mapping[str, str],
    donated: tuple[int, ...] = (), template: str = "", workload: str = "",
) -> PlanData:
    """Everything the plan says, as plain data."""
    extractor = Extractor(found.chosen)
    prediction, program = found.prediction, search.program
    arguments = extractor.arguments(argument_dims(search), frozenset(search.pins.arguments))
    ops = extractor.operations()
    made = made_specs(arguments, ops, program)
    kept = tuple(sorted(extractor.kept.items()))
    offers = [f for notes in (micro_batch_notes, gathered_again_notes) for f in notes(program, found.mesh, ops, made)]
    offers += kept_notes(program, found.mesh, kept)
    return PlanData(
        step=step, fingerprint=fingerprint(program), machine=search.machine.name, mesh=found.mesh,
        arguments=arguments, results=extractor.results(), ops=ops, collectives=prediction.collectives,
        flops=prediction.flops, compute_seconds=prediction.compute_seconds,
        communication_seconds=prediction.communication_seconds,
        argument_bytes=prediction.argument_bytes, peak_bytes=prediction.peak_bytes,
        at_peak=tuple(HeldBytes(what=h.what, nbytes=h.nbytes) for h in prediction.at_peak),
        memory_limit=search.limit, gap=found.gap,
        candidates=tuple(
            Candidate(
                mesh=f.mesh, step_seconds=search.seconds(f), peak_bytes=f.prediction.peak_bytes, feasible=f.feasible,
            )
            for f in tried
        ),
        pins=tuple(pins.items()), notes=(*program.notes, *search.pins.notes, *collision_notes(search, found), *offers),
        rules=logical_rules(search, found), template=template, workload=workload, donated=donated,
        kept=kept, timeline=step_timeline(found.chosen),
        stated=tuple(stated_pins(search.pins).items()), ranked_by=search.options.rank_by,
    )


def argument_dims(search: Search) -> dict[int, tuple[str, ...]]:
    """Names of the dims of every argument: the user's, or the class's."""
    classes, graph = search.classes, search.graph
    out = {}
    for i, node in graph.node_of_arg.items():
        dims = classes.dims(node, graph.nodes[node].arguments[i])
        out[i] = tuple(class_name(classes, c) for c in dims)
    return out


def class_name(classes: DimClasses, c: int) -> str:
    if c < 0:
        return ""
    if c in classes.names:
        return classes.names[c]
    known = {classes.batch: "batch", classes.sequence: "seq", classes.features: "embed"}
    return known.get(c, "")


def logical_rules(search: Search, found: Found) -> tuple[tuple[str, Axes], ...]:
    """Name -> axes: as most arguments with that name are stored, by bytes; for other names, as most values are split.

    Names that meet on one argument never share an axis, the one with more bytes behind it having the first choice:
    flax.nnx reads every name of a parameter by itself. On values inside the step the order of the rules decides.
    """
    graph, program = search.graph, search.program
    stored: Votes = {}
    inside: Votes = {}
    met: dict[str, set[str]] = {}
    for i, node in graph.node_of_arg.items():
        names = _vote(stored, search, found, node, graph.nodes[node].arguments[i], program.args[i].aval.nbytes)
        for name in names:
            met.setdefault(name, set()).update(n for n in names if n != name)
    for i, node in enumerate(graph.nodes):
        for value, dims in node.values.items():
            _vote(inside, search, found, i, dims, program.nbytes(value) * node.count)
    votes = {**inside, **stored}
    taken: dict[str, Axes] = {}
    for name in sorted(votes, key=lambda n: (-sum(votes[n].values()), n)):
        used = {a for other in met.get(name, ()) for a in taken.get(other, ())}
        free = {axes: weight for axes, weight in votes[name].items() if used.isdisjoint(axes)}
        taken[name] = max(sorted(free), key=lambda axes: free[axes]) if free else ()
    return tuple(sorted(taken.items()))


def _vote(votes: Votes, search: Search, found: Found, node: int, dims: Dims, weight: float) -> list[str]:
    """Count how an array with these dims at a node is split, by the names of its dims; returns those."""
    classes = search.classes
    names = [class_name(classes, c) for c in classes.dims(node, dims)]
    for name, axes in zip(names, found.chosen.spec(node, dims).dims, strict=True):
        if name:
            count = votes.setdefault(name, {})
            count[axes] = count.get(axes, 0.0) + weight
    return [name for name in names if name]
