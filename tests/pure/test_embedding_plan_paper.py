"""The 1.7 TB case of arXiv 2508.03854; the whole of it is tests/benchmarks/measure_embedding_plan.py."""

from __future__ import annotations

import pytest

from meshplan.core import MemoryLimitError
from meshplan.embedding import Groups, plan
from meshplan.embedding._cost import Feature, make_group, options
from meshplan.embedding._solve import least_memory, make_placing
from meshplan.machine import Machine
from tests.benchmarks.measure_embedding_plan import PRICING, SAMPLES, paper_tables


def least(devices: int, groups: Groups) -> float:
    machine = Machine.preset(f"h100:{devices // 8}x8")
    group = make_group(machine, groups, SAMPLES)
    found = [options(Feature(table=t), group, PRICING) for t in paper_tables()]
    return (least_memory(make_placing(group, found, 1.0)) + PRICING.reserved_bytes) / machine.memory_bytes


def test_the_tables_are_1_7_terabytes() -> None:
    assert sum(t.nbytes for t in paper_tables()) == pytest.approx(1.7e12, rel=1e-3)


def test_full_model_parallelism_is_out_of_memory_from_1024_gpus_on_and_not_before() -> None:
    with pytest.raises(MemoryLimitError, match="1 replicas of 1024 shards the fullest device needs at least"):
        plan(paper_tables(), Machine.preset("h100:128x8"), SAMPLES * 1024, groups=Groups(replicas=1, shards=1024),
             pricing=PRICING)  # fmt: skip
    assert least(512, Groups(replicas=1, shards=512)) < 1 < least(2048, Groups(replicas=1, shards=2048))


def test_groups_of_256_fit_any_number_of_gpus() -> None:
    """What a group needs does not depend on how many there are."""
    one, many = (least(256 * m, Groups(replicas=m, shards=256)) for m in (2, 16))
    assert one == pytest.approx(many)
    assert many < 1
