"""The prediction against the module that XLA compiles for 8 x H100."""

from __future__ import annotations

import pytest

import meshplan as mp
from models import gpt, llama
from tests._audits import check_prediction


@pytest.mark.parametrize("model", [gpt, llama], ids=["gpt", "llama"])
def test_prediction_holds_on_gpus(model):
    plan = mp.plan(model.workload("small"), machine="h100:1x8")
    check_prediction(plan.audit())
