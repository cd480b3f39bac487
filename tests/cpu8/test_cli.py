"""The command line from a workload to a verified plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshplan.cli import main
from meshplan.plan import load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file for the smallest real workload."""
    path = tmp_path_factory.mktemp("cli") / "plan.json"
    argv = ["plan", "models.mlp:workload", "--size", "tiny", "--machine", "cpu:8", "--pin", "batch.images=data"]
    assert main([*argv, "--set", "batch=32", "-o", str(path), "--html", str(path.with_suffix(".html"))]) == 0
    return path


def test_plan_writes_a_plan_that_knows_its_workload(planned: Path) -> None:
    data = load(planned)
    assert data.workload == "models.mlp:workload size=tiny batch=32"
    assert data.machine == "cpu:8"
    images = next(a for a in data.arguments if a.path == "batch/images")
    assert images.pinned and images.spec.dims == (("data",), ()) and images.shape == (32, 64)
    assert "batch/images" in planned.with_suffix(".html").read_text()
    assert sorted(p.name for p in planned.parent.iterdir()) == ["plan.html", "plan.json"]


def test_planning_twice_writes_the_same_bytes(planned: Path, tmp_path: Path) -> None:
    argv = ["plan", "models.mlp:workload", "--size", "tiny", "--machine", "cpu:8", "--pin", "batch.images=data"]
    assert main([*argv, "--set", "batch=32", "-o", str(tmp_path / "again.json")]) == 0
    assert (tmp_path / "again.json").read_bytes() == planned.read_bytes()


def test_plan_as_json_and_with_a_fixed_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "models.mlp:workload", "--machine", "cpu:8", "--mesh", "rows=2,columns=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"rows": 2, "columns": 4}
    assert found["search_seconds"] > 0


def test_verify_holds_and_says_so(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(planned), "--json", "--seed", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and len(found["leaves"]) == 15


def test_audit_has_the_status_of_its_answer(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["audit", str(planned), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == (0 if found["ok"] else 1)
    assert found["fits"] and found["bytes_by_kind"] and found["memory"]["argument_bytes"] > 0


def test_compare_lists_the_templates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "models.mlp:workload", "--machine", "cpu:8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["name"] for r in rows] == ["plan", "dp", "zero1", "fsdp", "megatron", "megatron_sp", "tp_fsdp"]
    assert all(rows[0]["step_seconds"] <= r["step_seconds"] for r in rows)


def test_a_plan_for_another_program_is_one_sentence(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(planned), "--workload", "models.mlp:workload size=tiny batch=64"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        f"meshplan audit: {planned} is for another program: argument 'batch/images' is float32[64, 64], planned was "
        "float32[32, 64]. Plan again for this program, or pass the arguments that were planned."
    )


@pytest.mark.parametrize(("extra", "sentence"), [
    (("--pin", "batch.imagez=data"), "pin 'batch.imagez' matches no argument. Nearest: batch/images."),
    (("--pin", "batch.images=rows"), "pin on 'batch/images': axis 'rows' is unknown"),
    (("--mesh", "data=3"), "mesh data=3 has 3 devices, machine cpu:8 has 8."),
    (
        ("--set", "batch=20", "--mesh", "data=8", "--pin", "batch.images=data"),
        "pin on 'batch/images': dim 0 has 20 entries",
    ),
    (("--machine", "cpu8"), "machine 'cpu8'"),
])
def test_what_cannot_be_planned_is_one_sentence(
    extra: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", "models.mlp:workload", "--machine", "cpu:8", *extra, "-o", str(tmp_path / "p.json")]
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith(f"meshplan plan: {sentence}")
    assert out == "" and list(tmp_path.iterdir()) == []


def test_a_limit_that_nothing_meets_has_status_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "models.mlp:workload", "--machine", "cpu:8", "--memory-limit", "10kB"]
    assert main([*argv, "-o", str(tmp_path / "p.json")]) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("meshplan plan: no plan fits 10 kB per device: the least achievable peak is ")
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_process_starts_the_devices_that_the_plan_needs(planned: Path) -> None:
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "meshplan.cli", "verify", str(planned)]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "All 15 result leaves agree." in done.stdout
