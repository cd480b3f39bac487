"""Reshard paths against a simulation of what every device holds, and their prices."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.core import MeshShape, Spec
from meshplan.cost import FORBIDDEN, Rates, Step, reshard_path
from meshplan.cost._rates import LEAST_SHARE
from meshplan.machine import Machine
from meshplan.plan._extract import settled

MESHES = [MeshShape.of(m) for m in ({"x": 2, "y": 4}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}, {"x": 3, "y": 2})]
Piece = tuple[tuple[int, int], ...]  # first and one past the last index of every dim
Coordinates = dict[str, int]


def spec(*dims: str, unreduced: str = "") -> Spec:
    """`spec("xy", "")`: dim 0 by x then y, dim 1 whole."""
    return Spec(tuple(tuple(d) for d in dims), tuple(unreduced))


# -------------------------------------------------------------------------------- what every device holds


def devices(mesh: MeshShape) -> list[Coordinates]:
    return [dict(zip(mesh.names, at, strict=True)) for at in itertools.product(*map(range, mesh.sizes))]


def piece(at: Coordinates, of: Spec, mesh: MeshShape) -> Piece:
    """What a device holds of an array whose dims all have as many entries as there are devices."""
    found = []
    for axes in of.dims:
        number, parts = 0, 1
        for axis in axes:  # outermost first
            number = number * mesh.size(axis) + at[axis]
            parts *= mesh.size(axis)
        width = mesh.devices // parts
        found.append((number * width, (number + 1) * width))
    return tuple(found)


def entries(p: Piece) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in p)))


def volume(p: Piece) -> int:
    return math.prod(b - a for a, b in p)


def group(at: Coordinates, axes: tuple[str, ...], mesh: MeshShape) -> list[Coordinates]:
    """The devices that differ from one in these axes alone."""
    return [d for d in devices(mesh) if all(d[a] == at[a] for a in mesh.names if a not in axes)]


def inside(small: Piece, big: Piece) -> bool:
    return all(c <= a and b <= d for (a, b), (c, d) in zip(small, big, strict=True))


def obey(before: Spec, step: Step, mesh: MeshShape) -> None:
    """Every device can get what it holds after the step by the step's collective within the step's groups alone."""
    after = step.after
    have = [piece(d, before, mesh) for d in devices(mesh)]
    get = [piece(d, after, mesh) for d in devices(mesh)]
    whole = float(mesh.devices ** len(before.dims))
    gone = set(before.unreduced) - set(after.unreduced)
    assert set(after.unreduced) <= set(before.unreduced)
    assert gone == (set(step.axes) if step.reduces else set())
    largest = max(volume(have[0]), volume(get[0])) / whole
    assert step.fraction == pytest.approx(0.0 if step.kind == "slice" else largest)
    parts = mesh.size(step.axes)
    if step.kind == "all-reduce":
        assert have == get
    elif step.kind in ("reduce-scatter", "slice"):
        assert volume(have[0]) == parts * volume(get[0])
        assert all(inside(small, big) for small, big in zip(get, have, strict=True))
    elif step.kind == "all-gather":
        for d, wanted in zip(devices(mesh), get, strict=True):
            sources = [piece(g, before, mesh) for g in group(d, step.axes, mesh)]
            assert sum(map(volume, sources)) == volume(wanted)
            assert all(inside(s, wanted) for s in sources)
    elif step.kind == "all-to-all":
        assert volume(have[0]) == volume(get[0])
        for d, wanted in zip(devices(mesh), get, strict=True):
            sources = [piece(g, before, mesh) for g in group(d, step.axes, mesh)]
            assert entries(wanted) <= set().union(*map(entries, sources))
    else:
        assert step.kind == "collective-permute"
        assert Counter(have) == Counter(get)
        for d, wanted in zip(devices(mesh), get, strict=True):
            assert wanted in [piece(g, before, mesh) for g in group(d, step.axes, mesh)]


@st.composite
def specs(draw: st.DrawFn, mesh: MeshShape, ndim: int, partial: bool = False) -> Spec:
    dims: list[list[str]] = [[] for _ in range(ndim)]
    unreduced = []
    for axis in draw(st.permutations(mesh.names)):
        place = draw(st.integers(-2 if partial else -1, ndim - 1))
        if place >= 0:
            dims[place].append(axis)
        elif place == -2:
            unreduced.append(axis)
    return Spec(tuple(map(tuple, dims)), tuple(sorted(unreduced)))


@st.composite
def moves(draw: st.DrawFn, ndim: int = 2) -> tuple[MeshShape, Spec, Spec]:
    mesh = draw(st.sampled_from(MESHES))
    source = draw(specs(mesh, ndim, partial=True))
    target = draw(specs(mesh, ndim))
    left = draw(st.sets(st.sampled_from(source.unreduced))) if source.unreduced else set()
    return mesh, source, Spec(target.dims, tuple(sorted(left - set(target.axes))))


def states(source: Spec, steps: tuple[Step, ...]) -> Iterator[tuple[Spec, Step]]:
    for step in steps:
        yield source, step
        source = step.after


# -------------------------------------------------------------------------------------------------- paths


@given(moves())
def test_every_step_is_its_collective_and_the_last_ends_in_the_target(move: tuple[MeshShape, Spec, Spec]):
    mesh, source, target = move
    at = source
    for before, step in states(source, reshard_path(source, target, mesh)):
        assert step.after != before
        obey(before, step, mesh)
        at = step.after
    assert (at.dims, set(at.unreduced)) == (target.dims, set(target.unreduced))


@given(moves(ndim=3))
def test_what_stays_in_place_is_never_gathered_and_what_nobody_wants_once(move: tuple[MeshShape, Spec, Spec]):
    mesh, source, target = move
    gathered: Counter[str] = Counter()
    for before, step in states(source, reshard_path(source, target, mesh)):
        if step.kind != "all-gather":
            continue
        gathered.update(step.axes)
        for d, axes in enumerate(before.dims):
            kept = next((i for i, (a, b) in enumerate(zip(axes, target.dims[d], strict=False)) if a != b),
                        min(len(axes), len(target.dims[d])))  # fmt: skip
            assert step.after.dims[d][:kept] == axes[:kept], "a dim's axes that are as wanted stay"
    for axis in set(source.axes) - set(target.axes):
        assert gathered[axis] == 1
    if len(set(gathered) & set(target.axes)) and not source.unreduced:
        # an axis that is wanted elsewhere is gathered only where exchanges block each other
        blocked = {a for a in source.axes if a in target.axes and place(a, source) != place(a, target)}
        assert set(gathered) & set(target.axes) <= blocked


def place(axis: str, of: Spec) -> int:
    return next(d for d, axes in enumerate(of.dims) if axis in axes)


@given(moves(ndim=3), st.permutations(range(3)), st.integers(0, 3))
def test_equal_moves_have_equal_paths(move: tuple[MeshShape, Spec, Spec], order: list[int], at: int):
    """Where a dim stands among the others changes nothing, nor does a dim that is whole."""
    mesh, source, target = move

    def moved(s: Spec) -> Spec:
        dims = [s.dims[d] for d in order]
        dims.insert(at, ())
        return Spec(tuple(dims), s.unreduced)

    path = reshard_path(source, target, mesh)
    other = reshard_path(moved(source), moved(target), mesh)
    assert [(s.kind, s.axes, s.fraction) for s in path] == [(s.kind, s.axes, s.fraction) for s in other]
    assert [moved(s.after) for s in path] == [s.after for s in other]


@given(moves())
def test_nothing_moves_between_equal_specs(move: tuple[MeshShape, Spec, Spec]):
    mesh, source, target = move
    assert reshard_path(source, source, mesh) == ()
    assert reshard_path(target, target, mesh) == ()


MESH = MeshShape.of({"x": 2, "y": 4})
DOCUMENTED = [
    (spec("", unreduced="x"), spec(""), ["all-reduce x"]),
    (spec("", unreduced="x"), spec("x"), ["reduce-scatter x"]),
    (spec("y", unreduced="x"), spec("y"), ["all-reduce x"]),
    (spec("y", "", unreduced="x"), spec("y", "x"), ["reduce-scatter x"]),
    (spec("y", unreduced="x"), spec("yx"), ["reduce-scatter x"]),
    (spec("", "", unreduced="xy"), spec("xy", ""), ["reduce-scatter xy"]),
    (spec("", "", unreduced="xy"), spec("x", ""), ["reduce-scatter x", "all-reduce y"]),
    # onto two dims at once, or onto a dim that is split already while another axis only reduces: no back end scatters
    (spec("", "", unreduced="xy"), spec("x", "y"), ["all-reduce xy", "slice xy"]),
    (spec("", "", unreduced="xy"), spec("", "", unreduced="y"), ["all-reduce x"]),
    # the scattered dim comes first, gathers last
    (spec("y", "", unreduced="x"), spec("", "x"), ["reduce-scatter x", "all-gather y"]),
    (spec("", "", unreduced="x"), spec("y", ""), ["all-reduce x", "slice y"]),
    (spec("x", ""), spec("", "x"), ["all-to-all x"]),
    (spec("xy", ""), spec("x", "y"), ["all-to-all y"]),
    (spec("xy", ""), spec("", "xy"), ["all-to-all xy"]),
    (spec("xy", ""), spec("y", "x"), ["collective-permute yx", "all-to-all x"]),
    (spec("xy"), spec("yx"), ["collective-permute yx"]),
    (spec("xy"), spec("x"), ["all-gather y"]),
    (spec("xy"), spec("y"), ["collective-permute yx", "all-gather x"]),
    (spec("x"), spec("xy"), ["slice y"]),
    (spec("x"), spec("y"), ["slice y", "collective-permute yx", "all-gather x"]),
    (spec("x"), spec(""), ["all-gather x"]),
    (spec(""), spec("xy"), ["slice xy"]),
    (spec("y", "", "x"), spec("", "xy", ""), ["all-to-all x", "all-to-all y"]),
]


@pytest.mark.parametrize(("source", "target", "steps"), DOCUMENTED, ids=lambda x: str(x) if isinstance(x, Spec) else "")
def test_paths_as_documented(source: Spec, target: Spec, steps: list[str]):
    found = reshard_path(source, target, MESH)
    assert [f"{s.kind} {''.join(s.axes)}" for s in found] == steps


# ------------------------------------------------------------------------------------------------- prices


MACHINES = ["cpu:8", "tpu-v5e:2x4", "h100:1x8", "h100:2x4"]


def all_specs(mesh: MeshShape, ndim: int, partial: bool) -> list[Spec]:
    """Axes of a dim in the mesh's order, as strategies give them."""
    places = range(-2 if partial else -1, ndim)
    found = []
    for at in itertools.product(places, repeat=len(mesh.names)):
        dims = tuple(tuple(a for a, p in zip(mesh.names, at, strict=True) if p == d) for d in range(ndim))
        found.append(Spec(dims, tuple(a for a, p in zip(mesh.names, at, strict=True) if p == -2)))
    return found


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("sizes", [{"a": 8}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}])
def test_tables_are_the_prices_of_each_pair(name: str, sizes: dict[str, int]):
    mesh = MeshShape.of(sizes)
    rates = Rates(Machine.preset(name), mesh)
    sources, targets = all_specs(mesh, 2, partial=True), all_specs(mesh, 2, partial=True)
    table = rates.tables(tuple(sources), tuple(targets))
    assert table.shape[1:] == (len(sources), len(targets))
    alone = Rates(Machine.preset(name), mesh)
    for i, j in itertools.product(range(len(sources)), range(len(targets))):
        assert tuple(table[:, i, j]) == alone.linear(sources[i], targets[j]), (sources[i], targets[j])


def test_tables_of_specs_in_another_order_than_the_mesh():
    mesh = MeshShape.of({"a": 2, "b": 4})
    rates = Rates(Machine.preset("cpu:8"), mesh)
    some = (spec("ab", ""), spec("ba", ""), spec("b", "a"))
    table = rates.tables(some, some)
    assert all(table[0, i, i] == 0 for i in range(3))
    for i, j in itertools.product(range(3), repeat=2):
        assert tuple(table[:, i, j]) == rates.linear(some[i], some[j])
    assert table[:, 0, 1].any()


@given(moves(), st.sampled_from([0.0, 0.5]))
def test_a_price_is_that_of_the_steps_of_the_path(move: tuple[MeshShape, Spec, Spec], share: float):
    mesh, source, target = move
    for name in (f"cpu:{mesh.devices}", f"h100:1x{mesh.devices}"):
        orders = [axes for n in (1, 2, 3) for axes in itertools.permutations(mesh.names, n)]
        shares = {(axes, "float32", waits): share for axes in orders for waits in (True, False)}
        rates = Rates(Machine.preset(name), mesh)
        latency = {True: 0.0, False: 0.0}
        per_byte = {True: 0.0, False: 0.0}
        for step in reshard_path(source, target, mesh):
            if step.kind != "slice":
                kind = "all-reduce" if step.kind == "reduce-scatter" and name.startswith("cpu") else step.kind
                one, rate = rates.collective(kind, step.axes)
                latency[step.reduces] += one
                per_byte[step.reduces] += rate * step.fraction
        found = rates.linear(source, target)
        assert found == pytest.approx((latency[True], latency[False], per_byte[True], per_byte[False]))
        seconds = rates.table([source], [target], 64e6, 32e6)[0, 0]
        assert seconds == pytest.approx(sum(latency.values()) + per_byte[True] * 64e6 + per_byte[False] * 32e6)
        rest = latency[False] + sum(per_byte.values()) * 1e3
        for waits, unknown in ((True, 1.0), (False, LEAST_SHARE)):
            small = rates.table([source], [target], 1e3, 1e3, waits, dtype="float32", shares=shares)[0, 0]
            assert small == pytest.approx(max(share, LEAST_SHARE) * latency[True] + rest)
            other = rates.table([source], [target], 1e3, 1e3, waits, dtype="bfloat16", shares=shares)[0, 0]
            assert other == pytest.approx(unknown * latency[True] + rest)


def test_a_value_that_stays_unreduced_is_not_constrained_on_its_way():
    """A constraint states a complete value: it would make the back end sum before the addition that follows."""
    source, target = spec("x", "", unreduced="y"), spec("", "x", unreduced="y")
    path = reshard_path(source, target, MESH)
    assert path
    assert settled(source, path) == []
    whole = reshard_path(source, spec("", ""), MESH)
    assert settled(source, whole)[-1] == spec("", "")


def test_no_value_becomes_more_unreduced_on_its_way():
    rates = Rates(Machine.preset("cpu:8"), MESH)
    assert rates.linear(spec("x", ""), spec("x", "", unreduced="y"))[0] == FORBIDDEN
    assert rates.linear(spec("", unreduced="x"), spec("", unreduced="y"))[0] == FORBIDDEN
    assert rates.linear(spec("", unreduced="xy"), spec("", unreduced="y"))[0] < 1
    table = rates.table([spec("x"), spec("", unreduced="y")], [spec("", unreduced="y")], 1e6, 1e6)
    assert np.array_equal(table >= FORBIDDEN, [[True], [False]])


@given(moves())
def test_no_path_costs_more_than_to_gather_all_that_is_not_in_place(move: tuple[MeshShape, Spec, Spec]):
    mesh, source, target = move
    rates = Rates(Machine.preset(f"h100:1x{mesh.devices}"), mesh)
    source = source.reduced()
    target = target.reduced()
    dims = [tuple(a for a, b in zip(s, t, strict=False) if s[: s.index(a) + 1] == t[: t.index(b) + 1])
            for s, t in zip(source.dims, target.dims, strict=True)]  # fmt: skip
    between = Spec(tuple(dims))
    assert rates.linear(source, target)[-1] <= rates.linear(source, between)[-1] * (1 + 1e-9)
