"""What XLA emits, measured: the tables in meshplan/cost/emission/, one per back end.

    python tests/benchmarks/measure_emission.py                      # all back ends, shows what differs from the tables
    python tests/benchmarks/measure_emission.py --platform tpu --only fft top_k
    python tests/benchmarks/measure_emission.py --write              # replaces the tables

Every case is compiled for eight devices, in a child process that is started again after a case that the compiler
dies of. A table holds the answers of the oldest supported jax and, for each other version, those that differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
sys.path.insert(0, str(ROOT))

from meshplan.cost import Emission  # noqa: E402
from tests._children import reports  # noqa: E402
from tests._emission import TARGETS, by_kind, cases, emitted, key, read_table, table_path  # noqa: E402

Answer = Any  # rows, or why there are none


def child(platform: str, only: list[str], skip: int) -> None:
    """Prints `number name` before and the answer after each case from number `skip` on."""
    from meshplan.lower._aot_child import topology_devices
    from meshplan.machine import Machine

    devices = topology_devices(*Machine.preset(TARGETS[platform]).aot_topology())
    for number, case in enumerate(cases()):
        if number < skip or (only and not case.name.startswith(tuple(only))):
            continue
        print(f"case {number} {key(case)}", flush=True)
        try:
            answer: Answer = [list(row) for row in emitted(case, devices)]
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        wrong = ""
        if not isinstance(answer, str) and case.expected is not None:
            expected = case.expected(Emission(platform))
            wrong = "" if expected == by_kind(answer) else f" expected {dict(expected)}"
        print(f"answer {json.dumps([answer, wrong])}", flush=True)


def measure(platform: str, only: list[str]) -> dict[str, Answer]:
    """Answers by the case's key."""
    found: dict[str, Answer] = {}
    for name, told in reports(__file__, platform, only, "answer"):
        if told is None:
            found[name] = "the compiler died"
            print(f"  {platform} {name}: {found[name]}", flush=True)
            continue
        answer, wrong = json.loads(told)
        found[name] = [tuple(row) for row in answer] if isinstance(answer, list) else answer
        if wrong:
            print(f"  {platform} {name}: {answer}{wrong}", flush=True)
    return found


def differences(old: dict[str, Answer], new: dict[str, Answer]) -> list[str]:
    """In words, one a line."""
    lines = [f"  {name}: {old[name]} -> {new[name]}" for name in new if name in old and old[name] != new[name]]
    lines += [f"  {name}: new, {new[name]}" for name in new if name not in old]
    return lines


def write(platform: str, version: str, answers: dict[str, Answer]) -> None:
    """Stores the answers of one jax version; the oldest version in the table is written in full."""
    path = table_path(platform)
    table = json.loads(path.read_text()) if path.is_file() else {"target": TARGETS[platform], "versions": {}}
    every = {v: read_table(platform, v) for v in table["versions"]} | {version: answers}
    oldest, *others = sorted(every, key=lambda v: [int(n) for n in v.split(".")])
    rows = {oldest: every[oldest]}
    for v in others:
        rows[v] = {name: a for name, a in every[v].items() if every[oldest].get(name, None) != a}
    parts = [f'{{"target": "{TARGETS[platform]}", "versions": {{']
    for i, (v, answers) in enumerate(rows.items()):
        lines = [f"{json.dumps(name)}: {json.dumps(answers[name])}" for name in sorted(answers)]
        parts.append(f'{json.dumps(v)}: {{\n' + ",\n".join(lines) + "\n}" + ("," if i < len(rows) - 1 else "}}"))
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(parts) + "\n")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[4:], int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", nargs="+", choices=sorted(TARGETS), default=sorted(TARGETS))
    parser.add_argument("--only", nargs="+", default=[], help="cases whose names begin so")
    parser.add_argument("--write", action="store_true", help="replace the tables")
    options = parser.parse_args()
    import jax

    changed = False
    for platform in options.platform:
        started = time.perf_counter()
        answers = measure(platform, options.only)
        old = read_table(platform, jax.__version__)
        lines = differences(old, answers)
        changed |= bool(lines)
        seconds = time.perf_counter() - started
        print(f"{platform}, jax {jax.__version__}: {len(answers)} cases in {seconds:.0f} s, {len(lines)} differ")
        print("\n".join(lines), flush=True)
        if options.write:
            write(platform, jax.__version__, old | answers if options.only else answers)
    return int(changed and not options.write)


if __name__ == "__main__":
    sys.exit(main())
