"""The stored tables of what each back end emits, against what the cost model predicts of the same programs."""

from __future__ import annotations

import json

import pytest

from meshplan.cost import Emission, runs_on_shards
from tests._emission import TARGETS, Case, by_kind, cases, key, read_table, table_path
from tests._micro import micros

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
