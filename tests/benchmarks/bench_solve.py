"""Seconds to solve transformer-like problems, with slack and with tight memory."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from meshplan.solve import minimum_peak, solve
from tests._problems import ladder

SIZES = [(64, 8), (192, 16), (300, 40)]


@pytest.mark.parametrize(("nodes", "strategies"), SIZES)
@pytest.mark.parametrize("room", [None, 0.5, 0.15], ids=["slack", "half", "tight"])
def bench_solve(benchmark: BenchmarkFixture, nodes: int, strategies: int, room: float | None) -> None:
    problem = ladder(nodes, strategies, room=room)
    found = benchmark.pedantic(solve, args=(problem,), kwargs={"relative_gap": 1e-4}, rounds=1, iterations=1)
    benchmark.extra_info.update(gap=found.gap, status=found.status)
    assert found.feasible


@pytest.mark.parametrize("room", [None, 0.3], ids=["slack", "tight"])
def bench_forty_mesh_shapes(benchmark: BenchmarkFixture, room: float | None) -> None:
    problems = [ladder(120, 40, seed=seed, room=room) for seed in range(40)]
    found = benchmark.pedantic(
        lambda: [solve(p, relative_gap=1e-3) for p in problems], rounds=1, iterations=1
    )
    benchmark.extra_info.update(gap=max(f.gap for f in found))
    assert all(f.feasible for f in found)


def bench_minimum_peak(benchmark: BenchmarkFixture) -> None:
    found = benchmark.pedantic(minimum_peak, args=(ladder(120, 40, room=0.3),), rounds=1, iterations=1)
    assert found.feasible
