"""Cases whose compiled modules tell what a back end emits: operations, reshards and dtypes, each by a stable name.

A case is a small function with specs for its arguments and results over a mesh of eight devices. `rows`
runs them; `predicted` is what the cost model says of the same case.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding

import meshplan
from meshplan.core import CollectiveKind, MeshShape, Spec
from meshplan.cost import Emission, Step, reshard_path
from meshplan.cost._reshard import canonical
from meshplan.lower import Constraints, constrained
from meshplan.lower._hlo import find_collectives
from meshplan.lower._local import local_form
from meshplan.machine import device_order
from meshplan.program import Op, Program
from meshplan.rules import Dims
from tests._micro import Micro, micros

Row = tuple[str, int, int, str]  # kind, group size, bytes, dtype as XLA writes it
ONE, TWO, THREE = MeshShape.of({"x": 8}), MeshShape.of({"x": 2, "y": 4}), MeshShape.of({"x": 2, "y": 2, "z": 2})
TARGETS = {"cpu": "cpu:8", "gpu": "h100:1x8", "tpu": "tpu-v5e:2x4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`fn(mesh)(*args)` under these specs. `expected(emission)`: bytes by kind that the cost model predicts, None for
    programs that no plan makes."""

    name: str
    mesh: MeshShape
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    ins: tuple[Spec, ...]
    outs: tuple[Spec, ...]
    expected: Callable[[Emission], Counter[str]] | None


def short(spec: Spec) -> str:
    """`(x+y, .)`."""
    return "(" + ", ".join("+".join(d) or "." for d in spec.dims) + ")"


# ---------------------------------------------------------------------------------------------------------- operations


def operations(mesh: MeshShape, some: Iterable[Micro] | None = None) -> Iterator[Case]:
    """Ways to give the mesh's axes to the factors of the micro-programs, by default of all."""
    for micro in micros() if some is None else some:
        program, op = micro.program()
        for place in itertools.product(range(-1, len(op.rule.sizes)), repeat=len(mesh.names)):
            # on several axes only what one axis does not tell: two factors at once, each pair once
            told = len(place) > 1 and any(f < 0 or f >= g for f, g in itertools.pairwise(place))
            if not told and legal(op.rule.sizes, (*op.rule.operands, *op.rule.results), place, mesh):
                yield from _operation(micro, program, op, place, mesh)


def legal(sizes: Sequence[int], values: Sequence[Dims], place: Sequence[int], mesh: MeshShape) -> bool:
    """Whether some axis splits a factor, all divide, and minor factors are split only after their major ones."""
    split: Counter[int] = Counter()
    for axis, f in zip(mesh.names, place, strict=True):
        if f >= 0:
            split[f] = (split[f] or 1) * mesh.size(axis)
    if not split or any(sizes[f] % n for f, n in split.items()):
        return False
    return not any(
        minor in split and (split[major] or 1) != sizes[major]
        for dims in values for d in dims for major, minor in itertools.pairwise(d)
    )


def _operation(micro: Micro, program: Program, op: Op, place: Sequence[int], mesh: MeshShape) -> Iterator[Case]:
    rule = op.rule

    def spec(dims: Dims) -> Spec:
        return Spec(tuple(tuple(a for f in d for a, g in zip(mesh.names, place, strict=True) if g == f) for d in dims))

    read, left = [spec(d) for d in rule.operands], [spec(d) for d in rule.results]
    ins = [Spec.replicated(len(a.shape)) for a in micro.args]
    for v, s in zip(op.operands, read, strict=True):
        if v is not None and v < len(ins):
            ins[v] = s
    outs = tuple(left[op.results.index(leaf.value) if leaf.value in op.results else 0] for leaf in program.results)
    sums = {f for f in place if f in rule.reduced_factors()}
    form = local_form(op, read, left, mesh)

    def expected(emission: Emission) -> Counter[str]:
        found: Counter[str] = Counter()
        times = len(sums) if form is None and not emission.joins_sums else min(len(sums), 1)
        for aval, s in zip(op.view.results, left, strict=True):
            local = aval.nbytes * emission.bytes_factor(aval.dtype, sums=True) / s.shards(mesh)
            found["all-reduce"] += round(times * local)
        for extra in emission.extras(op.view, rule) if form is None else ():
            s = read[extra.operand]
            if over := s.dims[extra.dim]:
                nbytes = op.view.operands[extra.operand].nbytes * mesh.size(over) / s.shards(mesh)
                found[extra.kind] += round(nbytes)
        return +found

    def fn(mesh: Any) -> Callable[..., Any]:
        return constrained(program.jaxpr, Constraints({}, {}, {} if form is None else {op.key: form}), mesh)

    def alone(mesh: Any) -> Callable[..., Any]:
        return constrained(program.jaxpr, Constraints({}, {}), mesh)

    text = f"{micro.name}: {' '.join(map(short, read))} -> {' '.join(map(short, left))}"
    common: dict[str, Any] = {"mesh": mesh, "args": micro.args, "ins": tuple(ins), "outs": outs}
    yield Case(name=text, fn=fn, expected=expected, **common)
    if form is not None:
        yield Case(name=f"{text} (XLA alone)", fn=alone, expected=None, **common)


# ------------------------------------------------------------------------------------------------------------ reshards


def reshards(mesh: MeshShape, ndim: int, every: int = 1) -> Iterator[Case]:
    """Moves between specs of an array (one of `every` so many), every step of the path stated.

    Moves that differ only in which dim is which count once.
    """
    shape, seen = (128, 64, 32)[:ndim], set()
    places = list(itertools.product(range(-1, ndim), repeat=len(mesh.names)))
    for one, two in itertools.product(places, repeat=2):
        source, target = (
            Spec(tuple(tuple(n for n, p in zip(mesh.names, place, strict=True) if p == d) for d in range(ndim)))
            for place in (one, two)
        )
        key = canonical(source, target)[1:]
        if source == target or key in seen:
            continue
        seen.add(key)
        if len(seen) % every == 0:
            yield _reshard(source, target, shape, mesh)


def _reshard(source: Spec, target: Spec, shape: tuple[int, ...], mesh: MeshShape) -> Case:
    path = reshard_path(source, target, mesh)
    aval = jax.ShapeDtypeStruct(shape, jnp.float32)

    def expected(emission: Emission) -> Counter[str]:
        return bytes_of_path(path, 4 * math.prod(shape), emission)

    def fn(mesh: Any) -> Callable[..., Any]:
        def moved(x: Any) -> Any:
            for step in path:
                x = lax.with_sharding_constraint(x, NamedSharding(mesh, step.after.partition_spec()))
            return [x]

        return moved

    return Case(
        name=f"move {short(source)} -> {short(target)}", mesh=mesh, fn=fn, args=(aval,), ins=(source,), outs=(target,),
        expected=expected,
    )


def bytes_of_path(path: Sequence[Step], nbytes: float, emission: Emission) -> Counter[str]:
    """Bytes by kind of collective."""
    found: Counter[str] = Counter()
    for step in path:
        kind = emission.kind(step)
        if kind is not None:
            found[kind] += round(step.fraction * nbytes)
    return found


# -------------------------------------------------------------------------------------------------------------- dtypes

DTYPES = (
    "bool", "int8", "uint8", "int16", "int32", "uint32", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16",
    "float32", "complex64",
)  # fmt: skip


def dtypes() -> Iterator[Case]:
    """Every kind of collective on arrays of every dtype."""
    for name in DTYPES:
        yield from _of_dtype(jnp.dtype(name))


def _of_dtype(dtype: Any) -> Iterator[Case]:
    x, n = jax.ShapeDtypeStruct((16, 512, 512), dtype), 16 * 512 * 512 * dtype.itemsize
    whole, row, column = Spec(((), (), ())), Spec((("x",), (), ())), Spec(((), ("x",), ()))
    combine = lax.reduce_or_p if dtype == jnp.bool_ else lax.reduce_sum_p

    def summed(mesh: Any) -> Callable[..., Any]:
        def fn(x: Any) -> Any:
            y = combine.bind(x, axes=(0,), **({} if dtype == jnp.bool_ else {"out_sharding": None}))
            return [lax.with_sharding_constraint(y, NamedSharding(mesh, jax.P()))]

        return fn

    def same(mesh: Any) -> Callable[..., Any]:
        return lambda x: [x]

    def case(what: str, fn: Any, ins: Spec, outs: Spec, kind: CollectiveKind, nbytes: int) -> Case:
        def expected(emission: Emission) -> Counter[str]:
            here = "all-reduce" if kind == "reduce-scatter" and not emission.scatters(dtype.name) else kind
            return Counter({here: round(nbytes * emission.bytes_factor(dtype.name, sums="reduce" in kind))})

        name = f"{what} of {dtype.name}"
        return Case(name=name, mesh=ONE, fn=fn, args=(x,), ins=(ins,), outs=(outs,), expected=expected)

    yield case("all-gather", same, row, whole, "all-gather", n)
    yield case("all-to-all", same, row, column, "all-to-all", n // 8)
    yield case("sum", summed, row, Spec(((), ())), "all-reduce", n // 16)
    yield case("sum and split", summed, row, Spec((("x",), ())), "reduce-scatter", n // 16)


def cases() -> Iterator[Case]:
    """All of them; names are unique within a mesh."""
    yield from dtypes()
    yield from operations(ONE)
    yield from operations(TWO)
    for mesh, ndim, every in ((TWO, 2, 1), (TWO, 3, 1), (THREE, 2, 3)):
        yield from reshards(mesh, ndim, every)


# ------------------------------------------------------------------------------------------------------------ compiled


def make_mesh(mesh: MeshShape, devices: Sequence[Any]) -> Mesh:
    grid = np.array(device_order(list(devices))).reshape(mesh.sizes)
    return Mesh(grid, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names))


def compiled(case: Case, devices: Sequence[Any]) -> Any:
    """The case's executable for these devices."""
    mesh = make_mesh(case.mesh, devices)
    ins, outs = (tuple(NamedSharding(mesh, s.partition_spec()) for s in side) for side in (case.ins, case.outs))
    jitted = jax.jit(lambda *args: tuple(case.fn(mesh)(*args)), in_shardings=ins, out_shardings=outs)
    return jitted.lower(*case.args).compile()


def emitted(case: Case, devices: Sequence[Any]) -> list[Row]:
    """The collectives of the case's module, in its order."""
    found = find_collectives(compiled(case, devices).as_text(), case.mesh)
    return [(c.kind, c.group_size, c.nbytes, c.dtype) for c in (f.collective for f in found)]


def by_kind(rows: Sequence[Row]) -> Counter[str]:
    """Bytes by kind."""
    found: Counter[str] = Counter()
    for kind, _, nbytes, _ in rows:
        found[kind] += nbytes
    return found


# -------------------------------------------------------------------------------------------------------------- tables


def key(case: Case) -> str:
    """Of the case in a table: its mesh and its name."""
    return f"{'x'.join(map(str, case.mesh.sizes))} {case.name}"


def table_path(platform: str) -> Path:
    return Path(meshplan.__file__).parent / "cost" / "emission" / f"{platform}.json"


def read_table(platform: str, version: str) -> dict[str, Any]:
    """Answers by key: rows, or in words why there are none; {} where the version was never measured."""
    path = table_path(platform)
    versions = json.loads(path.read_text())["versions"] if path.is_file() else {}
    oldest = next(iter(versions), "")
    answers = versions.get(oldest, {}) | versions[version] if version in versions else {}
    return {name: [tuple(row) for row in a] if isinstance(a, list) else a for name, a in answers.items()}
