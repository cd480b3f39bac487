"""Closed forms against figures computed by hand, link loads counted one by one, and their invariants."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.core import KINDS, ArgumentError, MeshError, MeshShape
from meshplan.machine import LinkDim, Machine, collective_rate, collective_seconds
from meshplan.machine._dims import LinkKind

CHIP = Machine.preset("cpu:1").chip


def machine_of(*dims: LinkDim) -> Machine:
    return Machine(name="hand", chip=CHIP, dims=dims)


def link(size: int, kind: LinkKind = "switch", rate=100.0, latency=0.5, wraps=False) -> LinkDim:
    return LinkDim(name="l", size=size, kind=kind, bytes_per_second=rate, latency_seconds=latency, wraps=wraps)


ONE = MeshShape.of({"a": 4})


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all-gather", 3 * 0.5 + 0.75 * 800 / 100),
        ("reduce-scatter", 3 * 0.5 + 0.75 * 800 / 100),
        ("all-reduce", 2 * (3 * 0.5 + 0.75 * 800 / 100)),
        ("all-to-all", 3 * 0.5 + 0.75 * 800 / 100),
        ("collective-permute", 0.5 + 800 / 100),
    ],
)
def test_four_devices_on_a_switch(kind, seconds):
    assert collective_seconds(machine_of(link(4)), ONE, kind, 800, ("a",)) == pytest.approx(seconds)


def test_an_open_line_has_one_link_and_a_ring_two():
    line, ring = machine_of(link(4, "torus")), machine_of(link(4, "ring"))
    closed = machine_of(link(4, "torus", wraps=True))
    # line: 3 hops, 3/4 of 800 bytes over one link; ring: 2 hops, both ways at once.
    assert collective_seconds(line, ONE, "all-gather", 800, ("a",)) == pytest.approx(1.5 + 6.0)
    assert collective_seconds(ring, ONE, "all-gather", 800, ("a",)) == pytest.approx(1.0 + 3.0)
    assert collective_rate(closed, ONE, "all-gather", ("a",)) == collective_rate(ring, ONE, "all-gather", ("a",))


def test_direct_links_carry_all_pieces_at_once():
    direct = machine_of(link(4, "fully-connected"))
    assert collective_seconds(direct, ONE, "all-gather", 800, ("a",)) == pytest.approx(0.5 + 6.0)
    pairs = MeshShape.of({"a": 2, "b": 2})
    # A pair uses one of a device's three links of 100/3 bytes/s.
    assert collective_seconds(direct, pairs, "all-gather", 800, ("b",)) == pytest.approx(0.5 + 400 * 3 / 100)
    assert collective_seconds(direct, pairs, "collective-permute", 800, ("b",)) == pytest.approx(0.5 + 800 * 3 / 100)


def test_two_torus_dims_together_have_about_twice_the_rate():
    v5e = Machine.preset("tpu-v5e:4x4")
    one = collective_rate(v5e, MeshShape.of({"x": 4, "y": 4}), "all-gather", ("y",))
    both = collective_rate(v5e, MeshShape.of({"xy": 16}), "all-gather", ("xy",))
    assert one == pytest.approx((3e-6, 0.75 / 50e9))
    assert both == pytest.approx((6e-6, 15 / 16 / 100e9))
    # The same group by two axes costs the same as by one.
    assert collective_rate(v5e, MeshShape.of({"x": 4, "y": 4}), "all-gather", ("x", "y")) == pytest.approx(both)


def test_the_gather_of_a_published_worked_problem():
    # How to Scale Your Model, Part 2, question 6: 16 GB on a v5e 4x4 slice, 15/16 over two links of 5e10: 150 ms.
    v5e = Machine.preset("tpu-v5e:4x4")
    seconds = collective_seconds(v5e, MeshShape.of({"m": 16}), "all-gather", 16e9, ("m",))
    assert seconds == pytest.approx(0.150, rel=1e-3)


def test_interleaved_groups_share_their_links():
    line = machine_of(link(8, "torus"))
    mesh = MeshShape.of({"far": 2, "near": 4})
    assert collective_rate(line, mesh, "all-gather", ("near",)) == pytest.approx((1.5, 0.75 / 100))
    # Four pairs at distance four run over the same middle link.
    assert collective_rate(line, mesh, "all-gather", ("far",)) == pytest.approx((4 * 0.5, 0.5 / (100 / 4)))
    joined = collective_rate(line, mesh, "all-gather", ("far", "near"))
    assert joined == pytest.approx(collective_rate(line, MeshShape.of({"a": 8}), "all-gather", ("a",)))


def test_two_levels_follow_the_hierarchical_formula():
    machine = machine_of(link(2, rate=10.0, latency=2.0), link(4, rate=100.0, latency=0.5))
    mesh = MeshShape.of({"fsdp": 8})
    gather = (3 * 0.5 + 0.75 * 800 / 100) + (1 * 2.0 + 0.5 * (800 / 4) / 10)
    assert collective_seconds(machine, mesh, "reduce-scatter", 800, ("fsdp",)) == pytest.approx(gather)
    assert collective_seconds(machine, mesh, "all-reduce", 800, ("fsdp",)) == pytest.approx(2 * gather)
    assert collective_seconds(machine, mesh, "collective-permute", 800, ("fsdp",)) == pytest.approx(2.0 + 800 / 10)
    phases = (1.5 + 0.75 * 800 / 100) + (2.0 + 0.5 * 800 / 10)
    assert collective_seconds(machine, mesh, "all-to-all", 800, ("fsdp",)) == pytest.approx(phases)


def test_three_levels_divide_the_bytes_by_all_inner_sizes():
    machine = machine_of(link(3, rate=1.0), link(2, rate=10.0), link(4, rate=100.0))
    hops = 0.5 * (3 + 1 + 2)
    moved = 0.75 * 800 / 100 + 0.5 * (800 / 4) / 10 + (2 / 3) * (800 / 8) / 1
    seconds = collective_seconds(machine, MeshShape.of({"a": 24}), "all-gather", 800, ("a",))
    assert seconds == pytest.approx(hops + moved)


@pytest.mark.parametrize("name", ["h100:2x4", "tpu-v5e:2*2x2"])
def test_an_axis_over_nodes_or_slices_is_priced_at_the_slow_link(name):
    machine, nbytes = Machine.preset(name), 1e9
    slow = machine.dims[0].bytes_per_second
    near = MeshShape.of({"dp": 2, "tp": 4})
    fast_tp = collective_seconds(machine, near, "all-reduce", nbytes, ("tp",))
    slow_dp = collective_seconds(machine, near, "all-reduce", nbytes, ("dp",))
    assert slow_dp == pytest.approx(2 * (machine.dims[0].latency_seconds + 0.5 * nbytes / slow))
    assert fast_tp < slow_dp / 2
    # dp=4 and fsdp=8 span: their slow part moves 1/2 and 1/4 of the bytes over the slow link.
    dp4 = collective_seconds(machine, MeshShape.of({"dp": 4, "tp": 2}), "all-reduce", nbytes, ("dp",))
    fsdp8 = collective_seconds(machine, MeshShape.of({"fsdp": 8}), "all-reduce", nbytes, ("fsdp",))
    assert dp4 > 2 * 0.5 * (nbytes / 2) / slow > fast_tp
    assert fsdp8 > 2 * 0.5 * (nbytes / 4) / slow
    # An axis that does not respect the boundary is slow in full.
    odd = Machine.preset("h100:2x6")
    inner = collective_seconds(odd, MeshShape.of({"a": 3, "b": 4}), "all-gather", nbytes, ("b",))
    assert inner == pytest.approx(3 * 4e-6 + 0.75 * nbytes / 50e9)


def _heaviest_link(size: int, wraps: bool, stride: int, members: int) -> float:
    """Bytes over the busiest link, one way, when every group of an axis does an all-to-all of 1 byte per device."""
    load: dict[tuple[int, int], float] = {}

    def send(start: int, step: int, hops: int, nbytes: float) -> None:
        for h in range(hops):
            key = ((start + step * h) % size, step)
            load[key] = load.get(key, 0.0) + nbytes

    block = stride * members
    for base in range(0, size, block):
        for offset in range(stride):
            group = [base + offset + stride * i for i in range(members)]
            for a in group:
                for b in group:
                    forward = (b - a) % size
                    ring = wraps and block == size
                    if a == b:
                        continue
                    if not ring:
                        send(a, 1 if b > a else -1, abs(b - a), 1 / members)
                    elif 2 * forward == size:
                        send(a, 1, forward, 0.5 / members)
                        send(a, -1, forward, 0.5 / members)
                    else:
                        step = 1 if 2 * forward < size else -1
                        send(a, step, min(forward, size - forward), 1 / members)
    return max(load.values())


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize(
    ("far", "members", "near"),
    [(1, 2, 1), (1, 4, 1), (1, 5, 1), (1, 8, 1), (2, 4, 1), (1, 2, 4), (1, 4, 2), (2, 2, 2), (1, 3, 3), (1, 4, 4)],
)
def test_all_to_all_on_a_torus_takes_as_long_as_its_busiest_link(wraps, far, members, near):
    size = far * members * near
    machine = machine_of(link(size, "torus", wraps=wraps, latency=0.0))
    mesh = MeshShape.of({"far": far, "axis": members, "near": near})
    seconds = collective_seconds(machine, mesh, "all-to-all", 1.0, ("axis",))
    assert seconds == pytest.approx(_heaviest_link(size, wraps, near, members) / 100.0)


def test_all_to_all_on_several_torus_dims_is_bound_by_the_longest():
    machine = machine_of(link(4, "torus"), link(8, "torus"))
    mesh = MeshShape.of({"m": 32})
    assert collective_rate(machine, mesh, "all-to-all", ("m",))[1] == pytest.approx(8 / 4 / 100)


def test_permute_around_a_torus_dim_uses_one_link():
    machine = machine_of(link(8, "torus"))
    mesh = MeshShape.of({"far": 4, "near": 2})
    assert collective_rate(machine, mesh, "collective-permute", ("near",)) == pytest.approx((0.5, 1 / 100))
    assert collective_rate(machine, mesh, "collective-permute", ("far",)) == pytest.approx((1.0, 2 / 100))


@pytest.mark.parametrize(
    ("error", "kind", "axes", "sentence"),
    [
        (ArgumentError, "all-gathers", ("a",), "collective kind 'all-gathers' is unknown. Nearest: all-gather"),
        (MeshError, "all-gather", ("b",), "axis 'b' is not in the mesh a=4. Known: a."),
        (MeshError, "all-gather", ("a", "a"), "axes ('a', 'a') of a collective name one axis twice;"),
    ],
)
def test_wrong_calls_are_told(error, kind, axes, sentence):
    with pytest.raises(error, match=re.escape(sentence)):
        collective_rate(machine_of(link(4)), ONE, kind, axes)


dims = st.lists(
    st.builds(
        link, st.integers(1, 6), st.sampled_from(["switch", "ring", "torus", "fully-connected"]),
        rate=st.sampled_from([1.0, 7.0]), latency=st.sampled_from([0.0, 0.5]), wraps=st.booleans(),
    ),
    min_size=1, max_size=3,
)


@st.composite
def machines_and_meshes(draw):
    machine = machine_of(*draw(dims))
    n = machine.devices
    inner = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
    middle = draw(st.sampled_from([d for d in range(1, n // inner + 1) if (n // inner) % d == 0]))
    sizes = {"a": n // inner // middle, "b": middle, "c": inner}
    axes = draw(st.lists(st.sampled_from("abc"), unique=True, max_size=3).map(tuple))
    return machine, MeshShape.of(sizes), axes


@settings(max_examples=80, deadline=None)
@given(machines_and_meshes(), st.sampled_from(KINDS))
def test_times_are_zero_for_one_device_and_positive_and_growing_for_more(case, kind):
    machine, mesh, axes = case
    latency, rate = collective_rate(machine, mesh, kind, axes)
    if mesh.size(axes) == 1:
        assert (latency, rate) == (0.0, 0.0)
    else:
        assert rate > 0
        assert latency >= 0
        assert math.isfinite(latency + rate)
    assert collective_seconds(machine, mesh, kind, 1e6, axes) == pytest.approx(latency + 1e6 * rate)
    assert collective_rate(machine, mesh, kind, axes[::-1]) == (latency, rate)


@settings(max_examples=60, deadline=None)
@given(machines_and_meshes(), st.sampled_from(KINDS))
def test_links_twice_as_fast_are_never_slower_and_all_reduce_is_two_gathers(case, kind):
    machine, mesh, axes = case
    faster = machine_of(*(
        link(d.size, d.kind, 2 * d.bytes_per_second, d.latency_seconds / 2, d.wraps) for d in machine.dims
    ))
    before, after = collective_rate(machine, mesh, kind, axes), collective_rate(faster, mesh, kind, axes)
    assert after == pytest.approx((before[0] / 2, before[1] / 2))
    gather = collective_rate(machine, mesh, "all-gather", axes)
    assert collective_rate(machine, mesh, "all-reduce", axes) == pytest.approx((2 * gather[0], 2 * gather[1]))
