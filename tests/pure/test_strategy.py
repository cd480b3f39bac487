"""Groups, legal strategies, the graph of decisions and the tying of repeated layers."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.core import MeshShape
from meshplan.cost import Chosen
from meshplan.program import CROSSINGS, SLICE, Program
from meshplan.rules import JOINTLY_LINEAR, Dims
from meshplan.strategy import UNREDUCED, UNUSED, Graph, Node, enumerate_choices, tie
from meshplan.strategy._factors import FactorTable, repeats
from meshplan.strategy._groups import Group, Grouper
from tests._programs import (
    adam_args,
    adam_step,
    block_args,
    block_step,
    f32,
    graph_of,
    mlp_args,
    model_of,
    priced,
    program_of,
    sgd_step,
)

# ----------------------------------------------------------------------------------------------- factors

SIZES = st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=4)


def product(table: FactorTable, factors: tuple[int, ...]) -> int:
    return math.prod(table.sizes[f] for f in table.leaves(factors))


@given(st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_joined_factors_are_the_same_and_sizes_multiply(pairs: list[tuple[list[int], list[int]]], random: Any):
    table = FactorTable()
    known: list[tuple[tuple[int, ...], int]] = []
    for left, right in pairs:
        sides = []
        for sizes in (left, right):
            part = tuple(table.new(n) for n in sizes)
            if known and random.random() < 0.5:
                part = random.choice(known)[0]
            known.append((part, product(table, part)))
            sides.append(part)
        saved = table.snapshot()
        if table.unify(*sides):
            assert table.leaves(sides[0]) == table.leaves(sides[1])
        else:
            table.restore(saved)
            assert table.leaves(sides[0]) != table.leaves(sides[1])
        for part, size in known:
            assert product(table, part) == size
            assert all(f not in table.parts for f in table.leaves(part)), "leaves are not joined or split further"


def test_a_dim_cut_in_two_is_a_major_and_a_minor_part():
    table = FactorTable()
    whole, major, minor = table.new(24), table.new(4), table.new(6)
    assert table.unify((whole,), (major, minor))
    assert [table.sizes[f] for f in table.leaves((whole,))] == [4, 6]
    assert table.leaves((whole,)) == table.leaves((major, minor))


def test_dims_cut_at_different_places_have_their_common_refinement():
    table = FactorTable()
    left, right = (table.new(4), table.new(6)), (table.new(8), table.new(3))
    assert table.unify(left, right)
    assert [table.sizes[f] for f in table.leaves(left)] == [4, 2, 3]
    assert table.leaves(left) == table.leaves(right)


def test_sizes_that_do_not_nest_are_not_joined_and_a_snapshot_undoes_the_attempt():
    table = FactorTable()
    left, right = (table.new(2), table.new(4)), (table.new(2), table.new(3))
    saved = table.snapshot()
    assert not table.unify(left, right)
    table.restore(saved)
    assert table.parts == {}
    assert table.leaves(left) == left


def test_factors_of_another_table_keep_their_joins():
    first, second = FactorTable(), FactorTable()
    first.new(5)
    whole, parts = second.new(12), (second.new(3), second.new(4))
    assert second.unify((whole,), parts)
    offset = first.absorb(second)
    assert first.leaves((whole + offset,)) == first.leaves(tuple(p + offset for p in parts))


# ------------------------------------------------------------------------------------------------ groups


def groups_of(program: Program) -> tuple[list[Group], list[int]]:
    return Grouper(program, frozenset()).build()


def group_with(program: Program, primitive: str, ordinal: int = 0) -> Group:
    groups, group_of = groups_of(program)
    return groups[group_of[[op.index for op in program.ops if op.primitive == primitive][ordinal]]]


def scanned_step(x: Any, ws: Any) -> Any:
    return jax.grad(lambda w: jax.lax.scan(lambda c, v: (jnp.tanh(c @ v), c.mean(0)), x, w)[0].sum())(ws)


STEPS: dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...]]] = {
    "mlp": (sgd_step, mlp_args(2), (0,)),
    "adam": (adam_step, adam_args(2), (0,)),
    "block": (block_step, block_args(), (0,)),
    "scan": (scanned_step, (f32(8, 16), f32(4, 16, 16)), ()),
}


@pytest.mark.parametrize("name", STEPS)
def test_every_operation_is_in_one_group_and_a_value_has_one_set_of_factors_there(name: str):
    step, args, _ = STEPS[name]
    program = program_of(step, *args)
    groups, group_of = groups_of(program)
    assert Counter(i for g in groups for i in g.ops) == Counter(range(len(program.ops)))
    assert all(i in groups[g].ops for i, g in enumerate(group_of))
    for group in groups:
        assert not group.anchor or len(group.ops) == 1, "an anchor decides alone"
        assert len({(program.ops[i].region, program.ops[i].scope) for i in group.ops}) == 1
        for index in group.ops:
            op = program.ops[index]
            for k, operand in enumerate(op.operands):
                if operand is None:
                    continue
                check_dims(group, group.operands[index, k], program.values[operand].aval.shape)
                if operand in group.results:
                    assert_same(group, group.operands[index, k], group.results[operand])
            for v in op.results:
                check_dims(group, group.results[v], program.values[v].aval.shape)


def check_dims(group: Group, dims: Dims, shape: tuple[int, ...]) -> None:
    assert len(dims) == len(shape)
    for factors, n in zip(dims, shape, strict=True):
        assert n % math.prod(group.sizes[f] for f in factors) == 0
    assert repeats(dims) <= group.whole


def assert_same(group: Group, want: Dims, have: Dims) -> None:
    """A value inside a group is wanted as it was made; a dim whole on one side is whole on the other."""
    for a, b in zip(want, have, strict=True):
        assert a == b or group.whole >= set(a) | set(b)


@pytest.mark.parametrize("name", STEPS)
def test_what_decides_for_itself_is_an_anchor(name: str):
    step, args, _ = STEPS[name]
    program = program_of(step, *args)
    groups, group_of = groups_of(program)
    for op in program.ops:
        alone = op.rule.anchor or op.primitive in CROSSINGS
        assert groups[group_of[op.index]].anchor == alone


def test_a_softmax_is_one_group_with_its_reductions_inside():
    program = program_of(jax.nn.softmax, f32(8, 16))
    groups, _ = groups_of(program)
    (group,) = groups
    assert group.sizes == (8, 16)
    assert sorted(how for _, how in group.reduced.values()) == ["max", "sum"]
    assert all(factors == (1,) for factors, _ in group.reduced.values())


def test_a_scalar_of_many_arrays_does_not_make_one_group_of_them():
    def clip(a: Any, b: Any, c: Any) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(x * x) for x in (a, b, c)))
        return tuple(x / norm for x in (a, b, c))

    program = program_of(clip, f32(8, 16), f32(16, 4), f32(8, 16))
    groups, group_of = groups_of(program)
    squaring = ("square", "mul", "integer_pow")
    squares = [op.index for op in program.ops if op.primitive in squaring and op.view.results[0].shape]
    assert len({group_of[i] for i in squares}) == 3
    divisions = [op.index for op in program.ops if op.primitive == "div" and op.view.results[0].shape]
    assert len({group_of[i] for i in divisions}) == 3
    assert all(len(groups[group_of[i]].sizes) == 2 for i in divisions)


def test_what_is_made_of_literals_is_free_until_it_meets_an_array():
    def mask(x: Any) -> Any:
        rows = jax.lax.broadcasted_iota(jnp.int32, (8, 8), 0)
        columns = jax.lax.broadcasted_iota(jnp.int32, (8, 8), 1)
        return jnp.where(rows >= columns, x @ x, 0.0)

    program = program_of(mask, f32(8, 8))
    assert not group_with(program, "select_n").free
    alone = program_of(lambda: jnp.arange(8.0)[:, None] * jnp.ones((8, 4)))
    groups, _ = groups_of(alone)
    assert all(g.free for g in groups)
    assert not any(g.free for g in groups_of(program_of(lambda x: x * 2, f32(8)))[0])


def test_the_dims_of_an_array_and_its_transpose_stay_apart():
    program = program_of(lambda x: x + x.T, f32(8, 8))
    add = group_with(program, "add")
    index = program.ops[-1].index
    left, right = add.operands[index, 0], add.operands[index, 1]
    assert left == right, "an addition wants both alike"
    assert not repeats(left)
    assert group_with(program, "transpose") is not None
    for group in groups_of(program)[0]:
        assert len(group.sizes) == 2
        assert not group.whole, "nothing is kept whole: the transpose is moved instead"


def test_a_failed_join_keeps_no_factor_whole():
    """The addition wants y and its transpose alike, which fails after a dim of `c` was found to be whole."""

    def step(x: Any) -> Any:
        y = jnp.tanh(x)
        c = jnp.cumsum(y, axis=0)
        return c + y.T, jax.lax.cumprod(y, axis=0)

    program = program_of(step, f32(8, 8))
    group = group_with(program, "tanh")
    (rows,), (columns,) = group.results[program.ops[0].results[0]]
    assert group.whole == {rows}
    assert columns not in group.whole


# --------------------------------------------------------------------------------------------- strategies

MESHES = [{"a": 8}, {"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 3, "b": 2}]


def brute_force(node: Node, mesh: MeshShape, dims: list[Dims]) -> set[tuple[int, ...]]:
    """Every assignment of axes to factors under which every array of the node can be cut."""
    found = set()
    places = [*range(len(node.sizes)), UNUSED] + ([UNREDUCED] if node.kind == "sum" else [])
    for assign in itertools.product(places, repeat=len(mesh.sizes)):
        given = list(zip(mesh.sizes, assign, strict=True))
        parts = [math.prod(s for s, f in given if f == g) for g in range(len(node.sizes))]
        ok = all(n % p == 0 for n, p in zip(node.sizes, parts, strict=True))
        ok &= all(f < 0 or f not in node.whole for f in assign)
        for array in dims:
            for factors in array:
                # blocks of the dim are whole ranges only if no factor is cut below one that is not cut entirely
                cut = [parts[f] for f in factors]
                last = max((i for i, p in enumerate(cut) if p > 1), default=0)
                ok &= all(cut[i] == node.sizes[factors[i]] for i in range(last))
        if ok:
            found.add(assign)
    return found


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    sizes = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 8, 12]), min_size=1, max_size=3)))
    order = draw(st.permutations(range(len(sizes))))
    cuts = sorted(draw(st.sets(st.integers(1, len(sizes)), max_size=2)) | {len(sizes)})
    dims = tuple(tuple(order[a:b]) for a, b in itertools.pairwise([0, *cuts]))
    whole = frozenset(draw(st.sets(st.sampled_from(range(len(sizes))), max_size=1)))
    return Node(kind="sum" if draw(st.booleans()) else "chain", sizes=sizes, whole=whole, values={0: dims})


@given(nodes(), st.sampled_from(MESHES))
def test_strategies_are_the_legal_assignments(node: Node, sizes: dict[str, int]):
    mesh = MeshShape.of(sizes)
    choices = enumerate_choices(node, mesh)
    assert len(choices) == len({tuple(row) for row in choices.assign.tolist()})
    assert {tuple(row) for row in choices.assign.tolist()} == brute_force(node, mesh, [node.values[0]])
    assert any((row == UNUSED).all() for row in choices.assign)


@given(nodes(), st.sampled_from(MESHES))
def test_specs_cut_an_array_as_the_strategies_say(node: Node, sizes: dict[str, int]):
    mesh = MeshShape.of(sizes)
    choices = enumerate_choices(node, mesh)
    dims = node.values[0]
    shape = [math.prod(node.sizes[f] for f in factors) for factors in dims]
    specs, index = choices.specs(dims, unreduced=True)
    assert len(set(specs)) == len(specs)
    shards = choices.shards(dims)
    for s, row in enumerate(choices.assign):
        spec = specs[index[s]]
        assert spec.shards(mesh) == shards[s]
        assert math.prod(spec.local_shape(shape, mesh)) * shards[s] == math.prod(shape)
        assert len(set(spec.axes)) == len(spec.axes)
        assert set(spec.unreduced) == {n for n, f in zip(mesh.names, row, strict=True) if f == UNREDUCED}
        assert set(spec.axes) == {n for n, f in zip(mesh.names, row, strict=True) if f >= 0}


def test_axes_of_a_summed_factor_leave_the_value_unreduced():
    node = Node(kind="anchor", sizes=(8, 8, 8))
    choices = enumerate_choices(node, MeshShape.of({"a": 2, "b": 4}))
    specs, index = choices.specs(((0,), (1,)), partial=(2,))
    for s, row in enumerate(choices.assign):
        assert specs[index[s]].unreduced == tuple(n for n, f in zip("ab", row, strict=True) if f == 2)


# -------------------------------------------------------------------------------------------------- graph


def arrives(graph: Graph, value: int, node: int) -> bool:
    """Whether an edge brings the value to the node, by way of a view or directly."""
    sources = {e.source for e in graph.edges if e.value == value and e.target == node}
    return bool(sources)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("merge_sums", [True, False])
def test_every_value_read_in_another_node_has_an_edge_there(name: str, merge_sums: bool):
    step, args, donate = STEPS[name]
    graph = graph_of(step, *args, donate=donate, merge_sums=merge_sums)
    program = graph.program
    for value, uses in enumerate(program.consumers):
        if program.values[value].aval.size == 1:
            continue
        for op, k in uses:
            if op not in graph.node_of_op or program.ops[op].primitive == SLICE:
                continue
            target, source = graph.node_of_op[op], graph.owner.get(value)
            if source is None or target == source:
                continue
            carried = [e for e in graph.edges if e.value == value and e.target == target and (op, k) in e.uses]
            assert len(carried) == 1
            edge = carried[0]
            if edge.source != source:
                assert graph.nodes[edge.source].kind == "view"
                assert arrives(graph, value, edge.source)
            sizes_have, sizes_want = graph.nodes[edge.source].sizes, graph.nodes[edge.target].sizes
            shape = program.values[value].aval.shape
            for n, have, want in zip(shape, edge.have, edge.want, strict=True):
                assert n % math.prod(sizes_have[f] for f in have) == 0
                assert n % math.prod(sizes_want[f] for f in want) == 0


@pytest.mark.parametrize("name", STEPS)
def test_every_argument_and_result_has_a_node(name: str):
    step, args, donate = STEPS[name]
    graph = graph_of(step, *args, donate=donate)
    for i, leaf in enumerate(graph.program.args):
        dims = graph.nodes[graph.node_of_arg[i]].arguments[i]
        assert len(dims) == len(leaf.aval.shape)
    for j, leaf in enumerate(graph.program.results):
        if leaf.pair < 0 and leaf.aval.size > 1:
            node = graph.result_nodes[j]
            assert [e.value for e in graph.edges if e.target == node] == [leaf.value]


def test_consumers_that_decide_apart_share_one_view():
    def step(x: Any, a: Any, b: Any) -> Any:
        y = jnp.tanh(x)
        return y @ a, y @ b

    graph = graph_of(step, f32(8, 8), f32(8, 8), f32(8, 8))
    (view,) = [i for i, n in enumerate(graph.nodes) if n.kind == "view"]
    into, out = [e for e in graph.edges if e.target == view], [e for e in graph.edges if e.source == view]
    assert len(into) == 1
    assert len(out) == 2
    assert sorted(u for e in out for u in e.uses) == sorted(into[0].uses)


def test_a_weight_read_forward_and_backward_is_one_view_unless_rematerialised():
    def grad(fn: Any) -> Graph:
        return graph_of(jax.grad(lambda w, x: fn(jnp.tanh(x), w).sum()), f32(16, 16), f32(8, 16))

    def layers(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    plain, remat = grad(layers), grad(jax.checkpoint(layers))
    scopes = {n.scope for n in remat.nodes if n.kind == "view"}
    assert len(scopes) >= 1
    weight = plain.program.args[0].value
    views = [e for e in plain.edges if e.value == weight and plain.nodes[e.target].kind == "view"]
    assert len(views) == 1
    in_scopes = {remat.nodes[e.target].scope for e in remat.edges if e.value == remat.program.args[0].value}
    assert len(in_scopes) > 1, "what a rematerialised block reads is brought to it anew"


def test_sums_of_products_are_decisions_only_where_they_are_merged():
    def step(x: Any, a: Any, b: Any) -> Any:
        return x @ a + x @ b

    args = (f32(8, 8), f32(8, 8), f32(8, 8))
    merged, apart = (graph_of(step, *args, merge_sums=m) for m in (True, False))
    assert [n.kind for n in merged.nodes].count("sum") == 1
    assert [n.kind for n in apart.nodes].count("sum") == 0
    (total,) = [n for n in merged.nodes if n.kind == "sum"]
    assert total.group is not None
    assert [merged.program.ops[i].primitive for i in total.group.ops] == ["add"]
    assert JOINTLY_LINEAR & {"add"}


def test_a_sum_with_a_value_that_is_complete_is_none():
    graph = graph_of(lambda x, a: x @ a + jnp.tanh(x), f32(8, 8), f32(8, 8))
    assert "sum" not in [n.kind for n in graph.nodes]


def test_conversions_there_and_back_do_not_part_a_sum_from_what_it_adds():
    """The gradient of a tied embedding: a scatter in one precision, a product that was rounded on its way."""

    def step(x: Any, y: Any, at: Any) -> Any:
        product = (x.T @ y).astype(jnp.bfloat16).astype(jnp.float32)
        return jnp.zeros_like(product).at[at].add(y) + product

    at = jax.ShapeDtypeStruct((8,), jnp.int32)
    graph = graph_of(step, f32(8, 16), f32(8, 4), at)
    (total,) = [n for n in graph.nodes if n.kind == "sum"]
    assert total.group is not None
    primitives = [graph.program.ops[i].primitive for i in total.group.ops]
    assert sorted(primitives) == ["add", "convert_element_type", "convert_element_type"]
    once = graph_of(lambda x, y: (x @ y).astype(jnp.bfloat16) + (y @ x).astype(jnp.bfloat16), f32(8, 8), f32(8, 8))
    assert "sum" not in [n.kind for n in once.nodes], "a sum in another precision is another sum"


def test_a_product_read_twice_is_not_summed_later():
    graph = graph_of(lambda x, a, b: (lambda p: (p + x @ b, jnp.tanh(p)))(x @ a), f32(8, 8), f32(8, 8), f32(8, 8))
    assert "sum" not in [n.kind for n in graph.nodes]


def test_moments_are_stored_as_their_update_wants_them_and_parameters_decide_for_themselves():
    graph = graph_of(adam_step, *adam_args(1), donate=(0,))
    kinds = {leaf.path: graph.nodes[graph.node_of_arg[i]].kind for i, leaf in enumerate(graph.program.args)}
    for name in ("up", "down"):
        assert kinds[f"state/mu/0/{name}"] == kinds[f"state/nu/0/{name}"] == "chain"
        assert kinds[f"state/params/0/{name}"] == "argument"
        nodes_ = {graph.node_of_arg[i] for i, leaf in enumerate(graph.program.args)
                  if leaf.path in (f"state/mu/0/{name}", f"state/nu/0/{name}")}  # fmt: skip
        assert len(nodes_) == 1, "both moments in the update's one chain"


def test_without_donation_nothing_is_absorbed():
    graph = graph_of(adam_step, *adam_args(1))
    assert {graph.nodes[graph.node_of_arg[i]].kind for i in range(len(graph.program.args))} == {"argument"}


def test_the_scanned_dim_of_a_stored_stack_is_whole():
    graph = graph_of(lambda x, ws: jax.lax.scan(lambda c, w: (c @ w, None), x, ws)[0], f32(8, 8), f32(4, 8, 8))
    node = graph.nodes[graph.node_of_arg[1]]
    assert set(node.arguments[1][0]) <= node.whole


def test_a_carry_enters_once_for_each_run_of_its_loop():
    def inner(c: Any, w: Any) -> Any:
        return jax.lax.scan(lambda d, _: (jnp.tanh(d @ w), None), c, length=5)[0], None

    graph = graph_of(lambda x, ws: jax.lax.scan(inner, x, ws)[0], f32(8, 8), f32(3, 8, 8))
    crossings = {i for i, n in enumerate(graph.nodes) if n.kind == "crossing"}
    counts = sorted(e.count for e in graph.edges if e.target in crossings)
    assert counts == [1.0, 3.0, 3.0, 15.0]  # outer in, outer back, inner in, inner back


def test_a_loop_of_no_steps_costs_nothing():
    graph = graph_of(lambda x, ws: jax.lax.scan(lambda c, w: (c @ w, None), x, ws)[0], f32(8, 8), f32(0, 8, 8))
    model = model_of(graph, "cpu:8", a=8)
    dots = [c for c, m in enumerate(model.space.ties.members) if graph.nodes[m[0]].kind == "anchor"]
    assert all((model.node_costs()[c] == 0).all() for c in dots)


# ---------------------------------------------------------------------------------------------------- ties


def classes(layers: int, step: Any = sgd_step, make: Any = mlp_args) -> int:
    graph = graph_of(step, *make(layers), donate=(0,))
    return len(tie(graph, {}).members)


def test_layers_far_from_both_ends_decide_alike():
    assert classes(6) == classes(12)
    assert classes(6, adam_step, adam_args) == classes(12, adam_step, adam_args)


def test_ties_are_a_partition_and_members_look_the_same():
    graph = graph_of(adam_step, *adam_args(8), donate=(0,))
    ties = tie(graph, {})
    assert sorted(n for m in ties.members for n in m) == list(range(len(graph.nodes)))
    for c, (first, members) in enumerate(zip(ties.first, ties.members, strict=True)):
        assert members[0] == first
        assert all(ties.class_of[n] == c for n in members)
        assert len({(graph.nodes[n].kind, graph.nodes[n].sizes, graph.nodes[n].whole) for n in members}) == 1


def test_marks_keep_nodes_apart():
    graph = graph_of(sgd_step, *mlp_args(8), donate=(0,))
    ties = tie(graph, {})
    together = max(ties.members, key=len)
    assert len(together) > 2
    marked = tie(graph, {together[1]: "pinned"})
    assert marked.members[marked.class_of[together[1]]] == (together[1],)


def test_a_wider_neighbourhood_ties_less():
    graph = graph_of(sgd_step, *mlp_args(10), donate=(0,))
    counts = [len(tie(graph, {}, radius).members) for radius in (0, 1, 2, 4, 100)]
    assert counts == sorted(counts)
    assert counts[-1] > counts[2]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("machine", ["cpu:8", "tpu-v5e:2x4"])
def test_a_tied_choice_costs_what_the_same_choice_costs_untied(seed: int, machine: str):
    args = mlp_args(6, batch=64, width=64, hidden=256)
    graph = graph_of(sgd_step, *args, donate=(0,), merge_sums=machine != "cpu:8")
    tied, untied = (model_of(graph, machine, radius=r, data=2, model=4) for r in (2, 1000))
    assert len(untied.choices) > len(tied.choices)
    rng = np.random.default_rng(seed)
    choice = [int(rng.integers(len(c))) for c in tied.choices]
    spread = []
    for node in untied.space.ties.first:
        c = tied.space.ties.class_of[node]
        mine = untied.choices[untied.space.ties.class_of[node]]
        (same,) = np.flatnonzero((mine.assign == tied.choices[c].assign[choice[c]]).all(axis=1))
        spread.append(int(same))
    a, b = Chosen(tied, choice).predict(), Chosen(untied, spread).predict()
    assert a.step_seconds == pytest.approx(b.step_seconds)
    assert a.peak_bytes == pytest.approx(b.peak_bytes)
    assert priced(tied, choice) == pytest.approx(priced(untied, spread))
