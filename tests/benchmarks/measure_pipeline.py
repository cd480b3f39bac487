"""Modelled throughput of XPipe's schedule against GPipe's and 1F1B's, beside the published averages.

    python tests/benchmarks/measure_pipeline.py
    python tests/benchmarks/measure_pipeline.py --machine a100:1x4 --layers 24 --width 2048 --seq 1024

A stack of equal transformer layers at the chip's peak; the links as meshplan.machine prices them. XPipe is
"async-1f1b" in its steady state; what its prediction costs (one pass over the weights and Adam's moments for each
mini-batch and direction) is in its update. Stages lie on the innermost devices or, "outer", on the outermost, the
rest of the machine copies the pipeline and sums its gradients. Published averages over GPipe (XPipe, 1911.04610):
+20 % on 2 GPUs and +88 % on 4, measured on the authors' machine and models. GPipe is printed without and with second
forwards ("gpipe+R").
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from meshplan.core import MeshShape, format_seconds
from meshplan.machine import Machine
from meshplan.pipeline import StageSeconds, schedule, stage_seconds, throughput, time_schedule

PUBLISHED = {2: "+20 %", 4: "+88 %"}
MOMENT_BYTES = 4  # f32, like the weights that the update reads and writes
PASSES = 7  # Adam: reads weight, gradient, two moments; writes weight, two moments
PREDICTION_PASSES = 4  # reads weight and two moments, writes the prediction; once for forwards, once for backwards


def layer_flops(width: int, seq: int, sequences: int) -> float:
    """A forward through one layer: 12 width^2 parameters used twice a token, and the attention's two products."""
    tokens = sequences * seq
    return 24 * tokens * width**2 + 4 * tokens * seq * width


def measure(machine: Machine, stages: int, outer: bool, micro_batches: int, args: argparse.Namespace) -> list[str]:
    copies = machine.devices // stages
    sizes = {"stage": stages, "data": copies}
    mesh = MeshShape.of(sizes if outer else dict(reversed(sizes.items())))
    layers = args.layers / stages
    weights = 12 * args.width**2 * layers
    plain = stage_seconds(
        machine, mesh, forward_flops=layers * layer_flops(args.width, args.seq, args.sequences),
        boundary_bytes=2 * args.sequences * args.seq * args.width, sum_axes=("data",) if copies > 1 else (),
        gradient_bytes=MOMENT_BYTES * weights, update_bytes=PASSES * MOMENT_BYTES * weights,
    )
    extra = 2 * PREDICTION_PASSES * MOMENT_BYTES * weights / machine.chip.memory_bytes_per_second
    ahead = replace(plain, update=[plain.of("update", k, stages) + extra for k in range(stages)])
    rates = {
        "gpipe": rate("gpipe", stages, micro_batches, plain),
        "gpipe, second forwards": rate("gpipe", stages, micro_batches, plain, recompute="late"),
        "1f1b": rate("1f1b", stages, micro_batches, plain),
        "zb-h1": rate("zb-h1", stages, micro_batches, plain),
        "xpipe": rate("async-1f1b", stages, micro_batches, ahead, mini_batches=2 * stages + 4),
    }
    gains = [f"{100 * (rates['xpipe'] / rates[name] - 1):+7.1f} %" for name in rates if name != "xpipe"]
    place = "outer" if outer else "inner"
    send = format_seconds(plain.of("send", 0, stages))
    forward = format_seconds(plain.of("forward", 0, stages))
    return [machine.name, str(stages), place, str(micro_batches), forward, send, *gains, PUBLISHED.get(stages, "-")]


def rate(name: str, stages: int, micro_batches: int, seconds: StageSeconds, **more) -> float:
    return throughput(schedule(name, stages, micro_batches, **more), seconds).samples_per_second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--machine", nargs="+", default=["a100:1x4", "h100:4x8"])
    for name, default in (("layers", 24), ("width", 2048), ("seq", 1024), ("sequences", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    head = ["machine", "N", "stages", "T", "forward", "send", "gpipe", "gpipe+R", "1f1b", "zb-h1", "published"]
    rows = [head]
    for name in args.machine:
        machine = Machine.preset(name)
        for stages in (2, 4):
            for outer in (False, True):
                if machine.devices == stages and outer:
                    continue
                rows += [measure(machine, stages, outer, micro, args) for micro in (stages, 2 * stages, 4 * stages)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    print("xpipe's samples per second over those of:")
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print("\n1f1b and xpipe on 4 stages, a backward twice a forward:")
    for table in (schedule("1f1b", 4, 4), schedule("async-1f1b", 4, 4, mini_batches=3)):
        print("\n".join(time_schedule(table, StageSeconds(forward=1, backward=2)).picture()))


if __name__ == "__main__":
    main()
