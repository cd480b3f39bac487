"""The embedding planner against exhaustive search, plain placements, closed forms and its own sentences."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.core import ArgumentError, MemoryLimitError, MeshShape, PlanFileError
from meshplan.embedding import Collection, Groups, Pricing, Table, load_embedding_plan, place, plan
from meshplan.embedding._cost import (
    COMMON_MEMORY,
    GATHERED,
    GRADS,
    IDS,
    MEMORY,
    OUT,
    READ,
    RECEIVED,
    SENT_GRADS,
    WEIGHTS,
    WRITE,
    Feature,
    make_group,
    options,
)
from meshplan.embedding._route_layout import make_layout
from meshplan.embedding._solve import Placing, lower_bound, make_placing, step_parts
from meshplan.embedding._solve_exact import _dense, _ways
from meshplan.machine import Machine, collective_time

NODE = Machine.preset("h100:1x8")
HASHED = Pricing(hashed=True)


def some_tables(count: int, seed: int, most_rows: float = 6.5) -> tuple[Table, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        Table(
            name=f"t{i}", rows=int(10 ** rng.uniform(2, most_rows)), dim=int(rng.choice([32, 64, 128])),
            hotness=float(np.ceil(rng.lognormal(1, 1))), zipf=float(rng.choice([0.0, 1.05])),
            pooling=str(rng.choice(["sum", "none", "weighted", "mean"])),  # type: ignore[arg-type]
        )
        for i in range(count)
    )  # fmt: skip


def exhaustive(tables: tuple[Table, ...], machine: Machine, batch: int, groups: Groups, pricing: Pricing) -> float:
    """The least seconds over the product of all placements, none left out."""
    group = make_group(machine, groups, batch // machine.devices)
    problem = make_placing(group, [options(Feature(table=t), group, pricing) for t in tables], machine.memory_bytes)
    n = groups.shards
    each = [[_dense(found[k], at, n) for k, at in _ways(found, n)] for found in problem.options]
    half = len(each) // 2
    left, right = (_sums(each[:half], n), _sums(each[half:], n))
    best = np.inf
    for loads, common in zip(*left, strict=True):
        peaks, shared = (loads + right[0]).max(axis=2), common + right[1]
        fits = peaks[:, MEMORY] + shared[:, COMMON_MEMORY] <= problem.limit
        cost = _vector_cost(problem, peaks, shared)
        best = min(best, float(cost[fits].min(initial=np.inf)))
    return best


def _sums(each: list, n: int) -> tuple[np.ndarray, np.ndarray]:
    loads, common = np.zeros((1, 7, n)), np.zeros((1, 4))
    for found in each:
        loads = (loads[:, None] + np.stack([f[0] for f in found])[None]).reshape(-1, 7, n)
        common = (common[:, None] + np.stack([f[1] for f in found])[None]).reshape(-1, 4)
    return loads, common


def _vector_cost(problem: Placing, peaks: np.ndarray, common: np.ndarray) -> np.ndarray:
    """`step_parts` of many at once, written out."""
    group = problem.group

    def took(lines: tuple, nbytes: np.ndarray) -> np.ndarray:
        each = [x.latency_seconds + x.seconds_per_byte * nbytes + x.seconds_per_root_byte * nbytes**0.5 for x in lines]
        return np.where(nbytes > 0, np.min(each, axis=0), 0) if lines else np.zeros_like(nbytes)

    cost = took(group.exchange, peaks[:, IDS]) + took(group.gather, common[:, GATHERED])
    cost = cost + took(group.exchange, np.maximum(peaks[:, OUT], common[:, RECEIVED]))
    cost = cost + took(group.exchange, np.maximum(peaks[:, GRADS], common[:, SENT_GRADS]))
    cost = cost + took(group.sync, peaks[:, WEIGHTS]) / group.groups.sync_every
    return cost + (peaks[:, READ] + peaks[:, WRITE]) / group.memory_bytes_per_second


@pytest.mark.parametrize("seed", range(3))
def test_six_tables_are_placed_as_an_exhaustive_search_places_them(seed: int) -> None:
    tables, machine, batch = some_tables(6, seed), Machine.preset("h100:1x2"), 2 * 2048
    least = min(
        exhaustive(tables, machine, batch, Groups(replicas=m, shards=2 // m, sync_every=5), HASHED) for m in (1, 2)
    )
    found = plan(tables, machine, batch, sync_every=5, pricing=HASHED)
    assert found.exact
    assert found.step_seconds == pytest.approx(least, rel=1e-9)


def test_four_devices_and_all_schemes_are_searched_exhaustively_too() -> None:
    tables, machine = some_tables(3, 7), Machine.preset("h100:1x4")
    groups = Groups(replicas=1, shards=4)
    found = plan(tables, machine, 4 * 4096, groups=groups, pricing=Pricing())
    assert found.exact
    assert found.step_seconds == pytest.approx(exhaustive(tables, machine, 4 * 4096, groups, Pricing()), rel=1e-9)


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 14), st.integers(0, 10_000), st.sampled_from(["h100:1x4", "h100:2x4", "tpu-v5e:2x4"]),
       st.booleans())  # fmt: skip
def test_no_plan_is_worse_than_the_plain_placements_or_better_than_the_bound(
    count: int, seed: int, name: str, hashed: bool
) -> None:
    tables, machine, pricing = some_tables(count, seed), Machine.preset(name), Pricing(hashed=hashed)
    batch = machine.devices * 512
    found = plan(tables, machine, batch, sync_every=4, pricing=pricing)
    for groups in (None, found.groups):
        for method in ("table-wise", "row-wise"):
            try:
                plain = plan(tables, machine, batch, groups=groups, sync_every=4, pricing=pricing, method=method)
            except MemoryLimitError:
                continue
            assert found.step_seconds <= plain.step_seconds * (1 + 1e-12)
    assert found.bound_seconds <= found.step_seconds * (1 + 1e-12)
    assert found.peak_bytes <= found.memory_limit * (1 + 1e-6)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10_000), st.booleans())
def test_every_table_is_covered_once_and_the_plan_survives_json(count: int, seed: int, near: bool) -> None:
    machine = Machine.preset("h100:2x4")
    found = plan(some_tables(count, seed), machine, 8 * 256, near=near, sync_every=3, pricing=HASHED)
    for table, placement in zip(found.tables, found.placements, strict=True):
        cells = sum(a * b for a, b in (s.shape for s in placement.shards))
        copies = found.groups.shards if placement.scheme == "data" else 1
        assert cells == copies * table.rows * table.dim
        assert all(0 <= s.device < found.groups.shards for s in placement.shards)
    again = load_embedding_plan(found.to_json())
    assert again == found
    assert again.to_json() == plan(some_tables(count, seed), machine, 8 * 256, near=near, sync_every=3,
                                   pricing=HASHED).to_json()  # fmt: skip
    assert str(again) == str(found)


@pytest.mark.parametrize("seed", range(4))
def test_the_runtime_takes_the_placements_and_holds_the_bytes_that_were_planned(seed: int) -> None:
    found = plan(some_tables(9, seed), Machine.preset("h100:2x4"), 8 * 256, groups=Groups(replicas=2, shards=4))
    layout = make_layout(Collection(tables=found.tables), found.placements, found.groups.shards)
    assert layout.used_bytes == found.weight_bytes


def test_a_shard_of_replicas_has_the_bytes_of_the_paper() -> None:
    """S M / T bytes of weights a device; an all-reduce of so many every K steps."""
    tables = tuple(Table(name=f"t{i}", rows=80_000, dim=64, hotness=4) for i in range(3))
    groups = Groups(replicas=2, shards=4, sync_every=10)
    p = plan(tables, NODE, 8 * 1024, groups=groups, pricing=Pricing(schemes=("row",), optimizer="sgd"))
    total = sum(t.nbytes for t in tables)
    assert set(p.weight_bytes) == {total * 2 // 8}
    assert set(p.sum_bytes) == {0}
    mesh = MeshShape.of({"shard": 4, "replica": 2})
    time_ = collective_time(NODE, mesh, "all-reduce", total * 2 // 8, ("replica",))
    assert p.parts["sync"] == pytest.approx(time_.seconds / 10)
    assert sum(time_.bytes_by_dim.values()) >= 2 * (2 - 1) * total / 8 * (1 - 1e-9)


def test_exchanged_bytes_of_one_table_are_those_counted_by_hand() -> None:
    table, pricing = Table(name="t", rows=10_000, dim=64, hotness=20), Pricing(schemes=("table",), optimizer="sgd")
    p = plan([table], NODE, 8 * 512, groups=Groups(replicas=1, shards=8), pricing=pricing)
    mesh = MeshShape.of({"shard": 8, "replica": 1})
    bags = 8 * 512
    for part, nbytes in (("ids", bags * 20 * 8), ("outputs", bags * 64 * 4), ("gradients", bags * 64 * 4)):
        there = collective_time(NODE, mesh, "all-to-all", nbytes, ("shard",)).seconds
        assert p.parts[part] == pytest.approx(there), part
    read = bags * 20 * (64 * 4 + 8) + bags * 64 * 4
    assert p.parts["lookup"] == pytest.approx(read / NODE.chip.memory_bytes_per_second)


def test_near_replicas_lie_on_the_fast_links_and_far_ones_do_not() -> None:
    machine, tables = Machine.preset("h100:4x8"), some_tables(12, 3, most_rows=7.5)
    near, far = (
        plan(tables, machine, 32 * 256, groups=Groups(replicas=4, shards=8, near=near), pricing=HASHED)
        for near in (True, False)
    )
    assert near.parts["sync"] < far.parts["sync"]
    assert near.parts["outputs"] > far.parts["outputs"]
    assert "(near)" in str(near) and "(far)" in str(far)


def test_a_law_of_hot_rows_loads_the_first_row_piece_unless_ids_are_hashed() -> None:
    table = Table(name="t", rows=1_000_000, dim=64, hotness=8, zipf=1.1)
    ranked, hashed = (
        plan([table], NODE, 8 * 1024, groups=Groups(replicas=1, shards=8), pricing=Pricing(schemes=("row",), hashed=h))
        for h in (False, True)
    )
    assert ranked.imbalance["lookups"] > 4 > hashed.imbalance["lookups"] > 1
    assert any("first row piece gets" in n or "hottest rows" in n for n in ranked.notes)


def test_hot_rows_on_every_device_are_taken_where_they_pay() -> None:
    table = Table(name="t", rows=400_000_000, dim=128, hotness=8, zipf=1.1)
    groups, pricing = Groups(replicas=1, shards=8), Pricing(schemes=("row", "data"), dense_data=True)
    plain, split = (
        plan([table], NODE, 8 * 512, groups=groups, hot_rows=hot, pricing=pricing) for hot in (False, True)
    )
    assert split.step_seconds < plain.step_seconds
    (how,) = split.splits
    hot, cold = split.tables
    assert (hot.name, cold.name) == (how.hot, how.cold) == ("t/hot", "t/cold")
    assert hot.rows == how.hot_rows and hot.rows + cold.rows == table.rows
    assert hot.hotness + cold.hotness == pytest.approx(table.hotness)
    assert hot.hotness == pytest.approx(table.hotness * how.hot_share)
    assert split.placement("t/hot").scheme == "data" and split.placement("t/cold").scheme == "row"
    assert f"its {how.hot_rows:,} hottest rows are on every device" in str(split)
    assert any("hot_rows=True prices them" in n for n in plain.notes)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10_000), st.booleans(), st.booleans())
def test_hot_rows_are_never_taken_where_they_cost(count: int, seed: int, hashed: bool, dense: bool) -> None:
    pricing = Pricing(hashed=hashed, dense_data=dense)
    plain, split = (plan(some_tables(count, seed), NODE, 8 * 512, hot_rows=h, pricing=pricing) for h in (False, True))
    assert split.step_seconds <= plain.step_seconds * (1 + 1e-12)
    assert {s.table for s in split.splits} <= {t.name for t in plain.tables}


def test_a_thousand_tables_on_64_devices_are_planned_within_20_seconds() -> None:
    machine, tables = Machine.preset("h100:8x8"), some_tables(1000, 0, most_rows=7.5)
    start = time.process_time()
    found = plan(tables, machine, 64 * 1024, sync_every=10, pricing=HASHED)
    assert time.process_time() - start <= 20
    plain = [plan(tables, machine, 64 * 1024, groups=found.groups, pricing=HASHED, method=m)
             for m in ("table-wise", "row-wise")]  # fmt: skip
    assert found.step_seconds < 0.75 * min(p.step_seconds for p in plain)
    assert found.step_seconds < 1.3 * found.bound_seconds
    text = str(found)
    assert "queries/s" in text and "groups considered:" in text and "more that take less" in text


def test_dense_seconds_and_reserved_bytes_are_part_of_the_answer() -> None:
    tables, groups = some_tables(4, 1), Groups(replicas=1, shards=8)
    bare = plan(tables, NODE, 8 * 128, groups=groups)
    full = plan(tables, NODE, 8 * 128, groups=groups, pricing=Pricing(dense_seconds=0.5, reserved_bytes=10**9))
    assert full.step_seconds == pytest.approx(bare.step_seconds + 0.5)
    assert full.peak_bytes == bare.peak_bytes + 10**9
    assert full.queries_per_second == pytest.approx(8 * 128 / full.step_seconds)


def test_a_node_is_used_for_rows_where_groups_span_nodes() -> None:
    tables = some_tables(6, 5)
    p = plan(tables, Machine.preset("h100:2x4"), 8 * 512, groups=Groups(replicas=1, shards=8),
             pricing=Pricing(schemes=("row_in_node",), hashed=True))  # fmt: skip
    for placement in p.placements:
        assert placement == place(
            next(t for t in tables if t.name == placement.table), "row_in_node", [s.device for s in placement.shards]
        )
        assert {s.device // 4 for s in placement.shards} in ({0}, {1})


def test_tables_that_cannot_fit_are_told_with_the_numbers() -> None:
    tables = [Table(name="big", rows=10**9, dim=256), Table(name="small", rows=100, dim=32)]
    with pytest.raises(MemoryLimitError) as caught:
        plan(tables, NODE, 8 * 64)
    said = str(caught.value)
    for part in ("the tables do not fit 'h100:1x8'", "2 tables take 1.02 TB", "8 devices have 680 GB (84.9 GB each)",
                 "1 replicas of 8 shards", "at least", "'big', 1000000000 x 256, 1.02 TB", "more devices",
                 "a smaller dtype"):  # fmt: skip
        assert part in said
    with pytest.raises(MemoryLimitError, match=r"Take one replica \(Groups\(replicas=1, \.\.\.\)\), more devices"):
        plan([Table(name="t", rows=2 * 10**8, dim=256)], NODE, 8 * 64, groups=Groups(replicas=4, shards=2))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tables": []}, "there are no tables to plan; give at least one Table."),
        ({"batch": 0}, "a batch of 0 samples does not divide over the 8 devices"),
        ({"batch": 100}, "a batch of 100 samples does not divide over the 8 devices of 'h100:1x8'; give a positive"),
        ({"groups": Groups(replicas=3, shards=2)}, "groups of 3 replicas x 2 shards are 6 devices, 'h100:1x8' has 8"),
        ({"groups": Groups(replicas=0, shards=8)}, "groups of 0 replicas x 8 shards are 0 devices"),
        ({"groups": Groups(replicas=1, shards=8, sync_every=0)}, "sync_every is 0; replicas are averaged every 1"),
        ({"method": "tablewise"}, "method 'tablewise' is unknown. Nearest: table-wise"),
        ({"memory_limit": 0}, "memory_limit is 0 bytes; give the positive number"),
        ({"pricing": Pricing(schemes=("row",))}, "table 't': none of the schemes row fits 3 rows of 32 columns on 8"),
    ],
)
def test_what_cannot_be_planned_is_a_sentence(change: dict, sentence: str) -> None:
    given_: dict = {"tables": [Table(name="t", rows=3, dim=32)], "machine": NODE, "batch": 64}
    if "pricing" in change:
        change = {**change, "groups": Groups(replicas=1, shards=8)}
    with pytest.raises(ArgumentError) as caught:
        plan(**{**given_, **change})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"optimizer": "adamw"}, "optimizer 'adamw' is unknown. Nearest: adam"),
        ({"schemes": ("rows",)}, "scheme 'rows' is unknown. Nearest: row"),
        ({"dense_seconds": -1.0}, "dense_seconds is -1.0; give 0 or more."),
        ({"min_columns": 0}, "min_columns is 0; give 1 or more."),
    ],
)
def test_what_cannot_be_priced_is_a_sentence(fields: dict, sentence: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Pricing(**fields)
    assert sentence in str(caught.value)


def test_a_damaged_or_foreign_plan_file_is_refused() -> None:
    text = plan([Table(name="t", rows=300, dim=32)], NODE, 64).to_json()
    for bad, sentence in [
        ("{", "this is no JSON"),
        ("{}", "this is no embedding plan"),
        (text.replace('"version":1', '"version":9'), "of version 9"),
        (text.replace('"batch":64', '"batch":"64"'), "plan.batch of the embedding plan is '64'"),
        (text.replace('"batch":64', '"bitch":64'), "lacks or adds 'batch'"),
    ]:
        with pytest.raises(PlanFileError, match=sentence):
            load_embedding_plan(bad)
    with pytest.raises(ArgumentError, match="the plan has no table 'u'"):
        load_embedding_plan(text).placement("u")


def test_the_bound_holds_for_any_choice() -> None:
    tables = some_tables(4, 11)
    machine = Machine.preset("h100:1x2")
    group = make_group(machine, Groups(replicas=1, shards=2), 1024)
    problem = make_placing(group, [options(Feature(table=t), group, HASHED) for t in tables], machine.memory_bytes)
    bound = lower_bound(problem)
    for ways in itertools.product(*(_ways(found, 2) for found in problem.options)):
        chosen = zip(problem.options, ways, strict=True)
        loads, common = zip(*(_dense(found[k], at, 2) for found, (k, at) in chosen), strict=True)
        parts = step_parts(group, np.sum(loads, axis=0).max(axis=1), np.sum(common, axis=0))
        assert bound <= sum(parts.values()) * (1 + 1e-12)


def test_a_fused_update_keeps_no_gradient_of_a_request() -> None:
    tables, groups = some_tables(4, 2), Groups(replicas=1, shards=8)
    plain, fused = (
        plan(tables, NODE, 8 * 1024, groups=groups, pricing=replace(HASHED, fused=f)) for f in (False, True)
    )
    assert max(fused.buffer_bytes) < max(plain.buffer_bytes)
    assert fused.parts["update"] < plain.parts["update"]
