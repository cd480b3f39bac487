"""Planning llama3-8b over 8 x 8 devices: seconds and memory of the planner, unrolled and scanned.

Bars, on two quiet cores: unrolled (32 layers, remat, adamw) under 20 s and 4 GB, scanned under 5 s. Each case
runs in a process of its own, so that the memory is the planner's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHILD = """
import json, resource, time
import meshplan as mp
from models import llama

workload = llama.workload("llama3-8b", scan={scan}, remat=True)
began = time.perf_counter()
plan = mp.plan(workload, machine="h100:8x8", mesh={{"data": 8, "model": 8}})
seconds = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({{"seconds": seconds, "bytes": peak, "operations": len(plan.program.ops), "gap": plan.gap}}))
"""


def planned(scan: bool) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(scan=scan)], cwd=ROOT, capture_output=True, text=True, timeout=600,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("scan", "seconds"), [(False, 20.0), (True, 5.0)], ids=["unrolled", "scanned"])
def bench_plan_llama3_8b(benchmark, scan: bool, seconds: float):
    found = benchmark.pedantic(planned, args=(scan,), rounds=2)
    benchmark.extra_info.update(found)
    print(found)
    assert found["bytes"] < 4e9
    assert found["seconds"] < seconds
