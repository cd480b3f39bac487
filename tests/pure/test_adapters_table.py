"""The table of logical axis rules that a plan gives back."""

from __future__ import annotations

from flax.linen import spmd
from jax.sharding import PartitionSpec as P

from meshplan.plan import logical_axis_rules
from tests._plans import array, make_plan, spec


def test_names_of_the_data_come_first_so_that_they_keep_an_axis_that_parameters_share() -> None:
    data = make_plan(
        arguments=(
            array("state/w", (64, 256), spec("data", "model"), dims=("embed", "mlp")),
            array("batch/x", (16, 32, 64), spec("data", None, None), dims=("zone", "seq", "embed")),
        ),
        rules=(("embed", ("data",)), ("mlp", ("model",)), ("seq", ()), ("zone", ("data",))),
    )
    rules = logical_axis_rules(data)
    assert spmd.logical_to_mesh_axes(("zone", "mlp"), rules) == P("data", "model")
    assert spmd.logical_to_mesh_axes(("embed", "mlp"), rules) == P("data", "model")
    assert spmd.logical_to_mesh_axes(("zone", "seq", "embed"), rules) == P("data", None, None)
    assert [name for name, _ in rules] == ["zone", "seq", "embed", "mlp"]
