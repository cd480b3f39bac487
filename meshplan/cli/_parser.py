"""What can be typed, and one sentence where it cannot."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, NoReturn

from meshplan._options import Options
from meshplan.cli._values import (
    UsageError,
    parse_bytes,
    parse_count,
    parse_mesh,
    parse_per_device,
    parse_pin,
    parse_seconds,
)
from meshplan.core import nearest

COMMANDS = {
    "plan": "choose a mesh shape and specs for a workload",
    "show": "print a plan, or write it as HTML or Python source",
    "explain": "why an argument is split as it is; what the collectives and the memory are",
    "diff": "what differs between two plans (status 1 where they differ)",
    "audit": "compile a plan and hold its predictions against the module (status 1 where they do not hold)",
    "verify": "run a plan against one device (status 1 where results differ)",
    "compare": "the plan beside the known templates",
    "forecast": "one step modelled on many machines, up to thousands of chips (status 1 where it fits none)",
    "solve": "solve an instance file of the intra-operator parallelism contest",
    "machines": "the machines that are known",
    "calibrate": "measure the devices here: kernels, memory, collectives (minutes); writes a machine file",
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage on top."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {_plainer(message)} Try {self.prog} --help.")


def _plainer(message: str) -> str:
    if "invalid choice:" in message:
        typed = message.split("invalid choice: ", 1)[1].split(" (", 1)[0].strip("'\"")
        if "COMMAND" in message:
            return f"there is no command '{typed}'. {nearest(typed, COMMANDS)}"
    return message[0].upper() + message[1:].rstrip(".") + "."


def _value(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def make_parser() -> Parser:
    parser = Parser(prog="meshplan", description="Plan how a JAX step is sharded over a machine.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    made = {
        name: commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        for name, text in COMMANDS.items()
    }
    for name in ("plan", "compare"):
        _planning(made[name])
    _forecasting(made["forecast"])
    made["plan"].add_argument("-o", "--output", metavar="FILE", help="write the plan here (JSON)")
    made["compare"].add_argument("--audit", action="store_true", help="compile every row and price the modules")
    for name in ("show", "explain", "audit", "verify"):
        made[name].add_argument("plan", help="a plan file")
    made["show"].add_argument("--source", action="store_true", help="print Python source that applies the plan by hand")
    made["show"].add_argument("--rules", action="store_true", help="print flax's logical axis rules")
    made["explain"].add_argument("subject", help="a path or pattern of arguments, 'collectives', 'memory' or 'time'")
    made["diff"].add_argument("before", help="a plan file")
    made["diff"].add_argument("after", help="a plan file")
    made["audit"].add_argument("--target", help="compile for this machine instead of the plan's, such as h100:1x8")
    made["verify"].add_argument("--seed", type=int, default=0, help="of the arguments' values (default 0)")
    for name in ("audit", "verify"):
        made[name].add_argument("--workload", help="module:function and settings, instead of those in the plan file")
    made["solve"].add_argument("instance", help="an instance file, .json or .json.gz")
    made["solve"].add_argument("--seconds", type=_value(parse_seconds), default=60.0, help="time limit (default 60)")
    _calibrating(made["calibrate"])
    made["machines"].add_argument(
        "--show", metavar="NAME", help="every figure of one machine, by name or in a .toml file, and where it is from"
    )
    for name in ("plan", "show", "diff", "audit", "verify", "compare"):
        made[name].add_argument("--html", metavar="FILE", help="write the report as one HTML file")
    for p in made.values():
        p.add_argument("--json", action="store_true", help="print machine-readable output")
    return parser


def _forecasting(p: argparse.ArgumentParser) -> None:
    _workload(p)
    p.add_argument(
        "--machine", action="append", dest="machines", required=True, metavar="NAME",
        help="such as tpu-v5e:16x16 or h100:1024x8; give one for each row",
    )
    p.add_argument(
        "--per-device", type=_value(parse_per_device), metavar="KEY=NUMBER",
        help="weak scaling: this argument of the function is so much for each device, as in batch=4",
    )
    p.add_argument("--tokens", type=_value(parse_count), metavar="N", help="that a step works on (default: counted)")
    p.add_argument("-o", "--html", metavar="FILE", help="write the report as one HTML file")
    _limits(p)


def _planning(p: argparse.ArgumentParser) -> None:
    _workload(p)
    p.add_argument("--machine", help="such as tpu-v5e:2x4 or h100:1x8 (default: the devices here)")
    p.add_argument("--mesh", type=_value(parse_mesh), metavar="AXIS=SIZE,...", help="fix the mesh (default: search)")
    _limits(p)


def _workload(p: argparse.ArgumentParser) -> None:
    p.add_argument("workload", help="module:function that makes a meshplan.Workload, such as models.gpt:workload")
    p.add_argument("--size", help="the workload's size argument")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further argument of the function")


def _limits(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--pin", action="append", default=[], type=_value(parse_pin), metavar="PATTERN=SPEC",
        help="fix a spec: 'batch.tokens=data', 'params/.*/up=None,data+model'; may be repeated",
    )
    p.add_argument("--memory-limit", type=_value(parse_bytes), metavar="BYTES", help="of one device, such as 60GB")
    group = p.add_argument_group("options of the planner")
    for option in option_fields():
        kind = float if isinstance(option[1], float) else int
        group.add_argument(f"--{option[0].replace('_', '-')}", type=kind, default=None, help=f"default {option[1]}")


def _calibrating(p: argparse.ArgumentParser) -> None:
    p.add_argument("-o", "--output", metavar="FILE", help="write the machine here (TOML) instead of printing it")
    p.add_argument("--quick", action="store_true", help="fewer sizes and rounds: rough figures in half a minute")
    p.add_argument(
        "--cpu-devices", type=_value(parse_count), metavar="N",
        help="measure so many host devices, whatever else is here",
    )


def option_fields() -> Sequence[tuple[str, float]]:
    """Names and defaults of the options that are numbers; the others are for programs."""
    found = [(f.name, f.default) for f in fields(Options) if f.default is not MISSING]
    return [(name, value) for name, value in found if isinstance(value, int | float) and not isinstance(value, bool)]
