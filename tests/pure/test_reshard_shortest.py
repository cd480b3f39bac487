"""Reshard paths are the cheapest, and stay within what the dims of an array can be cut into."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.core import MeshShape, Spec
from meshplan.cost import Rates, Step, reshard_path
from meshplan.cost._reshard import room_of
from meshplan.cost._shortest import STEP
from meshplan.machine import Machine

MESHES = [MeshShape.of(m) for m in ({"x": 2, "y": 4}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}, {"x": 3, "y": 2})]


def specs(mesh: MeshShape, ndim: int) -> st.SearchStrategy[Spec]:
    places = st.lists(st.integers(-1, ndim - 1), min_size=len(mesh.names), max_size=len(mesh.names))

    def made(at: list[int]) -> Spec:
        return Spec(tuple(tuple(a for a, p in zip(mesh.names, at, strict=True) if p == d) for d in range(ndim)))

    return places.map(made)


def cost(path: tuple[Step, ...], mesh: MeshShape) -> float:
    """What a ring sends, as a part of the array, and a little for every collective."""
    total = 0.0
    for step in path:
        if step.kind != "slice":
            n = mesh.size(step.axes)
            total += STEP + step.fraction * (1 if step.kind == "collective-permute" else (n - 1) / n)
    return total


@given(st.sampled_from(MESHES), st.data())
def test_no_way_by_a_third_spec_is_cheaper(mesh: MeshShape, data: st.DataObject):
    a, b, c = (data.draw(specs(mesh, 2)) for _ in range(3))
    used = {d for s in (a, c) for d in range(2) if s.dims[d]}
    if any(b.dims[d] for d in range(2) if d not in used) or set(b.axes) - {*a.axes, *c.axes}:
        return  # a path does not go over dims or axes that neither end splits
    straight = cost(reshard_path(a, c, mesh), mesh)
    assert straight <= cost(reshard_path(a, b, mesh), mesh) + cost(reshard_path(b, c, mesh), mesh) + 1e-9


@given(st.sampled_from(MESHES), st.data())
def test_no_step_cuts_a_dim_into_more_shards_than_divide_it(mesh: MeshShape, data: st.DataObject):
    source, target = data.draw(specs(mesh, 3)), data.draw(specs(mesh, 3))
    shape = []
    for a, b in zip(source.dims, target.dims, strict=True):
        least = math.lcm(mesh.size(a), mesh.size(b))
        shape.append(least * data.draw(st.sampled_from([1, 2, 3, 5])))
    for step in reshard_path(source, target, mesh, room_of(tuple(shape), mesh)):
        assert all(n % mesh.size(axes) == 0 for n, axes in zip(shape, step.after.dims, strict=True)), (shape, step)


@pytest.mark.parametrize(("sizes", "kinds"), [
    ({"x": 2, "y": 2}, ["collective-permute"]),  # devices swap their pieces
    ({"x": 4, "y": 4}, ["collective-permute"]),
    ({"x": 2, "y": 4}, ["all-to-all", "all-to-all", "all-to-all"]),
    ({"x": 4, "y": 2}, ["all-to-all", "all-to-all", "all-to-all"]),
])  # fmt: skip
def test_axes_of_two_dims_change_places_without_a_gather(sizes: dict[str, int], kinds: list[str]):
    path = reshard_path(Spec((("x",), ("y",))), Spec((("y",), ("x",))), MeshShape.of(sizes))
    assert [s.kind for s in path] == kinds
    assert all(s.fraction == pytest.approx(1 / math.prod(sizes.values())) for s in path)


def test_what_is_split_further_is_split_before_it_moves():
    """Half the bytes of moving first."""
    path = reshard_path(Spec((("x",), ())), Spec(((), ("x", "y"))), MeshShape.of({"x": 2, "y": 4}))
    assert [(s.kind, s.fraction) for s in path] == [("slice", 0.0), ("all-to-all", 1 / 8)]


def test_a_dim_without_room_is_gathered():
    mesh = MeshShape.of({"x": 2, "y": 4})
    source, target = Spec((("x",),)), Spec((("y",),))
    assert [s.kind for s in reshard_path(source, target, mesh)] == ["slice", "collective-permute", "all-gather"]
    assert [s.kind for s in reshard_path(source, target, mesh, (4,))] == ["all-gather", "slice"]


@pytest.mark.parametrize("room", [(4, 8), (8, 2), (2, 2), (4, 4)])
@pytest.mark.parametrize("sizes", [{"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}])
def test_tables_are_the_prices_of_each_pair_in_the_room_there_is(sizes: dict[str, int], room: tuple[int, ...]):
    mesh = MeshShape.of(sizes)
    all_specs = []
    for at in itertools.product(range(-1, 2), repeat=len(mesh.names)):
        spec = Spec(tuple(tuple(a for a, p in zip(mesh.names, at, strict=True) if p == d) for d in range(2)))
        if all(n % mesh.size(axes) == 0 for n, axes in zip(room, spec.dims, strict=True)):
            all_specs.append(spec)
    rates, alone = (Rates(Machine.preset("h100:1x8"), mesh) for _ in range(2))
    table = rates.tables(tuple(all_specs), tuple(all_specs), room)
    for (i, a), (j, b) in itertools.product(enumerate(all_specs), repeat=2):
        assert tuple(table[:, i, j]) == alone.linear(a, b, room)
        paths = reshard_path(a, b, mesh, room)
        moves = sum(alone.collective(s.kind, s.axes)[1] * s.fraction for s in paths if s.kind != "slice")  # type: ignore[arg-type]
        np.testing.assert_allclose(table[3, i, j], moves)
