"""The prediction against the module that XLA compiles for a TPU v5e 2x4 slice."""

from __future__ import annotations

import pytest

import meshplan as mp
from models import gpt, llama
from tests._audits import check_prediction


@pytest.mark.parametrize("model", [gpt, llama], ids=["gpt", "llama"])
def test_prediction_holds_on_tpus(model):
    plan = mp.plan(model.workload("small"), machine="tpu-v5e:2x4")
    check_prediction(plan.audit())
