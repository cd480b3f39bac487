"""`mp.load` and `mp.audit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshplan._api._plan import Plan
from meshplan._api._planning import make_call
from meshplan._options import Options
from meshplan.core import MachineError, PlanFileError
from meshplan.hints import Workload, match
from meshplan.lower import Audit, audit_jitted
from meshplan.machine import Machine
from meshplan.plan import PlanData, check_program, fingerprint
from meshplan.plan import load as read
from meshplan.program import trace


def load(
    path: str | Path,
    step: Callable[..., Any] | Workload | None = None,
    *args: Any,
    machine: Machine | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> Plan:
    """Read a plan file. With the step and its arguments the plan can be compiled again without a search.

    `machine`: only for plans made for a machine of the user's own, which the file names but does not hold.
    Its mesh counts as given: a further `pin` keeps it.
    Raises PlanFileError where the file is damaged, newer, or for another program or other shapes.
    """
    data = read(path)
    options = options or Options()
    where = machine or _machine(data.machine, str(path))
    if step is None:
        return Plan(data=data, machine=where, options=options)
    donated = data.donated if donate_argnums is None else donate_argnums
    call = make_call(step, args, donated, static_argnums, static_argnames, kwargs)
    program = trace(call, rules=options.rules)
    check_program(data, fingerprint(program), program.args, str(path))
    return Plan(
        data=data, program=program, call=call, machine=where, options=options, pins=_pins(data),
        given_mesh=data.mesh.to_dict(),
    )


def _pins(data: PlanData) -> dict[str, Any]:
    """The pins by pattern, each with the spec of the arguments (or results) that it holds."""
    return {
        pattern: next(a.spec.partition_spec() for a in (*data.arguments, *data.results) if match(pattern, a.path))
        for pattern, _ in data.pins
    }


def _machine(name: str, path: str) -> Machine:
    try:
        return Machine.preset(name)
    except MachineError as error:
        raise PlanFileError(
            f"{path} is for machine '{name}', which is no preset. Pass it: mp.load(path, ..., machine=...)."
        ) from error


def audit(jitted: Any, *args: Any, target: str | Machine | None = None, **kwargs: Any) -> Audit:
    """What XLA made of any sharded jit function: collectives by source line, memory, FLOPs, seconds.

    No plan is needed. `args` are arrays or ShapeDtypeStructs with shardings, which may be over an AbstractMesh;
    `target` None compiles for this process's devices, "h100:1x8" or "tpu-v5e:2x4" ahead of time, without them.
    """
    return audit_jitted(jitted, *args, target=target, **kwargs)
