"""Random programs: planned in some way, run on eight devices, compared with one device.

`random_program(rng)` writes one (`_fuzz_ops` and `_fuzz_control` have the lines), `random_way(rng)` says how it is
planned, `check` does it, `reduced` takes lines away as long as it fails in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import re
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import meshplan as mp
from meshplan._api._planning import answer
from meshplan.core import MeshShape
from meshplan.cost import Chosen, MeshModel
from meshplan.plan import Found, Search, prepare
from meshplan.program import Call, trace
from meshplan.solve._descend import descend
from meshplan.strategy import TEMPLATES, UNREDUCED, Edge
from tests._fuzz_control import table, write
from tests._fuzz_writer import PRELUDE, SIZES, Line, Skip, Var, Writer, count, free_variables

MESHES: tuple[dict[str, int], ...] = (
    {"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4}, {"data": 2, "fsdp": 2, "model": 2},
)  # fmt: skip
MODES = ("forward", "gradient", "gradient", "descent", "momentum")
# Neither LLVM's work nor the emission of fused loops is tested here, and both take most of a compile's time.
FAST_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False
# On one device too, XLA of jax 0.10 gets a slice of a slice wrong where a start is out of range: its simplifier adds
# the starts before they are clamped. What one device computes without that pass is what the step says.
PLAIN_COMPILE = {**FAST_COMPILE, "xla_disable_hlo_passes": "algsimp"}
QUICK = mp.Options(solver_seconds=1.0)

# Sums of up to some thousand 32-bit numbers in another order: 1e-4 of a leaf's norm (3e-2 for 16 bits). What a change
# of the arguments by 1e-6 does to a leaf is allowed a hundred times over: a program may be badly conditioned.
TOLERANCE, HALF_TOLERANCE, CHANGE, MARGIN = 1e-4, 3e-2, 1e-6, 100.0
FLOOR = 4e-6  # of the largest value at hand: what remains of a sum that cancels


@dataclass(frozen=True, slots=True)
class Program:
    """Lines and what is done with them. Arguments are what the lines read and none makes."""

    lines: tuple[Line, ...]
    results: tuple[Var, ...]
    mode: str
    seed: int

    def arguments(self) -> tuple[Var, ...]:
        known = {v.name for line in self.lines for v in line.makes}
        more = {v.name: v for v in self.results if v.name not in known}
        return tuple((free_variables(self.lines) | more).values())

    def trees(self) -> tuple[Any, Any]:
        """Parameters and batch as pytrees of variables: nested dicts, lists, tuples."""
        floats = [v for v in self.arguments() if v.dtype == "float32" and number(v) % 5 != 4]
        rest = [v for v in self.arguments() if v not in floats]
        top = {v.name: v for v in floats if number(v) % 3 == 0}
        params = {
            "top": top, "layers": [{"w": v} for v in floats if number(v) % 3 == 1],
            "pair": tuple(v for v in floats if number(v) % 3 == 2),
        }  # fmt: skip
        return params, {"ids": [v for v in rest if v.bound], "more": {v.name: v for v in rest if not v.bound}}

    def source(self) -> str:
        """A module with `step`, runnable by itself but for the arguments."""
        params, batch = self.trees()
        places = [*paths(params, "params"), *paths(batch, "batch")]
        unpack = [f"{v} = {place}" for place, v in places]
        parts = [[v for v in self.results if number(v) % 3 == k] for k in range(3)]
        named = ", ".join(f"{v.name!r}: {v}" for v in parts[0])
        ends = [f"return {{{named}}}, [{', '.join(map(str, parts[1]))}], ({''.join(f'{v}, ' for v in parts[2])})"]
        lines = [*unpack, *itertools.chain.from_iterable(render(line) for line in self.lines), *ends]
        shapes = ", ".join(f"{v}: {v.dtype}{list(v.shape)}" for _, v in places)
        return "\n".join([
            PRELUDE, "", f"# {shapes}", "def forward(params, batch):", *indented(lines), "", "", STEPS[self.mode], "",
        ])  # fmt: skip

    def step(self) -> Callable[..., Any]:
        return function_of(self.source())

    def values(self, change: float = 0.0, seed: int = 0) -> tuple[Any, Any]:
        """Arguments of the step; floats changed relatively by at most `change`."""
        rng, other = np.random.default_rng(self.seed), np.random.default_rng(seed)
        made = {v.name: value(v, rng, np.float32(1) + change * signs(v, other)) for v in self.arguments()}
        params, batch = jax.tree.map(lambda v: made[v.name], self.trees())
        if self.mode == "momentum":
            params = {"w": params, "m": jax.tree.map(lambda x: 0.1 * x, params)}
        return params, batch


STEPS = {
    "forward": "def step(params, batch):\n    return forward(params, batch)",
}
LOSS = '''\
def loss(params, batch):
    outs = forward(params, batch)
    floats = [x for x in jax.tree.leaves(outs) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((jnp.mean(jnp.sin(x.astype(jnp.float32))) for x in floats), 0.0 * TABLE[0, 0]), outs
'''
STEPS["gradient"] = f'''{LOSS}

def step(params, batch):
    (value, outs), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
    return value, grads, outs'''
STEPS["descent"] = f'''{LOSS}

def step(params, batch):
    (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value'''
STEPS["momentum"] = f'''{LOSS}

def step(state, batch):
    (value, _), grads = jax.value_and_grad(loss, has_aux=True)(state["w"], batch)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    return {{"w": jax.tree.map(lambda p, m: p - 0.1 * m, state["w"], m), "m": m}}, value'''


def number(v: Var) -> int:
    return int(v.name[1:])


def paths(tree: Any, root: str) -> Iterator[tuple[str, Var]]:
    """(how the step reaches it, variable) for every leaf."""
    if isinstance(tree, Var):
        yield root, tree
    elif isinstance(tree, dict):
        for key, entry in tree.items():
            yield from paths(entry, f"{root}[{key!r}]")
    else:
        for k, entry in enumerate(tree):
            yield from paths(entry, f"{root}[{k}]")


def indented(lines: Iterable[str]) -> list[str]:
    return [textwrap.indent(line, "    ") for line in lines]


def render(line: Line) -> list[str]:
    out: list[str] = []
    for body in line.bodies:
        inside = [text for inner in body.lines for text in render(inner)]
        out += [*body.head.split("\n"), *indented([*inside, body.tail])]
    return [*out, line.text]


@functools.lru_cache(maxsize=8)
def function_of(source: str) -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(compile(source, "<fuzz>", "exec"), names)
    return names["step"]


def value(v: Var, rng: np.random.Generator, factor: Any) -> Any:
    if v.dtype == "bool":
        return rng.random(v.shape) < 0.5
    if v.dtype == "int32":
        return rng.integers(0, max(v.bound, 1), v.shape).astype(np.int32)
    return np.asarray(rng.uniform(-1, 1, v.shape).astype(np.float32) * factor, np.float32).astype(v.dtype)


def signs(v: Var, rng: np.random.Generator) -> Any:
    return rng.uniform(-1, 1, v.shape).astype(np.float32)


# ------------------------------------------------------------------------------------------------- making


def random_program(rng: random.Random, least: int = 20, most: int = 45) -> Program:
    """Lines of `least` to `most` operations as written, bodies included; and which values are results."""
    w = Writer(rng, halves=rng.random() < 0.1)
    for _ in range(rng.randrange(2, 5)):
        with contextlib.suppress(Skip):  # too large
            w.argument(tuple(w.size() for _ in range(rng.randrange(1, 5))))
    w.argument((w.size(), w.size()))
    w.argument((w.size(),), bound=w.choice(SIZES[2:]))
    if w.chance(0.5):
        w.argument((w.size(),), dtype="bool")
    write(w, rng.randrange(least, most), table())
    unread = {v.name for v in w.pool} - {v.name for line in w.lines for v in all_reads(line)}
    made = [v for line in w.lines for v in line.makes]
    wanted = [v for v in made if v.name in unread or w.chance(0.1)]
    return Program(tuple(w.lines), tuple(wanted), w.choice(MODES), rng.randrange(1 << 16))


def all_reads(line: Line) -> Iterator[Var]:
    yield from line.reads
    for body in line.bodies:
        yield from body.gives
        for inner in body.lines:
            yield from all_reads(inner)


@dataclass(frozen=True, slots=True)
class Way:
    """How a program is planned: `kind` and a seed for what it leaves open."""

    kind: str
    mesh: dict[str, int]
    seed: int
    machine: str = "cpu:8"


# random: any legal strategy everywhere. priced: the best for random prices. mixed: the best, some of it thrown over.
KINDS = ("random", "random", "priced", "priced", "priced", "mixed", "mixed", "planned", "planned", "template", "pinned")
REFUSED = ("tight", "indivisible")


def random_way(rng: random.Random) -> Way:
    kind = rng.choice(KINDS) if rng.random() < 0.94 else rng.choice(REFUSED)
    machine = rng.choice(("cpu:8", "cpu:8", "cpu:8", "h100:1x8", "tpu-v5e:2x4"))
    return Way(kind, dict(rng.choice(MESHES)), rng.randrange(1 << 16), machine)


# ------------------------------------------------------------------------------------------------ planning


def planned(program: Program, way: Way) -> mp.Plan:
    """The program planned in this way. Raises what meshplan raises."""
    rng = random.Random(way.seed)
    args = jax.eval_shape(lambda: program.values())
    donate = (0,) if program.mode in ("descent", "momentum") else ()
    make = functools.partial(
        mp.plan, program.step(), *args, machine=way.machine, mesh=way.mesh, donate_argnums=donate, options=QUICK
    )
    if way.kind == "planned":
        return make()
    if way.kind == "tight":
        free = make()
        plan = make(memory_limit=max(1.0, free.peak_bytes * rng.choice((0.3, 0.7, 0.95))))
        assert plan.peak_bytes <= plan.data.memory_limit, (plan.peak_bytes, plan.data.memory_limit)
        return plan
    call = Call(step=program.step(), args=args, kwargs={}, donate_argnums=donate)
    search = prepare(trace(call), mp.Machine.preset(way.machine), {}, None, QUICK)
    if way.kind in ("pinned", "indivisible"):
        pins = random_pins(rng, search, way.mesh, way.kind == "pinned")
        return make(pins=pins)
    mesh = MeshShape.of(way.mesh)
    found = chosen(search, mesh, way.kind, rng)
    return answer(search, call, found, [found], {}, QUICK, 0.0)


def chosen(search: Search, mesh: MeshShape, kind: str, rng: random.Random) -> Found:
    """Strategies that no cost model would choose, or a template's."""
    if kind == "template":
        names = [t for t in TEMPLATES if len(mesh.axes) > 1 or t in ("dp", "zero1", "fsdp")]
        found = search.at(mesh, rng.choice(names), exact=False)
        if found is not None:
            return found
    model = MeshModel(search.space, search.machine, mesh)
    numbers = np.random.default_rng(rng.randrange(1 << 16))
    choice = [int(numbers.integers(len(c))) for c in model.choices]
    if kind in ("priced", "mixed"):
        problem = model.problem((), np.inf)
        if kind == "priced":
            prices = [numbers.exponential(1e-5, len(c)) * (c.split.prod(axis=1) ** -0.5) for c in model.choices]
            problem = replace(problem, node_costs=tuple(prices))
        best = descend(problem, [c.assign for c in model.choices], closed(model, choice), seconds=1.0).choice
        thrown = 0.15 if kind == "mixed" else 0.0
        choice = [r if numbers.random() < thrown else b for r, b in zip(choice, best, strict=True)]
    picked = Chosen(model, closed(model, choice))
    return Found(mesh, picked, picked.predict(), 0.0, True)


def closed(model: MeshModel, choice: Sequence[int]) -> list[int]:
    """The choice with sums completed that were wanted open after they had been completed."""
    out, numbers = list(choice), np.random.default_rng(0)
    for _ in range(len(out)):
        now = Chosen(model, out)
        bad = {model.space.ties.class_of[e.target] for e in now.graph.edges if more_open(now, e)}
        if not bad:
            return out
        for c in sorted(bad):
            out[c] = int(numbers.choice(np.flatnonzero((model.choices[c].assign != UNREDUCED).all(axis=1))))
    return out


def more_open(now: Chosen, edge: Edge) -> bool:
    return not set(now.target_spec(edge).unreduced) <= set(now.source_spec(edge).unreduced)


def random_pins(rng: random.Random, search: Search, mesh: dict[str, int], legal: bool) -> dict[str, PartitionSpec]:
    """Specs for some arguments; if not legal, one of a dim that does not divide."""
    pins: dict[str, PartitionSpec] = {}
    for leaf in rng.sample(search.program.args, min(3, len(search.program.args))):
        free = list(mesh)
        rng.shuffle(free)
        entries: list[Any] = []
        for n in leaf.aval.shape:
            axis = free[-1] if free else None
            fits = axis is not None and n % mesh[axis] == 0
            entries.append(free.pop() if fits and rng.random() < 0.7 else None)
            if not legal and axis is not None and not fits and n % mesh[axis]:
                entries[-1] = free.pop()
                return {re.escape(leaf.path): PartitionSpec(*entries)}
        pins[re.escape(leaf.path)] = PartitionSpec(*entries)
    return pins


# ------------------------------------------------------------------------------------------------ checking


@dataclass(frozen=True, slots=True)
class Outcome:
    """`kind`: same, wrong, crashed or refused. `stage`: how far it came. `leaves`: compared, and left out for being
    badly conditioned."""

    kind: str
    stage: str = ""
    detail: str = ""
    leaves: tuple[int, int] = (0, 0)

    @property
    def ok(self) -> bool:
        return self.kind in ("same", "refused")

    def like(self, other: Outcome) -> bool:
        """Whether this is the same failure, as far as can be told."""
        first = [re.sub(r"\d+", "#", o.detail.strip().splitlines()[-1] if o.detail else "")[:60] for o in (self, other)]
        return (self.kind, self.stage) == (other.kind, other.stage) and (self.kind == "wrong" or first[0] == first[1])


@dataclass
class Stage:
    """The name of what is being done, for a failure's report."""

    name: str = field(default="one device")


def check(program: Program, way: Way) -> Outcome:
    """Plan, compile, run, compare."""
    stage = Stage()
    try:
        wanted = reference(program)
        stage.name = "plan"
        plan = planned(program, way)
        if way.kind == "indivisible" and plan.pins and not legal_pins(plan):
            return Outcome("wrong", "plan", "an indivisible pin was accepted")
        stage.name = "compile"
        args = program.values()
        compiled = plan.jit().lower(*args).compile(FAST_COMPILE)
        stage.name = "run"
        found = compiled(*args)
        stage.name = "compare"
        return compared(plan, found, wanted)
    except mp.MeshplanError as error:
        return refusal(way, error)
    except Exception:
        return Outcome("crashed", stage.name, traceback.format_exc())


def refusal(way: Way, error: mp.MeshplanError) -> Outcome:
    """A refusal has a reason, and is asked for: by a limit, or by a pin on a dim that does not divide or is scanned."""
    text = str(error)
    scanned = r"says .*, which no strategy stores: dim \d+ stays whole, as the dim that a scan runs over has to"
    reasons = {
        "pinned": scanned,
        "indivisible": rf"dim \d+ has \d+ entries, \d+ is not divisible by \d+ .*Choices: |{scanned}",
        "tight": r"no plan fits .* per device: the least achievable peak is ",
    }
    if way.kind in reasons and re.search(reasons[way.kind], text, re.S):
        return Outcome("refused", "plan", text)
    return Outcome("crashed", "plan", f"refused without need: {type(error).__name__}: {text}")


def legal_pins(plan: mp.Plan) -> bool:
    """Whether all arguments that were pinned divide."""
    shape = plan.data.mesh
    return all(
        n % shape.size(axes) == 0 for a in plan.data.arguments for n, axes in zip(a.shape, a.spec.dims, strict=True)
    )


@functools.lru_cache(maxsize=4)
def reference(program: Program) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(every leaf of the result on one device, how far each moves when the arguments change a little)."""
    lowered = jax.jit(program.step()).lower(*program.values())
    try:
        compiled = lowered.compile(PLAIN_COMPILE)
    except jax.errors.JaxRuntimeError:  # the simplifier also writes what the CPU cannot do otherwise
        compiled = lowered.compile(FAST_COMPILE)

    def leaves(*args: Any) -> list[np.ndarray]:
        return [np.asarray(x) for x in jax.tree.leaves(compiled(*args))]

    plain = leaves(*program.values())
    moved = [leaves(*program.values(CHANGE, seed)) for seed in (1, 2)]
    return plain, [np.maximum(*(distance(m[i], x) for m in moved)) for i, x in enumerate(plain)]


def distance(a: np.ndarray, b: np.ndarray) -> Any:
    kind = np.float64
    if a.dtype.kind in "iub":
        return np.float64(np.sum(a != b))
    with np.errstate(invalid="ignore"):
        return np.linalg.norm((a.astype(kind) - b.astype(kind)).ravel())


def compared(plan: mp.Plan, found: Any, wanted: tuple[list[np.ndarray], list[Any]]) -> Outcome:
    """Every leaf within its tolerance and placed as planned."""
    program, mesh = plan.program, plan.mesh()
    assert program is not None
    leaves = jax.tree.leaves(found)
    floats = [b.astype(np.float64) for b in wanted[0] if b.dtype.kind not in "iub"]
    top = max((float(np.abs(b).max(initial=0.0)) for b in floats), default=0.0)
    halves = any(v.aval.dtype == "bfloat16" for v in program.values)
    faults, left_out = [], 0
    for x, b, moved, about in zip(leaves, wanted[0], wanted[1], plan.data.results, strict=True):
        a = np.asarray(x)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            faults.append(f"{about.path}: {a.dtype}{a.shape}, one device {b.dtype}{b.shape}")
            continue
        if not x.sharding.is_equivalent_to(NamedSharding(mesh, about.spec.partition_spec()), x.ndim):
            faults.append(f"{about.path}: placed as {x.sharding}, planned {about.spec}")
        off, size = distance(a, b), 1.0 if b.dtype.kind in "iub" else np.linalg.norm(b.astype(np.float64).ravel())
        if not np.isfinite(moved) or MARGIN * moved > 0.1 * size + FLOOR * top:
            left_out += 1
        elif b.dtype.kind in "iub":
            faults += [f"{about.path}: {int(off)} of {b.size} entries differ"] if off else []
        else:
            floor = FLOOR * top * np.sqrt(max(b.size, 1))
            allowed = (HALF_TOLERANCE if halves else TOLERANCE) * size + MARGIN * moved + floor
            if not off <= allowed:
                faults.append(f"{about.path}: off by {off:.3g}, norm {size:.3g}, allowed {allowed:.3g}")
    if faults:
        return Outcome("wrong", "compare", "\n".join(faults), (len(leaves), left_out))
    return Outcome("same", leaves=(len(leaves), left_out))


# ------------------------------------------------------------------------------------------------ reducing


def reduced(program: Program, way: Way, failure: Outcome, tries: int = 150) -> tuple[Program, Outcome]:
    """A program with fewer lines that fails alike. What a line made becomes an argument where something reads it."""
    best, seen = (program, failure), 0

    def better(candidate: Program) -> bool:
        nonlocal best, seen
        seen += 1
        outcome = check(candidate, way)
        if not outcome.ok and outcome.like(failure):
            best = (candidate, outcome)
            return True
        return False

    step = max(1, len(program.lines) // 2)
    while step and seen < tries:
        at = 0
        while at < len(best[0].lines) and seen < tries:
            if not better(without(best[0], at, at + step)):
                at += step
        step //= 2
    for result in program.results:
        if len(best[0].results) > 1 and result in best[0].results and seen < tries:
            better(replace(best[0], results=tuple(v for v in best[0].results if v != result)))
    if best[0].mode != "forward":
        better(replace(best[0], mode="forward"))
    while seen < 2 * tries and any(better(candidate) for candidate in shallower(best[0])):
        pass
    return best


def without(program: Program, start: int, stop: int) -> Program:
    """The program without some of its lines; results that they made are none any more, what they read is."""
    gone = {v.name for line in program.lines[start:stop] for v in line.makes}
    lines = program.lines[:start] + program.lines[stop:]
    results = tuple(v for v in program.results if v.name not in gone)
    if not results:
        results = tuple(v for line in lines[-1:] for v in line.makes)
    return replace(program, lines=lines, results=results)


def shallower(program: Program) -> Iterator[Program]:
    """The program with one line of a body left out, what it made being closed over."""
    for i, line in enumerate(program.lines):
        for b, body in enumerate(line.bodies):
            for k in range(len(body.lines)):
                less = replace(body, lines=body.lines[:k] + body.lines[k + 1 :])
                bodies = (*line.bodies[:b], less, *line.bodies[b + 1 :])
                less_line = replace(line, bodies=bodies)
                yield replace(program, lines=(*program.lines[:i], less_line, *program.lines[i + 1 :]))


def made_from(seed: int) -> tuple[Program, Way]:
    """The program and the way of a seed."""
    rng = random.Random(seed)
    return random_program(rng), random_way(rng)


def report(program: Program, way: Way, outcome: Outcome) -> str:
    """What failed, as source that can be run."""
    return (
        f"{program.source()}\n# {way}\n# mode {program.mode}, values of seed {program.seed}, {count(program.lines)} "
        f"operations\n# {outcome.kind} at {outcome.stage}:\n{textwrap.indent(outcome.detail, '# ')}\n"
    )
