"""Every primitive that the installed jax registers is listed: split by a rule, opened, or whole with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from meshplan.core import _jax_primitives
from meshplan.rules import TABLE, Coverage, counts
from meshplan.rules._coverage import KINDS

ROOT = Path(__file__).resolve().parents[2]


_ROWS = """
import dataclasses, json
from meshplan.rules import coverage
print(json.dumps([dataclasses.asdict(row) for row in coverage()]))
"""


@pytest.fixture(scope="module")
def rows() -> tuple[Coverage, ...]:
    """Of jax alone: in this process other tests may have imported libraries that register primitives of their own."""
    ran = subprocess.run([sys.executable, "-c", _ROWS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return tuple(Coverage(**row) for row in json.loads(ran.stdout))


def test_no_primitive_is_unlisted(rows: tuple[Coverage, ...]) -> None:
    print(jax.__version__, len(rows), counts(rows))
    for row in rows:
        if row.kind == "whole":
            print(f"  whole: {row.primitive}: {row.reason}")
    assert [row.primitive for row in rows if row.kind == "unlisted"] == []
    assert sum(counts(rows).values()) == len(rows) > 400


_ALIVE = """
from meshplan.core import _jax_primitives
found = _jax_primitives.registered_primitives()
print(sorted(_jax_primitives.alive_primitives() - set(found)))
"""


def test_the_walk_finds_every_primitive_that_is_alive() -> None:
    """Whatever holds a primitive, a module or a closure: the walk over jax's modules sees it."""
    ran = subprocess.run([sys.executable, "-c", _ALIVE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "[]", ran.stderr  # in a process of its own: tests make primitives too
    found = _jax_primitives.registered_primitives()
    assert {"dot_general", "pallas_call", "ffi_call", "psum", "scatter-add", "threefry2x32"} <= found.keys()


def test_whole_primitives_state_a_reason_and_covered_ones_have_a_rule(rows: tuple[Coverage, ...]) -> None:
    for row in rows:
        assert row.kind in KINDS
        assert row.reason or row.kind == "covered", row
        assert row.primitive in TABLE or row.kind != "covered", row


def test_calls_loops_and_collectives_are_told_apart(rows: tuple[Coverage, ...]) -> None:
    kinds = {row.primitive: row.kind for row in rows}
    assert kinds["jit"] == kinds["remat2"] == kinds["custom_vjp_call"] == "opened"
    calls = "composite custom_vmap_call eval_jaxpr xla_metadata_call linear_call custom_linear_solve"
    assert {kinds[name] for name in calls.split()} == {"opened"}
    assert kinds["scan"] == kinds["while"] == kinds["cond"] == "region"
    assert kinds["psum"] == kinds["program_id"] == "inside"
    assert kinds["debug_callback"] == "effect"
    assert kinds["pallas_call"] == kinds["shard_map"] == kinds["rng_bit_generator"] == "whole"


def test_a_primitive_that_nobody_lists_would_be_seen() -> None:
    from meshplan.rules._coverage import _kind

    assert _kind("no_such_primitive", "jax._src.lax.lax", _jax_primitives.KERNEL_MODULES)[0] == "unlisted"


def test_names_in_the_table_are_of_some_jax(rows: tuple[Coverage, ...]) -> None:
    """What this jax does not register is an alias, or of another version."""
    other = {
        "copy_p", "expand_dims", "log2", "one_minus_square", "polynomial", "relayout", "shard_alike", "scatter_add",
        "scatter_max", "scatter_min", "scatter_mul", "scatter_sub",
    }  # fmt: skip
    assert set(TABLE) - {row.primitive for row in rows} <= other
