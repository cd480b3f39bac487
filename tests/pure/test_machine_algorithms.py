"""Algorithms by size: closed forms by hand, the choice among them, and the bytes that each link dim carries."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.core import KINDS, ArgumentError, MachineError, MeshShape
from meshplan.machine import (
    CollectiveTime,
    LinkAlgorithm,
    LinkDim,
    Machine,
    collective_lines,
    collective_seconds,
    collective_time,
)
from meshplan.machine._dims import Duplex, LinkKind

CHIP = Machine.preset("cpu:1").chip


def link(
    size: int, kind: LinkKind = "switch", rate: float = 100.0, latency: float = 0.5, wraps: bool = False,
    duplex: Duplex = "full", algorithms: tuple[LinkAlgorithm, ...] = (), name: str = "l",
) -> LinkDim:
    return LinkDim(
        name=name, size=size, kind=kind, bytes_per_second=rate, latency_seconds=latency, wraps=wraps, duplex=duplex,
        algorithms=algorithms,
    )


def machine_of(*dims: LinkDim) -> Machine:
    return Machine(name="hand", chip=CHIP, dims=dims)


def seconds_by(machine: Machine, kind: str, nbytes: float = 800.0) -> dict[str, float]:
    mesh = MeshShape.of({"a": machine.devices})
    return {x.algorithm: x.seconds(nbytes) for x in collective_lines(machine, mesh, kind, ("a",))}  # type: ignore[arg-type]


def test_eight_devices_on_a_switch_choose_among_ring_halving_and_tree():
    said = seconds_by(machine_of(link(8)), "all-reduce")
    assert said == {
        "ring": pytest.approx(14 * 0.5 + 2 * 7 / 8 * 8),
        "halving-doubling": pytest.approx(6 * 0.5 + 2 * 7 / 8 * 8),
        "tree": pytest.approx(6 * 0.5 + 2 * 8),
    }
    assert set(seconds_by(machine_of(link(6)), "all-gather")) == {"ring"}, "six is no power of two"
    assert seconds_by(machine_of(link(2)), "all-reduce")["tree"] == pytest.approx(2 * 0.5 + 8)


def test_a_closed_ring_goes_both_ways_or_one_way_and_full_duplex_pays_off():
    full = seconds_by(machine_of(link(4, "ring")), "all-gather")
    assert full == {"bidirectional-ring": pytest.approx(2 * 0.5 + 3.0), "ring": pytest.approx(3 * 0.5 + 6.0)}
    half = seconds_by(machine_of(link(4, "ring", duplex="half")), "all-gather")
    # One way round the other direction is idle, so half duplex costs nothing; both ways share the rate.
    assert half == {"bidirectional-ring": pytest.approx(2 * 0.5 + 6.0), "ring": pytest.approx(3 * 0.5 + 6.0)}


@pytest.mark.parametrize(
    ("kind", "wraps", "full", "half"),
    [
        ("switch", False, 6.0, 12.0),
        ("fully-connected", False, 6.0, 12.0),
        ("torus", False, 6.0, 8.0),  # a line of half-duplex links carries all 800 bytes over each
        ("torus", True, 3.0, 6.0),
    ],
)
def test_half_duplex_links_share_their_rate_between_both_ways(kind, wraps, full, half):
    times = [
        collective_seconds(
            machine_of(link(4, kind, latency=0.0, wraps=wraps, duplex=duplex)), MeshShape.of({"a": 4}), "all-gather",
            800, ("a",),
        )
        for duplex in ("full", "half")
    ]
    assert times == [pytest.approx(full), pytest.approx(half)]


def test_all_dims_of_a_torus_are_used_at_once():
    said = seconds_by(machine_of(link(4, "torus", wraps=True, name="x"), link(4, "torus", wraps=True, name="y")),
                      "all-gather")
    assert said == {"torus": pytest.approx(4 * 0.5 + 15 / 16 * 800 / 400)}


def test_the_algorithm_changes_with_the_bytes_and_is_the_least_of_those_offered():
    algorithms = (
        LinkAlgorithm(name="ring", kind="all-reduce", efficiency=0.8, fixed_seconds=1.0),
        LinkAlgorithm(name="tree", kind="all-reduce", efficiency=0.5, own_bytes_per_second=1000.0),
    )
    machine, mesh = machine_of(link(8, latency=0.0, algorithms=algorithms)), MeshShape.of({"a": 8})
    ring = 1.0 + 2 * 7 / 8 * 8000 / 80
    tree = 2 * 8 / 50 + 8 / (8 * 1000)
    assert collective_time(machine, mesh, "all-reduce", 8, ("a",)).seconds == pytest.approx(tree)
    assert collective_time(machine, mesh, "all-reduce", 8, ("a",)).algorithm == "tree"
    assert collective_time(machine, mesh, "all-reduce", 8000, ("a",)).seconds == pytest.approx(ring)
    assert collective_time(machine, mesh, "all-reduce", 8000, ("a",)).algorithm == "ring"
    assert collective_time(machine, mesh, "all-reduce", 8000, ("a",), "tree").seconds > ring
    assert set(seconds_by(machine, "all-gather")) == {"ring", "halving-doubling"}, "not listed, so all are offered"


def test_cutting_into_pieces_costs_with_the_root_of_the_bytes():
    # A pipeline of cost c a piece beside its bytes: min over k of B/W + k c + B/(k W) is B/W + 2 sqrt(c B/W).
    c, rate, nbytes = 0.02, 100.0, 800.0
    best = min(nbytes / rate + k * c + nbytes / (k * rate) for k in range(1, 200))
    root = 2 * math.sqrt(c / rate)
    listed = (LinkAlgorithm(name="tree", kind="all-reduce", seconds_per_root_byte=root),)
    machine = machine_of(link(2, rate=rate, latency=0.0, algorithms=listed))
    assert seconds_by(machine, "all-reduce")["tree"] == pytest.approx(best, rel=1e-3)


def two_levels(*kinds_and_names: tuple[str, str, str]) -> Machine:
    """Four nodes of two, each algorithm listed as (kind, outer, inner)."""
    outer = tuple(LinkAlgorithm(name=o, kind=k) for k, o, _ in kinds_and_names)  # type: ignore[arg-type]
    inner = tuple(LinkAlgorithm(name=i, kind=k, fixed_seconds=0.25) for k, _, i in kinds_and_names)  # type: ignore[arg-type]
    return machine_of(
        link(4, rate=10.0, latency=2.0, algorithms=outer, name="far"),
        link(2, rate=100.0, latency=0.5, algorithms=inner, name="near"),
    )


def test_a_flat_algorithm_over_nodes_is_bound_by_the_slowest_level():
    machine = two_levels(
        ("all-reduce", "ring", "ring"), ("all-reduce", "tree", "chain"),
        ("all-reduce", "between-switches", "in-switch"),
        ("all-gather", "ring", "ring"), ("all-to-all", "pairwise", "pairwise"), ("collective-permute", "send", "send"),
    )
    hops = 4 * 0.5 + 3 * 2.0  # seven steps of the ring, three of them between nodes
    assert seconds_by(machine, "all-gather") == {"ring": pytest.approx(0.25 + hops + 7 / 8 * 400 / 10)}
    assert seconds_by(machine, "all-reduce") == {
        "ring": pytest.approx(0.25 + 2 * hops + 2 * 7 / 8 * 400 / 10),
        "tree": pytest.approx(0.25 + 2 * 0.5 + 4 * 2.0 + 2 * 400 / 10),
        "in-switch": pytest.approx(0.25 + 2 * 0.5 + 4 * 2.0 + 2 * 400 / 10),
    }
    # Of 800 bytes 6/8 go to other nodes.
    assert seconds_by(machine, "all-to-all") == {"pairwise": pytest.approx(0.25 + 0.5 + 3 * 2.0 + 600 / 10)}
    assert seconds_by(machine, "collective-permute") == {"send": pytest.approx(0.25 + 2.5 + 800 / 10)}


def test_an_algorithm_of_several_levels_is_offered_only_where_each_level_lists_its_part():
    machine = two_levels(("all-reduce", "ring", "ring"), ("all-reduce", "tree", "in-switch"))
    assert set(seconds_by(machine, "all-reduce")) == {"ring"}
    assert all(x.startswith("hierarchical(") for x in seconds_by(machine, "all-gather")), "listed for no level"


def test_levels_that_list_nothing_are_hierarchical_and_choose_level_by_level():
    machine, mesh = machine_of(link(4, rate=10.0, latency=2.0), link(2, rate=100.0)), MeshShape.of({"a": 8})
    near, far = 0.5 + 0.5 * 8, 0.75 * 400 / 10
    ring = collective_time(machine, mesh, "all-reduce", 800, ("a",), "hierarchical(ring, ring)")
    assert ring.seconds == pytest.approx(2 * (near + 3 * 2.0 + far))
    assert ring.seconds == pytest.approx(collective_seconds(machine, mesh, "all-reduce", 800, ("a",)))
    best = collective_time(machine, mesh, "all-reduce", 800, ("a",), "hierarchical")
    assert best == collective_time(machine, mesh, "all-reduce", 800, ("a",))
    assert best.seconds == pytest.approx(2 * (near + 2 * 2.0 + far))
    assert best.algorithm == "hierarchical(ring, halving-doubling)"


def test_an_axis_over_slices_is_slow_and_its_bytes_over_the_slow_link_are_the_inner_share():
    machine = Machine.preset("tpu-v5e:2*2x2")
    mesh, nbytes = MeshShape.of({"dp": 2, "tp": 4}), 8e8
    across = collective_time(machine, mesh, "all-reduce", nbytes, ("dp",))
    inside = collective_time(machine, mesh, "all-reduce", nbytes, ("tp",))
    both = collective_time(machine, mesh, "all-reduce", nbytes, ("dp", "tp"))
    slow = machine.dims[0].bytes_per_second
    assert across.seconds >= nbytes / slow > 3 * inside.seconds
    assert across.bytes_by_dim == {"dcn": pytest.approx(nbytes)}
    assert both.bytes_by_dim["dcn"] == pytest.approx(nbytes / 4)
    assert nbytes / 4 / slow < both.seconds < across.seconds


def test_a_group_of_one_takes_no_time_and_wrong_calls_are_told():
    machine, mesh = machine_of(link(4)), MeshShape.of({"a": 4, "one": 1})
    nothing = CollectiveTime(seconds=0.0, algorithm="none", bytes_by_dim={})
    assert collective_time(machine, mesh, "all-gather", 8, ("one",)) == nothing
    with pytest.raises(ArgumentError, match=re.escape("a collective of -1 bytes cannot be; give at least 0.")):
        collective_time(machine, mesh, "all-gather", -1, ("a",))
    sentence = "machine 'hand' offers no 'rings' for all-gather over a. Nearest: ring."
    with pytest.raises(ArgumentError, match=re.escape(sentence)):
        collective_time(machine, mesh, "all-gather", 8, ("a",), "rings")


# ------------------------------------------------------------------------------------------------- bytes by link dim


def replica_groups(sizes: tuple[int, ...], position: int) -> list[list[int]]:
    """Groups of a mesh that vary one of its axes, as a module lists them; device numbers are row-major."""
    places = list(itertools.product(*map(range, sizes)))
    numbers = {p: i for i, p in enumerate(places)}
    heads = [p for p in places if p[position] == 0]
    return [[numbers[(*p[:position], k, *p[position + 1 :])] for k in range(sizes[position])] for p in heads]


def ring_bytes(groups: list[list[int]], nbytes: float, device: int) -> float:
    """What the device sends in a gather of `nbytes` around the ring of its group, piece by piece."""
    group = next(g for g in groups if device in g)
    sent = 0.0
    for _step in range(len(group) - 1):
        sent += nbytes / len(group)
    return sent


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (3, 2, 4), (2, 2, 2)])
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
def test_bytes_by_dim_are_those_of_the_replica_groups_of_the_phases(sizes, kind):
    machine = machine_of(*(link(n, rate=10.0**i, name=f"d{i}") for i, n in enumerate(sizes)))
    nbytes = 5760.0
    rings = f"hierarchical({', '.join(['ring'] * len(sizes))})"
    said = collective_time(machine, MeshShape.of({"a": math.prod(sizes)}), kind, nbytes, ("a",), rings).bytes_by_dim
    passes = 2 if kind == "all-reduce" else 1
    for device in range(math.prod(sizes)):
        left, counted = nbytes, {}
        for position in reversed(range(len(sizes))):  # innermost first; each phase leaves one piece of its group
            counted[f"d{position}"] = passes * ring_bytes(replica_groups(sizes, position), left, device)
            left /= sizes[position]
        assert said == pytest.approx(counted)


@pytest.mark.parametrize(("size", "wraps"), [(2, False), (4, False), (5, False), (4, True), (5, True), (8, True)])
def test_bytes_of_an_all_to_all_on_a_torus_dim_are_every_hop_counted(size, wraps):
    machine = machine_of(link(size, "torus", wraps=wraps))
    said = collective_time(machine, MeshShape.of({"a": size}), "all-to-all", 100.0, ("a",)).bytes_by_dim
    hops = [
        min(abs(a - b), size - abs(a - b)) if wraps else abs(a - b) for a in range(size) for b in range(size)
    ]
    assert said == {"l": pytest.approx(100.0 / size * sum(hops) / size)}


dims = st.lists(
    st.builds(
        link, st.integers(1, 6), st.sampled_from(["switch", "ring", "torus", "fully-connected"]),
        rate=st.sampled_from([1.0, 7.0]), latency=st.sampled_from([0.0, 0.5]), wraps=st.booleans(),
        duplex=st.sampled_from(["full", "half"]),
    ),
    min_size=1, max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(dims, st.sampled_from(KINDS), st.sampled_from([1.0, 1e3, 1e6]))
def test_the_chosen_is_the_least_of_the_lines_and_never_above_the_usual_algorithm(found, kind, nbytes):
    machine = machine_of(*found)
    mesh = MeshShape.of({"a": machine.devices})
    lines = collective_lines(machine, mesh, kind, ("a",))
    chosen = collective_time(machine, mesh, kind, nbytes, ("a",))
    assert chosen.seconds == min((x.seconds(nbytes) for x in lines), default=0.0)
    assert chosen.seconds <= collective_seconds(machine, mesh, kind, nbytes, ("a",)) * (1 + 1e-9)
    assert (chosen.algorithm == "none") == (machine.devices == 1)
    assert all(b >= 0 for b in chosen.bytes_by_dim.values())


@settings(max_examples=40, deadline=None)
@given(dims, st.sampled_from(KINDS))
def test_half_duplex_is_never_faster_and_at_most_twice_as_slow(found, kind):
    from dataclasses import replace

    def made(duplex: Duplex) -> Machine:
        return machine_of(*(replace(d, duplex=duplex, latency_seconds=0.0) for d in found))

    mesh = MeshShape.of({"a": machine_of(*found).devices})
    full, half = (collective_seconds(made(d), mesh, kind, 1e6, ("a",)) for d in ("full", "half"))
    assert full * (1 - 1e-9) <= half <= 2 * full * (1 + 1e-9)


def test_remote_memory_that_cannot_be_is_refused():
    from meshplan.machine import RemoteMemory

    with pytest.raises(MachineError, match="remote memory of scope 'node' has 0 bytes, 1 bytes/s, 0 s of latency"):
        RemoteMemory(scope="node", nbytes=0, bytes_per_second=1.0)
