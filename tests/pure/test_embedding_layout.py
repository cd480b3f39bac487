"""Where rows lie on the devices of a group, how many requests fit, and bags on the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.core import ArgumentError
from meshplan.embedding import Collection, Placement, Shard, Table, check_ids, pad_bags, place
from meshplan.embedding._route_layout import capacities, make_layout

ITEM = Table(name="item", rows=10, dim=8, length=4)
USER = Table(name="user", rows=6, dim=8, pooling="weighted", length=2)
BOTH = Collection(tables=(ITEM, USER))
SHORT = Shard(device=0, row=0, row_end=9, column=0, column_end=8)
SCHEMES = ("data", "table", "row", "column", "grid", "row_in_node")


DRAWN = st.tuples(st.sampled_from(SCHEMES), st.integers(1, 40), st.sampled_from([4, 8]))


@given(st.lists(DRAWN, min_size=1, max_size=6))
def test_pieces_of_a_device_lie_behind_one_another_and_hold_every_entry_once(drawn: Any) -> None:
    tables = tuple(Table(name=f"t{i}", rows=rows, dim=dim) for i, (_, rows, dim) in enumerate(drawn))
    placements = []
    for i, (table, (scheme, _, _)) in enumerate(zip(tables, drawn, strict=True)):
        devices = {"table": [i % 4], "row_in_node": [2, 3]}.get(scheme, [3, 1, 0, 2])
        placements.append(place(table, scheme, devices, columns=2))
    layout = make_layout(Collection(tables=tables), placements, 4)
    held = [np.zeros((t.rows, t.dim), int) for t in tables]
    for n, pack in enumerate(layout.packs):
        for d in range(4):
            here = sorted((p for p in layout.pieces if p.pack == n and p.shard.device == d), key=lambda p: p.start)
            ends = np.cumsum([0, *(p.shard.shape[0] for p in here)])
            assert [p.start for p in here] == ends[:-1].tolist()
            assert ends[-1] == pack.used[d] <= pack.rows
            for p in here:
                held[p.table][p.shard.row : p.shard.row_end, p.shard.column : p.shard.column_end] += 1
    copies = [4 if scheme == "data" else 1 for scheme, _, _ in drawn]
    assert all((h == c).all() for h, c in zip(held, copies, strict=True))
    for lane in (x for x in layout.lanes if x.kind == "local"):
        starts = {s.table: s.starts for s in lane.streams}
        assert all(p.start == starts[p.table][0] for p in layout.pieces if p.table in starts)
    assert layout.padded_bytes >= max(layout.used_bytes)


def test_capacity_is_the_even_share_with_a_margin_and_at_most_every_id() -> None:
    layout = make_layout(Collection(tables=(ITEM,)), [place(ITEM, "row", [0, 1])], 2)
    (lane,) = layout.lanes
    assert capacities(layout, lane, 100, 1.0) == (200, 400)
    assert capacities(layout, lane, 100, 1.5) == (300, 400)
    assert capacities(layout, lane, 100, 9.0) == (400, 400)
    whole = make_layout(Collection(tables=(ITEM,)), [place(ITEM, "table", [1])], 2)
    assert capacities(whole, whole.lanes[0], 100, 1.0) == (400, 400)


def test_owners_send_sums_of_bags_where_that_is_less() -> None:
    def kind(table: Table, scheme: Any, devices: list[int]) -> str:
        return make_layout(Collection(tables=(table,)), [place(table, scheme, devices)], 4).lanes[0].kind

    assert kind(ITEM, "table", [0]) == "bags"
    assert kind(ITEM, "row", [0, 1]) == "bags"
    assert kind(ITEM, "row", [0, 1, 2, 3]) == "rows"
    assert kind(dataclasses.replace(ITEM, pooling="none"), "table", [0]) == "rows"
    assert kind(ITEM, "data", [0, 1, 2, 3]) == "local"


@pytest.mark.parametrize(
    ("placements", "sentence"),
    [
        ([place(ITEM, "table", [0])], r"table 'user' has no placement; give one for each table"),
        ([place(ITEM, "table", [0])] * 2, r"table 'item' has two placements; give one"),
        ([place(ITEM, "table", [2])], r"table 'item': a shard is on device 2, but a group has 2 devices"),
        ([place(ITEM, "data", [0])], r"table 'item', scheme 'data': every one of the 2 devices of a group keeps"),
        ([dataclasses.replace(place(ITEM, "table", [0]), table="itme")], r"names table 'itme'. Nearest: item"),
        (
            [Placement(table="item", scheme="row", shards=(SHORT,))],
            r"its 1 shards are no grid of row pieces by column pieces that covers 10 x 8 once",
        ),
    ],
)
def test_placements_that_do_not_fit_are_refused(placements: list[Placement], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        make_layout(BOTH, placements, 2)


def ids(**changed: Any) -> dict[str, Any]:
    return {"item": np.zeros((3, 4), np.int32), "user": np.zeros((3, 2), np.int32), **changed}


@pytest.mark.parametrize(
    ("given_ids", "sentence"),
    [
        (ids(item=np.full((3, 4), 10)), r"table 'item': id 10 at \[0, 0\] is past the table's end \(12 such ids\)"),
        (ids(user=np.array([[0, 0], [0, -2], [0, 0]])), r"table 'user': id -2 at \[1, 1\] is negative; -1 alone marks"),
        (ids(usre=np.zeros((3, 2), int)), r"ids: table 'usre' is unknown\. Nearest: user"),
        ({"item": np.zeros((3, 4), int)}, r"ids: table 'user' has none; give an array of -1 for empty bags"),
        (ids(item=np.zeros((3, 5), int)), r"ids: table 'item' has int64 \[3, 5\]; give integers \[batch, 4\]"),
        (ids(item=np.zeros((3, 4))), r"ids: table 'item' has float64 \[3, 4\]; give integers \[batch, 4\]"),
        (ids(item=np.zeros((2, 4), int)), r"ids: batches differ: \{'item': 2, 'user': 3\}"),
    ],
)
def test_bad_ids_are_named(given_ids: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        check_ids(BOTH, given_ids, {"user": np.ones((3, 2), np.float32)})


def test_weights_belong_to_weighted_tables() -> None:
    check_ids(BOTH, ids(item=np.full((3, 4), -1)), {"user": np.ones((3, 2))})
    with pytest.raises(ArgumentError, match=r"table 'user': pooling 'weighted' needs weights"):
        check_ids(BOTH, ids())
    with pytest.raises(ArgumentError, match=r"table 'item': pooling 'sum' takes no weights"):
        check_ids(BOTH, ids(), {"item": np.ones((3, 4))})
    with pytest.raises(ArgumentError, match=r"weights: table 'user' has \[3, 1\], its ids \[3, 2\]"):
        check_ids(BOTH, ids(), {"user": np.ones((3, 1))})


def test_ragged_bags_are_filled_up() -> None:
    assert pad_bags(np.array([5, 6, 7]), np.array([2, 0, 1]), 2).tolist() == [[5, 6], [-1, -1], [7, -1]]
    assert pad_bags(np.array([0.5]), np.array([1]), 2).tolist() == [[0.5, 0.0]]
    with pytest.raises(ArgumentError, match=r"bag 1 has 3 ids, a table's `length` says 2 at most"):
        pad_bags(np.arange(4), np.array([1, 3]), 2)
    with pytest.raises(ArgumentError, match=r"the lengths add up to 3, but there are 4 ids"):
        pad_bags(np.arange(4), np.array([1, 2]), 2)
