"""Tables as pins: ordered patterns, rules from names of dims to axes; collisions, fallbacks, one axis twice."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.linen import spmd
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.hints import axis_mapping, read_rules, resolve
from tests._programs import f32

# ------------------------------------------------------------------------------------------- reading tables

NAMES = ("batch", "seq", "embed", "mlp", "vocab")
AXES = st.sampled_from(["data", "fsdp", "model", "seq"])
ROWS = st.tuples(
    st.sampled_from(NAMES), st.none() | AXES | st.lists(AXES, min_size=1, max_size=2, unique=True).map(tuple)
)


@given(st.lists(ROWS, max_size=8), st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
def test_rules_are_read_as_flax_reads_them(rules: list[Any], names: list[str]) -> None:
    found = resolve(tuple(names), read_rules(rules))
    flax = spmd.logical_to_mesh_axes(tuple(names), tuple(rules))
    assert P(*(None if not a else a[0] if len(a) == 1 else a for a in found.dims)) == flax
    for dims in found.choices:
        axes = [a for d in dims for a in d or ()]
        assert len(axes) == len(set(axes)), "no way to share the axes out gives one to two dims"
    if found.contested:
        assert found.choices[0] == found.dims, "the table's own way comes first"


def test_maxtext_lists_and_none_are_rows_too() -> None:
    assert read_rules([["batch", ["data", "fsdp"]], ("norm", None)]) == (("batch", ("data", "fsdp")), ("norm", ()))
    for bad in ([("batch",)], [("batch", 3)], ["batch"]):
        with pytest.raises(mp.PinError, match="row 1 of the rules"):
            read_rules(bad)


def test_a_dim_is_free_where_its_row_says_so_and_whole_where_there_is_none() -> None:
    rules = read_rules([("batch", "data"), ("embed", P.UNCONSTRAINED)])
    assert resolve(("batch", "seq", "embed", None), rules).dims == (("data",), (), None, ())
    mesh = {"data": 4, "model": 2}
    rows = ("vocab", None), ("vocab", P.UNCONSTRAINED)
    whole, free = (planned([("batch", "data"), row], mesh, *BIG) for row in rows)
    assert whole.specs["w"] == P()
    assert free.specs["w"] == P(None, "model")


def test_haliax_takes_the_rules_as_a_mapping() -> None:
    rules = (("batch", "data"), ("embed", None), ("mlp", ("a", "b")))
    assert axis_mapping(rules) == {"batch": "data", "mlp": ("a", "b")}


# ------------------------------------------------------------------------------------------------ the cases


@mp.dims("batch seq embed, embed vocab -> batch seq vocab")
def logits(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def step(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(logits(x, w)).mean()


def planned(pins: Any, mesh: dict[str, int] | None, *args: Any, fn: Any = step, machine: str = "cpu:8") -> mp.Plan:
    return mp.plan(fn, *(args or (f32(16, 64, 32), f32(32, 256))), machine=machine, mesh=mesh, pins=pins,
                   donate_argnums=())  # fmt: skip


BIG = f32(64, 64, 512), f32(512, 8192)
COLLIDING = [("batch", ("data", "fsdp")), ("seq", ("sequence", "context")), ("vocab", ("tensor", "sequence"))]


def test_colliding_rules_are_reported_with_the_axis_that_loses_and_its_cost() -> None:
    """Case 9: the plan shares the axis out by cost, not by the order of the rules."""
    mesh = {"data": 1, "fsdp": 1, "tensor": 2, "sequence": 2, "context": 2}
    made = planned(COLLIDING, mesh, f32(16, 256, 256), f32(256, 4096))
    (note,) = [n for n in made.notes if n.startswith("rules collide")]
    assert "(batch seq vocab): axis 'sequence' is wanted by 'seq' (row 2, seq -> sequence+context) and 'vocab' " in note
    assert "the plan gives it to 'seq', 'vocab' loses it: 8.39 MB on each device, with it too 4.19 MB" in note
    assert "Split as (None, sequence+context, tensor), the step takes" in note, "vocab keeps what is left of its row"
    assert "(the table's order)" in note
    by_order = spmd.logical_to_mesh_axes(("batch", "seq", "vocab"), [(n, a) for n, a in COLLIDING])
    assert by_order == P(("data", "fsdp"), ("sequence", "context"), None), "flax: vocab loses tensor too"
    chosen, *others = [float(ms) for ms in re.findall(r"([\d.]+) ms", note)]
    assert len(others) == 2
    assert made.step_seconds * 1e3 == pytest.approx(chosen, rel=0.01)
    assert chosen < 1.01 * min(others), "close ones are told apart by memory traffic"


def test_the_cost_decides_who_gets_the_axis() -> None:
    mesh = {"data": 1, "fsdp": 4, "tensor": 1, "sequence": 2, "context": 1}
    wide, long = (f32(8, 2, 64), f32(64, 1 << 17)), (f32(8, 2048, 16), f32(16, 32))
    found = [planned(COLLIDING, mesh, *args).notes[-1] for args in (wide, long)]
    assert "gives it to 'vocab', 'seq' loses it" in found[0]
    assert "gives it to 'seq', 'vocab' loses it" in found[1]


def test_one_axis_twice_is_an_error_that_names_the_path_and_both_dims() -> None:
    """Case 10: as a pin, and after nnx has resolved the rules of a Variable."""
    message = "pin on 'w': axis 'fsdp' splits dims 0 and 1 of (fsdp, fsdp). One axis can split one dim of an array"
    with pytest.raises(mp.SpecError) as caught:
        planned({"w": P("fsdp", "fsdp")}, {"fsdp": 8})
    assert message in str(caught.value)
    rules = (("embed", "fsdp"), ("vocab", "fsdp"))
    weight = nnx.Param(f32(32, 256), out_sharding=("embed", "vocab"), sharding_rules=rules, eager_sharding=False)
    assert nnx.get_partition_spec(weight).get_value() == P("fsdp", "fsdp")
    with pytest.raises(mp.SpecError, match=r"the sharding of 'w/kernel': axis 'fsdp' splits dims 0 and 1"):
        planned({}, {"fsdp": 8}, f32(16, 64, 32), {"kernel": weight}, fn=lambda x, w: step(x, w["kernel"][...]))


def test_fallback_rules_say_which_row_won() -> None:
    """Case 11."""

    @mp.dims("batch length embed -> batch length embed")
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    rules = [("batch", "data"), ("embed", "model"), ("embed", "data")]
    made = planned(rules, {"data": 4, "model": 2}, f32(16, 64, 32), fn=lambda x: double(x).sum())
    assert made.specs["x"] == P("data", None, "model")
    (note,) = made.notes
    assert "(batch length embed): 'embed' takes row 2, embed -> model; row 3, embed -> data is not needed" in note
    rules = [("batch", "model"), *rules[1:]]
    other = planned(rules, {"data": 4, "model": 2}, f32(16, 64, 32), fn=lambda x: double(x).sum())
    assert other.specs["x"] == P("model", None, "data")
    wanted = "'embed' takes row 3, embed -> data; row 2, embed -> model is passed over, its axis is taken"
    assert wanted in other.notes[0]


def test_axes_of_a_row_may_stand_in_any_order_and_have_size_one() -> None:
    mesh = {"data": 4, "fsdp": 1, "model": 2}
    made = planned([("batch", ("model", "fsdp", "data"))], mesh)
    assert made.specs["x"] == P(("data", "model"))


@pytest.mark.parametrize(
    ("rules", "mesh", "words"),
    [
        ([("batch", "dat")], None, "axis 'dat' is unknown; the search names its axes data, fsdp, model. Nearest: data"),
        ([("vocab", "tensor")], {"data": 8}, "axis 'tensor' is not in the mesh (data=8). Known: data. An axis that the "
                                             "machine does not need may have size 1 in mesh={...}."),
        ([("batc", "data")], {"data": 8}, "no array of the step has a dim that the rules name (batc). Named dims are: "
                                          "batch, embed, seq, vocab."),
    ],
)  # fmt: skip
def test_rules_that_cannot_hold_say_what_to_do(rules: Any, mesh: Any, words: str) -> None:
    with pytest.raises(mp.MeshplanError) as caught:
        planned(rules, mesh)
    assert words in str(caught.value)


# ------------------------------------------------------------------------------------------ ordered patterns


def model_step(params: Any, x: jax.Array) -> jax.Array:
    h = x @ params["attention"]["wq"]["kernel"]
    return jnp.tanh(h * params["norm"]["scale"]).sum() * params["temperature"]


MODEL = {"attention": {"wq": {"kernel": f32(32, 64)}}, "norm": {"scale": f32(64)}, "temperature": f32()}
EASYLM = [
    ("attention/(wq|wk|wv)/kernel", P("data", "model")), ("attention/wo/kernel", P("model", "data")),
    ("kernel", P("data")), (".*", P(None)),
]  # fmt: skip


def test_the_first_pattern_found_in_a_path_wins() -> None:
    made = planned(EASYLM, {"data": 4, "model": 2}, MODEL, f32(64, 32), fn=model_step)
    assert made.specs["params/attention/wq/kernel"] == P("data", "model")
    assert made.specs["params/norm/scale"] == P()
    assert made.specs["params/temperature"] == P(), "scalars need no row"
    assert made.notes == ("rows of the pins that no argument took: 2 'attention/wo/kernel', 3 'kernel'",)
    assert dict(made.data.pins)["^params/attention/wq/kernel"] == "P('data', 'model')"


def test_further_pins_lie_over_the_table() -> None:
    made = planned(EASYLM, {"data": 4, "model": 2}, MODEL, f32(64, 32), fn=model_step)
    again = made.pin({"x": P("data"), "kernel": P(None, "model")})
    assert (again.specs["x"], again.specs["params/attention/wq/kernel"]) == (P("data"), P(None, "model"))
    assert again.specs["params/norm/scale"] == P()


def test_a_table_survives_the_plan_file(tmp_path: Any) -> None:
    args = (MODEL, f32(64, 32))
    made = planned(EASYLM, {"data": 4, "model": 2}, *args, fn=model_step)
    made.save(tmp_path / "plan.json")
    loaded = mp.load(tmp_path / "plan.json", model_step, *args, donate_argnums=())
    assert loaded.pin({"norm/scale": P()}).specs == made.specs


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("kernal", P())], "pin 'kernal' matches no argument. Nearest: params/attention/wq/kernel."),
        ([("(", P())], "row 1: '(' is no regular expression"),
        ([("kernel", P()), ("scale", "data")], "row 2 of the pins is ('scale', 'data'); write (pattern,"),
        ([("kernel", P("data", None, "model"))], "row 1, 'kernel' on 'params/attention/wq/kernel' has 2 dims"),
        ([("kernel", P("data", "data"))], "axis 'data' splits dims 0 and 1"),
    ],
)
def test_tables_that_cannot_hold_say_which_row(rows: Any, words: str) -> None:
    with pytest.raises(mp.MeshplanError) as caught:
        planned(rows, {"data": 4, "model": 2}, MODEL, f32(64, 32), fn=model_step)
    assert words in str(caught.value)


def test_a_pattern_of_results_pins_those_that_are_no_arguments_place() -> None:
    made = planned({"0/y": P("model"), "x": P("data")}, {"data": 4, "model": 2}, f32(64, 32), fn=lambda x: {"y": x * 2})
    assert made.out_specs == {"y": P("model")}
    assert made.specs["x"] == P("data")
