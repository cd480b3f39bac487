"""Which links an axis uses, and which mesh shapes keep slow and fast links apart."""

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.core import MachineError, MeshError, MeshShape
from meshplan.machine import LinkDim, LinkShare, Machine, axis_levels, legal_mesh_shapes, link_groups, spans_levels

CHIP = Machine.preset("cpu:1").chip


def switches(*sizes: int) -> Machine:
    """A machine of nested switches, each dim its own level."""
    dims = [
        LinkDim(name=f"s{i}", size=n, kind="switch", bytes_per_second=10.0**i, latency_seconds=1e-6)
        for i, n in enumerate(sizes)
    ]
    return Machine(name="switches", chip=CHIP, dims=tuple(dims))


def test_axes_on_a_slice_cover_one_torus_dim_or_both():
    v5e = Machine.preset("tpu-v5e:4x4")
    apart = link_groups(v5e, MeshShape.of({"x": 4, "y": 4}))
    assert apart["x"] == (LinkShare(level=0, dim=0, size=4, stride=1, closed=False),)
    assert apart["y"] == (LinkShare(level=0, dim=1, size=4, stride=1, closed=False),)
    together = link_groups(v5e, MeshShape.of({"xy": 16}))["xy"]
    assert [(s.dim, s.size) for s in together] == [(0, 4), (1, 4)]


def test_an_axis_of_two_in_a_dim_of_four_is_a_line_and_the_rest_is_strided():
    v5e = Machine.preset("tpu-v5e:4x4")
    groups = link_groups(v5e, MeshShape.of({"outer": 8, "inner": 2}))
    assert groups["inner"] == (LinkShare(level=0, dim=1, size=2, stride=1, closed=False),)
    assert groups["outer"] == (
        LinkShare(level=0, dim=0, size=4, stride=1, closed=False),
        LinkShare(level=0, dim=1, size=2, stride=2, closed=False),
    )


def test_a_closed_dim_gives_rings_to_the_axis_that_reaches_its_end():
    v6e = Machine.preset("tpu-v6e:16x16")
    groups = link_groups(v6e, MeshShape.of({"x": 16, "far": 4, "near": 4}))
    assert groups["x"][0].closed
    assert groups["far"] == (LinkShare(level=0, dim=1, size=4, stride=4, closed=True),)
    assert groups["near"] == (LinkShare(level=0, dim=1, size=4, stride=1, closed=False),)


def test_levels_of_axes_on_two_nodes_of_four():
    machine = Machine.preset("h100:2x4")
    assert axis_levels(machine, MeshShape.of({"dp": 2, "tp": 4})) == {"dp": ((0, 2),), "tp": ((1, 4),)}
    assert axis_levels(machine, MeshShape.of({"dp": 4, "tp": 2})) == {"dp": ((0, 2), (1, 2)), "tp": ((1, 2),)}
    assert axis_levels(machine, MeshShape.of({"fsdp": 8, "one": 1})) == {"fsdp": ((0, 2), (1, 4)), "one": ()}


def test_an_axis_that_does_not_divide_into_a_node_counts_as_slow():
    machine = switches(2, 6)
    mesh = MeshShape.of({"outer": 3, "inner": 4})
    assert axis_levels(machine, mesh) == {"outer": ((0, 3),), "inner": ((0, 4),)}
    assert not any(s.whole for s in link_groups(machine, mesh)["inner"])
    assert spans_levels(machine, mesh, "inner")


def test_a_mesh_of_another_size_or_an_unknown_axis_is_refused():
    machine = Machine.preset("h100:2x4")
    with pytest.raises(MeshError, match=re.escape("mesh dp=2 x tp=2 has 4 devices, machine 'h100:2x4' has 8;")):
        link_groups(machine, MeshShape.of({"dp": 2, "tp": 2}))
    with pytest.raises(MeshError, match=re.escape("axis 'pp' is not in the mesh dp=2 x tp=4; its axes are dp, tp.")):
        spans_levels(machine, MeshShape.of({"dp": 2, "tp": 4}), "pp")


def test_legal_shapes_keep_the_node_boundary():
    assert legal_mesh_shapes(Machine.preset("h100:2x8")) == [(2, 8), (2, 2, 4), (2, 4, 2)]
    assert legal_mesh_shapes(Machine.preset("tpu-v5e:2x4"), max_axes=2) == [(8,), (2, 4), (4, 2)]
    assert legal_mesh_shapes(Machine.preset("h100:1x1")) == [(1,)]


def test_more_levels_than_axes_is_refused():
    with pytest.raises(MachineError, match=re.escape("has 2 levels of links (infiniband, nvlink) and max_axes is 1;")):
        legal_mesh_shapes(Machine.preset("h100:2x8"), max_axes=1)


def _mixes_by_coordinates(levels: tuple[int, ...], shape: tuple[int, ...], axis: int) -> bool:
    """Walk all devices: do the groups of this axis differ in the coordinates of several levels?"""
    strides = [math.prod(levels[i + 1 :]) for i in range(len(levels))]
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(itertools.product(*map(range, shape))):
        groups.setdefault(place[:axis] + place[axis + 1 :], []).append(number)
    varying = set()
    for members in groups.values():
        for i, stride in enumerate(strides):
            if len({m // stride % levels[i] for m in members}) > 1:
                varying.add(i)
    return len(varying) > 1


small_levels = st.lists(st.integers(2, 6), min_size=1, max_size=3).map(tuple).filter(lambda s: math.prod(s) <= 48)


@settings(max_examples=40, deadline=None)
@given(small_levels)
def test_legal_shapes_are_exactly_those_that_brute_force_finds(levels):
    n = math.prod(levels)
    divisors = [d for d in range(2, n + 1) if n % d == 0]
    expected = [
        shape
        for k in (1, 2, 3)
        for shape in itertools.product(divisors, repeat=k)
        if math.prod(shape) == n and not any(_mixes_by_coordinates(levels, shape, a) for a in range(k))
    ]
    assert legal_mesh_shapes(switches(*levels)) == expected


@settings(max_examples=40, deadline=None)
@given(small_levels, st.data())
def test_spanning_is_what_the_devices_coordinates_say(levels, data):
    n = math.prod(levels)
    inner = data.draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
    middle = data.draw(st.sampled_from([d for d in range(1, n // inner + 1) if (n // inner) % d == 0]))
    shape = (n // inner // middle, middle, inner)
    machine, mesh = switches(*levels), MeshShape.of(dict(zip("abc", shape, strict=True)))
    for i, axis in enumerate("abc"):
        assert spans_levels(machine, mesh, axis) == _mixes_by_coordinates(levels, shape, i)
    sizes = axis_levels(machine, mesh)
    assert [math.prod(s for _, s in sizes[a]) for a in "abc"] == list(shape)
