"""The search: mesh shapes, pins, templates, memory limits, names, and descent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.core import MemoryLimitError, MeshError, MeshShape, Spec, SpecError
from meshplan.cost import MeshModel
from meshplan.cost._problem import FORBIDDEN, Problem
from meshplan.machine import Machine, legal_mesh_shapes
from meshplan.plan import Found, Search, fixed_mesh
from meshplan.plan._bind import axes_in_use
from meshplan.program import CARRY
from meshplan.solve import evaluate, exhaustive
from meshplan.solve._descend import descend, star_bound
from meshplan.strategy import TEMPLATES
from tests._problems import problems
from tests._programs import (
    adam_args,
    adam_block_args,
    adam_block_step,
    adam_step,
    f32,
    mlp_args,
    priced,
    search_of,
    sgd_step,
)

# ------------------------------------------------------------------------------------------ mesh shapes


def shapes(search: Search, template: str | None = None) -> list[tuple[int, ...]]:
    return [m.sizes for m in search.meshes(template)]


def tiny(machine: str = "cpu:8", **more: Any) -> Search:
    return search_of(lambda w, x: jnp.tanh(x @ w), f32(16, 16), f32(16, 16), machine=machine, **more)


def test_on_uniform_links_one_order_of_the_sizes_is_enough():
    for machine in ("h100:1x8", "cpu:8"):
        assert shapes(tiny(machine)) == [(8,), (4, 2), (2, 2, 2)]
    assert [m.names for m in tiny("h100:1x8").meshes()] == [("data",), ("data", "model"), ("data", "fsdp", "model")]


@pytest.mark.parametrize("machine", ["tpu-v5e:2x4", "h100:2x4", "tpu-v5e:2*2x4"])
def test_where_links_differ_all_legal_shapes_are_looked_at(machine: str):
    legal = legal_mesh_shapes(Machine.preset(machine), 3)
    assert sorted(shapes(tiny(machine))) == sorted(legal)
    assert [len(s) for s in shapes(tiny(machine))] == sorted(len(s) for s in legal)


@pytest.mark.parametrize(("most", "longest"), [(1, 1), (2, 2), (3, 3)])
def test_no_more_axes_than_asked_for(most: int, longest: int):
    assert max(map(len, shapes(tiny(max_axes=most)))) == longest


def test_a_pin_restricts_the_meshes_to_those_with_its_axes():
    assert shapes(tiny(pins={"w": P("data")})) == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    assert shapes(tiny(pins={"w": P("model")})) == [(2, 4), (4, 2), (2, 2, 2)]
    assert shapes(tiny(pins={"w": P("fsdp", "model")})) == [(2, 2, 2)]
    assert shapes(tiny(pins={"w": P("model")}, max_axes=2)) == [(2, 4), (4, 2)]


def test_an_axis_that_no_mesh_of_the_search_has_is_an_error():
    with pytest.raises(SpecError, match="axis 'fsdp' is unknown; the search names its axes data, model"):
        tiny(pins={"w": P("fsdp")}, max_axes=2).meshes()


def test_templates_have_meshes_of_their_own():
    for template in TEMPLATES:
        found = shapes(tiny(), template)
        if template in ("megatron", "megatron_sp", "tp_fsdp"):
            assert found == [(2, 4), (4, 2), (2, 2, 2)]
        else:
            assert found == [(8,)]


def test_the_users_mesh_must_have_the_machines_devices():
    machine = Machine.preset("cpu:8")
    assert fixed_mesh({"a": 2, "b": 4}, machine) == MeshShape.of({"a": 2, "b": 4})
    for wrong in ({"a": 4}, {"a": 0}, {}):
        with pytest.raises(MeshError):
            fixed_mesh(wrong, machine)


# ------------------------------------------------------------------------------------------------- pins


def argument(found: Found, path: str) -> Spec:
    graph = found.chosen.graph
    (i,) = [i for i, leaf in enumerate(graph.program.args) if leaf.path == path]
    node = graph.node_of_arg[i]
    return found.chosen.spec(node, graph.nodes[node].arguments[i])


@pytest.mark.parametrize("pin", [P("data"), P(None, "data"), P("model", "data"), P(("data", "model")), P()])
def test_a_pinned_argument_is_stored_as_pinned(pin: P):
    search = search_of(sgd_step, *mlp_args(3), donate=(0,), pins={"params/1/up": pin})
    found = search.at(MeshShape.of({"data": 4, "model": 2}))
    assert found is not None
    assert argument(found, "params/1/up") == Spec.of(pin, 2)


def test_meshes_that_a_pin_does_not_divide_are_passed_over():
    search = search_of(lambda w, x: x @ w, f32(4, 16), f32(16, 4), pins={"w": P("data")})
    best, tried = search.best(search.meshes())
    assert all(f.mesh.size("data") in (2, 4) for f in tried)
    assert argument(best, "w") == Spec.of(P("data"), 2)


def test_a_pin_on_the_dim_that_a_scan_runs_over_says_so():
    def step(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0]

    search = search_of(step, f32(16, 16), f32(8, 16, 16), pins={"ws": P("data")})
    with pytest.raises(SpecError, match=r"pin on 'ws' says \(data, None, None\), which no strategy stores: dim 0 stays "
                       r"whole, as the dim that a scan runs over has to; split another dim"):  # fmt: skip
        search.best(search.meshes())


# -------------------------------------------------------------------------------------------- templates

MESH = MeshShape.of({"data": 2, "model": 4})
BLOCK = {"batch": 32, "seq": 64, "width": 2048, "vocab": 4096}  # large enough for its sums to matter


@pytest.fixture(scope="module")
def block_search() -> Search:
    return search_of(adam_block_step, *adam_block_args(**BLOCK), machine="h100:1x8", donate=(0,))


def allowed(search: Search, template: str) -> MeshModel:
    return MeshModel(search.space, search.machine, MESH, search.keep(template))


def splits(model: MeshModel, c: int) -> list[list[int]]:
    """For each allowed strategy of a class the factor of every axis, negative for none."""
    return model.choices[c].assign.tolist()


def stored(search: Search, roots: Sequence[str]) -> set[int]:
    return {search.graph.node_of_arg[i] for i, leaf in enumerate(search.program.args)
            if leaf.path.startswith(tuple(roots)) and len(leaf.aval.shape) == 2}  # fmt: skip


def kind_of(search: Search, node: int, factor: int) -> str:
    classes = search.classes
    c = classes.of[node, factor]
    return {classes.batch: "batch", classes.sequence: "sequence", classes.features: "features"}.get(c, "inner")


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_node_keeps_a_strategy_and_data_axes_split_the_batch(template: str, block_search: Search):
    model = allowed(block_search, template)
    tensor = 1 if template in ("megatron", "megatron_sp", "tp_fsdp") else -1
    for c, node in enumerate(block_search.space.ties.first):
        about = block_search.graph.nodes[node]
        kinds = [kind_of(block_search, node, f) for f in range(len(about.sizes))]
        assert splits(model, c)
        for row in splits(model, c):
            for axis, factor in enumerate(row):
                if factor < 0:
                    continue
                if axis == tensor:
                    assert kinds[factor] not in ("batch", "features")
                elif "batch" in kinds or template in ("dp", "megatron", "megatron_sp"):
                    assert kinds[factor] == "batch"
        if "batch" in kinds and about.kind == "anchor":
            data = [a for a in range(2) if a != tensor]
            assert all(row[a] >= 0 for row in splits(model, c) for a in data), "the batch is split wherever work is"


@pytest.mark.parametrize(
    ("template", "states", "parameters"),
    [("dp", "whole", "whole"), ("zero1", "split", "whole"), ("fsdp", "split", "split"), ("tp_fsdp", "split", "split")],
)
def test_what_is_stored_whole_and_what_is_split(template: str, states: str, parameters: str, block_search: Search):
    model = allowed(block_search, template)
    data = [0] if template == "tp_fsdp" else [0, 1]
    for roots, how in ((("state/mu", "state/nu"), states), (("state/params",), parameters)):
        for node in stored(block_search, roots):
            rows = splits(model, block_search.space.ties.class_of[node])
            for row in rows:
                assert all((row[a] >= 0) == (how == "split") for a in data)


def test_tensor_parallel_splits_heads_and_mlp_by_the_last_axis_and_keeps_the_residual_whole(block_search: Search):
    found = block_search.at(MESH, "megatron")
    assert found is not None
    specs = {name: str(argument(found, f"state/params/block/{name}")) for name in ("q", "k", "v", "out", "up", "down")}
    column, row_ = "(None, model)", "(model, None)"
    assert specs == {"q": column, "k": column, "v": column, "up": column, "out": row_, "down": row_}
    residual = (BLOCK["batch"], BLOCK["seq"], BLOCK["width"])
    for i, node in enumerate(block_search.graph.nodes):
        for value, dims in node.values.items():
            if block_search.program.values[value].aval.shape == residual and node.kind == "chain":
                assert found.chosen.spec(i, dims) == Spec((("data",), (), ()))


def test_sequence_parallel_may_split_the_residual_by_its_sequence(block_search: Search):
    plain, sequence = allowed(block_search, "megatron"), allowed(block_search, "megatron_sp")
    chains = [c for c, n in enumerate(block_search.space.ties.first) if block_search.graph.nodes[n].kind == "chain"]
    found = {
        name: any(
            kind_of(block_search, block_search.space.ties.first[c], row[1]) == "sequence"
            for c in chains for row in splits(model, c) if row[1] >= 0
        )
        for name, model in (("plain", plain), ("sequence", sequence))
    }  # fmt: skip
    assert found == {"plain": False, "sequence": True}


@pytest.fixture(scope="module")
def free_choice(block_search: Search) -> Found:
    found = block_search.at(MESH)
    assert found is not None
    assert found.gap < 1e-3
    return found


@pytest.mark.parametrize("template", TEMPLATES)
def test_no_template_costs_less_than_the_free_choice(template: str, block_search: Search, free_choice: Found):
    bound = block_search.at(MESH, template)
    assert bound is not None
    free = free_choice.chosen
    assert priced(free.model, free.choice) <= priced(bound.chosen.model, bound.chosen.choice) * 1.001


# --------------------------------------------------------------------------------------- carries and scans


@pytest.mark.parametrize("template", [None, *TEMPLATES])
def test_a_scanned_dim_is_whole_and_a_carry_has_one_spec(template: str | None):
    def step(params: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            return jnp.mean(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0] ** 2)

        return params - jax.grad(loss)(params)

    search = search_of(step, f32(8, 64, 64), f32(64, 64), machine="h100:1x8", donate=(0,))
    found = search.at(MESH, template)
    assert found is not None
    assert argument(found, "params").dims[0] == ()
    graph = found.chosen.graph
    carries = [op for op in search.program.ops if op.primitive == CARRY and op.view.results[0].size > 1]
    assert carries
    for op in carries:
        node = graph.node_of_op[op.index]
        (value,) = op.results
        ends = {str(found.chosen.target_spec(e)) for e in graph.edges if e.target == node}
        assert ends == {str(found.chosen.spec(node, graph.nodes[node].values[value]))}


# ---------------------------------------------------------------------------------------------- memory


def test_plans_keep_the_limit_and_cost_more_the_less_there_is():
    """Each limit a little below what the plan before it needed."""
    args = adam_args(2, batch=256, width=64, hidden=256)
    limit, before, peaks = 1e9, 0.0, []
    for _ in range(4):
        found = search_of(adam_step, *args, machine="h100:1x8", donate=(0,), limit=limit).at(MESH)
        assert found is not None
        assert found.feasible == (found.prediction.peak_bytes <= limit)
        if not found.feasible:
            break
        cost = priced(found.chosen.model, found.chosen.choice)
        assert cost >= before * (1 - 1e-6)
        before = cost
        peaks.append(found.prediction.peak_bytes)
        limit = 0.95 * peaks[-1]
    assert len(peaks) >= 2
    assert peaks == sorted(peaks, reverse=True)


def test_a_limit_that_nothing_meets_is_an_error_with_the_least_peak():
    search = search_of(adam_step, *adam_args(1), donate=(0,), limit=100)
    with pytest.raises(MemoryLimitError, match="no plan fits 100 B per device: the least achievable peak is"):
        search.best([MESH])
    least, _ = search.best([MESH], "dp")
    assert not least.feasible


def test_more_axes_have_to_bring_a_hundredth():
    one, two = (Found(MeshShape.of(m), None, None, 0.0, True) for m in ({"data": 8}, {"data": 4, "model": 2}))  # type: ignore[arg-type]
    assert Search.worth(one, two) == 0.01
    assert Search.worth(two, one) == Search.worth(one, one) == 1e-6
    search = search_of(sgd_step, *mlp_args(1, batch=512, width=64, hidden=256), machine="h100:1x8", donate=(0,))
    best, everything = search.best(search.meshes())
    simpler = [f for f in everything if len(f.mesh.axes) < len(best.mesh.axes)]
    assert [f.mesh.sizes for f in everything] == [(8,), (4, 2), (2, 2, 2)]
    assert all(best.prediction.score < 0.99 * f.prediction.score for f in simpler)


def test_the_same_search_gives_the_same_answer():
    def found() -> tuple[tuple[int, ...], str]:
        search = search_of(sgd_step, *mlp_args(2), machine="tpu-v5e:2x4", donate=(0,))
        best, _ = search.best([MeshShape.of({"data": 8}), MESH])
        return best.chosen.choice, str(best.mesh)

    assert found() == found()


# ---------------------------------------------------------------------------------------------- names


def named_step(named: Sequence[int], layers: int) -> tuple[Any, Any]:
    """A deep MLP of which only some layers have names."""

    @mp.dims("batch mlp -> batch mlp")
    def hidden(h: Any) -> Any:
        return jnp.tanh(h)

    def step(params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            y = x
            for i, layer in enumerate(p):
                h = y @ layer["up"]
                y = y + (hidden(h) if i in named else jnp.tanh(h)) @ layer["down"]
            return jnp.mean(y**2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params, x, _ = mlp_args(layers, batch=64, width=64, hidden=256)
    return step, (params, x)


@pytest.mark.parametrize("axes", [("model",), ("data", "model"), ()])
def test_a_name_given_to_one_of_many_tied_layers_binds_there(axes: tuple[str, ...]):
    step, args = named_step([4], 8)
    search = search_of(step, *args, donate=(0,))
    assert len(search.places["mlp"]) >= 1
    found = search.at(MESH, names={"mlp": axes, "batch": ()})
    assert found is not None
    assert axes_in_use(found.chosen, search.places) == {"mlp": [axes], "batch": [()]}


def test_equal_names_make_all_bound_places_agree():
    step, args = named_step(range(3), 3)
    for mesh in ({"data": 8}, {"data": 2, "model": 4}):
        search = search_of(step, *args, donate=(0,), machine="h100:1x8", equal_names=True)
        best, _ = search.best([MeshShape.of(mesh)])
        assert all(len(axes) == 1 for axes in axes_in_use(best.chosen, search.places).values())


# --------------------------------------------------------------------------------------------- descent


def coordinates(problem: Problem, seed: int) -> list[Any]:
    """Two coordinates per strategy, no two alike."""
    rng = np.random.default_rng(seed)
    return [np.array(rng.permutation([(i, j) for i in range(3) for j in range(3)])[: len(c)], np.int8)
            for c in problem.node_costs]  # fmt: skip


@settings(max_examples=60)
@given(problems(), st.integers(0, 1000), st.integers(1, 2))
def test_descent_is_never_worse_than_its_start(problem: Problem, seed: int, width: int):
    rng = np.random.default_rng(seed)
    start = [int(rng.integers(len(c))) for c in problem.node_costs]
    cost, usage = evaluate(problem, start)
    fits = bool((usage <= problem.limits).all())
    found = descend(problem, coordinates(problem, seed), start, width=width)
    again, held = evaluate(problem, found.choice)
    assert found.cost == pytest.approx(again) or cost >= FORBIDDEN
    assert found.feasible == bool((held <= problem.limits * (1 + 1e-9)).all())
    if fits:
        assert found.feasible
        assert found.cost <= cost * (1 + 1e-9)
    assert found.bound <= found.cost


@settings(max_examples=100)
@given(problems())
def test_the_star_bound_is_below_the_least_cost(problem: Problem):
    best = exhaustive(problem)
    assume(best.feasible)
    assert star_bound(problem) <= best.cost * (1 + 1e-9)
    assert math.isfinite(star_bound(problem))
