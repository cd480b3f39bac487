"""From a search's answer to `PlanData`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshplan.core import Axes
from meshplan.plan._data import Candidate, HeldBytes, PlanData
from meshplan.plan._extract import Extractor, fingerprint
from meshplan.plan._search import Found, Search
from meshplan.strategy import DimClasses


def plan_data(
    search: Search, found: Found, tried: Sequence[Found], *, step: str, pins: Mapping[str, str],
    donated: tuple[int, ...] = (), template: str = "", workload: str = "",
) -> PlanData:
    """Everything the plan says, as plain data."""
    extractor = Extractor(found.chosen)
    prediction, program = found.prediction, search.program
    return PlanData(
        step=step, fingerprint=fingerprint(program), machine=search.machine.name, mesh=found.mesh,
        arguments=extractor.arguments(argument_dims(search), frozenset(search.pins)), results=extractor.results(),
        ops=extractor.operations(), collectives=prediction.collectives, flops=prediction.flops,
        compute_seconds=prediction.compute_seconds, communication_seconds=prediction.communication_seconds,
        argument_bytes=prediction.argument_bytes, peak_bytes=prediction.peak_bytes,
        at_peak=tuple(HeldBytes(what=h.what, nbytes=h.nbytes) for h in prediction.at_peak),
        memory_limit=search.limit, gap=found.gap,
        candidates=tuple(
            Candidate(
                mesh=f.mesh, step_seconds=f.prediction.step_seconds, peak_bytes=f.prediction.peak_bytes,
                feasible=f.feasible,
            )
            for f in tried
        ),
        pins=tuple(pins.items()), notes=program.notes, rules=logical_rules(search, found), template=template,
        workload=workload, donated=donated,
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
    """Name -> axes, the most frequent use among the program's values, weighted by bytes."""
    votes: dict[str, dict[Axes, float]] = {}
    graph, classes = search.graph, search.classes
    for i, node in enumerate(graph.nodes):
        for value, dims in node.values.items():
            spec = found.chosen.spec(i, dims)
            for c, axes in zip(classes.dims(i, dims), spec.dims, strict=True):
                name = class_name(classes, c)
                if name:
                    count = votes.setdefault(name, {})
                    count[axes] = count.get(axes, 0.0) + graph.program.nbytes(value) * node.count
    return tuple((name, max(sorted(count), key=lambda a: count[a])) for name, count in sorted(votes.items()))
