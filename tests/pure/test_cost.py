"""Seconds, bytes and memory against closed forms, and the arrays of the problem against the prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshplan.core import Collective, MeshShape, bytes_by_kind
from meshplan.cost import Chosen, MeshModel, Prediction, Rates, Space
from meshplan.cost._combine import Emitted, runs
from meshplan.cost._emission import Emission
from meshplan.cost._nodes import node_seconds
from meshplan.cost._rates import LEAST_SHARE
from meshplan.machine import Machine
from meshplan.plan import Found, Search
from meshplan.plan._search import unused
from meshplan.program import CARRY, STACK
from meshplan.strategy import UNREDUCED, Graph, tie
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
    search_of,
    sgd_step,
    without_latency,
)

# -------------------------------------------------------------------------------------------- computation


def only(graph: Graph, kind: str) -> int:
    (found,) = [i for i, n in enumerate(graph.nodes) if n.kind == kind]
    return found


def row(model: MeshModel, node: int, assign: Sequence[int]) -> int:
    """The strategy of a node that gives each axis to the factor named."""
    c = model.space.ties.class_of[node]
    (found,) = np.flatnonzero((model.choices[c].assign == np.array(assign)).all(axis=1))
    return int(found)


@pytest.mark.parametrize("machine", ["cpu:8", "h100:1x8", "tpu-v5e:2x4"])
def test_a_dot_takes_its_arithmetic_or_its_traffic_and_every_device_does_its_shard(machine: str):
    m, k, n = 512, 1024, 256
    graph = graph_of(lambda a, b: a @ b, f32(m, k), f32(k, n))
    model = model_of(graph, machine, a=2, b=4)
    node = graph.nodes[only(graph, "anchor")]
    choices, chip = model.choices[model.space.ties.class_of[only(graph, "anchor")]], model.machine.chip
    seconds = node_seconds(graph.program, node, choices, model.rates)
    assert node.group is not None
    (rows, contracted), (_, columns) = node.group.operands[0, 0], node.group.operands[0, 1]
    named = dict(zip(("m", "k", "n"), (*rows, *contracted, *columns), strict=True))
    for s in range(len(choices)):
        part = {name: choices.split[s, f] for name, f in named.items()}
        local = m / part["m"], k / part["k"], n / part["n"]
        arithmetic = 2 * local[0] * local[1] * local[2] / chip.flops_for("float32")
        moved = 4 * (local[0] * local[1] + local[1] * local[2] + local[0] * local[2]) / chip.memory_bytes_per_second
        assert seconds[s] == pytest.approx(max(arithmetic, moved) + model.rates.kernel_seconds)


def test_a_chain_reads_what_enters_once_and_writes_what_leaves():
    def step(x: Any, y: Any) -> Any:
        z = jnp.sin(x) * y + jnp.cos(x)
        return jnp.exp(z), jnp.sum(z * z, axis=1)

    graph = graph_of(step, f32(256, 1024), f32(256, 1024))
    model = model_of(graph, "h100:1x8", a=2, b=4)
    node = graph.nodes[only(graph, "chain")]
    choices = model.choices[model.space.ties.class_of[only(graph, "chain")]]
    assert node.group is not None
    seconds = node_seconds(graph.program, node, choices, model.rates)
    read_and_written = 3 * 4 * 256 * 1024 / choices.shards(range(2))
    sums = 4 * 256 / choices.shards([0])
    wanted = (read_and_written + sums) / model.machine.chip.memory_bytes_per_second + model.rates.kernel_seconds
    np.testing.assert_allclose(seconds, wanted)


def test_a_sum_that_a_chain_needs_itself_is_an_all_reduce():
    graph = graph_of(jax.nn.softmax, f32(2048, 4096))
    model = model_of(graph, "h100:1x8", a=8)
    node = graph.nodes[only(graph, "chain")]
    choices = model.choices[model.space.ties.class_of[only(graph, "chain")]]
    seconds = node_seconds(graph.program, node, choices, model.rates)
    split_rows, split_columns = ([int(np.flatnonzero(choices.assign[:, 0] == f)[0]) for f in (0, 1)])
    nbytes = 4 * 2048
    latency, per_byte = model.rates.collective("all-reduce", ("a",))
    two = 2 * (latency + per_byte * nbytes)  # the largest, and the sum
    assert seconds[split_columns] - seconds[split_rows] == pytest.approx(two)
    nothing_waits = node_seconds(graph.program, node, choices, model.rates, waits=lambda value: False)
    two = 2 * (LEAST_SHARE * latency + per_byte * nbytes)
    assert nothing_waits[split_columns] - nothing_waits[split_rows] == pytest.approx(two)


def test_what_runs_in_a_loop_counts_with_its_trips():
    def step(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0]

    once, often = (graph_of(step, f32(64, 64), f32(n, 64, 64)) for n in (1, 7))
    for kind in ("anchor", "chain"):
        seconds = []
        for graph in (once, often):
            model = model_of(graph, "cpu:8", a=8)
            c = model.space.ties.class_of[only(graph, kind)]
            seconds.append(node_seconds(graph.program, graph.nodes[only(graph, kind)], model.choices[c], model.rates))
        np.testing.assert_allclose(seconds[1], 7 * seconds[0])


def test_what_is_made_of_literals_costs_no_time_however_it_is_split():
    def step(x: Any) -> Any:
        mask = (jnp.arange(64)[:, None] >= jnp.arange(64)[None, :]).astype(jnp.float32)
        return x * (mask / mask.max(axis=1, keepdims=True))

    graph = graph_of(step, f32(64, 64))
    model = model_of(graph, without_latency("cpu:8"), a=2, b=4)
    rng = np.random.default_rng(0)
    for _ in range(20):
        choice = [int(rng.integers(len(c))) for c in model.choices]
        prediction = Chosen(model, choice).predict()
        assert prediction.traffic_seconds > 0
        assert prediction.score == pytest.approx(priced(model, choice))


# ------------------------------------------------------------------------------------------------- memory


def spans(step: Any, *args: Any, donate: tuple[int, ...] = ()) -> tuple[Space, dict[str, list[tuple[int, int]]]]:
    """When the results of each primitive are held."""
    graph = graph_of(step, *args, donate=donate)
    space = Space.of(graph, tie(graph, {}))
    found: dict[str, list[tuple[int, int]]] = {}
    for op in graph.program.ops:
        for v in op.results:
            found.setdefault(op.primitive, []).append(space.live.span[v])
    return space, found


def test_a_value_is_held_from_its_making_to_its_last_use():
    space, found = spans(lambda x, w: ((x @ w) @ w) @ w, f32(8, 8), f32(8, 8))
    assert found["dot_general"] == [(0, 1), (1, 2), (2, 3)]  # the last is a result: held to the end
    for leaf in space.graph.program.args:
        assert space.live.span[leaf.value] == (0, 3)  # type: ignore[index]


def test_what_a_loop_reads_from_outside_is_held_to_its_end():
    def step(x: Any, w: Any) -> Any:
        v = w @ w
        y = jax.lax.scan(lambda c, _: (jnp.sin(jnp.tanh(c @ v) @ c), None), x, length=3)[0]
        return y @ y

    space, found = spans(step, f32(8, 8), f32(8, 8))
    ops = space.graph.program.ops
    inside = [op.index for op in ops if op.region == 1]
    made = next(op for op in ops if op.primitive == "dot_general")
    assert space.live.span[made.results[0]] == (made.index, max(inside))
    (carry,) = found[CARRY]
    assert carry[0] <= min(inside)
    assert carry[1] == len(ops) - 1  # read after the loop
    assert made.index < min(inside)


def test_a_stack_takes_its_memory_when_its_loop_starts():
    def step(x: Any, ws: Any) -> Any:
        _, ys = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c), x, ws)
        return jnp.sum(ys @ ys)

    space, found = spans(step, f32(8, 8), f32(4, 8, 8))
    inside = [op.index for op in space.graph.program.ops if op.region == 1]
    (stack,) = found[STACK]
    assert stack[0] == min(inside)
    assert stack[1] > max(inside)


def unsplit(graph: Graph, machine: str = "cpu:8") -> Chosen:
    model = model_of(graph, machine, a=8)
    return Chosen(model, [row(model, n, [-1]) for n in model.space.ties.first])


def test_memory_over_time_of_a_chain_of_products():
    graph = graph_of(lambda x, w: ((x @ w) @ w) @ w, f32(8, 8), f32(8, 8))
    _, usage = unsplit(graph).memory()
    one = 8 * 8 * 4
    assert usage[:3].tolist() == [3 * one, 4 * one, 4 * one]
    assert unsplit(graph).predict().peak_bytes == 4 * one


def test_a_donated_result_takes_no_memory_of_its_own():
    args = f32(64, 64), f32(64, 64)

    def step(w: Any, g: Any) -> Any:
        return w - jnp.tanh(g)

    one = 64 * 64 * 4
    assert unsplit(graph_of(step, *args)).predict().peak_bytes == 3 * one
    assert unsplit(graph_of(step, *args, donate=(0,))).predict().peak_bytes == 2 * one


def test_a_result_made_of_literals_takes_memory():
    graph = graph_of(lambda x: (x * 2, jnp.zeros((64, 64)) + jnp.arange(64.0)), f32(8))
    assert unsplit(graph).predict().peak_bytes >= 64 * 64 * 4


def test_a_gathered_copy_is_held_while_it_is_used():
    graph = graph_of(lambda x, w: (x @ w, jnp.tanh(x)), f32(64, 64), f32(64, 64))
    model = model_of(graph, "cpu:8", a=8)
    weight = graph.node_of_arg[1]
    plain = [row(model, n, [-1]) for n in model.space.ties.first]
    stored = list(plain)
    stored[model.space.ties.class_of[weight]] = row(model, weight, [0])
    before, after = Chosen(model, plain).predict(), Chosen(model, stored).predict()
    one = 64 * 64 * 4
    assert before.argument_bytes == 2 * one
    assert after.argument_bytes == one + one / 8
    assert before.peak_bytes == 4 * one
    assert after.peak_bytes == 3 * one + one / 8  # the copy is gone when the second result is made
    _, usage = Chosen(model, stored).memory()
    assert usage[:2].tolist() == [3 * one + one / 8] * 2
    assert [h.what for h in after.at_peak if h.nbytes == one / 8] == ["w float32[64,64]"]
    assert [(c.kind, c.nbytes) for c in after.collectives] == [("all-gather", one)]


# ------------------------------------------------------------------------------------------- known plans

LAYERS, BATCH, WIDTH, HIDDEN = 3, 64, 32, 128
WEIGHT = 4 * WIDTH * HIDDEN
PARAMETERS = 2 * LAYERS * WEIGHT
ACTIVATION = 4 * BATCH * WIDTH
DOT_FLOPS = (6 * LAYERS - 1) * 2 * BATCH * WIDTH * HIDDEN  # nobody asks for the gradient of the input


def planned(template: str, machine: str, step: Any = adam_step, scale: int = 1, **mesh: int) -> Found:
    make = adam_args if step is adam_step else mlp_args
    args = make(LAYERS, batch=scale * BATCH, width=scale * WIDTH, hidden=scale * HIDDEN)
    search: Search = search_of(step, *args, machine=machine, donate=(0,))
    found = search.at(MeshShape.of(mesh), template)
    assert found is not None
    assert found.feasible
    return found


def large(p: Prediction) -> dict[str, float]:
    """Bytes by kind without the scalar loss."""
    return bytes_by_kind(c for c in p.collectives if c.nbytes > 4)


def loss_reduction(p: Prediction) -> list[tuple[str, int, float]]:
    return [(c.kind, c.nbytes, c.count) for c in p.collectives if c.nbytes <= 4]


@pytest.mark.parametrize("machine", ["cpu:8", "h100:1x8", "tpu-v5e:2x4"])
@pytest.mark.parametrize("step", [sgd_step, adam_step])
def test_data_parallel_reduces_every_gradient_once(machine: str, step: Any):
    p = planned("dp", machine, step, data=8).prediction
    assert large(p) == {"all-reduce": PARAMETERS}
    assert loss_reduction(p) == [("all-reduce", 4, 1.0)]
    copies = 3 if step is adam_step else 1
    assert p.argument_bytes == copies * PARAMETERS + 2 * ACTIVATION / 8
    assert p.flops == DOT_FLOPS / 8


def test_fully_sharded_gathers_weights_and_scatters_gradients():
    scale = 4  # large enough for pieces of whole tiles on TPU
    parameters, activation = PARAMETERS * scale**2, ACTIVATION * scale**2
    for machine, narrow in (("h100:1x8", 1.0), ("tpu-v5e:2x4", 0.5)):
        p = planned("fsdp", machine, scale=scale, data=8).prediction
        assert large(p) == {"all-gather": narrow * parameters, "reduce-scatter": parameters}
        assert p.argument_bytes == 3 * parameters / 8 + 2 * activation / 8
    cpu = planned("fsdp", "cpu:8", data=8).prediction
    assert large(cpu) == {"all-reduce": PARAMETERS, "all-gather": PARAMETERS}


def test_additions_by_index_are_no_products():
    graph = graph_of(lambda x, w, i: jnp.zeros((64, 256)).at[i].add(x @ w), f32(512, 128), f32(128, 256),
                     jax.ShapeDtypeStruct((512,), jnp.int32))  # fmt: skip
    model = model_of(graph, "tpu-v5e:2x4", a=8)
    whole = Chosen(model, [int(np.flatnonzero((c.assign == -1).all(axis=1))[0]) for c in model.choices])
    assert any(op.primitive == "scatter-add" and op.rule.flops for op in graph.program.ops)
    assert whole.flops()[0] == 2 * 512 * 128 * 256


def test_sharded_states_scatter_gradients_and_gather_new_weights():
    p = planned("zero1", "h100:1x8", data=8).prediction
    assert large(p) == {"reduce-scatter": PARAMETERS, "all-gather": PARAMETERS}
    assert p.argument_bytes == PARAMETERS + 2 * PARAMETERS / 8 + 2 * ACTIVATION / 8
    cpu = planned("zero1", "cpu:8", data=8).prediction
    assert large(cpu) == {"all-reduce": PARAMETERS, "all-gather": PARAMETERS}


@pytest.mark.parametrize("machine", ["cpu:8", "h100:1x8"])
def test_a_pair_of_split_products_reduces_once_forward_and_once_backward(machine: str):
    scale = 32  # large enough for the split to pay
    p = planned("megatron", machine, scale=scale, data=1, model=8).prediction
    forward, backward = LAYERS, LAYERS - 1  # nobody asks for the gradient of the input
    assert large(p) == {"all-reduce": (forward + backward) * ACTIVATION * scale**2}
    assert {c.axes for c in p.collectives} == {("model",)}
    assert p.argument_bytes == (3 * PARAMETERS / 8 + 2 * ACTIVATION) * scale**2
    assert p.flops == DOT_FLOPS * scale**3 / 8


def test_both_together_move_less_of_each():
    scale = 32
    p = planned("tp_fsdp", "h100:1x8", scale=scale, data=4, model=2).prediction
    over: dict[tuple[str, tuple[str, ...]], float] = {}
    for c in p.collectives:
        if c.nbytes > 4:
            over[c.kind, c.axes] = over.get((c.kind, c.axes), 0.0) + c.total_bytes
    assert over["all-gather", ("data",)] == over["reduce-scatter", ("data",)] == PARAMETERS / 2 * scale**2
    assert p.argument_bytes == (3 * PARAMETERS / 8 + 2 * ACTIVATION / 4) * scale**2


# ------------------------------------------------------------------------------------- what goes over wires


def test_dtypes_on_the_wire_by_back_end():
    cpu, gpu, tpu = (Emission(p) for p in ("cpu", "gpu", "tpu"))
    for into_dot in (False, True):
        assert cpu.dtype("bfloat16", into_dot) == "float32"
        assert cpu.dtype("float16", into_dot) == "float16"
        assert gpu.dtype("bfloat16", into_dot) == "bfloat16"
        assert gpu.dtype("float32", into_dot) == "float32"
        assert cpu.bytes_factor("bfloat16", into_dot) == 2.0
        assert gpu.bytes_factor("float32", into_dot) == 1.0
    assert tpu.bytes_factor("float32", into_dot=True) == 0.5
    assert tpu.bytes_factor("float32") == tpu.bytes_factor("int32", into_dot=True) == 1.0
    assert (cpu.merges_sums, gpu.merges_sums, tpu.merges_sums) == (False, True, True)


def gather_bytes(machine: str, dtype: Any, use: Any) -> list[int]:
    w = jax.ShapeDtypeStruct((64, 64), dtype)
    graph = graph_of(use, w, jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))
    model = model_of(graph, machine, a=8)
    choice = [row(model, n, [-1]) for n in model.space.ties.first]
    stored = graph.node_of_arg[0]
    choice[model.space.ties.class_of[stored]] = row(model, stored, [0])
    return [c.nbytes for c in Chosen(model, choice).predict().collectives]


def test_a_gather_moves_what_the_back_end_sends():
    def dot(w: Any, x: Any) -> Any:
        return x.astype(w.dtype) @ w

    def cast(w: Any, x: Any) -> Any:
        return x @ w.astype(jnp.bfloat16)

    n = 64 * 64
    assert gather_bytes("h100:1x8", jnp.float32, dot) == [4 * n]
    assert gather_bytes("tpu-v5e:2x4", jnp.float32, dot) == [2 * n]
    assert gather_bytes("cpu:8", jnp.bfloat16, dot) == [4 * n]
    assert gather_bytes("h100:1x8", jnp.bfloat16, dot) == [2 * n]
    assert gather_bytes("h100:1x8", jnp.float32, cast) == [2 * n]  # moved after the narrowing


# --------------------------------------------------------------------------------- problem and prediction


def shares_a_move(chosen: Chosen) -> bool:
    """Whether two edges bring one value through one step in one place."""
    seen: Counter[Any] = Counter()
    for edge in chosen.graph.edges:
        target = chosen.graph.nodes[edge.target]
        for step in chosen.path(edge):
            if step.kind != "slice":
                seen[edge.value, step.kind, step.axes, step.after, target.region, target.scope, edge.stored] += 1
    return max(seen.values(), default=0) > 1


# So large that sums into pieces are of whole tiles: of others TPUs make all-reduces, which the score alone knows.
LARGE = {"batch": 1024, "width": 1024, "hidden": 4096}
CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mlp": (sgd_step, mlp_args(2, **LARGE)), "adam": (adam_step, adam_args(2, **LARGE)),
    "block": (block_step, block_args()),
}  # fmt: skip


@pytest.mark.parametrize("machine", ["cpu:8", "h100:1x8", "tpu-v5e:2x4"])
@pytest.mark.parametrize("name", CASES)
def test_the_cost_of_a_choice_is_its_score_or_more_where_moves_are_shared(name: str, machine: str):
    """But for latencies, which depend on what is combined and so on the whole choice."""
    step, args = CASES[name]
    graph = graph_of(step, *args, donate=(0,), merge_sums=not machine.startswith("cpu"))
    model = model_of(graph, without_latency(machine), data=2, model=4)
    rng = np.random.default_rng(0)
    whole = [unused(c) for c in model.choices]
    equal = 0
    for changes in (1, 1, 1, 2, 2, 3, 4, 8, 16, 32):
        choice = list(whole)
        for c in rng.permutation(len(choice))[:changes]:
            open_sums = (model.choices[c].assign == UNREDUCED).any(axis=1)
            choice[c] = int(rng.choice(np.flatnonzero(~open_sums)))
        chosen = Chosen(model, choice)
        cost, seconds = priced(model, choice), chosen.predict().score
        if shares_a_move(chosen):
            assert cost >= seconds * (1 - 1e-6)
        else:
            assert cost == pytest.approx(seconds)
            equal += 1
    assert equal >= 2


def test_a_prediction_adds_up():
    """Arithmetic at the peak rate, bytes at the links' rate, a latency for every collective that is not combined."""
    for machine in ("cpu:8", "h100:1x8", "tpu-v5e:2x4"):
        p, free = planned("fsdp", machine, data=8).prediction, without_latency(machine)
        rates = Rates(free, MeshShape.of({"data": 8}))
        moved = sum(rates.collective(c.kind, c.axes)[1] * c.total_bytes for c in p.collectives)
        each = sum(Rates(Machine.preset(machine), MeshShape.of({"data": 8})).collective(c.kind, c.axes)[0] * c.count
                   for c in p.collectives)  # fmt: skip
        assert moved * (1 - 1e-9) <= p.communication_seconds <= moved + each * (1 + 1e-9)
        assert p.compute_seconds == pytest.approx(p.flops / free.chip.flops_for("float32"))
        assert p.step_seconds == p.compute_seconds + p.communication_seconds
        assert p.traffic_seconds > 0


def test_reductions_of_two_dtypes_are_not_combined():
    """XLA combines reductions of one computation, and that has one dtype: three runs, not two."""

    def reduction(dtype: str, nbytes: int) -> Emitted:
        found = Collective(
            kind="all-reduce", nbytes=nbytes, group_size=8, count=1, axes=("data",), dtype=dtype, source="", op_name=""
        )
        return Emitted(collective=found, region=0, combine="sum")

    model = model_of(graph_of(sgd_step, *mlp_args(1), donate=(0,)), "h100:1x8", data=8)
    chosen = Chosen(model, [0] * len(model.choices))
    latency, per_byte = model.rates.collective("all-reduce", ("data",))
    large, small = 20 << 20, 1 << 10
    program = chosen.graph.program
    one = chosen.communication_seconds(runs(program, [reduction("bfloat16", large), reduction("bfloat16", small)]))
    two = chosen.communication_seconds(runs(program, [reduction("bfloat16", large), reduction("float32", small)]))
    assert one == pytest.approx(latency + per_byte * (large + small))
    assert two == pytest.approx(2 * latency + per_byte * (large + small))
