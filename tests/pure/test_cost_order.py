"""The order of computation beside collectives: closed cases, and no schedule of few items is much shorter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.core import MeshShape, Spec
from meshplan.cost._order import Moving, list_scheduled
from meshplan.cost._reshard import laid_out_elements

MESH = MeshShape.of({"x": 2, "y": 4})


def moving(made: set[int], uses: set[int], seconds: float, *links: int) -> Moving:
    return Moving(made=frozenset(made), uses=frozenset(uses), seconds=seconds, links=links or (0,))


def ends(
    order: Sequence[int], before: Sequence[frozenset[int]], seconds: Sequence[float], moved: Sequence[Moving]
) -> float:
    """When the last item and the last collective end, items in this order."""
    now, free = 0.0, dict[int, float]()
    done: dict[int, float] = {}
    arrived: dict[int, float] = {}
    for at in order:
        assert before[at] <= done.keys()
        now = max((now, *(arrived[c] for c, m in enumerate(moved) if at in m.uses)))
        now += seconds[at]
        done[at] = now
        for c, m in enumerate(moved):
            if c not in arrived and m.made <= done.keys():
                arrived[c] = max((now, *(free.get(link, 0.0) for link in m.links))) + m.seconds
                free.update(dict.fromkeys(m.links, arrived[c]))
    return max((now, *arrived.values()))


def test_what_no_collective_waits_for_is_computed_beside_it():
    # as in a layer's way back: the gradient of a weight beside the sum of the input's gradient
    before = [frozenset(), frozenset({0}), frozenset({0}), frozenset({2})]
    order = list_scheduled(before, lambda _: 1.0, [moving({2}, {3}, 1.0)])
    assert order == [0, 2, 1, 3]


def test_items_of_equal_ways_keep_the_order_of_the_program():
    assert list_scheduled([frozenset()] * 5, lambda _: 1.0, []) == [0, 1, 2, 3, 4]


def test_nothing_passes_an_item_that_is_alone():
    before = [frozenset(), frozenset({0}), frozenset({1})]
    order = list_scheduled(before, lambda _: 1.0, [moving({0}, {2}, 5.0)], frozenset({1}))
    assert order == [0, 1, 2]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[frozenset[int]], list[float], list[Moving]]:
    count = draw(st.integers(1, 6))
    before = [frozenset(draw(st.sets(st.integers(0, i - 1), max_size=2))) if i else frozenset() for i in range(count)]
    seconds = draw(st.lists(st.integers(0, 4).map(float), min_size=count, max_size=count))
    moved = []
    for _ in range(draw(st.integers(0, 3))):
        first = draw(st.integers(0, count - 1))
        uses = draw(st.sets(st.integers(first + 1, count - 1), max_size=2)) if first + 1 < count else set()
        moved.append(moving({first}, uses, float(draw(st.integers(0, 5))), draw(st.integers(0, 1))))
    return before, seconds, moved


@settings(max_examples=60, deadline=None)
@given(problems())
def test_a_list_schedule_is_legal_and_at_most_twice_the_best(problem):
    before, seconds, moved = problem
    order = list_scheduled(before, lambda i: seconds[i], moved)
    assert sorted(order) == list(range(len(before)))
    found = ends(order, before, seconds, moved)
    legal = (
        p for p in itertools.permutations(range(len(before)))
        if all(before[i] <= set(p[:k]) and all(m.made <= set(p[:k]) for m in moved if i in m.uses)
               for k, i in enumerate(p))
    )  # fmt: skip
    best = min(ends(p, before, seconds, moved) for p in legal)
    assert best - 1e-9 <= found <= 2 * best + max((m.seconds for m in moved), default=0.0)


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ([("x",), ()], [(), ()], 0),  # gathered along the first dim
        ([(), ("y",)], [(), ()], 2 * 8 * 16),  # pieces of 8 x 4, joined along the second
        ([(), ()], [(), ("y",)], 2 * 8 * 16),  # cut along the second
        ([(), ("y",)], [("y",), ()], 2 * 8 * 16 // 4),  # exchanged: what arrives is joined along the second
        ([("x",), ("y",)], [("x",), ()], 2 * 4 * 16),
        ([("x", "y"), ()], [(), ()], 0),
        ([(), ()], [(), ()], 0),
    ],
)
def test_pieces_are_put_in_order_where_another_dim_than_the_first_is_cut(before, after, wanted):
    assert laid_out_elements((8, 16), Spec(tuple(before)), Spec(tuple(after)), MESH) == wanted
