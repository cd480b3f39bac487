"""A user's own machine: a TOML file, and every mistake in it told in a sentence with the file and the line."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from meshplan.core import MachineError, MeshShape
from meshplan.machine import LinkAlgorithm, Machine, RemoteMemory, collective_time
from meshplan.machine._presets import load_preset
from meshplan.machine._toml import key_lines

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

MORE = """
[[links.algorithms]]
name = "ring"
kind = ["all-gather", "reduce-scatter"]
efficiency = { value = 0.5, source = "s" }
own_bytes_per_second = { value = 4.0, source = "s" }
fixed_seconds = { value = 1.0, source = "s" }
seconds_per_root_byte = { value = 0.25, source = "s" }
"""
POOL = """
[remote_memory]
scope = "pool"
bytes = { value = 4_000, source = "s" }
bytes_per_second = { value = 1.0, source = "s" }
"""


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


@pytest.mark.parametrize(
    ("old", "new", "at", "sentence"),
    [
        ("memory_bytes = {", "memory_byte = {", "[chip]",
         "key 'chip.memory_bytes' is missing; give { value = ..., source"),
        ("bytes_per_second = { value = 2.0", "rate = { value = 2.0", "[[links]]",
         "key 'links[0].bytes_per_second' is missing; give { value = ..., source = \"...\" }."),
        ("value = 2.0", "value = -2.0", "value = -2.0",
         "key 'links[0].bytes_per_second' is -2.0; it must be a positive number."),
        ("value = 2.0", 'value = "fast"', 'value = "fast"',
         "key 'links[0].bytes_per_second' is 'fast'; it must be a positive number."),
        ("value = 2.0", "value = true", "value = true", "'links[0].bytes_per_second' is True; it must be a positive"),
        ("value = 1_000,", "value = 0,", "value = 0,", "key 'chip.memory_bytes' is 0; it must be a positive number."),
        ('value = 2.0, source = "s"', 'value = 2.0, source = " "', 'source = " "',
         "'links[0].bytes_per_second' has an empty source; say where the number is from."),
        ('{ value = 2.0, source = "s" }', "2.0", "= 2.0", "'links[0].bytes_per_second' must be written { value"),
        ('"ring"', '"mesh"', '"mesh"',
         "key 'links[0].kind' is 'mesh'; it must be one of switch, ring, torus, fully-connected."),
        ('kind = "ring"', 'kind = "ring"\nduplex = "simplex"', "simplex",
         "key 'links[0].duplex' is 'simplex'; it must be one of full, half."),
        ('platform = "gpu"', 'platform = "npu"', "npu",
         "key 'chip.platform' is 'npu'; it must be one of cpu, gpu, tpu."),
        ("bfloat16 =", "float16 =", "[chip.flops]", "key 'chip.flops.bfloat16' is missing;"),
        ('form = "flat"', 'form = "torus"', "[size]", "key 'size.largest' is missing; give a list of sizes."),
        ('form = "flat"', 'form = "nodes"\nlargest = -8', "largest = -8",
         "'size.largest' is -8; it must be a positive whole number."),
        ('form = "flat"', 'form = "torus"\nlargest = [4, -4]', "largest = [4, -4]",
         "key 'size.largest' is [4, -4]; it must be a list of positive sizes."),
        ('form = "flat"', 'form = "nodes"\nlargest = 8', "[[links]]",
         "key 'links' has 1 entries; the size form 'nodes' needs 2."),
        ("[aot]", "[aot]\nmising = 1", "mising = 1",
         "key 'aot.mising' is not a key of a machine file; remove it or correct its spelling (Nearest: missing)."),
        ("missing =", "prefix =", "[aot]",
         "key 'aot.platform' must be given, or else 'missing' with the reason why not."),
        ('name = "toy"', "name toy", "name toy", "it is not TOML: Expected '=' after a key in a key/value pair."),
        ('name = "toy"', "names = 3", "", "key 'name' is missing; give a text."),
        ('name = "Toy"', "name = 3", "name = 3", "key 'chip.name' is 3; it must be a text."),
        ('device_kinds = ["Toy 1"]', "device_kinds = [1]", "device_kinds",
         "'device_kinds' is [1]; it must be a list of"),
        ("[chip.flops]", "[chip.flop]", "[chip]", "key 'chip.flops' is missing; give a table."),
        ('source = "s"\n[[links]]', 'source = "s"\n[links]', "[links]",
         "key 'links' must be a list of tables, outermost"),
    ],
)
def test_a_mistake_is_told_by_file_line_and_key(old, new, at, sentence):
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    with pytest.raises(MachineError) as caught:
        load_preset(text, "toy.toml")
    said = str(caught.value)
    assert said.startswith(f"machine file toy.toml, line {line_of(text, at) if at else 1}: ")
    assert sentence in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("old", "new", "at", "sentence"),
    [
        ("value = 0.5", "value = 1.5", "value = 1.5",
         "key 'links[0].algorithms[0].efficiency' is 1.5; it must be a part of the links' rate, at most 1."),
        ('name = "ring"', 'name = "rong"', '"rong"',
         "key 'links[0].algorithms[0].name' is 'rong'; it must be one of ring,"),
        ('"reduce-scatter"]', '"scatter"]', '"scatter"]',
         "key 'links[0].algorithms[0].kind' has 'scatter'; it must be one"),
        ("efficiency =", "efficency =", "[[links.algorithms]]", "key 'links[0].algorithms[0].efficiency' is missing;"),
        ('scope = "pool"', 'scope = "rack"', '"rack"',
         "key 'remote_memory.scope' is 'rack'; it must be one of chip, node,"),
        ('scope = "pool"', 'scope = "node"', "[remote_memory]", "key 'remote_memory.sharers' is missing; give { value"),
        ("value = 4_000", "value = -4_000", "value = -4_000",
         "key 'remote_memory.bytes' is -4000; it must be a positive"),
    ],
)
def test_a_mistake_in_algorithms_and_remote_memory_is_told_by_file_line_and_key(old, new, at, sentence):
    base = GOOD.replace("[aot]", MORE + POOL + "[aot]")
    assert old in base[base.index(MORE):]
    head, tail = base.split(MORE, 1)
    text = head + (MORE + tail).replace(old, new, 1)
    with pytest.raises(MachineError) as caught:
        load_preset(text, "toy.toml")
    assert str(caught.value).startswith(f"machine file toy.toml, line {line_of(text, at)}: ")
    assert sentence in str(caught.value)


def test_lines_are_found_past_comments_long_texts_quoted_keys_and_nested_tables():
    text = (
        "# name = 1\na = 1\n\n[b] # [c]\n'x y' = 2\ntext = \"\"\"\na = 3\n[d]\n\"\"\"\n[[e]]\nf = 1\n"
        "[[e.g]]\nh = 1\n[[e]]\n[[e.g]]\nh.i = 2\n[[e.g]]\n"
    )
    assert key_lines(text) == {
        ("a",): 2, ("b",): 4, ("b", "x y"): 5, ("b", "text"): 6, ("e", 0): 10, ("e", 0, "f"): 11, ("e", 0, "g", 0): 12,
        ("e", 0, "g", 0, "h"): 13, ("e", 1): 14, ("e", 1, "g", 0): 15, ("e", 1, "g", 0, "h", "i"): 16,
        ("e", 1, "g", 1): 17,
    }


def test_a_machine_can_be_described_in_a_file_of_its_own(tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(GOOD)
    machine = Machine.from_toml(path, "4")
    assert (machine.name, machine.devices, machine.levels[0].kind) == ("toy:4", 4, "ring")
    assert machine == Machine.from_toml(path) == Machine.preset(f"{path}:4") == Machine.preset(str(path))
    assert Machine.preset(f"{path}:6").devices == 6
    with pytest.raises(MachineError, match="'toy:4' cannot be compiled for ahead of time: nobody compiles for toys"):
        machine.aot_topology()
    with pytest.raises(MachineError, match="machine 'toy:4x4': found 2 numbers; write a number of devices"):
        Machine.from_toml(path, "4x4")


def test_a_file_that_is_not_there_is_told(tmp_path):
    path = tmp_path / "none.toml"
    sentence = f"machine file {path}: it cannot be read (No such file or directory); give a file there."
    with pytest.raises(MachineError, match=re.escape(sentence)):
        Machine.from_toml(path)


def test_duplex_algorithms_and_a_pool_of_memory_are_read():
    text = GOOD.replace('kind = "ring"', 'kind = "switch"\nduplex = "half"').replace("[aot]", MORE + POOL + "[aot]")
    preset = load_preset(text, "toy.toml")
    gather = LinkAlgorithm(
        name="ring", kind="all-gather", efficiency=0.5, own_bytes_per_second=4.0, fixed_seconds=1.0,
        seconds_per_root_byte=0.25, source="s",
    )
    assert preset.links[0].duplex == "half"
    assert preset.links[0].algorithms == (gather, replace(gather, kind="reduce-scatter"))
    assert preset.remote_memory == RemoteMemory(
        scope="pool", nbytes=4_000, bytes_per_second=1.0, source="bytes: s; rate: s"
    )


def test_figures_of_a_file_price_its_collectives(tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(GOOD.replace('kind = "ring"', 'kind = "switch"').replace("[aot]", MORE + "[aot]"))
    machine, mesh = Machine.preset(f"{path}:4"), MeshShape.of({"a": 4})
    said = collective_time(machine, mesh, "all-gather", 64, ("a",))
    assert said.algorithm == "ring"
    assert said.seconds == pytest.approx(3 * 0.5 + 1.0 + 48 / (2.0 * 0.5) + 16 / 4.0 + 8 * 0.25)


def test_the_command_line_shows_a_file_and_tells_its_mistake(tmp_path, capsys):
    from meshplan.cli import main

    path = tmp_path / "toy.toml"
    path.write_text(GOOD)
    assert main(["machines", "--show", f"{path}:6"]) == 0
    assert capsys.readouterr().out.startswith("toy:6: 6 x Toy, 1 kB each, wire 6\n")
    path.write_text(GOOD.replace('"ring"', '"mesh"'))
    assert main(["machines", "--show", str(path)]) == 2
    at = line_of(GOOD, '"ring"')
    assert capsys.readouterr().err == (
        f"meshplan machines: machine file toy.toml, line {at}: key 'links[0].kind' is 'mesh'; it must be one of "
        "switch, ring, torus, fully-connected.\n"
    )
