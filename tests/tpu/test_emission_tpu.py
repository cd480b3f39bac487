"""Plans for a TPU v5e slice of what XLA would gather: the compiled module holds what the plan says."""

from __future__ import annotations

import pytest

from tests._emission_plans import PLANS, check


@pytest.mark.parametrize("name", [*PLANS, "eigh"])
def test_a_plan_of_what_xla_gathers_moves_what_it_says(name: str):
    check(name, "tpu-v5e:2x4")
