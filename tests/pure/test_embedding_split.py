"""A plan's placements as a layout, and bags of tables that it keeps as hot and cold rows."""

from __future__ import annotations

import numpy as np

from meshplan.embedding import Collection, Split, Table, join_features, plan, split_ids
from meshplan.embedding._route_layout import make_layout
from meshplan.machine import Machine


def test_a_plans_placements_are_a_layout_of_its_bytes() -> None:
    tables = [Table(name=f"t{i}", rows=rows, dim=16) for i, rows in enumerate((100_000, 50_000, 2_000, 40))]
    found = plan(tables, Machine.preset("cpu:8"), 1024)
    layout = make_layout(Collection(tables=found.tables), found.placements, found.groups.shards)
    assert layout.used_bytes == tuple(found.weight_bytes)


def test_hot_and_cold_bags_add_up_to_the_whole_ones() -> None:
    rows = np.random.default_rng(0).normal(size=(10, 3))
    split = Split(table="item", hot="item/hot", cold="item/cold", hot_rows=4, hot_share=0.5)
    ids = np.array([[0, 3, 4], [9, -1, -1], [-1, -1, -1], [10, -2, 5]])
    given, weights = split_ids([split], {"item": ids, "user": ids}, {"item": np.ones((4, 3))})
    assert sorted(given) == ["item/cold", "item/hot", "user"]
    assert sorted(weights) == ["item/cold", "item/hot"]
    assert given["item/cold"][3].tolist() == [6, -1, 1]  # 10 is past the ten rows, and past the six cold ones
    assert given["item/hot"][3].tolist() == [-1, -2, -1]
    tables = {"item/hot": rows[:4], "item/cold": rows[4:]}

    def pooled(table: np.ndarray, bags: np.ndarray) -> np.ndarray:
        return (table[np.maximum(bags, 0)] * (bags >= 0)[..., None]).sum(1)

    parts = {name: pooled(table, given[name][:3]) for name, table in tables.items()}
    np.testing.assert_allclose(join_features([split], parts)["item"], pooled(rows, ids[:3]))
