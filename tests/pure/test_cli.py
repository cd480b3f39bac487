"""The command line: what it prints, its status, and one sentence for every mistake."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from meshplan.cli import main
from meshplan.cli._progress import working
from meshplan.cli._values import UsageError, WorkloadRef, parse_bytes, parse_mesh, parse_pin
from meshplan.plan import save
from tests._plans import make_plan

Run = Any


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("show", path)` -> (status, stdout, stderr)."""

    def call(*argv: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err

    return call


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    save(make_plan(), path)
    return path


# ------------------------------------------------------------------------------------------------ plan files


def test_show_prints_the_report(run: Run, plan_file: Path) -> None:
    status, out, err = run("show", plan_file)
    assert (status, err) == (0, "")
    assert out.startswith("train_step on tpu-v5e:2x4\nmesh data=2 x model=4 (8 devices)")
    assert "state/params/layers/*/up x 3" in out


def test_show_writes_html_source_rules_and_json(run: Run, plan_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    status, _, err = run("show", plan_file, "--html", page)
    assert (status, err) == (0, f"wrote {page}\n")
    assert page.read_text().startswith("<!doctype html>")
    assert run("show", plan_file, "--source")[1].startswith('"""Shardings of train_step')
    assert run("show", plan_file, "--rules")[1] == "(('batch', 'data'), ('embed', None), ('mlp', ('data', 'model')))\n"
    found = json.loads(run("show", plan_file, "--json")[1])
    assert found["mesh"] == {"data": 2, "model": 4}
    assert found["step_seconds"] == 4e-3
    assert found["arguments"][1] == {
        "path": "state/mu/layers/0/up", "shape": [64, 256], "dtype": "float32", "spec": [["data"], ["model"]],
        "used": [], "dims": ["embed", "mlp"], "pinned": False, "bytes_per_device": 8192.0,
    }
    assert found["collectives"][0]["total_bytes"] == 196608.0


def test_json_has_no_infinities(run: Run, tmp_path: Path) -> None:
    save(make_plan(memory_limit=float("inf")), tmp_path / "p.json")
    assert json.loads(run("show", tmp_path / "p.json", "--json")[1])["memory_limit"] is None


def test_explain_prints_one_argument(run: Run, plan_file: Path) -> None:
    status, out, _ = run("explain", plan_file, "params/layers/0/up")
    assert status == 0
    assert out.startswith("state/params/layers/0/up  float32[64, 256]\n")
    found = json.loads(run("explain", plan_file, "collectives", "--json")[1])
    assert [c["kind"] for c in found["collectives"]] == ["all-gather", "all-reduce"]
    status, _, err = run("explain", plan_file, "params/up")
    assert status == 2
    assert err.startswith("meshplan explain: 'params/up' matches no argument or result of the plan. Nearest: state/")


def test_diff_has_status_one_where_plans_differ(run: Run, plan_file: Path, tmp_path: Path) -> None:
    other, page = tmp_path / "other.json", tmp_path / "diff.html"
    save(make_plan(peak_bytes=4e6), other)
    assert run("diff", plan_file, plan_file) == (0, "the two plans say the same\n", "")
    status, out, _ = run("diff", plan_file, other, "--html", page)
    assert status == 1
    assert "peak memory  5 MB -> 4 MB (-20.0 %)" in out
    assert "Two plans" in page.read_text()
    status, out, _ = run("diff", plan_file, other, "--json")
    assert (status, json.loads(out)["figures"]) == (
        1, [{"what": "peak memory", "before": 5e6, "after": 4e6, "unit": "bytes"}],
    )


@pytest.mark.parametrize("command", ["show", "explain", "audit", "verify"])
def test_bad_plan_files_are_one_sentence(run: Run, tmp_path: Path, command: str) -> None:
    more = ["memory"] if command == "explain" else []
    missing, bad = tmp_path / "no.json", tmp_path / "bad.json"
    bad.write_text('{"kind": "meshplan plan", "format": 9}')
    assert run(command, missing, *more) == (
        2, "", f"meshplan {command}: plan file {missing} does not exist. Write one with plan.save or `meshplan plan "
        "-o`.\n",
    )
    assert run(command, bad, *more) == (
        2, "", f"meshplan {command}: {bad} was written by a newer meshplan (format 9, this one reads up to 1): upgrade "
        "meshplan, or plan again.\n",
    )


def test_a_plan_without_its_workload_asks_for_it(run: Run, tmp_path: Path) -> None:
    save(make_plan(workload=""), tmp_path / "p.json")
    status, _, err = run("verify", tmp_path / "p.json")
    assert status == 2
    assert err.endswith("p.json does not say where its step comes from. Give --workload module:function.\n")


# -------------------------------------------------------------------------------------------------- mistyped


MISTYPED = {
    ("pln",): "meshplan: there is no command 'pln'. Nearest: plan, explain. Try meshplan --help.\n",
    (): "meshplan: The following arguments are required: COMMAND. Try meshplan --help.\n",
    ("plan",): "meshplan plan: The following arguments are required: workload. Try meshplan plan --help.\n",
    ("show", "a", "--frobnicate"): "meshplan: Unrecognized arguments: --frobnicate. Try meshplan --help.\n",
    ("plan", "m:w", "--mesh", "data=x"): (
        "meshplan plan: Argument --mesh: mesh 'data=x': 'data=x' is no axis with its size. Write data=2,model=4. Try "
        "meshplan plan --help.\n"
    ),
    ("plan", "m:w", "--memory-limit", "many"): (
        "meshplan plan: Argument --memory-limit: 'many' is no size in bytes. Write 60GB, 16GiB or 6e10. Try meshplan "
        "plan --help.\n"
    ),
    ("plan", "m:w", "--pin", "tokens"): (
        "meshplan plan: Argument --pin: pin 'tokens' has no spec. Write PATTERN=SPEC, such as 'batch.tokens=data' or "
        "'params/.*/up=None,model'. Try meshplan plan --help.\n"
    ),
    ("solve", "x.json", "--seconds", "-1"): (
        "meshplan solve: Argument --seconds: '-1' is no positive number of seconds. Write 60. Try meshplan solve "
        "--help.\n"
    ),
    ("machines", "--show", "h10"): "meshplan machines: machine 'h10' is unknown. Nearest: h100, v100, p100.\n",
}


@pytest.mark.parametrize("argv", MISTYPED)
def test_mistakes_are_one_sentence_and_status_two(run: Run, argv: tuple[str, ...]) -> None:
    assert run(*argv) == (2, "", MISTYPED[argv])


def test_help_names_every_command(run: Run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    for command in ("plan", "show", "explain", "diff", "audit", "verify", "compare", "forecast", "solve", "machines"):
        assert f"\n    {command} " in out


# --------------------------------------------------------------------------------------------------- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_a_bar_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with working("solving A", 60.0):
        pass
    assert "solving A" in shown.getvalue()
    assert "of at most 60 s" in shown.getvalue()
    assert "\x1b[2K" in shown.getvalue(), "the line is cleared"


def test_a_log_gets_one_line_at_the_start_and_the_time_of_slow_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with working("quick"):
        pass
    assert capsys.readouterr().err == "quick ...\n"
    clock = iter((10.0, 13.5, 13.5))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with working("slow"):
        pass
    assert capsys.readouterr().err == "slow ...\nslow: 3.5 s\n"


# -------------------------------------------------------------------------------------------------- workloads


@pytest.fixture
def workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cli_workloads.py").write_text(
        "import jax\nfrom meshplan import Workload\n"
        "def workload(size='tiny', *, width=8):\n"
        "    if size != 'tiny':\n        raise ValueError(f'size {size!r} is unknown. Known: tiny.')\n"
        "    shape = jax.ShapeDtypeStruct((width,), 'float32')\n"
        "    return Workload(step=lambda x: x, args=(shape,), name=size)\n"
        "ready = workload()\n"
        "def number():\n    return 3\n"
        "text = 'no function'\n"
    )
    (tmp_path / "cli_broken.py").write_text("import surely_not_installed\n")
    (tmp_path / "cli_syntax.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_workload_is_called_with_its_settings(workloads: Path) -> None:
    ref = WorkloadRef.parse("cli_workloads:workload size=tiny", ["width=16"])
    assert ref.load().args[0].shape == (16,)
    assert str(ref) == "cli_workloads:workload size=tiny width=16"
    assert WorkloadRef.parse(str(ref)) == ref
    assert WorkloadRef.parse("cli_workloads:ready").load().name == "tiny"


def test_settings_keep_their_types() -> None:
    ref = WorkloadRef.parse("m:w", ["a=1", "b=2.5", "c=True", "d=None", "e=adamw", "f='two words'", "g=(1, 2)"])
    assert ref.arguments == {"a": 1, "b": 2.5, "c": True, "d": None, "e": "adamw", "f": "two words", "g": (1, 2)}
    assert WorkloadRef.parse(str(ref)) == ref


UNUSABLE = {
    "cli_workloads": "workload 'cli_workloads' is no module:function. Write models.gpt:workload.",
    "cli_workloadz:w": "workload 'cli_workloadz:w': there is no module 'cli_workloadz' here or on the path.",
    "cli_broken:w": "workload 'cli_broken:w': importing 'cli_broken' needs module 'surely_not_installed', which is not",
    "cli_syntax:w": "workload 'cli_syntax:w': ",
    "cli_workloads:workloda": "module 'cli_workloads' has no 'workloda'. Nearest: workload, Workload.",
    "cli_workloads:number": "cli_workloads:number made a int, not a meshplan.Workload.",
    "cli_workloads:text": "workload 'cli_workloads:text' is a str, not a function that makes a Workload.",
    "cli_workloads:workload size=big": "cli_workloads:workload(size='big') failed: size 'big' is unknown. Known: tiny.",
    "cli_workloads:workload depth=3": "cli_workloads:workload(depth=3) failed: workload() got an unexpected keyword",
    "cli_workloads:workload deep": "setting 'deep' is no key=value. Write batch=16.",
}


@pytest.mark.parametrize("text", UNUSABLE)
def test_an_unusable_workload_says_why(run: Run, workloads: Path, text: str) -> None:
    status, out, err = run("plan", text, "--machine", "cpu:8")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"meshplan plan: {UNUSABLE[text]}")


def test_values_as_people_type_them() -> None:
    assert parse_mesh("data=2, model=4") == {"data": 2, "model": 4}
    assert parse_pin("batch.tokens=data") == ("batch.tokens", P("data"))
    assert parse_pin("p/.*/up=None,data+model") == ("p/.*/up", P(None, ("data", "model")))
    assert parse_pin("x=") == ("x", P())
    assert [parse_bytes(t) for t in ("60GB", "16GiB", "1.5e9", "2 mb")] == [60e9, 2.0**34, 1.5e9, 2e6]
    with pytest.raises(UsageError, match="axis 'a' stands twice"):
        parse_mesh("a=2,a=2")
    with pytest.raises(UsageError, match="'2x' is no name of an axis"):
        parse_pin("x=2x")


# --------------------------------------------------------------------------------------------- solve, machines


def test_solve_prints_cost_and_bound(run: Run, tmp_path: Path) -> None:
    instance = {"problem": {
        "name": "small",
        "nodes": {"intervals": [[0, 2], [0, 2]], "costs": [[3, 1], [2, 5]], "usages": [[4, 9], [1, 1]]},
        "edges": {"nodes": [[0, 1]], "costs": [[0, 7, 2, 0]]}, "usage_limit": 6,
    }}  # fmt: skip
    path = tmp_path / "small.json.gz"
    path.write_bytes(gzip.compress(json.dumps(instance).encode()))
    status, out, err = run("solve", path, "--seconds", "5")
    assert status == 0
    assert "small: 2 nodes, 1 edges\n" in out
    assert "  cost        5\n" in out
    assert "  peak usage  5 of 6\n" in out
    assert "solving small.json.gz" in err
    assert json.loads(run("solve", path, "--seconds", "5", "--json")[1])["choice"] == [0, 0]
    instance["problem"]["usage_limit"] = 2
    path.write_bytes(gzip.compress(json.dumps(instance).encode()))
    status, out, _ = run("solve", path, "--seconds", "5")
    assert status == 1
    assert "over the limit" in out


def test_solve_of_something_else_is_one_sentence(run: Run, plan_file: Path) -> None:
    status, _, err = run("solve", plan_file)
    assert status == 2
    assert "no iopddl instance" in err


def test_machines_are_listed_and_shown(run: Run) -> None:
    status, out, _ = run("machines")
    assert status == 0
    assert any(line.startswith("h100:1x8: 8 x NVIDIA H100") for line in out.splitlines())
    assert "memory rate" in run("machines", "--show", "h100")[1]
    assert run("machines", "--show", "tpu-v5e:2x4")[1].startswith("tpu-v5e:2x4: 8 x TPU v5e")
    listed = json.loads(run("machines", "--json")[1])
    assert "h100:1x8" in [m["example"] for m in listed]
    assert json.loads(run("machines", "--show", "h100", "--json")[1])["chip"]["platform"] == "gpu"
    shown = run("machines", "--show", "h100:4x8")[1]
    assert "ring" in shown and "fitted to the even rows of machine/references/h100.toml" in shown
    assert "  8 x NVIDIA P100 SXM2 16GB" in run("machines", "--show", "v100+p100:1x8")[1]
