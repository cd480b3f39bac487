"""Plans as Python source and as flax's logical axis rules."""

from __future__ import annotations

import types
from typing import Any

import jax
import numpy as np
import pytest
from inline_snapshot import snapshot
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshplan.plan import PlanData, logical_axis_rules, to_source
from tests._plans import arguments, array, make_plan, spec


def run(data: PlanData) -> types.SimpleNamespace:
    names: dict[str, Any] = {}
    exec(compile(to_source(data), "plan.py", "exec"), names)
    return types.SimpleNamespace(**names)


def test_the_tables_are_what_a_person_would_write() -> None:
    text = to_source(make_plan())
    assert text[: text.index("def make_mesh")] == snapshot('''\
"""Shardings of train_step for tpu-v5e:2x4, mesh data=2 x model=4.

Predicted: 4 ms a step, 5 MB on each device at the peak.

    mesh = make_mesh()
    fn = jit(step, args, mesh)
"""

import re

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

MESH = {"data": 2, "model": 4}
NAMES = ("state", "batch")  # of the step's arguments
DONATED = (0,)

ARGUMENTS = {
    "state/mu/embed": P("model"),  # float32[512, 64]
    "state/mu/layers/*/up": P("data", "model"),  # float32[64, 256]
    "state/mu/layers/*/scale": P(),  # float32[64]
    "state/params/embed": P("model"),  # float32[512, 64]
    "state/params/layers/*/up": P("data", "model"),  # float32[64, 256]
    "state/params/layers/*/scale": P(),  # float32[64]
    "batch/tokens": P("data"),  # int32[16, 32]
}

RESULTS = {
    **{path.replace("state/", "0/", 1): spec for path, spec in ARGUMENTS.items() if path.startswith("state/")},
    "1/loss": P(),  # float32[]
}


''')


def test_the_source_does_without_meshplan() -> None:
    lines = [line.strip() for line in to_source(make_plan()).splitlines()]
    imported = [line for line in lines if line.startswith(("import ", "from "))]
    assert imported == [
        "import re", "import jax", "from jax.sharding import AxisType, NamedSharding",
        "from jax.sharding import PartitionSpec as P",
    ]


def test_every_planned_path_finds_its_spec() -> None:
    data = make_plan()
    source = run(data)
    for a in data.arguments:
        assert source.spec_of(a.path, source.ARGUMENTS) == a.spec.partition_spec()
    for r in data.results:
        assert source.spec_of(r.path, source.RESULTS) == r.spec.partition_spec()
    assert source.spec_of("state/params/embed/value", source.ARGUMENTS) == P("model"), "inside a framework's box"
    with pytest.raises(KeyError, match="the plan has no spec for state/params/other"):
        source.spec_of("state/params/other", source.ARGUMENTS)


def test_layers_that_differ_stand_by_their_own_names() -> None:
    layers = tuple(
        array(f"state/layers/{i}/up", (64, 256), spec("data", None) if i else spec(None, "model")) for i in range(3)
    )
    source = run(make_plan(arguments=layers))
    assert source.ARGUMENTS == {
        "state/layers/0/up": P(None, "model"), "state/layers/1/up": P("data"), "state/layers/2/up": P("data"),
    }


def test_names_of_any_kind_stay_valid_python() -> None:
    odd = "state/a\"b\\c'd\n"
    data = make_plan(step='say """hi"""\\', arguments=(array(odd, (8, 8), spec("data+model", None)),))
    assert run(data).ARGUMENTS == {odd: P(("data", "model"))}


def test_constraints_by_names_of_dims() -> None:
    source = run(make_plan())
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    found = jax.make_jaxpr(lambda x: source.constrain(x, mesh, "batch", None, "mlp"))(np.zeros((8, 3, 8)))
    (constraint,) = found.eqns
    assert constraint.params["sharding"].spec == P("data", None, "model"), "an axis is used once, leftmost first"
    assert source.DIMS == {"batch": ("data",), "embed": (), "mlp": ("data", "model")}
    assert "def constrain" not in to_source(make_plan(rules=()))


def test_rules_have_flax_form() -> None:
    rules = logical_axis_rules(make_plan())
    assert rules == (("batch", "data"), ("embed", None), ("mlp", ("data", "model")))
    linen = pytest.importorskip("flax.linen")
    with linen.logical_axis_rules(rules):
        assert linen.logical_to_mesh_axes(("batch", "embed")) == P("data", None)
    assert linen.logical_to_mesh_axes(("embed", "mlp"), rules) == P(None, ("data", "model"))


def test_the_source_of_a_plan_is_always_the_same() -> None:
    assert to_source(make_plan(arguments=arguments(5))) == to_source(make_plan(arguments=arguments(5)))
