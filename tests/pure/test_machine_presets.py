"""Presets: they load, every number says where it is from, and wrong names and files are told in a sentence."""

import re
import tomllib
from importlib import resources

import pytest

from meshplan.core import MachineError
from meshplan.machine import Aot, Chip, ChipGroup, LinkDim, Machine, RemoteMemory
from meshplan.machine._chip import slowest

FOLDER = resources.files("meshplan.machine").joinpath("presets")
FILES = sorted((p for p in FOLDER.iterdir() if p.name.endswith(".toml")), key=lambda p: p.name)


def _bare_numbers(table: object, path: str = "") -> list[str]:
    """Paths of numbers with no source beside them."""
    if isinstance(table, dict):
        if isinstance(table.get("source"), str) and table["source"].strip():
            return []
        return [bad for key, value in table.items() for bad in _bare_numbers(value, f"{path}.{key}")]
    if isinstance(table, list):
        return [bad for i, value in enumerate(table) for bad in _bare_numbers(value, f"{path}[{i}]")]
    return [path] if isinstance(table, int | float) else []


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_every_number_of_a_preset_has_a_source(file):
    assert _bare_numbers(tomllib.loads(file.read_text())) == []


@pytest.mark.parametrize("name", Machine.presets())
def test_every_preset_loads_at_its_example_size_and_shows_a_source_for_each_figure(name):
    machine = Machine.preset(name)
    assert machine.name == name
    assert machine.devices > 1
    assert machine.memory_bytes > 2**30
    lines = machine.describe()
    assert lines[0] == str(machine)
    algorithms = {id(d.algorithms): len(d.algorithms) for d in machine.dims}
    figures = len(machine.chip.flops) + 3 + len(machine.dims) + sum(algorithms.values())
    assert len(lines) == 1 + figures + (machine.remote_memory is not None)
    assert not [line for line in lines if "no source given" in line]


def test_presets_lists_each_machine_with_an_example_size():
    assert Machine.presets() == (
        "a100:1x8", "b200:1x8", "cpu:8", "h100:1x8", "h200:1x8", "p100:1x8",
        "tpu-v4:2x2x4", "tpu-v5e:4x4", "tpu-v5p:4x4x4", "tpu-v6e:8x8", "v100:1x8",
    )


def test_a_tpu_slice_is_one_level_and_gpu_nodes_are_two():
    slice_levels = Machine.preset("tpu-v5p:4x4x8").levels
    assert [(level.name, level.size, level.kind) for level in slice_levels] == [("ici", 128, "torus")]
    node_levels = Machine.preset("h100:4x8").levels
    assert [(level.name, level.size, level.kind) for level in node_levels] == [
        ("infiniband", 4, "switch"), ("nvlink", 8, "switch"),
    ]


def test_slices_are_an_outer_level():
    machine = Machine.preset("tpu-v5e:2*4x4")
    assert machine.devices == 32
    assert [(level.name, level.size) for level in machine.levels] == [("dcn", 2), ("ici", 16)]
    assert Machine.preset("tpu-v5e:1*4x4") == Machine.preset("tpu-v5e:4x4")


def test_one_device_has_no_level():
    assert Machine.preset("cpu:1").levels == ()
    assert Machine.preset("tpu-v5e:1x1").devices == 1


@pytest.mark.parametrize(
    ("name", "closed"),
    [
        ("tpu-v5e:4x4", (False, False)), ("tpu-v5e:8x16", (False, True)), ("tpu-v6e:16x16", (True, True)),
        ("tpu-v5p:4x4x4", (True, True, True)), ("tpu-v4:2x2x4", (False, False, False)),
        ("tpu-v5p:2x4x4", (False, False, False)), ("tpu-v4:12x12x24", (True, True, True)),
    ],
)
def test_only_full_dims_of_small_pods_and_whole_cubes_of_large_ones_are_closed(name, closed):
    assert tuple(d.closed for d in Machine.preset(name).dims) == closed


PUBLISHED = {
    # Shapes: Cloud TPU documentation of v5e (v6e has the same 256-chip pod) and v5p; of v4 the documentation and
    # Google's cluster toolkit. Closed dims: How to Scale Your Model, Part 2, and the v5p page (from 4x4x4 on).
    "tpu-v5e": {
        "1x1": "--", "2x2": "--", "2x4": "--", "4x4": "--", "4x8": "--", "8x8": "--", "8x16": "-o", "16x16": "oo",
    },
    "tpu-v6e": {
        "1x1": "--", "2x2": "--", "2x4": "--", "4x4": "--", "4x8": "--", "8x8": "--", "8x16": "-o", "16x16": "oo",
    },
    "tpu-v5p": {
        "2x2x1": "---", "2x2x2": "---", "2x4x4": "---", "4x4x4": "ooo", "4x4x8": "ooo", "4x8x8": "ooo", "8x8x8": "ooo",
        "8x8x16": "ooo", "8x16x16": "ooo", "16x16x16": "ooo", "16x16x24": "ooo",
    },
    "tpu-v4": {
        "2x2x1": "---", "2x2x2": "---", "2x2x4": "---", "2x4x4": "---", "4x4x4": "ooo", "4x4x8": "ooo", "4x8x8": "ooo",
        "8x8x8": "ooo", "8x8x12": "ooo", "8x8x16": "ooo", "8x16x16": "ooo", "4x16x16": "ooo", "12x12x24": "ooo",
        "16x16x16": "ooo",
    },
}


@pytest.mark.parametrize(("name", "shape"), [(n, s) for n, shapes in PUBLISHED.items() for s in shapes])
def test_every_published_slice_exists_with_its_wrap_around_links(name, shape):
    machine = Machine.preset(f"{name}:{shape}")
    assert "x".join(str(d.size) for d in machine.dims) == shape
    assert "".join("o" if d.closed else "-" for d in machine.dims) == PUBLISHED[name][shape]
    assert all(d.duplex == "full" for d in machine.dims)


def test_nodes_of_two_kinds_are_planned_for_at_the_slower_figure_and_keep_their_own():
    machine = Machine.preset("v100+p100:2x4")
    v100, p100 = Machine.preset("v100:2x4"), Machine.preset("p100:2x4")
    assert [(g.chip, g.devices) for g in machine.groups] == [(v100.chip, 8), (p100.chip, 8)]
    assert [(d.name, d.size) for d in machine.dims] == [("infiniband", 4), ("nvlink", 4)]
    assert machine.dims[1].bytes_per_second == p100.dims[1].bytes_per_second < v100.dims[1].bytes_per_second
    for dtype in ("float32", "float16", "float64"):
        assert machine.chip.flops_for(dtype) == min(v100.chip.flops_for(dtype), p100.chip.flops_for(dtype))
    assert machine.memory_bytes == min(v100.memory_bytes, p100.memory_bytes)
    assert str(machine).startswith("v100+p100:2x4: 16 x NVIDIA V100 SXM2 32GB + NVIDIA P100 SXM2 16GB, 16 GB each")
    assert not [line for line in machine.describe() if "no source given" in line]
    with pytest.raises(MachineError, match="a compiler is told of one kind of chip, and this machine has several"):
        machine.aot_topology()


def test_a_dtype_that_one_kind_lacks_counts_at_the_rate_it_is_computed_with_there():
    # A100 has no rate for 8-bit floats and computes them in bfloat16.
    mixed = Machine.preset("h100+a100:1x8").chip
    assert mixed.flops["float8_e4m3fn"] == Machine.preset("a100:1x8").chip.flops["bfloat16"]
    assert "computed in the next wider type" in mixed.sources["flops.float8_e4m3fn"]


def test_groups_that_do_not_add_up_are_refused():
    part = Machine.preset("v100:1x8")
    with pytest.raises(MachineError, match="machine 'hand' has 8 devices and groups of 4, 3; give groups"):
        Machine(
            name="hand", chip=part.chip, dims=part.dims,
            groups=(ChipGroup(chip=part.chip, devices=4), ChipGroup(chip=part.chip, devices=3)),
        )
    with pytest.raises(MachineError, match=r"chips of one platform, found NVIDIA V100 SXM2 32GB \(gpu\), TPU v4 \(tpu"):
        slowest([part.chip, Machine.preset("tpu-v4:2x2x1").chip])


def test_memory_beyond_the_chip_is_shared_by_those_who_reach_it():
    host = Machine.preset("h100:4x8").remote_memory
    assert host is not None
    assert (host.scope, host.nbytes, host.sharers) == ("node", 2_000_000_000_000, 8)
    assert host.nbytes_per_device(32) == 250_000_000_000
    pool = RemoteMemory(scope="pool", nbytes=3_200, bytes_per_second=1.0)
    assert pool.nbytes_per_device(32) == 100
    assert RemoteMemory(scope="chip", nbytes=3_200, bytes_per_second=1.0).nbytes_per_device(32) == 3_200
    assert Machine.preset("a100:1x8").remote_memory is None


def test_rates_are_those_of_one_link_one_way_and_of_one_gpu_one_way():
    assert Machine.preset("tpu-v5e:4x4").dims[0].bytes_per_second == 50e9
    assert [d.bytes_per_second for d in Machine.preset("h100:4x8").dims] == [50e9, 450e9]


def test_flops_of_a_dtype_without_a_rate_are_those_of_the_next_wider_type():
    v5e, h100, a100 = (Machine.preset(n).chip for n in ("tpu-v5e:4x4", "h100:1x8", "a100:1x8"))
    assert v5e.flops_for("bfloat16") == 197e12
    assert v5e.flops_for("float16") == 197e12
    assert v5e.flops_for("uint8") == 393e12
    assert v5e.flops_for("float64") == v5e.flops_for("no_such_dtype") == min(v5e.flops.values())
    assert h100.flops_for("float8_e5m2") == 1979e12
    assert a100.flops_for("float8_e5m2") == a100.flops["bfloat16"]
    assert a100.flops_for("complex128") == 19.5e12
    only32 = Chip(
        name="x", platform="cpu", flops={"float32": 1.0, "float64": 0.5}, memory_bytes=1,
        memory_bytes_per_second=1.0, host_bytes_per_second=1.0,
    )
    assert only32.flops_for("bfloat16") == 1.0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("h10:1x8", "machine 'h10:1x8': there is no preset 'h10'. Nearest: h100, v100. Presets: a100:1x8, "),
        ("zzz:1", "machine 'zzz:1': there is no preset 'zzz'. Presets: a100:1x8, "),
        ("h100", "machine 'h100' has no size; write nodes x GPUs per node, as in 'h100:1x8'."),
        ("h100:8", "machine 'h100:8': found 1 numbers; write nodes x GPUs per node, as in 'h100:1x8'."),
        ("h100:1x16", "machine 'h100:1x16': a node has at most 8 GPUs, found 16; write 'h100:2x8'."),
        ("h100:2*1x8", "machine 'h100:2*1x8': only TPUs come in slices ('*'); write nodes x GPUs per node,"),
        ("cpu:-3", "machine 'cpu:-3': '-3' is not a size; write a number of devices, as in 'cpu:8'."),
        ("tpu-v5e:0x4", "machine 'tpu-v5e:0x4': '0x4' is not a size; write chips per torus dim, as in 'tpu-v5e:4x4'."),
        ("tpu-v5p:4x4", "machine 'tpu-v5p:4x4': its torus has 3 dims, found 2; write chips per torus dim,"),
        ("tpu-v5e:4x5", "at most 16 along a dim and 256 in all. Nearest: 'tpu-v5e:4x4'."),
        ("tpu-v5e:16x32", "2x2 chips, at most 16 along a dim and 256 in all. Nearest: 'tpu-v5e:16x16'."),
        ("v100+p100", "machine 'v100+p100' has no size; write nodes x GPUs per node, as in 'v100:1x8'."),
        ("v100+p10:1x8", "machine 'v100+p10:1x8': there is no preset 'p10'. Nearest: p100, v100. Presets: "),
        ("v100+v100:1x8", "machine 'v100+v100:1x8': only different kinds of GPU node can be joined with '+', as in"),
        ("v100+tpu-v4:2x2x4", "only different kinds of GPU node can be joined with '+', as in 'v100+p100:1x8'."),
        ("v100+p100:1x9", "machine 'v100:1x9': a node has at most 8 GPUs, found 9; write 'v100:2x8'."),
        ("tpu-v4:16x16x32", "hosts of 2x2x1 chips, at most 256 along a dim and 4096 in all."),
    ],
)
def test_a_name_or_size_that_does_not_exist_is_told_with_what_to_write(name, sentence):
    with pytest.raises(MachineError, match=re.escape(sentence)):
        Machine.preset(name)


def test_a_link_dim_that_cannot_be_is_refused():
    chip = Machine.preset("cpu:2").chip
    dim = LinkDim(name="wire", size=0, kind="switch", bytes_per_second=1.0, latency_seconds=0.0)
    with pytest.raises(MachineError, match=r"machine 'hand': link dim 'wire' has size 0, 1 bytes/s and 0 s"):
        Machine(name="hand", chip=chip, dims=(dim,))


def test_compilers_are_told_of_the_machine_by_their_own_names():
    assert Machine.preset("tpu-v5e:2x4").aot_topology() == ("tpu", "v5e:2x4", {})
    assert Machine.preset("tpu-v5e:2*2x4").aot_topology() == ("tpu", "v5e:2x4", {"num_slices": 2})
    assert Machine.preset("tpu-v6e:1x1").aot_topology() == ("tpu", "v6e:1x1", {"chips_per_host_bounds": [1, 1, 1]})
    assert Machine.preset("cpu:8").aot_topology() == ("cpu", "8", {})
    with pytest.raises(MachineError, match=r"'tpu-v4:2x2x4' cannot be compiled for ahead of time: libtpu describes"):
        Machine.preset("tpu-v4:2x2x4").aot_topology()


@pytest.mark.parametrize(("name", "cores"), [("a100", 108), ("h100", 132), ("h200", 132), ("b200", 148)])
def test_gpu_targets_carry_the_text_of_their_chip(name, cores):
    platform, topology, extra = Machine.preset(f"{name}:4x8").aot_topology()
    assert (platform, topology) == ("cuda", "1x4x8")
    assert f"core_count: {cores}\n" in extra["target_config"]
    assert extra["target_config"].count("{") == extra["target_config"].count("}")


def test_machines_are_values():
    first, second = Machine.preset("h100:2x8"), Machine.preset("h100:2x8")
    assert first == second
    assert hash(first) == hash(second)
    assert first != Machine.preset("h200:2x8")
    assert isinstance(first.aot, Aot)


def test_a_machine_reads_as_one_line():
    nodes = "h100:4x8: 32 x NVIDIA H100 SXM 80GB, 84.9 GB each, nvlink 8 over infiniband 4"
    assert str(Machine.preset("h100:4x8")) == nodes
    assert str(Machine.preset("tpu-v5e:4x4")) == "tpu-v5e:4x4: 16 x TPU v5e, 16.9 GB each, ici 4x4"
