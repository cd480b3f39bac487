"""Replica groups: every spelling XLA prints, and the mesh axes they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.core import MeshShape
from meshplan.lower._hlo_groups import group_size, infer_axes, parse_groups, parse_slice_groups, spanning_axes

MESH = MeshShape.of({"x": 2, "y": 4})


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['x'=2,'y'=4] {'x'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['axis_0'=1,'axis_1'=2,'axis_2'=4] {'axis_2'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        (
            "replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_1'}",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        (
            "replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,2,2]T(0,2,1)) {'axis_0':(2)2}, dimensions={0}",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", (tuple(range(8)),)),
        ("replica_groups={}, to_apply=%add", (tuple(range(8)),)),
        ("dimensions={0}", (tuple(range(8)),)),
        ("channel_id=2, source_target_pairs={{0,0},{1,1},{4,2},{5,3},{2,4},{3,5},{6,6},{7,7}}",
         ((0,), (1,), (2, 4), (3, 5), (6,), (7,))),
    ],
)  # fmt: skip
def test_every_spelling_of_groups_is_read(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert {frozenset(g) for g in parse_groups(text, 8)} == {frozenset(g) for g in groups}
    assert group_size(parse_groups(text, 8)) == max(len(g) for g in groups)


def test_a_part_of_an_axis_joins_the_devices_that_differ_in_that_part() -> None:
    minor = parse_groups("replica_groups=mesh['a'=4,'b'=2] {'a':(2)2}", 8)
    major = parse_groups("replica_groups=mesh['a'=4,'b'=2] {'a':(1)2}", 8)
    assert {frozenset(g) for g in minor} == {frozenset(g) for g in ((0, 2), (1, 3), (4, 6), (5, 7))}
    assert {frozenset(g) for g in major} == {frozenset(g) for g in ((0, 4), (1, 5), (2, 6), (3, 7))}


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4), st.data())
def test_the_groups_of_axes_are_recognised_as_those_axes(sizes: list[int], data: st.DataObject) -> None:
    mesh = MeshShape.of({f"a{i}": n for i, n in enumerate(sizes)})
    real = [name for name, n in mesh.axes if n > 1]
    chosen = tuple(data.draw(st.lists(st.sampled_from(real), unique=True))) if real else ()
    axes = tuple(n for n in mesh.names if n in chosen)
    listed = ",".join(f"'{n}'={s}" for n, s in mesh.axes)
    text = f"replica_groups=mesh[{listed}] {{{','.join(repr(a) for a in axes)}}}"
    groups = parse_groups(text, mesh.devices)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.devices))
    assert group_size(groups) == mesh.size(axes)
    if axes:
        assert infer_axes(groups, mesh) == axes
    assert spanning_axes(groups, mesh) == axes


@given(st.permutations(range(3)), st.sampled_from([(2, 3, 4), (4, 2, 2), (1, 5, 2)]))
def test_a_transposed_range_is_numpys(order: list[int], shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    rows = np.arange(count).reshape(shape).transpose(order).reshape(-1, shape[order[-1]])
    text = (
        f"replica_groups=[{rows.shape[0]},{rows.shape[1]}]<=[{','.join(map(str, shape))}]"
        f"T({','.join(map(str, order))})"
    )
    assert parse_groups(text, count) == tuple(tuple(r) for r in rows.tolist())


def test_groups_that_are_no_axes_are_not_guessed_but_spanned() -> None:
    half_of_y = parse_groups("replica_groups=[4,2]<=[8]", 8)
    assert infer_axes(half_of_y, MESH) is None
    assert spanning_axes(half_of_y, MESH) == ("y",)


def test_a_permute_between_two_axes_spans_both() -> None:
    swap = parse_groups("source_target_pairs={{0,0},{1,4},{2,1},{3,5},{4,2},{5,6},{6,3},{7,7}}", 8)
    assert spanning_axes(swap, MESH) == ("x", "y")


@pytest.mark.parametrize(
    "target",
    ['"{1,2}x{0:3}"', '"{1,2}x{0,1,2:3}"', "{{100000,200000},{100001,200001},{100002,200002},{100003,200003}}"],
)
def test_groups_between_slices_join_equal_devices_of_each(target: str) -> None:
    text = f'frontend_attributes={{_xla_megascale_target={target},_xla_megascale_transfer_type="ALL_REDUCE"}}'
    groups = parse_slice_groups(text, 4)
    assert groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert infer_axes(groups, MESH) == ("x",)


def test_groups_of_one_slice_are_those_of_the_axes_within_it() -> None:
    assert infer_axes(((0, 1, 2, 3),), MESH) == ("y",)
    assert infer_axes(((0, 1),), MESH) is None
