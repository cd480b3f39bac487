"""The stored tables of what each back end emits, against what the cost model predicts of the same programs."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshplan.core import MeshShape, Spec
from meshplan.cost import Emission, runs_on_shards
from meshplan.cost._model import narrowed, widened_from
from meshplan.cost._reshard import reshard_path
from meshplan.program import Call, trace
from tests._emission import TARGETS, Case, by_kind, cases, key, read_table, table_path
from tests._micro import micros
from tests._programs import f32, graph_of

VERSIONS = {p: list(json.loads(table_path(p).read_text())["versions"]) for p in TARGETS}
TABLES = [(platform, version) for platform in TARGETS for version in VERSIONS[platform]]
# What the model does not follow, by back end: beginnings of the cases' names, with the reason.
NOT_MODELLED = {
    "cpu": {},
    "gpu": {"read_row": "the row is read from the gathered dim, so that its sum is not needed"},
    "tpu": {
        "sum of complex64": "parts are gathered, real and imaginary alone, and added on every device",
        "sum and split of complex64": "as a sum",
        "reduce_and": "a small array of booleans is padded to whole tiles of 32-bit words",
        "reduce_or": "as reduce_and",
        "conv_inputs_strided": "the smaller operand is gathered instead of a sum of the larger result",
    },
}


@pytest.fixture(scope="module")
def all_cases() -> list[Case]:
    return list(cases())


@pytest.mark.parametrize(("platform", "version"), TABLES)
def test_the_model_predicts_what_was_measured_to_the_byte(platform: str, version: str, all_cases: list[Case]):
    table, emission = read_table(platform, version), Emission(platform)
    wrong, checked = [], 0
    for case in all_cases:
        answer = table.get(key(case))
        if case.expected is None or not isinstance(answer, list):
            continue
        if case.name.startswith(tuple(NOT_MODELLED[platform])):
            continue
        checked += 1
        if by_kind(answer) != case.expected(emission):
            wrong.append(f"{key(case)}: predicted {dict(case.expected(emission))}, measured {answer}")
    assert not wrong, "\n".join(wrong)
    assert checked > 0.85 * sum(c.expected is not None for c in all_cases), "measure again: the tables lack cases"


@pytest.mark.parametrize(("platform", "version"), TABLES)
def test_what_is_not_modelled_still_differs(platform: str, version: str, all_cases: list[Case]):
    table, emission = read_table(platform, version), Emission(platform)
    for prefix in NOT_MODELLED[platform]:
        found = [c for c in all_cases if c.expected is not None and c.name.startswith(prefix)]
        assert any(by_kind(table[key(c)]) != c.expected(emission) for c in found if c.expected), prefix


def test_what_runs_on_shards_was_gathered_by_some_back_end(all_cases: list[Case]):
    """Each kind of operation that lower/ takes out of XLA's hands was measured, and moved too much in them."""
    primitive = {m.name: m.primitive for m in micros() if runs_on_shards(m.program()[1].view)}
    gathered: set[str] = set()
    tables = [read_table(p, v) for p, v in TABLES]
    alone = {key(c): primitive[c.name.partition(":")[0]] for c in all_cases if c.expected is None}
    for name, of in alone.items():
        answers = [t.get(name) for t in tables]
        if any(isinstance(a, list) and "all-gather" in by_kind(a) for a in answers):
            gathered.add(of)
    needed = {
        "conv_general_dilated", "eigh", "fft", "lu", "ragged_dot_general", "scatter", "scatter-add", "svd", "top_k",
        "triangular_solve", "tridiagonal_solve",
    }  # fmt: skip
    assert needed <= gathered


def test_nothing_that_runs_on_shards_is_gathered(all_cases: list[Case]):
    on_shards = {key(c).removesuffix(" (XLA alone)") for c in all_cases if c.expected is None}
    assert len(on_shards) > 50
    for platform, version in TABLES:
        table = read_table(platform, version)
        emitted = {name: table[name] for name in on_shards if isinstance(table.get(name), list)}
        found = {name for name, collectives in emitted.items() if "all-gather" in by_kind(collectives)}
        assert not found, (platform, version, found)


def test_dtypes_of_sums_by_back_end():
    cpu, gpu, tpu = (Emission(p) for p in TARGETS)
    assert cpu.bytes_factor("bfloat16", sums=True) == 2.0
    assert cpu.bytes_factor("float16", sums=True) == 1.0
    assert cpu.bytes_factor("float8_e4m3fn") == 2.0
    assert gpu.bytes_factor("int16", sums=True) == 2.0
    assert gpu.bytes_factor("int16") == 1.0
    assert (gpu.scatters("int32"), tpu.scatters("int32"), tpu.scatters("float32"), cpu.scatters("float32")) == (
        True, False, True, False,
    )  # fmt: skip


# Sums over eight v5e chips whose result is split: (shape, dim, dtype, whether the compiler scatters them). Measured.
SCATTERED = [
    ((16, 4096), 0, "bfloat16", False), ((32, 4096), 0, "bfloat16", False), ((64, 4096), 0, "bfloat16", True),
    ((64, 128), 0, "bfloat16", False), ((128, 128), 0, "bfloat16", True), ((96, 512), 0, "bfloat16", True),
    ((32, 4096), 0, "float32", False), ((48, 4096), 0, "float32", True), ((64, 64), 0, "float32", False),
    ((256, 64), 1, "bfloat16", True), ((479, 1024), 1, "bfloat16", False), ((479, 2048), 1, "bfloat16", True),
    ((512, 3072), 1, "bfloat16", False), ((512, 1536), 1, "bfloat16", True), ((64, 1536), 1, "bfloat16", False),
    ((479, 512), 1, "bfloat16", True), ((64, 512), 1, "bfloat16", False), ((169344, 40), 0, "bfloat16", False),
    ((1024, 32), 1, "float32", False), ((1024, 1024), 1, "float32", True), ((1024, 3072), 1, "float32", True),
    ((32768,), 0, "float32", False), ((8192,), 0, "bfloat16", False), ((4, 16, 512), 2, "float32", False),
    ((4, 16, 2048), 2, "float32", True), ((4, 32, 256), 1, "float32", False), ((4, 64, 256), 1, "float32", True),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dim", "dtype", "scattered"), SCATTERED)
def test_tpus_scatter_sums_into_pieces_of_whole_tiles(shape: tuple[int, ...], dim: int, dtype: str, scattered: bool):
    mesh = MeshShape.of({"x": 8})
    target = Spec(tuple(("x",) if d == dim else () for d in range(len(shape))))
    (step,) = reshard_path(Spec(((),) * len(shape), ("x",)), target, mesh)
    piece = target.local_shape(shape, mesh)
    assert Emission("tpu").kind(step, dtype, piece) == ("reduce-scatter" if scattered else "all-reduce")
    assert Emission("gpu").kind(step, dtype, piece) == "reduce-scatter"


def test_tpus_meet_rows_with_all_groups_only_where_the_rows_are_summed():
    def step(rows: jax.Array, groups: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.grad(lambda g: jnp.sin(lax.ragged_dot(rows, g, sizes)).sum())(groups)

    program = graph_of(step, f32(64, 16), f32(8, 16, 32), jax.ShapeDtypeStruct((8,), jnp.int32)).program
    views = [op.view for op in program.ops if op.primitive == "ragged_dot_general"]
    assert [Emission("tpu").flops_factor(v) for v in views] == [1.0, 8.0]
    assert [Emission("gpu").flops_factor(v) for v in views] == [8.0, 8.0]


def test_a_widening_conversion_is_made_after_the_move_on_gpus():
    def step(x: Any) -> Any:
        return jnp.sin((x * 2).astype(jnp.float32)), x.astype(jnp.float32).astype(jnp.bfloat16)

    program = trace(Call(step=step, args=(jax.ShapeDtypeStruct((64, 32), jnp.bfloat16),), kwargs={}))
    found = {
        (op.primitive, str(op.view.results[0].dtype)): widened_from(program, op.results[0]) for op in program.ops
    }
    wide = found["convert_element_type", "float32"]
    assert wide is not None and wide.dtype == "bfloat16"
    assert found["convert_element_type", "bfloat16"] is None and found["mul", "bfloat16"] is None
    assert [Emission(p).widens_after for p in ("cpu", "gpu", "tpu")] == [False, True, False]


@pytest.mark.parametrize("kept", [False, True])
def test_gpus_drop_a_narrowing_conversion_that_some_uses_undo_unless_a_rematerialised_block_keeps_it(kept: bool):
    def block(x: Any) -> Any:
        return x + jnp.sin(x.astype(jnp.float32)).astype(jnp.bfloat16)

    def step(table: Any, ids: Any) -> Any:
        run = jax.checkpoint(block) if kept else block
        return jax.grad(lambda t: run(jnp.take(t, ids, axis=0).astype(jnp.bfloat16)).astype(jnp.float32).sum())(table)

    graph = graph_of(step, f32(64, 32), jax.ShapeDtypeStruct((16,), jnp.int32))
    values, ops = graph.program.values, graph.program.ops
    edges = [e for e in graph.edges if values[e.value].op >= 0 and ops[values[e.value].op].primitive == "gather"]
    moved = {p: narrowed(graph.program, edges[0], Emission(p)) for p in ("gpu", "tpu")}
    assert moved["tpu"] is not None and moved["tpu"].dtype == "bfloat16"
    assert (moved["gpu"] is None) is not kept
