"""The planned step under jax's own distributed runtime: two processes, four host devices each, gloo on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import with_host_devices

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("_child.py")
STEPS = 5
FAST_COMPILE = "--xla_backend_optimization_level=0"  # LLVM's work is not what is tested
TIMEOUT_SECONDS = 420.0


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that stays this test's: bound here without listening, so that only who shares it on purpose, as the
    coordinator's gRPC server does, can bind it too."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def start(index: int, processes: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    """One process of the job; what it prints goes to `folder`."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = with_host_devices(f"{env.get('XLA_FLAGS', '')} {FAST_COMPILE}", 8 // processes)
    out = folder / f"{processes}-{index}.json"
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(CHILD), str(index), str(processes), str(port), str(out), str(STEPS)],
            env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def wait(running: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, one has failed, or the time is up; none is left behind."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    waiting = list(running)
    try:
        while waiting and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if waiting[0].wait(timeout=0.5):
                    return
            if any(process.poll() for process in waiting):
                return
            waiting = [process for process in waiting if process.poll() is None]
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()


def run(processes: int, folder: Path) -> list[dict[str, Any]]:
    """What every process of a job found; fails with their logs where one did not end well."""
    with reserved_port() as port:
        running = [start(index, processes, port, folder) for index in range(processes)]
        wait(running)
    codes = [process.returncode for process in running]
    if any(codes):
        logs = (path.read_text(errors="replace")[-4000:] for path in sorted(folder.glob(f"{processes}-*.log")))
        pytest.fail(f"exit codes {codes} of {processes} processes; they said:\n" + "\n---\n".join(logs))
    return [json.loads((folder / f"{processes}-{index}.json").read_text()) for index in range(processes)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(one process with eight devices, two with four)."""
    folder = tmp_path_factory.mktemp("processes")
    return run(1, folder)[0], run(2, folder)


def test_two_processes_make_one_mesh_of_eight_devices(found: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    alone, both = found
    assert (alone["devices"], alone["local_devices"], alone["processes"]) == (8, 8, 1)
    assert [(b["devices"], b["local_devices"], b["processes"]) for b in both] == [(8, 4, 2)] * 2
    assert [b["across"] for b in both] == [["data"]] * 2, "the slow link is inside no axis but the outermost"
    assert sum(b["held_bytes"] for b in both) == alone["held_bytes"]


def test_both_processes_plan_the_same(found: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    _, (first, second) = found
    assert first["specs"] == second["specs"]
    assert (first["machine"], first["fingerprint"]) == (second["machine"], second["fingerprint"])
    assert "data" in first["specs"]["batch/tokens"]


def test_the_losses_are_those_of_one_process(found: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    alone, (first, second) = found
    assert first["losses"] == second["losses"]
    np.testing.assert_allclose(first["losses"], alone["losses"], rtol=1e-6)
    assert len(alone["losses"]) == STEPS
    assert alone["losses"][0] == pytest.approx(np.log(256), rel=0.02)
    assert alone["losses"][-1] < alone["losses"][0] - 0.5
