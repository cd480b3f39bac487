"""Compiles a program for a described machine, in a child process, and reports what came out.

The child is `_aot_child.py`, run by this interpreter with `JAX_PLATFORMS=cpu`: no device is
touched, and a compiler that aborts takes only the child with it. Whatever the compiler prints
goes to a log file. The files live in a temporary directory that is removed after a success and kept
after a failure, whose error names the log.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshplan.core import CompileError, MeshError, format_bytes
from meshplan.lower._aot_export import ExportedProgram

Target = tuple[str, str, Mapping[str, Any]]
LOG_TAIL = 3000
CHILD = Path(__file__).with_name("_aot_child.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one device by XLA's own analysis; `host_*` are in the host's memory."""

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    code_bytes: int = 0
    host_argument_bytes: int = 0
    host_output_bytes: int = 0
    host_temp_bytes: int = 0
    host_alias_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """arguments + results + temporaries - results that take over an argument's buffer."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes

    @property
    def host_peak_bytes(self) -> int:
        return self.host_argument_bytes + self.host_output_bytes + self.host_temp_bytes - self.host_alias_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledModule:
    """A compiled program: optimised module text, memory of one device, shardings as text, compile time."""

    text: str
    memory: MemoryUse
    input_shardings: tuple[str, ...]
    output_shardings: tuple[str, ...]
    seconds: float
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The compiler found that the program does not fit. Bytes as it printed them, 0 where it printed none."""

    needed_bytes: int
    limit_bytes: int
    message: str
    seconds: float


def compile_module(
    program: ExportedProgram, target: Target, *, timeout_seconds: float = 600.0, command: Sequence[str] | None = None
) -> CompiledModule | OutOfMemory:
    """`program` compiled for `target`: (platform, topology name, further arguments) of `Machine.aot_topology`.

    Raises CompileError where the compiler is not installed, dies, runs out of time or refuses the program (the
    message ends with its log), MeshError where the target has another number of devices. `command`
    stands in for the child (the directory is appended to it).
    """
    platform, topology, extra = target
    if command is None:
        require_compiler(platform)
    folder = Path(tempfile.mkdtemp(prefix="meshplan-aot-"))
    try:
        (folder / "program.pickle").write_bytes(program.blob)
        (folder / "request.json").write_text(json.dumps({
            "platform": platform, "topology": topology, "extra": dict(extra), "donated": program.donated,
            "devices": program.devices, "config": {"jax_enable_x64": bool(jax.config.read("jax_enable_x64"))},
        }), encoding="utf-8")
        argv = [*(command or (sys.executable, "-P", str(CHILD))), str(folder)]
        result = _until_free(argv, folder, _environment(platform, topology), timeout_seconds, f"{platform} {topology}")
        return _read_result(result, folder, program)
    except CompileError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def require_compiler(platform: str) -> None:
    """Raises CompileError, with the command that cures it, where no compiler for `platform` is installed."""
    from importlib import metadata

    wanted = {"tpu": ("tpu", ("libtpu",)), "cuda": ("cuda-aot", ("jax-cuda12-pjrt", "jax-cuda13-pjrt"))}
    if platform not in wanted:
        return
    extra, names = wanted[platform]
    jaxlib = metadata.version("jaxlib")
    tie = f"exactly jaxlib's version, {jaxlib}" if platform == "cuda" else _libtpu_wish() or "the one jax asks for"
    cure = f"pip install 'meshplan[{extra}]' (its version must be {tie}; no hardware is needed)"
    present = {name: version for name in names if (version := _installed(name))}
    if not present:
        raise CompileError(f"no compiler for '{platform}': {' or '.join(names)} is not installed. Install it: {cure}.")
    if platform == "cuda" and jaxlib not in present.values():
        others = ", ".join(f"{name} {version}" for name, version in present.items())
        raise CompileError(f"{others} does not go with jaxlib {jaxlib}. Install the one that does: {cure}.")


def _installed(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _libtpu_wish() -> str:
    """The libtpu version that the installed jax names, as in '==0.0.42.*'."""
    from importlib import metadata

    rows = [r for r in metadata.requires("jax") or () if r.startswith("libtpu") and "extra" in r]
    found = re.search(r"==\s*[\w.*]+", rows[0]) if rows else None
    return found.group(0) if found else ""


def _environment(platform: str, topology: str) -> dict[str, str]:
    env = dict(os.environ)
    env["JAX_PLATFORMS"] = "cpu"
    env["PYTHONPATH"] = os.pathsep.join(p or str(Path.cwd()) for p in sys.path)
    # libtpu would look for a metadata server, and admit one process even where none touches a chip.
    env.setdefault("TPU_SKIP_MDS_QUERY", "1")
    env["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    if platform == "cpu":
        rest = re.sub(r"--xla_force_host_platform_device_count=\S+", "", env.get("XLA_FLAGS", ""))
        env["XLA_FLAGS"] = f"{rest} --xla_force_host_platform_device_count={topology}".strip()
    return env


def _until_free(
    argv: list[str], folder: Path, env: dict[str, str], timeout_seconds: float, target: str
) -> dict[str, Any]:
    """Runs the child, and again while another process holds the compiler, until the time is over."""
    ends, pause = time.monotonic() + timeout_seconds, 1.0
    while True:
        result = _run_child(argv, folder, env, ends - time.monotonic(), timeout_seconds, target)
        busy = re.search(r"lockfile|already in use by", str(result.get("error", "")))
        if not busy or time.monotonic() + pause >= ends:
            return result
        _sleep(pause)
        pause = min(pause * 2, 15.0)


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _run_child(
    argv: list[str], folder: Path, env: dict[str, str], seconds: float, timeout_seconds: float, target: str
) -> dict[str, Any]:
    log, answer = folder / "log.txt", folder / "result.json"
    answer.unlink(missing_ok=True)
    with log.open("wb") as out:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            code = child.wait(timeout=max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            raise CompileError(
                f"compiling for {target} took longer than {timeout_seconds:g} s and was stopped. "
                f"Raise timeout_seconds. {_log_words(log)}"
            ) from None
        finally:
            if child.poll() is None:
                _kill(child)
    if code == 0 and answer.is_file():
        return json.loads(answer.read_text(encoding="utf-8"))
    if code < 0:
        raise CompileError(f"the compiler for {target} died of {signal.Signals(-code).name}. {_log_words(log)}")
    raise CompileError(f"the compiler for {target} ended with exit status {code}, no result. {_log_words(log)}")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Ends the child and whatever it started: it leads a process group of its own."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def log_tail(log: Path) -> str:
    """The end of a log file, '' where it cannot be read."""
    try:
        return log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip()
    except OSError:
        return ""


def _log_words(log: Path) -> str:
    tail = log_tail(log)
    return f"Its log, {log}, ends:\n{tail}" if tail else f"Its log, {log}, is empty."


def _read_result(result: dict[str, Any], folder: Path, program: ExportedProgram) -> CompiledModule | OutOfMemory:
    log = folder / "log.txt"
    error = result.get("error", "")
    if "RESOURCE_EXHAUSTED" in error:
        shutil.rmtree(folder, ignore_errors=True)
        return out_of_memory(error, result["seconds"])
    if error:
        if "the topology" in error and "devices, the program" in error:
            raise MeshError(f"{error.partition(': ')[2]}. Give the arguments shardings over as many devices.")
        raise CompileError(f"the compiler refused the program: {error[:LOG_TAIL]}\nIts log: {log}")
    text = (folder / "module.hlo").read_text(encoding="utf-8")
    compiled = CompiledModule(
        text=program.with_argument_names(text), memory=MemoryUse(**result["memory"]),
        input_shardings=tuple(result["input_shardings"]), output_shardings=tuple(result["output_shardings"]),
        seconds=result["seconds"], log=log_tail(log),
    )
    shutil.rmtree(folder, ignore_errors=True)
    return compiled


_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)\s*([KMGT]?)(?:i?B|\b)"


def out_of_memory(message: str, seconds: float) -> OutOfMemory:
    """The bytes in a compiler's RESOURCE_EXHAUSTED message, in each wording it has."""
    for pattern in (rf"\({_SIZE}\) exceeds available \w+ \({_SIZE}\)", rf"[Uu]sed {_SIZE} of {_SIZE}"):
        found = re.search(pattern, message)
        if found:
            needed, limit = (int(float(n) * _UNITS[u]) for n, u in (found.group(1, 2), found.group(3, 4)))
            return OutOfMemory(needed_bytes=needed, limit_bytes=limit, message=message, seconds=seconds)
    asked = re.search(rf"allocate {_SIZE}", message)
    needed = int(float(asked.group(1)) * _UNITS[asked.group(2)]) if asked else 0
    return OutOfMemory(needed_bytes=needed, limit_bytes=0, message=message, seconds=seconds)


def words(failure: OutOfMemory) -> str:
    """One sentence for a report."""
    if failure.limit_bytes:
        needed, limit = format_bytes(failure.needed_bytes), format_bytes(failure.limit_bytes)
        return f"does not fit: {needed} needed, {limit} available"
    return f"does not fit: {failure.message.splitlines()[0]}"
