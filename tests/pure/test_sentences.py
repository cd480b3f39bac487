"""What a user reads when something is wrong: each sentence says what, where, what was found, what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshplan as mp

MACHINE = "cpu:8"


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
    def loss(p: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ p["layers"][0]["up"])
        return ((hidden @ p["layers"][0]["down"]) ** 2).mean() + (p["layers"][1]["up"] ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(rows: int = 64, width: int = 16) -> tuple[Any, Any]:
    layers = [{"up": shape(width, 32), "down": shape(32, width)}, {"up": shape(width, 32)}]
    return {"layers": layers}, {"x": shape(rows, width)}


def sentence(kind: type[Exception], call: Callable[[], Any]) -> str:
    """What the error of exactly this kind says."""
    with pytest.raises(kind) as raised:
        call()
    assert raised.type is kind
    assert isinstance(raised.value, mp.MeshplanError)
    return str(raised.value)


def plan_with(pins: Any, rows: int = 64, **options: Any) -> Callable[[], mp.Plan]:
    return lambda: mp.plan(step, *arguments(rows), machine=MACHINE, pins=pins, **options)


# --------------------------------------------------------------------------------------------------------- pins


def test_a_pin_that_matches_nothing_names_the_nearest_paths() -> None:
    assert sentence(mp.PinError, plan_with({"params/.*/upp": P()})) == (
        "pin 'params/.*/upp' matches no argument. Nearest: params/layers/0/up."
    )


def test_the_nearest_paths_of_a_model_are_those_of_its_parameters() -> None:
    pytest.importorskip("optax")
    from models import mlp

    said = sentence(mp.PinError, lambda: mp.plan(mlp.workload("tiny"), machine=MACHINE, pins={"params/upp": P()}))
    assert said.startswith("pin 'params/upp' matches no argument. Nearest: state/params/up")


def test_a_pattern_that_is_no_regular_expression_says_where() -> None:
    said = sentence(mp.PinError, plan_with({"batch/(x": P()}))
    assert said.startswith("pin 'batch/(x' is no regular expression: ")
    assert "at position 6" in said


def test_two_pins_on_one_argument_must_agree() -> None:
    assert sentence(mp.PinError, plan_with({"batch.x": P("data"), ".*/x": P()})) == (
        "pins 'batch.x' and '.*/x' both match 'batch/x' but say (data, None) and (None, None). Keep one."
    )


@pytest.mark.parametrize("mesh", [None, {"data": 8}])
def test_an_indivisible_dim_is_found_before_any_compile(mesh: Any) -> None:
    """Case 2: a dim of 17 over 8 devices."""
    said = sentence(mp.SpecError, plan_with({"batch.x": P("data")}, rows=17, mesh=mesh))
    assert said.startswith("pin on 'batch/x': dim 0 has 17 entries, 17 is not divisible by 8 (data). ")
    assert "Kept whole it takes 1.09 kB on every device, split 136 B." in said  # 17 x 16 x 4 bytes
    assert said.endswith("Choices: pad dim 0 to 24; split dim 1 instead.")


def test_a_dim_that_only_some_of_its_axes_divide_is_offered_those() -> None:
    pins, mesh = {"batch.x": P(("data", "model"))}, {"data": 4, "model": 2}
    said = sentence(mp.SpecError, plan_with(pins, rows=12, mesh=mesh))
    assert "dim 0 has 12 entries, 12 is not divisible by 8 (data+model)" in said
    assert "split dim 0 over data (4) only" in said


@pytest.mark.parametrize("mesh", [None, {"fsdp": 8}, {"fsdp": 4, "model": 2}])
def test_one_axis_on_two_dims_names_the_argument_and_both_dims(mesh: Any) -> None:
    """Case 10."""
    assert sentence(mp.SpecError, plan_with({"params/layers/1/up": P("fsdp", "fsdp")}, mesh=mesh)) == (
        "pin on 'params/layers/1/up': axis 'fsdp' splits dims 0 and 1 of (fsdp, fsdp). One axis can split one dim of "
        "an array; drop it from one of them."
    )


def test_an_unknown_axis_names_the_nearest_of_the_mesh() -> None:
    pins = {"batch.x": P("dta")}
    assert sentence(mp.SpecError, plan_with(pins, mesh={"data": 4, "model": 2})) == (
        "pin on 'batch/x': axis 'dta' is not in the mesh (data=4 x model=2). Nearest: data."
    )
    said = sentence(mp.SpecError, plan_with(pins))
    assert said.startswith("pin on 'batch/x': axis 'dta' is unknown; the search names its axes data, fsdp, model. ")
    assert said.endswith("Nearest: data. Or fix the mesh: mesh={'dta': ...}.")


def test_a_spec_longer_than_the_rank_is_counted() -> None:
    said = sentence(mp.SpecError, plan_with({"batch.x": P("data", None, None)}))
    assert said.startswith("pin 'batch.x' on 'batch/x' has 2 dims, the spec ('data', None, None) names 3.")


# ------------------------------------------------------------------------------------------ mesh, machine, memory


def test_a_mesh_of_another_size_than_the_machine_has_its_devices_counted() -> None:
    assert sentence(mp.MeshError, plan_with({}, mesh={"data": 2, "model": 2})) == (
        "mesh data=2 x model=2 has 4 devices, machine cpu:8 has 8. Sizes must multiply to 8."
    )
    assert "give one positive size per axis, such as {'data': 8}" in sentence(mp.MeshError, plan_with({}, mesh={}))
    assert "one positive size per axis" in sentence(mp.MeshError, plan_with({}, mesh={"data": 0}))


def test_an_unknown_machine_lists_those_there_are() -> None:
    said = sentence(mp.MachineError, lambda: mp.plan(step, *arguments(), machine="h1000:1x8"))
    assert said.startswith("machine 'h1000:1x8': there is no preset 'h1000'. Nearest: h100, v100. Presets: ")
    assert all(name in said for name in mp.Machine.presets())
    assert len(mp.Machine.presets()) >= 9
    said = sentence(mp.MachineError, lambda: mp.plan(step, *arguments(), machine="tpu-v5e"))
    assert said == "machine 'tpu-v5e' has no size; write chips per torus dim, as in 'tpu-v5e:4x4'."


def test_a_memory_limit_that_nothing_meets_says_what_could_be_reached() -> None:
    said = sentence(mp.MemoryLimitError, plan_with({}, memory_limit=1000))
    assert said.startswith("no plan fits 1 kB per device: the least achievable peak is ")
    assert " (mesh data=" in said
    values = said.partition("The largest values at that time: ")[2].partition(". Raise memory_limit")[0].split("; ")
    assert 2 <= len(values) <= 5
    assert all(" B " in v or " kB " in v for v in values)
    assert any("batch/x float32[64,16]" in v for v in values)
    assert any("test_sentences.py:" in v for v in values), "values that are no arguments have their source line"
    assert said.endswith(
        "Raise memory_limit, take more devices, a smaller batch, or rematerialise with jax.checkpoint."
    )


def test_the_limit_that_is_said_to_be_reachable_is() -> None:
    """With one mesh and one argument to keep, the least peak is what the error says."""
    def pair(x: Any) -> Any:
        return x + 1.0

    def made(limit: float) -> mp.Plan:
        return mp.plan(pair, shape(64, 16), machine=MACHINE, mesh={"data": 8}, memory_limit=limit)

    assert "the least achievable peak is 512 B" in sentence(mp.MemoryLimitError, lambda: made(511))
    assert made(512).peak_bytes == 512


# ------------------------------------------------------------------------------------------------------- tracing


def test_a_step_that_does_not_trace_has_jaxs_error_as_its_cause_and_one_line_on_top() -> None:
    params, _ = arguments()
    _, batch = arguments(width=8)
    with pytest.raises(mp.TraceError) as raised:
        mp.plan(step, params, batch, machine=MACHINE)
    said, cause = str(raised.value), raised.value.__cause__
    assert "\n" not in said
    assert said.startswith("step 'step' does not trace with arguments (params, batch); JAX says: dot_general requires ")
    assert isinstance(cause, TypeError)
    assert str(cause).splitlines()[0] in said


def test_an_error_of_the_step_itself_is_the_cause_too() -> None:
    def broken(x: Any) -> Any:
        raise KeyError("no such layer")

    with pytest.raises(mp.TraceError, match="step 'broken' does not trace with arguments") as raised:
        mp.plan(broken, shape(8), machine=MACHINE)
    assert isinstance(raised.value.__cause__, KeyError)


def test_what_is_no_step_is_named() -> None:
    said = sentence(mp.ArgumentError, lambda: mp.plan(7, shape(8), machine=MACHINE))  # pyright: ignore[reportArgumentType]
    assert said == "the first argument must be the step function, found int."
    pytest.importorskip("optax")
    from models import mlp

    said = sentence(mp.ArgumentError, lambda: mp.plan(mlp.workload("tiny"), shape(8), machine=MACHINE))
    assert said.startswith("a Workload brings its own arguments")


def test_too_many_arguments_are_counted() -> None:
    said = sentence(mp.ArgumentError, lambda: mp.plan(step, *arguments(), shape(1), machine=MACHINE))
    assert said == "step takes 2 positional arguments (params, batch), 3 were given. Pass as many as it takes."


def test_an_unknown_template_names_the_nearest() -> None:
    said = sentence(mp.ArgumentError, lambda: mp.compare(step, *arguments(), machine=MACHINE, templates=("fsdq",)))
    assert said.startswith("template 'fsdq' is unknown. Nearest: fsdp")


# --------------------------------------------------------------------------------------------------------- files


@pytest.fixture(scope="module")
def made() -> mp.Plan:
    return mp.plan(step, *arguments(), machine=MACHINE, mesh={"data": 8})


@pytest.fixture
def saved(made: mp.Plan, tmp_path: Path) -> Path:
    made.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda text: text[: len(text) // 2], "is damaged: it ends in the middle. Save the plan again."),
        (lambda text: text.replace('"mesh"', '"mash"', 1), "is damaged: field 'mesh' is missing. Save the plan again."),
        (lambda text: text.replace('"flops": ', '"flops": [', 1), "is damaged: "),
        (lambda text: "", "is empty. Save the plan again."),
        (lambda text: "{}", "is not a plan file"),
        (lambda text: "not json", "is damaged: "),
    ],
)
def test_a_damaged_plan_file_says_what_is_wrong_with_it(saved: Path, damage: Callable[[str], str], found: str) -> None:
    saved.write_text(damage(saved.read_text()))
    said = sentence(mp.PlanFileError, lambda: mp.load(saved))
    assert said.startswith(f"{saved} ")
    assert found in said


def test_a_newer_plan_file_asks_for_a_newer_meshplan(saved: Path) -> None:
    content = json.loads(saved.read_text())
    saved.write_text(json.dumps({**content, "format": content["format"] + 1}))
    said = sentence(mp.PlanFileError, lambda: mp.load(saved))
    mine = content["format"]
    newer = f"was written by a newer meshplan (format {mine + 1}, this one reads up to {mine})"
    assert said.startswith(f"{saved} {newer}: ")
    assert said.endswith("upgrade meshplan, or plan again.")


def test_a_missing_plan_file_says_how_to_write_one(tmp_path: Path) -> None:
    said = sentence(mp.PlanFileError, lambda: mp.load(tmp_path / "no.json"))
    assert said == f"plan file {tmp_path / 'no.json'} does not exist. Write one with plan.save or `meshplan plan -o`."


def test_a_plan_for_other_shapes_names_the_first_that_differs(saved: Path) -> None:
    said = sentence(mp.PlanFileError, lambda: mp.load(saved, step, *arguments(rows=32)))
    assert said.startswith(
        f"{saved} is for another program: argument 'batch/x' is float32[32, 16], planned was float32[64, 16]. "
    )


def test_a_plan_for_another_step_says_so(saved: Path) -> None:
    def other(params: Any, batch: Any) -> Any:
        return step(params, {"x": jnp.sin(batch["x"])})

    said = sentence(mp.PlanFileError, lambda: mp.load(saved, other, *arguments()))
    assert "is for another program: the arguments are the same, the operations differ" in said
    assert "plan again" in said
    params, batch = arguments()
    more = {**params, "bias": shape(16)}
    said = sentence(mp.PlanFileError, lambda: mp.load(saved, step, more, batch))
    assert "is for another program: it has no argument 'params/bias' (float32[16])" in said


def test_a_plan_without_its_step_can_be_shown_and_says_how_to_compile_it(saved: Path, made: mp.Plan) -> None:
    alone = mp.load(saved)
    assert str(alone) == str(made)
    for call in (alone.jit, lambda: alone.in_specs, lambda: alone.audit(), lambda: alone.verify(np.ones(3))):
        assert "Load it with mp.load(path, step, *args)" in sentence(mp.ArgumentError, call)


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(
    made: mp.Plan, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, page = saved.read_bytes(), saved.with_name("plan.html")
    page.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    for write, path in ((made.pin({"batch.x": P()}).save, saved), (made.html, page)):
        said = sentence(mp.PlanFileError, lambda write=write, path=path: write(path))
        assert said == f"{path} cannot be written: No space left on device."
    assert saved.read_bytes() == before
    assert page.read_text() == "old"
    assert sorted(p.name for p in saved.parent.iterdir()) == ["plan.html", "plan.json"]


def test_an_interrupted_write_leaves_nothing(made: mp.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    for write in (made.save, made.html):
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
