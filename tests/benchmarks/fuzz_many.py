"""Random programs by the thousand: planned in random ways, run on eight devices, compared with one.

    python tests/benchmarks/fuzz_many.py 0 1000 --out fuzz

`fuzz/outcomes.jsonl` has a line for every seed; seeds that are there are not run again, so that a run may be stopped
and started anew. Every failure leaves `fuzz/SEED.py`: the program, reduced, as source, and what went wrong. Programs
run in a child process, which takes a compiler that aborts with it: such a seed counts as crashed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PER_CHILD = 50  # programs a process compiles before it gives its memory back
REDUCING = 60  # programs tried to make a failure smaller
KINDS = ("same", "refused", "wrong", "crashed")


def outcomes(folder: Path) -> dict[int, dict[str, Any]]:
    """What is known of every seed; of two lines the later counts."""
    path = folder / "outcomes.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {entry["seed"]: entry for entry in map(json.loads, lines)}


def note(folder: Path, seed: int, **about: Any) -> None:
    with (folder / "outcomes.jsonl").open("a") as file:
        file.write(json.dumps({"seed": seed, **about}) + "\n")


def run_seeds(folder: Path, seeds: Sequence[int], reducing: bool) -> None:
    """In the child: check each seed; a failure is written down before it is made smaller."""
    import jax

    from tests._fuzz import check, made_from, reduced, report

    for seed in seeds:
        note(folder, seed, kind="begun")
        program, way = made_from(seed)
        outcome = check(program, way)
        about = {"kind": outcome.kind, "stage": outcome.stage, "way": way.kind, "leaves": outcome.leaves}
        note(folder, seed, **about, detail=outcome.detail[-600:])
        if not outcome.ok:
            path = folder / f"{seed}.py"
            path.write_text(report(program, way, outcome))
            if reducing:
                path.write_text(report(*small(reduced(program, way, outcome, REDUCING), way)))
        jax.clear_caches()


def small(found: tuple[Any, Any], way: Any) -> tuple[Any, Any, Any]:
    return found[0], way, found[1]


def children(folder: Path, wanted: Sequence[int], reducing: bool) -> Iterator[None]:
    """Run all seeds in child processes; yields now and then, for the bar."""
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    while left := [s for s in wanted if outcomes(folder).get(s, {}).get("kind") not in KINDS]:
        batch = ",".join(map(str, left[:PER_CHILD]))
        command = [sys.executable, __file__, "0", "0", "--out", str(folder), "--seeds", batch]
        with (folder / "errors.txt").open("a") as errors:
            child = subprocess.Popen(
                command + ([] if reducing else ["--no-reduce"]), cwd=ROOT, env=environment, stdout=errors, stderr=errors
            )
            while child.poll() is None:
                time.sleep(2.0)
                yield
        begun = [s for s, entry in outcomes(folder).items() if entry["kind"] == "begun" and s in left]
        if child.returncode and not begun and not set(left) & set(outcomes(folder)):
            raise SystemExit(f"the child process failed at once, see {folder / 'errors.txt'}")
        for seed in begun:
            note(folder, seed, kind="crashed", stage="process", way="", detail=f"died with {child.returncode}")


def bar(done: int, total: int, counts: collections.Counter[str], began: float) -> str:
    width = 30
    full = width * done // max(total, 1)
    listed = ", ".join(f"{counts[k]} {k}" for k in KINDS)
    return f"\r[{'#' * full}{'.' * (width - full)}] {done}/{total} {listed} {time.monotonic() - began:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", type=int, help="the first seed")
    parser.add_argument("stop", type=int, help="the seed after the last")
    parser.add_argument("--out", type=Path, default=Path("fuzz"), help="folder of outcomes and failures")
    parser.add_argument("--seeds", default="", help="run these in this process (what the children do)")
    parser.add_argument("--no-reduce", action="store_true", help="leave failing programs as they are")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.seeds:
        run_seeds(given.out, [int(s) for s in given.seeds.split(",")], not given.no_reduce)
        return 0
    wanted = range(given.start, given.stop)
    began = time.monotonic()
    for _ in children(given.out.resolve(), wanted, not given.no_reduce):
        found = [e for s, e in outcomes(given.out).items() if s in wanted and e["kind"] in KINDS]
        counts = collections.Counter(e["kind"] for e in found)
        print(bar(len(found), len(wanted), counts, began), end="", flush=True)
    found = [e for s, e in outcomes(given.out).items() if s in wanted]
    counts = collections.Counter(e["kind"] for e in found)
    leaves, left_out = (sum(e.get("leaves", (0, 0))[k] for e in found) for k in (0, 1))
    print(bar(len(found), len(wanted), counts, began))
    print(f"{leaves} result leaves compared, {left_out} of them left out as badly conditioned")
    for e in found:
        if e["kind"] in ("wrong", "crashed"):
            print(f"  seed {e['seed']}: {e['kind']} at {e['stage']} ({e['way']}): {e['detail'].splitlines()[-1:]}")
    return 1 if counts["wrong"] or counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
