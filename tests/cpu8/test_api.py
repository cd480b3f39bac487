"""The public API on eight devices: plan, jit, pins, files, decorators, rules, on small steps."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshplan as mp

ROOT = Path(__file__).resolve().parents[2]
MESH = {"data": 4, "model": 2}


def step(state: Any, batch: Any) -> tuple[Any, Any]:
    """Two layers and plain gradient descent."""

    def loss(w: Any) -> jax.Array:
        return (jnp.tanh(batch["x"] @ w["up"]) @ w["down"]).var()

    value, grads = jax.value_and_grad(loss)(state["w"])
    return {"n": state["n"] + 1, "w": jax.tree.map(lambda a, g: a - 0.1 * g, state["w"], grads)}, {"loss": value}


def normal(*sizes: int) -> Any:
    """Of deviation one over the root of the first size: products with it neither grow nor shrink."""
    return (np.random.default_rng(0).standard_normal(sizes) / sizes[0] ** 0.5).astype(np.float32)


def arrays(rows: int = 64) -> tuple[Any, Any]:
    return {"n": np.int32(0), "w": {"up": normal(32, 128), "down": normal(128, 16)}}, {"x": normal(rows, 32)}


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype), tree)


def same(found: Any, wanted: Any, rtol: float = 1e-5) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=1e-6)


@pytest.fixture(scope="module")
def plan() -> mp.Plan:
    pins = {"batch.x": P("data"), "up": P(None, "model")}
    return mp.plan(step, *shapes(arrays()), machine="cpu:8", mesh=MESH, pins=pins)


# --------------------------------------------------------------------------------------------- plan and compile


def test_specs_have_the_structure_of_arguments_and_results(plan: mp.Plan) -> None:
    assert jax.tree.structure(plan.in_specs) == jax.tree.structure(arrays())
    assert jax.tree.structure(plan.out_specs) == jax.tree.structure(jax.eval_shape(step, *arrays()))
    assert plan.in_specs[1]["x"] == plan.specs["batch/x"] == P("data")
    assert plan.out_specs[0] == plan.in_specs[0], "what is donated comes back as it was stored"
    mesh = plan.mesh()
    assert dict(mesh.shape) == plan.mesh_shape == MESH
    assert jax.tree.leaves(plan.in_shardings(mesh)) == [NamedSharding(mesh, s) for s in jax.tree.leaves(plan.in_specs)]


def test_abstract_arguments_lower_and_compile_to_the_planned_shardings_with_the_state_donated(plan: mp.Plan) -> None:
    mesh = plan.mesh()
    compiled = plan.jit(mesh).lower(*plan.abstract_args(mesh)).compile()
    (state, batch), _ = compiled.input_shardings
    assert batch["x"].is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    assert state["w"]["up"].is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)
    memory = compiled.memory_analysis()
    state_bytes = sum(a.nbytes // plan.data.mesh.size(a.spec.axes) for a in plan.data.arguments if a.pair >= 0)
    assert memory.alias_size_in_bytes == state_bytes
    assert memory.argument_size_in_bytes == plan.data.argument_bytes


def test_the_planned_function_is_called_like_the_step_and_computes_the_same(plan: mp.Plan) -> None:
    planned = plan.jit()
    wanted = step(*arrays())
    same(planned(*plan.shard(*arrays())), wanted)
    new, _ = planned(*arrays())  # host arrays go where they belong
    same(planned(new, arrays()[1]), step(*jax.tree.map(np.asarray, (wanted[0], arrays()[1]))))
    assert planned.__name__ == "step"


def test_verify_holds_every_leaf_against_one_device(plan: mp.Plan) -> None:
    found = plan.verify(*arrays())
    assert found.ok
    assert found.devices == 8
    assert {leaf.path for leaf in found.leaves} == {"0/n", "0/w/down", "0/w/up", "1/loss"}
    assert found.worst.relative_error < 1e-5


def test_verify_tells_a_leaf_that_is_all_rounding_from_a_wrong_one() -> None:
    def step(state: Any, x: Any) -> Any:
        def loss(w: Any, bias: Any) -> Any:  # a bias of all logits alike changes no softmax: its gradient is rounding
            return -jnp.mean(jax.nn.log_softmax(x @ w + bias.sum())[:, 0])

        gradient = jax.grad(loss, (0, 1))(*state)
        signs = [g / (jnp.abs(g) + 1e-30) for g in gradient]  # the first step of Adam
        return tuple(s - 1e-2 * g for s, g in zip(state, signs, strict=True))

    args = ((normal(32, 16), np.zeros(64, np.float32)), normal(256, 32))
    made = mp.plan(step, *args, machine="cpu:8", mesh={"data": 8}, pins={"x": P("data")}, donate_argnums=())
    found = made.verify(*args)
    assert found.ok, str(found)
    weights, bias = found.leaves
    assert weights.noise == 0 or not weights.is_noise
    if bias.relative_error > bias.tolerance:
        assert bias.is_noise and "by rounding alone" in str(found)
        assert found.worst is weights

    def wrong(state: Any, x: Any) -> Any:
        return tuple(s * 1.01 for s in step(state, x))

    assert made.call is not None
    found = replace(made, call=replace(made.call, step=wrong)).verify(*args)
    assert not found.leaves[0].ok and found.worst is found.leaves[0]


def test_verify_finds_the_leaf_that_differs() -> None:
    def planned(x: Any) -> Any:
        return {"held": x + 1, "off": x * 1.01}

    def other(x: Any) -> Any:
        return {"held": x + 1, "off": x}

    made = mp.plan(planned, normal(64, 8), machine="cpu:8", mesh={"data": 8}, donate_argnums=())
    assert made.call is not None
    found = replace(made, call=replace(made.call, step=other)).verify(normal(64, 8))
    assert not found.ok
    assert [leaf.path for leaf in found.leaves if not leaf.ok] == ["0/off"]
    assert found.worst.path == "0/off"
    assert found.worst.relative_error == pytest.approx(0.01, rel=1e-3)
    assert "1 differ" in str(found)


def test_an_audit_of_the_plan_finds_what_it_predicted(plan: mp.Plan) -> None:
    audit = plan.audit()
    assert audit.predicted is not None
    assert audit.predicted.collectives == plan.collectives
    assert {"all-reduce"} <= audit.bytes_by_kind().keys()
    assert [m for m in audit.mismatches(0.05, above_bytes=100) if m.kind not in ("flops", "peak memory")] == []


def test_a_pinned_batch_is_in_the_compiled_modules_input_shardings() -> None:
    from models import gpt

    workload = gpt.workload("tiny", layers=1, seq=16, width=32)
    made = mp.plan(workload, machine="cpu:8", mesh=MESH, pins={"batch.tokens": P("data")})
    compiled = made.jit().lower(*made.abstract_args()).compile()
    assert compiled.input_shardings[0][1]["tokens"].is_equivalent_to(NamedSharding(made.mesh(), P("data")), 2)
    assert [a.path for a in made.data.arguments if a.pinned] == ["batch/tokens"]


def test_audit_reads_a_sharded_function_that_was_never_planned(make_mesh: Any) -> None:
    mesh = make_mesh(data=8)

    def shaped(*sizes: int, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, spec))

    audit = mp.audit(jax.jit(lambda x, w: (x.T @ x) @ w), shaped(64, 32, spec=P("data")), shaped(32, 16, spec=P()))
    assert audit.bytes_by_kind() == {"all-reduce": 32 * 32 * 4}
    assert audit.predicted is None
    assert audit.fits
    assert audit.flops == 2 * 8 * 32 * 32 + 2 * 32 * 32 * 16


def test_keyword_and_static_arguments_of_the_step() -> None:
    def scaled(state: Any, batch: Any, *, scale: Any, mode: str) -> Any:
        out = jnp.tanh(batch @ state["w"]) * scale
        return {"w": state["w"] + out.mean(0)}, (out * 2 if mode == "double" else out)

    state, batch, scale = {"w": normal(32, 64)}, normal(64, 32), np.float32(3.0)
    made = mp.plan(scaled, state, batch, kwargs={"scale": scale, "mode": "double"}, static_argnames="mode",
                   machine="cpu:8", mesh={"data": 8}, pins={"state/w": P(None, "data")})  # fmt: skip
    assert set(made.specs) == {"state/w", "batch", "scale"}
    (args, kwargs), mesh = made.abstract_args(), made.mesh()
    assert kwargs["scale"].shape == ()
    assert made.in_specs[0][0]["w"] == P(None, "data")
    assert made.jit(mesh).lower(*args, **kwargs, mode="double").compile().memory_analysis().alias_size_in_bytes == 1024
    placed = jax.device_put((state, batch), made.in_shardings(mesh)[0])
    same(made.jit(mesh)(*placed, scale=scale, mode="double"), scaled(state, batch, scale=scale, mode="double"))
    placed = jax.device_put((state, batch), made.in_shardings(mesh)[0])
    with pytest.raises(mp.ArgumentError, match="static argument 'mode' is 'single', planned was 'double'"):
        made.jit(mesh)(*placed, scale=scale, mode="single")


def test_static_positional_arguments_of_the_step() -> None:
    def repeated(times: int, state: Any, x: Any) -> Any:
        for _ in range(times):
            state = jnp.tanh(state + x.mean(0))
        return state

    state, x = np.zeros(64, np.float32), normal(32, 64)
    made = mp.plan(repeated, 3, state, x, static_argnums=0, donate_argnums=(1,), machine="cpu:8", mesh={"data": 8})
    assert jax.tree.structure(made.in_specs) == jax.tree.structure((state, x))
    same(made.jit()(3, state, x), repeated(3, state, x))
    with pytest.raises(mp.ArgumentError, match=r"static argument 0 is 2, planned was 3\. Plan again"):
        made.jit()(2, state, x)


def test_verify_takes_static_arguments_as_the_step_does() -> None:
    def repeated(times: int, x: Any) -> Any:
        return x * times

    made = mp.plan(repeated, 3, np.ones(8, np.float32), static_argnums=0, donate_argnums=(), machine="cpu:8")
    assert made.verify(3, np.ones(8, np.float32)).ok


@pytest.mark.parametrize("mesh", [{"data": 8}, MESH], ids=str)
def test_loops_and_branches_keep_their_results(mesh: dict[str, int]) -> None:
    def control(state: Any, x: Any) -> Any:
        _, s = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ state["w"])), (0, x))
        s = lax.cond(s.sum() > 0, lambda s: s * 2, lambda s: jnp.sin(s) @ state["w"], s)
        s, sums = lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), s, state["stack"])
        s = lax.fori_loop(0, 4, lambda i, s: s + x * i, s)
        return {"w": state["w"] + s.mean(), "stack": state["stack"] * sums.mean()}, lax.map(lambda row: row * 2, s)

    state = {"w": normal(64, 64), "stack": np.stack([normal(64, 64)] * 4)}
    x = normal(32, 64)
    pins = {"state/stack": P(None, None, "data"), "x": P("data"), "state/w": P(list(mesh)[-1])}
    made = mp.plan(control, state, x, machine="cpu:8", mesh=mesh, pins=pins)
    assert sum(c.total_bytes for c in made.collectives) > 0
    found = made.verify(state, x)
    assert found.ok, str(found)


# --------------------------------------------------------------------------------------------- reasons and files


def test_explain_says_where_an_array_lies_and_what_moves(plan: mp.Plan) -> None:
    found = plan.explain("w/up")
    assert [a.path for a in found.arrays] == ["state/w/up"]
    assert str(found).startswith("state/w/up  float32[32, 128]")
    for part in ("pinned", "over model (2), 4 copies", "each device [32, 64], 8.19 kB of"):
        assert part in str(found)
    moved = plan.explain("collectives")
    assert sum(c.nbytes for c in moved.collectives) == sum(c.total_bytes for c in plan.collectives)
    assert "test_api.py:" in str(moved)
    assert str(plan.explain("memory")).startswith("peak ")
    with pytest.raises(mp.ArgumentError, match="Nearest: state/w/up"):
        plan.explain("w/upp")


def test_the_explained_collectives_take_no_more_time_than_the_plan_counts(plan: mp.Plan) -> None:
    """The plan's figure also has the latency of small reductions, which combining leaves to no single line."""
    rows = plan.explain("collectives").collectives
    assert 0 < sum(c.seconds or 0.0 for c in rows) <= plan.data.communication_seconds * (1 + 1e-9)


def test_a_further_pin_is_solved_again_and_shows_in_the_difference(plan: mp.Plan) -> None:
    again = plan.pin({"down": P(None, "model"), "up": P("model")})
    assert again.specs["state/w/down"] == P(None, "model")
    assert again.specs["state/w/up"] == P("model"), "a pattern given before is replaced"
    assert again.specs["batch/x"] == P("data"), "other pins stay"
    assert again.mesh_shape == plan.mesh_shape
    changes = plan.diff(again)
    (up,) = (c for c in changes.arguments if c.what == "state/w/up")
    assert up.before.startswith("(None, model)")
    assert up.after.startswith("(model, None)")
    assert ("pin down", "absent", "P(None, 'model')") in changes.setting
    assert plan.diff(plan).empty
    assert not changes.empty
    assert again.verify(*arrays()).ok


def test_the_source_of_a_plan_is_python_that_places_arrays_the_same(plan: mp.Plan) -> None:
    names: dict[str, Any] = {}
    exec(compile(plan.to_source(), "plan.py", "exec"), names)
    found = names["in_shardings"](arrays(), names["make_mesh"]())
    assert jax.tree.map(lambda s: s.spec, found) == plan.in_specs


def test_logical_axis_rules_name_the_users_dims() -> None:
    from models import mlp

    made = mp.plan(mlp.workload("tiny"), machine="cpu:8", mesh=MESH, pins={"up": P(None, "model"), "images": P("data")})
    rules = dict(made.logical_axis_rules())
    assert rules["mlp"] == "model"
    assert rules["batch"] == "data"
    assert rules["pixels"] is None


def test_a_saved_plan_comes_back_whole_beside_its_step(plan: mp.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "a.json")
    back = mp.load(tmp_path / "a.json", step, *shapes(arrays()))
    assert back.data == plan.data
    assert back.diff(plan).empty
    back.save(tmp_path / "b.json")
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "a.json").read_bytes()
    same(back.jit()(*arrays()), step(*arrays()))
    assert back.verify(*arrays()).ok


def test_a_loaded_plan_keeps_its_pins_when_it_is_pinned_further(plan: mp.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "a.json")
    again = mp.load(tmp_path / "a.json", step, *shapes(arrays())).pin({"down": P(None, "model")})
    assert dict(again.data.pins).keys() == {"batch.x", "up", "down"}
    assert again.mesh_shape == MESH


def test_planning_twice_gives_the_same_file_in_any_process(tmp_path: Path) -> None:
    code = (
        "import sys, meshplan as mp\nfrom models import gpt\n"
        "w = gpt.workload('tiny', layers=1, seq=16, width=32)\n"
        "mp.plan(w, machine='cpu:8', options=mp.Options(max_axes=2)).save(sys.argv[1])\n"
    )
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path / seed)], env=env, capture_output=True,
                              text=True, timeout=300, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert len((tmp_path / "1").read_bytes()) > 1000


# ---------------------------------------------------------------------------------------------------- mp.shard


def test_a_bare_decorator_plans_once_for_every_signature() -> None:
    traced: list[tuple[int, ...]] = []

    @mp.shard
    def trained(state: Any, batch: Any) -> Any:
        traced.append(batch["x"].shape)
        return step(state, batch)

    state, batch = arrays()
    new, first = trained(state, batch)
    newer, second = trained(new, batch)
    assert traced == [(64, 32)], "the second call neither plans nor traces"
    wanted = step(state, batch)
    same(first, wanted[1])
    assert float(second["loss"]) == pytest.approx(float(step(wanted[0], batch)[1]["loss"]), rel=1e-5)
    trained(newer, arrays(128)[1])
    assert traced == [(64, 32), (128, 32)]
    assert trained.__name__ == "trained"
    assert trained.plan(*shapes(arrays())).mesh_shape
    assert traced == [(64, 32), (128, 32)], "plan() of known shapes is remembered too"


def test_a_decorator_with_arguments_keeps_to_them() -> None:
    pins = {"batch.x": P("data"), "down": P(None, "data")}

    @mp.shard(machine="cpu:8", mesh={"data": 8}, pins=pins, donate_argnums=())
    def trained(state: Any, batch: Any) -> Any:
        return step(state, batch)

    state, batch = arrays()
    new, metrics = trained(state, batch)
    same((new, metrics), step(state, batch))
    specs = trained.plan(state, batch).specs
    assert specs["batch/x"] == P("data")
    assert specs["state/w/down"] == P(None, "data")
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(new)} == {8}


def test_static_arguments_of_a_decorated_step_are_part_of_its_signature() -> None:
    times = mp.shard(lambda x, n: x * n, donate_argnums=(), static_argnums=1)
    x = np.arange(8, dtype=np.float32)
    same(times(x, 3), x * 3)
    same(times(x, 2), x * 2)


def test_a_product_without_any_annotation_runs_sharded() -> None:
    """Case 16."""
    x, w = normal(512, 512), normal(512, 512)[::-1].copy()
    run = mp.shard(lambda x, w: jnp.tanh(x @ w) @ w.T, mesh={"x": 4, "y": 2}, donate_argnums=())
    out = run(x, w)
    same(out, np.tanh(x @ w) @ w.T, rtol=1e-4)
    assert len({str(shard.index) for shard in out.addressable_shards}) == 8, "no device holds what another holds"


# ------------------------------------------------------------------------------------- primitives without a rule

twice = Primitive("test_twice")
twice.def_abstract_eval(lambda x: x)
mlir.register_lowering(twice, mlir.lower_fun(lambda x: x * 2, multiple_results=False))


def with_twice(w: Any, x: Any) -> Any:
    return jnp.tanh(twice.bind(x @ w))


def plan_twice(options: mp.Options) -> mp.Plan:
    args = (jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((1024, 256), jnp.float32))
    return mp.plan(with_twice, *args, machine="cpu:8", mesh={"data": 8}, pins={"x": P("data")}, donate_argnums=(),
                   options=options)  # fmt: skip


def test_a_primitive_without_a_rule_is_kept_whole_and_reported_with_its_bytes() -> None:
    made = plan_twice(mp.Options())
    assert made.notes == (
        "primitive 'test_twice' has no sharding rule: kept whole, 2.1 MB per step are not split. Give one with "
        "Options(rules={'test_twice': ...})",
    )
    gathered = {c.kind: c.nbytes for c in made.collectives}
    assert gathered == {"all-gather": 1024 * 256 * 4}
    assert made.notes[0] in str(made).replace("\n", " ")
    assert made.verify(normal(256, 256), 16 * normal(1024, 256)).ok


def test_a_rule_of_the_users_lets_it_be_split() -> None:
    made = plan_twice(mp.Options(rules={"test_twice": "i j -> i j"}))
    assert made.notes == ()
    assert made.collectives == ()
    assert made.out_specs == P("data")
    assert made.verify(normal(256, 256), 16 * normal(1024, 256)).ok
    with pytest.raises(mp.SpecError, match=r"operand 0 has 2 dims \(1024, 256\), the rule writes 3"):
        plan_twice(mp.Options(rules={"test_twice": "i j k -> i j k"}))


# -------------------------------------------------------------------------------------------- how much to shard


def adam_step(state: Any, x: Any) -> Any:
    import optax

    def loss(weights: Any) -> jax.Array:
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return (y**2).mean()

    tx = optax.adam(1e-3)
    value, grads = jax.value_and_grad(loss)(state["w"])
    updates, opt = tx.update(grads, state["opt"], state["w"])
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, value


def adam_arguments(rows: int, width: int, layers: int) -> tuple[Any, Any]:
    import optax

    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    state = {"w": weights, "opt": jax.eval_shape(optax.adam(1e-3).init, weights)}
    return state, jax.ShapeDtypeStruct((rows, width), jnp.float32)


def slow_links() -> mp.Machine:
    """Links so slow that no gather is worth the update's work that it saves: only memory asks for a split."""
    cpu = mp.Machine.preset("cpu:8")
    chip = replace(cpu.chip, memory_bytes_per_second=1e14)
    return mp.Machine(name="slow", chip=chip, dims=tuple(replace(d, bytes_per_second=1e8) for d in cpu.dims))


def split(plan: mp.Plan, part: str) -> int:
    """How many arrays under this part of the state are stored in pieces."""
    return sum(bool(a.spec.axes) for a in plan.data.arguments if a.path.startswith(part))


def lowered(pins: dict[str, P]) -> list[mp.Plan]:
    """Plans under ever lower limits, until none fits."""
    limit, plans = None, []
    while True:
        try:
            plans.append(mp.plan(adam_step, *adam_arguments(8192, 512, 2), machine=slow_links(), mesh={"data": 8},
                                 pins={"x": P("data"), **pins}, memory_limit=limit))  # fmt: skip
        except mp.MemoryLimitError:
            return plans
        limit = 0.97 * min(plans[-1].peak_bytes, limit or np.inf)


def test_replicated_then_states_split_then_fsdp_as_the_memory_limit_falls() -> None:
    """Case 4: what is stored in pieces is no mode but what the limit asks for."""
    plans = lowered({})
    assert split(plans[0], "state") == 0
    assert {c.kind for c in plans[0].collectives} == {"all-reduce"}
    assert split(plans[-1], "state/opt") == 4, "all moments"
    assert split(plans[-1], "state/w") >= 1, "and weights: FSDP"
    assert any(c.kind == "all-gather" and c.nbytes == 512 * 512 * 4 for c in plans[-1].collectives)
    for before, after in itertools.pairwise(plans):
        assert after.peak_bytes < before.peak_bytes
        assert after.step_seconds >= before.step_seconds * (1 - 1e-9)
        assert after.data.argument_bytes <= before.data.argument_bytes


def test_zero1_is_found_where_the_weights_stay_whole() -> None:
    plans = lowered({"state/w/.*": P()})
    assert (split(plans[0], "state/opt"), split(plans[-1], "state/opt")) == (0, 4)
    assert all(split(p, "state/w") == 0 for p in plans)
    assert plans[-1].data.argument_bytes < 0.6 * plans[0].data.argument_bytes


def test_weights_within_the_node_and_states_over_all_is_a_plan() -> None:
    pins = {"x": P(("node", "gpu")), "state/w/.*": P("gpu"), "state/opt/0/(mu|nu)/.*": P(("node", "gpu"))}
    args = adam_arguments(64, 64, 2)
    made = mp.plan(adam_step, *args, machine="h100:2x4", mesh={"node": 2, "gpu": 4}, pins=pins)
    assert {c.axes for c in made.collectives} & {("node",), ("node", "gpu")}
    rng = np.random.default_rng(0)
    real = jax.tree.map(lambda s: rng.uniform(0.1, 0.2, s.shape).astype(s.dtype), args)
    assert made.verify(*real).ok


def test_every_leaf_of_the_state_gets_its_share_when_it_is_made() -> None:
    """Case 3: `jit(tx.init)` alone puts both moments on one device."""
    import optax

    state, x = adam_arguments(64, 1024, 1)
    made = mp.plan(adam_step, state, x, machine="cpu:8", mesh={"d": 8}, pins={"state/.*/0": P("d")})
    wanted = made.in_shardings()[0]
    opt = jax.jit(optax.adam(1e-3).init, out_shardings=wanted["opt"])([jnp.ones((1024, 1024))])
    held = {leaf.nbytes: leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(opt)}
    assert held == {4: 4, 1024 * 1024 * 4: 1024 * 1024 * 4 // 8}
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(opt)} == {8}


def test_the_plan_of_an_init_function_splits_what_it_makes() -> None:
    import optax

    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    made = mp.plan(optax.adam(1e-3).init, w, machine="cpu:8", mesh={"d": 8}, pins={"params": P("d")}, donate_argnums=())
    assert made.peak_bytes >= sum(r.nbytes // made.data.mesh.size(r.spec.axes) for r in made.data.results)
    assert all(r.spec.axes for r in made.data.results if r.shape)


def test_the_scanned_dim_of_a_stack_is_never_split() -> None:
    """Case 5: splitting it would gather the stack in every step of the loop."""

    def scanned(stack: Any, c: Any) -> Any:
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), c, stack)[0]

    args = (jax.ShapeDtypeStruct((8, 256, 256), jnp.float32), jax.ShapeDtypeStruct((8, 256), jnp.float32))
    whole = 8 * 256 * 256 * 4
    for limit in (None, 0.3 * whole):
        made = mp.plan(scanned, *args, machine="cpu:8", mesh={"data": 8}, donate_argnums=(), memory_limit=limit)
        spec = made.data.arguments[0].spec
        assert spec.dims[0] == ()
        assert spec.axes == (("data",) if limit else ()), "split only where it must be: the batch can be instead"
        assert max((c.nbytes for c in made.audit().collectives), default=0) <= 256 * 256 * 4
        assert made.verify(np.stack([normal(256, 256)] * 8), normal(8, 256)).ok


def test_a_dim_that_nothing_divides_is_left_whole_and_the_other_is_split() -> None:
    """Case 2, without a pin: no constraint is dropped in silence, the plan says what it does."""
    made = mp.plan(lambda t, i: t[i] * 2.0, jax.ShapeDtypeStruct((17, 16), jnp.float32),
                   jax.ShapeDtypeStruct((64,), jnp.int32), machine="cpu:8", mesh={"data": 8},
                   donate_argnums=(), pins={"t": P(None, "data")})  # fmt: skip
    (sharding, _), _ = made.jit().lower(*made.abstract_args()).compile().input_shardings
    assert sharding.is_equivalent_to(NamedSharding(made.mesh(), P(None, "data")), 2)
    free = mp.plan(lambda t: t * 2.0, jax.ShapeDtypeStruct((17, 16), jnp.float32), machine="cpu:8", mesh={"data": 8})
    assert free.specs["t"] == P(None, "data")
