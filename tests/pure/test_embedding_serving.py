"""Serving placements: queues against closed forms and the event simulator, balances against each other."""

from __future__ import annotations

import numpy as np
import pytest

from meshplan.core import ArgumentError, MemoryLimitError
from meshplan.embedding import Table, serve
from meshplan.embedding._serving_queue import draw, latencies, waits
from meshplan.machine import Machine
from meshplan.simulate import Resource, TaskList, simulate

NODE = Machine.preset("h100:1x8")


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("sizes", ["constant", "exponential"])
def test_the_mean_wait_is_that_of_the_closed_form(busy: float, sizes: str) -> None:
    """M/D/1: rho s / (2 (1 - rho)); M/M/1: rho s / (1 - rho)."""
    service = 2e-3
    gaps, factors = draw(400_000, busy / service, sizes, seed=1)  # type: ignore[arg-type]
    mean = waits(gaps, service * factors[None])[0].mean()
    half = 2 if sizes == "constant" else 1
    assert mean == pytest.approx(busy * service / (half * (1 - busy)), rel=0.05)


def test_two_stages_in_a_row_are_what_the_event_simulator_finds() -> None:
    """Arrivals are a chain of tasks; every query then uses each server's memory and after that its link."""
    rng = np.random.default_rng(3)
    stages = np.array([[2e-3, 1e-3], [5e-4, 2.5e-3], [1.5e-3, 1.5e-3]])
    gaps, factors = rng.exponential(3e-3, 200), np.ones(200)
    resources = [Resource(name="arrivals", kind="host", in_order=True)]
    resources += [Resource(name=f"{s}.{k}", kind="compute") for s in range(3) for k in range(2)]
    tasks, last, ends, starts = TaskList(), [], [], []
    for n in range(200):
        born = tasks.add("host", seconds=0.0 if n == 0 else float(gaps[n - 1]), uses=[0], after=last)
        last = [born]
        starts.append(born)
        second = []
        for s in range(3):
            first = tasks.add("compute", seconds=float(stages[s, 0]), uses=[1 + 2 * s], after=[born])
            second.append(tasks.add("compute", seconds=float(stages[s, 1]), uses=[2 + 2 * s], after=[first]))
        ends.append(second)
    timeline = simulate(tasks.build(), resources)
    expected = timeline.end[np.array(ends)].max(axis=1) - timeline.end[np.array(starts)]
    np.testing.assert_allclose(latencies(gaps, factors, stages, 0.0), expected, rtol=1e-9)


def uneven_tables() -> tuple[Table, ...]:
    """Large tables are cold and small ones hot, so that balances differ."""
    rng = np.random.default_rng(0)
    return tuple(
        Table(
            name=f"t{i}", rows=int(10 ** rng.uniform(4, 7)), dim=64,
            hotness=float(np.ceil(10 ** rng.uniform(0, 2.3))),
        )
        for i in range(40)
    )  # fmt: skip


def test_each_balance_is_best_at_what_it_balances() -> None:
    found = {b: serve(uneven_tables(), NODE, queries_per_second=1e5, samples=64, balance=b, queries=2000)
             for b in ("capacity", "load", "network")}  # type: ignore[arg-type] # fmt: skip
    assert min(found, key=lambda b: found[b].imbalance["memory"]) == "capacity"
    assert min(found, key=lambda b: found[b].imbalance["lookups"]) == "load"
    assert min(found, key=lambda b: found[b].imbalance["network"]) == "network"
    best = serve(uneven_tables(), NODE, queries_per_second=1e5, samples=64, queries=2000)
    assert best.latency["p99"] == min(f.latency["p99"] for f in found.values())
    assert best.compared == pytest.approx({b: f.latency["p99"] for b, f in found.items()})


def test_percentiles_rise_with_the_load_and_the_answer_is_the_same_every_time() -> None:
    plans = [serve(uneven_tables(), NODE, queries_per_second=q, samples=64, balance="load", queries=4000)
             for q in (1e4, 1e5, 1e5)]  # fmt: skip
    slow, busy, again = plans
    assert busy == again and str(busy) == str(again)
    assert slow.latency["p99"] < busy.latency["p99"]
    for p in plans:
        assert p.latency["p50"] <= p.latency["p95"] <= p.latency["p99"]
        assert max(p.utilisation) == pytest.approx(p.queries_per_second / p.most_queries_per_second)
        assert sum(p.memory_bytes) >= sum(t.nbytes for t in uneven_tables())
    text = str(busy)
    assert "40 tables on 8 servers of h100:1x8, balanced by load" in text and "server 7:" in text


def test_one_lonely_server_waits_as_the_closed_form_says() -> None:
    machine = Machine.preset("h100:1x1")
    table = Table(name="t", rows=100_000, dim=64, hotness=50)
    idle = serve([table], machine, queries_per_second=1.0, samples=1000, queries=500)
    service = idle.lookup_seconds[0]
    assert idle.latency["p99"] == pytest.approx(service)
    busy = serve([table], machine, queries_per_second=0.7 / service, samples=1000, queries=200_000)
    assert busy.latency["mean"] == pytest.approx(service * (1 + 0.7 / (2 * 0.3)), rel=0.05)


def test_a_table_larger_than_a_server_is_cut_by_rows() -> None:
    table = Table(name="big", rows=10_000_001, dim=64, hotness=4)
    p = serve([table], NODE, queries_per_second=10.0, memory_limit=table.nbytes // 3, queries=200)
    (placement,) = p.placements
    assert placement.scheme == "row" and len({s.device for s in placement.shards}) == 4
    assert sum(a * b for a, b in (s.shape for s in placement.shards)) == table.rows * table.dim
    assert max(p.memory_bytes) <= table.nbytes // 3
    assert "'big' is larger than a server" in p.notes[0]


def test_what_cannot_be_served_is_a_sentence() -> None:
    tables = [Table(name="t", rows=1000, dim=64, hotness=100)]
    for change, sentence in [
        ({"tables": []}, "there are no tables to serve"),
        ({"queries_per_second": 0}, "queries_per_second is 0; give a positive number."),
        ({"balance": "loads"}, "balance 'loads' is unknown. Nearest: load"),
        ({"queries": 10}, "10 simulated queries have no 99th percentile"),
        ({"queries_per_second": 1e12}, "more than the busiest of 8 servers can answer"),
    ]:
        with pytest.raises(ArgumentError) as caught:
            serve(**{"tables": tables, "machine": NODE, "queries_per_second": 10.0, **change})
        assert sentence in str(caught.value)
    with pytest.raises(MemoryLimitError, match="1 tables of 256 kB do not fit 8 servers of 1 kB"):
        serve(tables, NODE, queries_per_second=10.0, memory_limit=1000)
