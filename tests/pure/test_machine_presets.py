"""Presets: they load, every number says where it is from, and wrong names and files are told in a sentence."""

import re
import tomllib
from importlib import resources

import pytest

from meshplan.core import MachineError
from meshplan.machine import Aot, Chip, LinkDim, Machine
from meshplan.machine._presets import load_preset

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
    assert len(lines) == 1 + len(machine.chip.flops) + 3 + len(machine.dims)
    assert not [line for line in lines if "no source given" in line]


def test_presets_lists_each_machine_with_an_example_size():
    assert Machine.presets() == (
        "a100:1x8", "b200:1x8", "cpu:8", "h100:1x8", "h200:1x8",
        "tpu-v4:2x2x4", "tpu-v5e:4x4", "tpu-v5p:4x4x4", "tpu-v6e:8x8",
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
        ("h10:1x8", "machine 'h10:1x8': there is no preset 'h10'. Nearest: h100, h200. Presets: a100:1x8, "),
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
        ("tpu-v4:16x16x32", "hosts of 2x2x1 chips, at most 256 along a dim and 4096 in all."),
    ],
)
def test_a_name_or_size_that_does_not_exist_is_told_with_what_to_write(name, sentence):
    with pytest.raises(MachineError, match=re.escape(sentence)):
        Machine.preset(name)


GOOD = """
name = "toy"
device_kinds = ["Toy 1"]
[chip]
name = "Toy"
platform = "gpu"
memory_bytes = { value = 1_000, source = "s" }
memory_bytes_per_second = { value = 10.0, source = "s" }
host_bytes_per_second = { value = 1.0, source = "s" }
[chip.flops]
float32 = { value = 5.0, source = "s" }
bfloat16 = { value = 10.0, source = "s" }
[size]
form = "flat"
example = "4"
source = "s"
[[links]]
name = "wire"
kind = "ring"
bytes_per_second = { value = 2.0, source = "s" }
latency_seconds = { value = 0.5, source = "s" }
[aot]
missing = "nobody compiles for toys"
source = "s"
"""


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("memory_bytes = {", "memory_byte = {", "file toy.toml: key 'chip.memory_bytes' is missing; give { value"),
        ("value = 2.0", "value = -2.0", "key 'links[0].bytes_per_second' is -2.0; it must be a positive number."),
        ('value = 2.0, source = "s"', 'value = 2.0, source = " "', "'links[0].bytes_per_second' has an empty source;"),
        ('{ value = 2.0, source = "s" }', "2.0", "'links[0].bytes_per_second' must be written { value"),
        ('"ring"', '"mesh"', "key 'links[0].kind' is 'mesh'; it must be one of switch, ring, torus, fully-connected."),
        ('platform = "gpu"', 'platform = "npu"', "key 'chip.platform' is 'npu'; it must be one of cpu, gpu, tpu."),
        ("bfloat16 =", "float16 =", "key 'chip.flops.bfloat16' is missing;"),
        ('form = "flat"', 'form = "torus"', "key 'size.largest' is missing; give a list of sizes."),
        ('form = "flat"', 'form = "nodes"\nlargest = 0', "'size.largest' is 0; it must be a positive whole number."),
        ('form = "flat"', 'form = "nodes"\nlargest = 8', "key 'links' has 1 entries; the size form 'nodes' needs 2."),
        ("[aot]", "[aot]\ntwist = 1", "key 'aot.twist' is not a key of a preset; remove it or correct its spelling."),
        ("missing =", "prefix =", "key 'aot.platform' must be given, or else 'missing' with the reason why not."),
        ('name = "toy"', "name toy", "preset file toy.toml: it is not TOML:"),
    ],
)
def test_a_wrong_preset_file_is_told_by_file_and_key(old, new, sentence):
    assert old in GOOD
    with pytest.raises(MachineError, match=re.escape(sentence)):
        load_preset(GOOD.replace(old, new, 1), "toy.toml")


def test_a_machine_can_be_described_in_a_file_of_its_own(tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(GOOD)
    machine = Machine.from_toml(path, "4")
    assert (machine.name, machine.devices, machine.levels[0].kind) == ("toy:4", 4, "ring")
    with pytest.raises(MachineError, match="'toy:4' cannot be compiled for ahead of time: nobody compiles for toys"):
        machine.aot_topology()


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
