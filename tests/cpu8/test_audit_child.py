"""The compiler's child process: what it hands back, and every way in which it can fail."""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshplan.core import CompileError, MeshError
from meshplan.lower import _aot
from meshplan.lower._aot import CompiledModule, OutOfMemory, compile_module, out_of_memory, require_compiler
from meshplan.lower._aot_export import ExportedProgram, export_program
from meshplan.lower._audit import audit_compiled, audit_jitted
from meshplan.machine import Machine

CPU16 = ("cpu", "16", {})


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    mesh = AbstractMesh((16,), ("data",), axis_types=(AxisType.Auto,))
    sharding, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    double = jax.jit(lambda x: x * 2, in_shardings=sharding, out_shardings=whole)
    return export_program(double, jax.ShapeDtypeStruct((64,), jnp.float32), platform="cpu")


def child(body: str) -> tuple[str, ...]:
    """A command that runs `body` instead of the compiler; `folder` is where it finds and leaves files."""
    head = "import json, os, pathlib, signal, sys, time\nfolder = pathlib.Path(sys.argv[1])\n"
    return (sys.executable, "-c", head + body)


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("meshplan-aot-*/*"))


def test_a_target_with_more_devices_than_this_process_is_compiled_in_a_child(tmp_path: Path) -> None:
    mesh = AbstractMesh((16,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float64, sharding=NamedSharding(mesh, P("data")))
    with jax.enable_x64(True):
        gather = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P())), donate_argnums=0)
        audit = audit_jitted(gather, x, target="cpu:16")
    (found,) = audit.collectives
    assert (found.kind, found.nbytes, found.axes, found.dtype) == ("all-gather", 64 * 64 * 8, ("data",), "f64")
    assert found.op_name.split("/")[0] in ("jit(<lambda>)", "x")
    assert found.source.startswith(f"{__file__}:")
    assert audit.compile_seconds > 0
    assert leftovers(tmp_path) == []


def test_a_child_that_dies_is_named_with_its_signal_and_its_log(program: ExportedProgram, tmp_path: Path) -> None:
    body = "print('last words', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    with pytest.raises(CompileError, match=r"compiler for cpu 16 died of SIGSEGV.*log\.txt, ends:\nlast words"):
        compile_module(program, CPU16, command=child(body))
    assert "log.txt" in leftovers(tmp_path)
    assert "result.json" not in leftovers(tmp_path)


def test_a_child_that_ends_without_a_result_is_an_error(program: ExportedProgram) -> None:
    with pytest.raises(CompileError, match=r"ended with exit status 3, no result\. Its log, .* is empty"):
        compile_module(program, CPU16, command=child("sys.exit(3)"))
    with pytest.raises(CompileError, match="ended with exit status 0, no result"):
        compile_module(program, CPU16, command=child("pass"))


def test_a_child_that_takes_too_long_is_stopped_with_all_it_started(program: ExportedProgram, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    script = f"echo slow; (echo started; exec sleep 600) > {pipe} & sleep 600"
    try:
        with pytest.raises(CompileError, match=r"cpu 16 took longer than 2 s and was stopped\. Raise (.|\n)*slow"):
            compile_module(program, CPU16, command=("sh", "-c", script), timeout_seconds=2)
        # Its child held the pipe open; the end of the pipe is the end of that child.
        said = b""
        while select.select([reader], [], [], 30)[0] and (more := os.read(reader, 100)):
            said += more
        assert said == b"started\n"
        assert select.select([reader], [], [], 0)[0], "what the child started is still running"
    finally:
        os.close(reader)


def test_a_compiler_that_another_process_holds_is_tried_again(
    program: ExportedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(_aot, "_sleep", waits.append)
    memory = dict.fromkeys(("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes"), 1)
    good = {"memory": memory, "input_shardings": [], "output_shardings": ["P()"], "seconds": 1.5}
    body = (
        f"tries = pathlib.Path({str(tmp_path / 'tries')!r})\n"
        "tries.write_text((tries.read_text() if tries.exists() else '') + 'x')\n"
        "busy = {'error': 'ABORTED: Internal error when accessing libtpu multi-process lockfile.', 'seconds': 0}\n"
        f"good = json.loads({json.dumps(json.dumps(good))})\n"
        "(folder / 'module.hlo').write_text('HloModule m')\n"
        "(folder / 'result.json').write_text(json.dumps(busy if len(tries.read_text()) < 3 else good))\n"
        "print('noise')"
    )
    compiled = compile_module(program, CPU16, command=child(body))
    assert isinstance(compiled, CompiledModule)
    assert (compiled.text, compiled.seconds, compiled.log) == ("HloModule m", 1.5, "noise")
    assert compiled.memory.peak_bytes == 2
    assert waits == [1.0, 2.0]
    assert leftovers(tmp_path) == []


def failing(error: str) -> tuple[str, ...]:
    answer = json.dumps({"error": error, "seconds": 2.0})
    return child(f"(folder / 'result.json').write_text({answer!r})")


def test_what_the_compiler_refuses_is_an_error_with_its_words(program: ExportedProgram) -> None:
    with pytest.raises(CompileError, match=r"refused the program: JaxRuntimeError: INTERNAL: no such thing"):
        compile_module(program, CPU16, command=failing("JaxRuntimeError: INTERNAL: no such thing"))


def test_a_topology_of_another_size_is_a_mesh_error(program: ExportedProgram) -> None:
    with pytest.raises(MeshError, match="the topology 8 has 8 devices, the program 16"):
        compile_module(program, ("cpu", "8", {}))


OOM = (
    "JaxRuntimeError: RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (60.00G) exceeds available HBM (15.75G). HLO module: jit__lambda."
)


def test_running_out_of_memory_is_a_result_with_its_bytes(program: ExportedProgram, tmp_path: Path) -> None:
    failure = compile_module(program, CPU16, command=failing(OOM))
    assert isinstance(failure, OutOfMemory)
    assert (failure.needed_bytes, failure.limit_bytes) == (60 * 2**30, int(15.75 * 2**30))
    audit = audit_compiled(failure, name="step", machine=Machine.preset("cpu:16"), mesh_shape=program.mesh_shape)
    assert not audit.ok
    assert not audit.fits
    assert audit.memory_limit == int(15.75 * 2**30)
    assert "does not fit: 64.4 GB needed, 16.9 GB available" in str(audit)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("message", "needed", "limit"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in hbm. Used 27.00G of 15.75G hbm.", 27 * 2**30, 15.75 * 2**30),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1048576 bytes.", 2**20, 0),
        ("RESOURCE_EXHAUSTED: something else", 0, 0),
    ],
)  # fmt: skip
def test_bytes_are_read_from_each_wording(message: str, needed: float, limit: float) -> None:
    failure = out_of_memory(message, 1.0)
    assert (failure.needed_bytes, failure.limit_bytes) == (needed, limit)


def test_a_missing_compiler_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_aot, "_installed", lambda name: None)
    with pytest.raises(CompileError, match=r"no compiler for 'tpu'.*pip install 'meshplan\[tpu\]'.*==0\.0\.\d+"):
        require_compiler("tpu")
    with pytest.raises(CompileError, match=r"no compiler for 'cuda'.*'meshplan\[cuda-aot\]'.*exactly jaxlib's"):
        require_compiler("cuda")
    require_compiler("cpu")


def test_a_gpu_compiler_of_another_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_aot, "_installed", lambda name: "0.0.1" if name == "jax-cuda12-pjrt" else None)
    with pytest.raises(CompileError, match=r"jax-cuda12-pjrt 0\.0\.1 does not go with jaxlib .*'meshplan\[cuda-aot\]'"):
        require_compiler("cuda")
