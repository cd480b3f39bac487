"""The search: for every mesh shape the cheapest strategies that fit, then the best shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshplan._options import Options
from meshplan.core import Axes, MemoryLimitError, MeshError, MeshShape, Spec, format_bytes
from meshplan.cost import TRAFFIC, Chosen, Emission, MeshModel, Prediction, Problem, Solution, Space, timeline_of
from meshplan.cost._rates import Shares
from meshplan.machine import Machine, legal_mesh_shapes
from meshplan.plan._bind import keep_named, settle_names
from meshplan.plan._pin_meshes import named_meshes, own_meshes
from meshplan.plan._pins import Pins, as_pins, keep_pinned, pin_axes, pin_marks, pinned_meshes
from meshplan.program import Program
from meshplan.solve import minimum_peak, solve
from meshplan.solve._descend import descend
from meshplan.strategy import (
    TEMPLATES,
    TENSOR_TEMPLATES,
    Choices,
    DimClasses,
    Graph,
    Node,
    bound_places,
    build_graph,
    dim_classes,
    template_keep,
    tie,
)

AXIS_NAMES = {1: ("data",), 2: ("data", "model"), 3: ("data", "fsdp", "model")}
MEMORY_ROUNDS, LEAST_ROUNDS = 8, 2
ROWS_PER_ROUND = 6
EXACT_ENTRIES = 400_000  # edge table entries up to which the exact solver is given its full time
SMALL_ENTRIES = 150_000  # and up to which it takes no time worth saving
EXACT_GAP, GOOD_GAP = 1e-6, 1e-3  # relative gaps that end the exact solver
CLOSE, MOST_PROVEN = 0.01, 2  # meshes this close to the fastest, and how many of them, are solved with more care

# Plans whose computation and collectives together take so many times longer are not looked at on a timeline.
FAR = 1.5

KeepNode = Callable[[int, Node, Choices], np.ndarray]


@dataclass(frozen=True, slots=True)
class Found:
    """The best strategies found for one mesh. `rows`: the positions at which memory bound them."""

    mesh: MeshShape
    chosen: Chosen
    prediction: Prediction
    gap: float
    feasible: bool
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Everything fixed before a mesh is looked at; make one with `prepare`."""

    program: Program
    machine: Machine
    graph: Graph
    space: Space
    classes: DimClasses
    places: Mapping[str, Sequence[tuple[int, int]]]
    pins: Pins
    limit: float
    options: Options
    models: dict[MeshShape, MeshModel]  # those of unrestricted meshes looked at so far: strategies and prices are dear
    timed: dict[Chosen, float] = field(default_factory=dict)  # seconds on a timeline, of those looked at there

    def keep(
        self, template: str | None, names: Mapping[str, Axes] | None = None
    ) -> Callable[[int, Node, Choices], np.ndarray]:
        extra = template_keep(template, self.graph, self.classes) if template else None

        def wanted(c: int, about: Node, choices: Choices) -> np.ndarray:
            node = self.space.ties.first[c]
            ok = keep_pinned(node, choices, self.pins)
            if extra is not None and node not in self.pins.at:
                ok &= extra(node, about, choices)
            if names:
                ok &= keep_named(self.space.ties.members[c], choices, self.places, names)
            return ok

        return wanted

    def at(
        self, mesh: MeshShape, template: str | None = None, known: Sequence[Found] = (), exact: bool = True,
        names: Mapping[str, Axes] | None = None, traffic: float = TRAFFIC, refine: bool = False,
    ) -> Found | None:
        """The cheapest strategies over one mesh; None where the restrictions leave none.

        `known`: answers to start from. Not `exact`: good strategies without a proof, in a fraction of the time.
        `refine`: solved once more with the latencies that small reductions were found to bear.
        """
        if mesh not in self.models:
            self.models[mesh] = MeshModel(self.space, self.machine, mesh)
        keep = self.keep(template, names)
        model = MeshModel(self.space, self.machine, mesh, keep, traffic, self.models[mesh])
        if any(len(c) == 0 for c in model.choices):
            return None
        starts = [s for f in known if (s := lifted(f, model)) is not None]
        rows = next((f.rows for f in known if f.mesh == mesh), ())
        return self.fit(model, starts, rows, exact, refine)

    def fit(
        self, model: MeshModel, starts: list[tuple[int, ...]], known_rows: Sequence[int], exact: bool, refine: bool,
        shares: Shares | None = None,
    ) -> Found:
        """Solve, look where memory runs over, add rows for those times, solve again.

        `shares`: of latencies, as small reductions were found to bear them before.
        """
        rows, limit = list(known_rows), self.limit
        best: Found | None = None
        if not starts:
            starts = [tuple(unused(c) for c in model.choices)]
        for _ in range(MEMORY_ROUNDS):
            solution = self.solve(model.problem(rows, limit, shares), model, starts, exact)
            chosen = Chosen(model, solution.choice)
            prediction = chosen.predict()
            fits = prediction.peak_bytes <= self.limit
            found = Found(model.mesh, chosen, prediction, solution.gap, fits, tuple(rows))
            best = found if best is None or better(found, best) else best
            if fits and (not refine or shares is not None):
                return best
            borne = chosen.small_shares() if refine else None
            if fits and not borne:
                return best
            if not solution.feasible:
                break
            starts, shares = [solution.choice], borne if refine else shares
            if fits:
                continue
            new = [r for r in peaks(chosen, self.limit) if r not in rows]
            if not new:  # the rows hold, the exact count is above: ask for less
                limit *= min(0.98, self.limit / prediction.peak_bytes)
            rows += new[:ROWS_PER_ROUND]
        assert best is not None
        return best if best.feasible else self.least(model, rows, best)

    def solve(
        self, problem: Problem, model: MeshModel, starts: Sequence[Sequence[int]], exact: bool
    ) -> Solution:
        """Exactly where the problem is small enough; else by descent, two axes at a time where it should be good."""
        seconds = self.options.solver_seconds
        entries = sum(table.size for table in problem.edge_costs)
        if entries <= (EXACT_ENTRIES if exact else SMALL_ENTRIES):
            gap = EXACT_GAP if exact else GOOD_GAP
            return solve(problem, seconds=seconds, warm_starts=starts, relative_gap=gap)
        coordinates = [c.assign for c in model.choices]
        warm = [descend(problem, coordinates, start, seconds=seconds) for start in starts]
        best = min(warm, key=lambda w: (not w.feasible, w.cost))
        if not best.feasible:
            return solve(problem, seconds=seconds, warm_starts=[best.choice])
        return descend(problem, coordinates, best.choice, width=2, seconds=seconds) if exact else best

    def least(self, model: MeshModel, rows: Sequence[int], best: Found) -> Found:
        """Nothing seems to fit: the least peak that can be reached, rows added where it turns up next."""
        rows = list(dict.fromkeys([*rows, best.prediction.peak_position]))
        for _ in range(LEAST_ROUNDS):
            solution = minimum_peak(model.problem(rows, self.limit))
            chosen = Chosen(model, solution.choice)
            prediction = chosen.predict()
            fits = prediction.peak_bytes <= self.limit
            if prediction.peak_bytes < best.prediction.peak_bytes:
                best = Found(model.mesh, chosen, prediction, solution.gap, fits)
            if fits or prediction.peak_position in rows:
                break
            rows.append(prediction.peak_position)
        return best

    # meshes

    def meshes(self, template: str | None = None) -> list[MeshShape]:
        """All mesh shapes worth a look, fewest axes first."""
        given = {a for n, names in AXIS_NAMES.items() if n <= self.options.max_axes for a in names}
        named = pin_axes(self.pins, [a for a in AXIS_NAMES[3] if a in given])
        shapes = legal_mesh_shapes(self.machine, self.options.max_axes)
        uniform = len(self.machine.levels) == 1 and self.machine.levels[0].kind == "switch"
        if uniform and not named and template not in TENSOR_TEMPLATES:
            shapes = [s for s in shapes if tuple(sorted(s, reverse=True)) == tuple(s)]
        exact = any(pin.exact for pin in self.pins)
        meshes = [] if exact else named_meshes(shapes, named, AXIS_NAMES)
        meshes = meshes or own_meshes(self.pins, self.machine.devices, self.machine.name)
        if template in TENSOR_TEMPLATES:
            meshes = [m for m in meshes if len(m.axes) >= 2]
        elif template is not None:
            fewest = min((len(m.axes) for m in meshes), default=0)
            meshes = [m for m in meshes if len(m.axes) == fewest][:1]
        return sorted(meshes, key=lambda m: len(m.axes))

    def proven(self, everything: list[Found], template: str | None) -> list[Found]:
        """The answers with those that may still be the best solved again, exactly."""
        fitting = [f for f in everything if f.feasible] or everything
        least = min((f.prediction.score for f in fitting), default=0.0)
        close = sorted(
            (f for f in fitting if f.gap > EXACT_GAP and f.prediction.score <= least * (1 + CLOSE)),
            key=lambda f: f.prediction.score,
        )[:MOST_PROVEN]
        again = {id(f): self.at(f.mesh, template, [f], refine=True) or f for f in close}
        return [again.get(id(f), f) for f in everything]

    @staticmethod
    def worth(simpler: Found, other: Found) -> float:
        """The gain a mesh with more axes must bring: less than the model can tell is not worth an axis."""
        return 1e-6 if len(other.mesh.axes) <= len(simpler.mesh.axes) else 0.01

    def best(self, meshes: Sequence[MeshShape], template: str | None = None) -> tuple[Found, list[Found]]:
        """(the fastest that fits, all). Raises `MemoryLimitError` where none fits, unless a template is asked for."""
        everything: list[Found] = []
        meshes = pinned_meshes(self.pins, self.graph, meshes)
        for mesh in meshes:
            alone = len(meshes) == 1
            found = self.at(mesh, template, everything[-3:], exact=alone, refine=alone)
            if found is not None:
                everything.append(found)
        everything = self.proven(everything, template) if len(meshes) > 1 else everything
        if not everything:
            raise MeshError(
                f"no mesh shape of {self.machine.name} allows the pins together; give mesh=... with the pinned axes."
            )
        fitting = [f for f in everything if f.feasible]
        if not fitting:
            least = min(everything, key=lambda f: f.prediction.peak_bytes)
            if template is None:
                raise MemoryLimitError(too_large(least, self.limit))
            return least, everything
        best = preferred(fitting)
        if self.options.equal_names:
            best = self.named(best, template)
        elif template is not None:
            best = min(fitting, key=self.rank) if self.options.rank_by == "timeline" else best
        else:
            best = self.beyond_templates(best, fitting, meshes if len(meshes) == 1 else None)
        return best, everything

    def beyond_templates(self, found: Found, fitting: Sequence[Found], given: Sequence[MeshShape] | None) -> Found:
        """The answer, unless a template takes less time on its mesh or one of two axes: then the best by time alone.

        `fitting`: the answers for other meshes; `given`: the meshes to look at. Where the timeline is to rank, the one
        of all these that takes clearly less time there is taken instead (see `disposed`).

        Templates are points of the same graph; the answer can only lose to one where it gave time for less
        memory traffic, or a mesh with more axes for one with fewer.
        """
        tried = [
            (name, self.at(mesh, name, exact=False))
            for name in TEMPLATES for mesh in given or self.meshes(name)
            if mesh == found.mesh or (not given and len(mesh.axes) <= 2)
        ]
        known = [(name, a) for name, a in tried if a is not None and a.feasible]
        near = found.prediction.step_seconds * (1 + CLOSE)  # those that latencies as found may bring before the answer
        again = [self.at(a.mesh, n, [a], refine=True) for n, a in known if a.prediction.step_seconds <= near]
        answers = [found, *(a for _, a in known), *(a for a in again if a is not None and a.feasible)]
        best = min(answers, key=lambda a: a.prediction.step_seconds)
        if best is found:
            best = self.simplest(found, answers)
        else:
            free = self.at(best.mesh, None, [best], traffic=0.0, refine=True)
            both = (f for f in (best, free) if f is not None and f.feasible)
            best = min(both, key=lambda f: f.prediction.step_seconds)
        return self.disposed(best, [*fitting, *answers]) if self.options.rank_by == "timeline" else best

    def disposed(self, best: Found, answers: Sequence[Found]) -> Found:
        """The one that takes least time on a timeline, memory traffic and overlap included; of equals, the fewest axes.

        The fastest of them there is solved once more with all memory traffic priced.
        """
        least = min(_roofline(a) for a in answers)
        near = [best, *(a for a in answers if a is not best and _roofline(a) <= least * FAR)]

        fastest = min(near, key=self.rank)
        whole = self.at(fastest.mesh, None, [fastest], exact=False, traffic=1.0)
        return min((fastest, whole), key=self.rank) if whole is not None and whole.feasible else fastest

    def rank(self, found: Found) -> tuple[float, int]:
        """By seconds as `Options.rank_by` has it, then the number of axes."""
        return self.seconds(found), len(found.mesh.axes)

    def seconds(self, found: Found) -> float:
        """Of a step, as `Options.rank_by` has it."""
        if self.options.rank_by == "sum":
            return found.prediction.step_seconds
        if found.chosen not in self.timed:
            self.timed[found.chosen] = timeline_of(found.chosen).seconds
        return self.timed[found.chosen]

    @staticmethod
    def simplest(found: Found, answers: Sequence[Found]) -> Found:
        """Of answers that take no longer than the one found, nor more than a whit by its score, the fewest axes."""
        time, score = found.prediction.step_seconds * (1 + 1e-9), found.prediction.score * (1 + 1e-2)
        equal = [a for a in answers if a.prediction.step_seconds <= time and a.prediction.score <= score]
        return min(equal, key=lambda a: len(a.mesh.axes))

    def named(self, found: Found, template: str | None) -> Found:
        """The answer with equal names at equal axes, where the user gave names and they do not agree by themselves."""
        answers: dict[int, Found] = {}

        def solve_with(axes: Mapping[str, Axes]) -> tuple[Chosen, float] | None:
            again = self.at(found.mesh, template, [found], exact=False, names=axes)
            if again is None or not again.feasible:
                return None
            answers[id(again.chosen)] = again
            return again.chosen, again.prediction.score

        settled = settle_names(found.chosen, self.places, solve_with)
        return answers[id(settled)] if settled is not None else found


def prepare(
    program: Program, machine: Machine, pins: Pins | Mapping[int, Spec], limit: float | None, options: Options
) -> Search:
    pins = as_pins(pins, program)
    emission = Emission(machine.chip.platform)
    graph = build_graph(program, emission.merges_sums, frozenset(pins.arguments), emission.hoists)
    pins = pins.bind(graph)
    ties = tie(graph, pin_marks(pins), options.tie_radius)
    budget = limit if limit is not None else machine.memory_bytes * options.memory_fraction
    return Search(
        program=program, machine=machine, graph=graph, space=Space.of(graph, ties), classes=dim_classes(graph),
        places=bound_places(graph), pins=pins, limit=float(budget), options=options, models={},
    )


def preferred(found: Sequence[Found]) -> Found:
    """The best of at least one, where a mesh with more axes must be `worth` it. `found`: fewest axes first."""
    best = found[0]
    for f in found[1:]:
        gains = f.prediction.score < best.prediction.score * (1 - Search.worth(best, f))
        if better(f, best) and (gains or not (f.feasible and best.feasible)):
            best = f
    return best


def _roofline(found: Found) -> float:
    """Seconds of computation with its memory traffic and of collectives, one after the other."""
    return found.prediction.step_seconds + found.prediction.traffic_seconds


def better(found: Found, best: Found) -> bool:
    """Whether an answer is to be preferred: one that fits, then less time, or less memory where none fits."""
    if found.feasible != best.feasible:
        return found.feasible
    if not found.feasible:
        return found.prediction.peak_bytes < best.prediction.peak_bytes
    return found.prediction.score < best.prediction.score


def unused(choices: Choices) -> int:
    """The strategy that leaves most axes unused: everything whole, where the pins allow."""
    return int(np.argmin((choices.assign >= 0).sum(axis=1)))


def lifted(found: Found, model: MeshModel) -> tuple[int, ...] | None:
    """The strategies found for a coarser mesh, on a finer one: an axis cut in two splits what it split."""
    groups = _refines(found.mesh.sizes, model.mesh.sizes)
    if groups is None:
        return None
    coarse = found.chosen.model.choices
    out = []
    for mine, theirs, s in zip(model.choices, coarse, found.chosen.choice, strict=True):
        row = theirs.assign[s][groups]
        same = np.flatnonzero((mine.assign == row).all(axis=1))
        if not len(same):
            return None
        out.append(int(same[0]))
    return tuple(out)


def _refines(coarse: Sequence[int], fine: Sequence[int]) -> list[int] | None:
    """For each fine axis the coarse axis that it is a part of, in order; None where they do not nest."""
    out: list[int] = []
    at = 0
    for k, size in enumerate(coarse):
        product = 1
        while product < size and at < len(fine):
            product *= fine[at]
            out.append(k)
            at += 1
        if product != size:
            return None
    return out if at == len(fine) else None


def peaks(chosen: Chosen, limit: float) -> list[int]:
    """Positions where memory is over the limit, one per stretch, the highest first."""
    _, usage = chosen.memory()
    over = np.flatnonzero(usage > limit)
    if not len(over):
        return []
    stretches = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    tops = [int(s[np.argmax(usage[s])]) for s in stretches]
    # a long stretch may hold several different situations
    tops += [int(s[len(s) // 2]) for s in stretches if len(s) > 50] + [int(s[-1]) for s in stretches if len(s) > 50]
    return sorted(dict.fromkeys(tops), key=lambda r: -usage[r])


def too_large(least: Found, limit: float) -> str:
    peak = least.prediction
    shown = "; ".join(f"{format_bytes(h.nbytes)} {h.what}" for h in peak.at_peak[:5])
    return (
        f"no plan fits {format_bytes(limit)} per device: the least achievable peak is {format_bytes(peak.peak_bytes)} "
        f"(mesh {least.mesh}). The largest values at that time: {shown}. Raise memory_limit, take more devices, a "
        f"smaller batch, or rematerialise with jax.checkpoint."
    )


def fixed_mesh(mesh: Mapping[str, int], machine: Machine) -> MeshShape:
    """The user's mesh, which must have as many devices as the machine."""
    shape = MeshShape.of(dict(mesh))
    if not shape.axes or any(s < 1 for s in shape.sizes):
        raise MeshError(f"mesh {dict(mesh)!r}: give one positive size per axis, such as {{'data': {machine.devices}}}.")
    if shape.devices != machine.devices:
        raise MeshError(
            f"mesh {shape} has {shape.devices} devices, machine {machine.name} has {machine.devices}. "
            f"Sizes must multiply to {machine.devices}."
        )
    return shape

