"""Seconds to place embedding tables: a thousand on one group of 64 devices, and few exactly."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from meshplan.embedding import Groups, Pricing, plan
from meshplan.machine import Machine
from tests.benchmarks.measure_embedding_plan import thousand_tables


@pytest.mark.parametrize("count", [6, 100, 1000])
def bench_placement(benchmark: BenchmarkFixture, count: int) -> None:
    machine, tables = Machine.preset("h100:8x8"), thousand_tables()[:count]
    groups = Groups(replicas=1, shards=64)
    found = benchmark.pedantic(
        plan, args=(tables, machine, 64 * 1024), kwargs={"groups": groups, "pricing": Pricing(hashed=True)},
        rounds=1, iterations=1,
    )  # fmt: skip
    benchmark.extra_info.update(seconds=found.step_seconds, bound=found.bound_seconds)
    assert found.step_seconds >= found.bound_seconds * (1 - 1e-12)
