"""One function per command: the parsed arguments in, a status out."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from meshplan.cli import _json
from meshplan.cli._progress import working
from meshplan.cli._values import UsageError, WorkloadRef, check_writable
from meshplan.core import ArgumentError, MachineError, format_seconds, nearest
from meshplan.plan import PlanData, load, logical_axis_rules, to_source, write_atomically

HOLDS, DOES_NOT_HOLD = 0, 1


# ----------------------------------------------------------------------------------------------- plans from files


def show(args: Namespace) -> int:
    data = load(args.plan)
    if args.json:
        _json.emit(_json.plan_value(data))
    elif args.source:
        print(to_source(data), end="")
    elif args.rules:
        print(repr(logical_axis_rules(data)))
    else:
        _print_plan(data)
    _write_plan_html(args.html, data)
    return HOLDS


def explain(args: Namespace) -> int:
    from meshplan.plan import explain as explained

    data = load(args.plan)
    found = explained(data, args.subject)
    if args.json:
        _json.emit(found)
    else:
        print(found)
    return HOLDS


def diff(args: Namespace) -> int:
    from meshplan.plan import diff as compared
    from meshplan.report import diff_doc

    found = compared(load(args.before), load(args.after))
    if args.json:
        _json.emit(found)
    else:
        print(found if not found.empty else "the two plans say the same")
    if args.html:
        _write_html(args.html, diff_doc(found, args.before, args.after))
    return HOLDS if found.empty else DOES_NOT_HOLD


def _print_plan(data: PlanData) -> None:
    from meshplan.report import plan_doc

    _print_doc(plan_doc(data))


def _print_doc(doc: Any) -> None:
    from meshplan.report import show as shown

    shown(doc, sys.stdout)


def _write_plan_html(path: str | None, data: PlanData) -> None:
    from meshplan.report import plan_doc

    if path:
        _write_html(path, plan_doc(data))


def _write_html(path: str, doc: Any) -> None:
    from meshplan.report import html

    write_atomically(html(doc).encode(), path)
    print(f"wrote {path}", file=sys.stderr)


# ----------------------------------------------------------------------------------- plans that need their program


def plan(args: Namespace) -> int:
    import meshplan as mp

    reference, workload, given = _planning(args)
    with working(f"planning {workload.name or reference.target} for {args.machine or 'the devices here'}"):
        made = mp.plan(workload, **given).with_workload(str(reference))
    if args.output:
        made.save(args.output)
        print(f"wrote {args.output}", file=sys.stderr)
    if args.json:
        _json.emit({**_json.plan_value(made.data), "search_seconds": made.search_seconds})
    else:
        _print_plan(made.data)
    _write_plan_html(args.html, made.data)
    return HOLDS


def compare(args: Namespace) -> int:
    import meshplan as mp
    from meshplan.report import compare_doc

    reference, workload, given = _planning(args)
    what = f"comparing {workload.name or reference.target} on {args.machine or 'the devices here'}"
    with working(what + (", compiling every row" if args.audit else "")):
        rows = mp.compare(workload, audit=args.audit, **given).rows
    where = args.machine or f"the {rows[0].mesh.devices} devices here"
    doc = compare_doc(rows, f"{workload.name or reference.target} on {where}")
    if args.json:
        _json.emit(rows)
    else:
        _print_doc(doc)
    if args.html:
        _write_html(args.html, doc)
    return HOLDS


def forecast(args: Namespace) -> int:
    import meshplan as mp

    if args.html:
        check_writable(args.html)
    if args.tokens and args.per_device:
        raise UsageError("--tokens is the number of one batch, and --per-device makes many. Leave one of the two away.")
    reference, workload, given = _planning(args)

    def grown(devices: int) -> Any:
        name, count = args.per_device
        return WorkloadRef(reference.target, {**reference.arguments, name: count * devices}).load()

    how = {"step": grown, "scaling": "weak"} if args.per_device else {"step": workload}
    what = f"{workload.name or reference.target} on {len(args.machines)} machines"
    with working(f"forecasting {what}"):
        found = mp.forecast(**how, machines=args.machines, tokens=args.tokens, **given)
    if args.json:
        names = ("step", "scaling", "unit", "counted", "rows")
        _json.emit({"modelled": True, **{n: getattr(found, n) for n in names}})
    else:
        _print_doc(found.doc)
    if args.html:
        _write_html(args.html, found.doc)
    return HOLDS if found.plans else DOES_NOT_HOLD


def _planning(args: Namespace) -> tuple[WorkloadRef, Any, dict[str, Any]]:
    """(the reference, the workload, keyword arguments of `mp.plan`, or of `mp.forecast` where several machines are)."""
    from meshplan._options import Options
    from meshplan.cli._parser import option_fields

    size = [f"size={args.size}"] if args.size else []
    reference = WorkloadRef.parse(args.workload, [*size, *args.set])
    options = {name: value for name, _ in option_fields() if (value := getattr(args, name)) is not None}
    pins = dict(args.pin)
    if len(pins) < len(args.pin):
        raise UsageError("the same pin pattern is given twice. Give each once.")
    with working(f"loading {reference.target}"):
        workload = reference.load()
    return reference, workload, {
        **({"machine": args.machine, "mesh": args.mesh} if "machine" in args else {}),
        "pins": pins, "memory_limit": args.memory_limit, "options": Options(**options),
    }


def audit(args: Namespace) -> int:
    from meshplan.report import audit_doc

    made = _with_program(args)
    with working(f"compiling for {args.target or made.data.machine}"):
        found = made.audit(args.target)
    if args.json:
        _json.emit(_audit_value(found))
    else:
        _print_doc(audit_doc(found))
    if args.html:
        _write_html(args.html, audit_doc(found))
    return HOLDS if found.ok else DOES_NOT_HOLD


def _audit_value(found: Any) -> dict[str, Any]:
    names = (
        "name", "target", "ok", "fits", "mesh_shape", "flops", "flops_by_dtype", "memory", "memory_limit", "seconds",
        "compute_seconds", "collective_seconds", "timeline", "compile_seconds", "notes",
    )
    out = {name: getattr(found, name) for name in names}
    out |= {"bytes_by_kind": found.bytes_by_kind(), "mismatches": found.mismatches()}
    out["collectives"] = [_json.collective_value(c) for c in found.collectives]
    return out


def verify(args: Namespace) -> int:
    import jax

    from meshplan.report import verify_doc

    made = _with_program(args)
    workload = WorkloadRef.parse(args.workload or made.data.workload).load()
    if workload.init is None or workload.batches is None:
        raise ArgumentError(
            f"workload '{workload.name}' has no init and batches, so there is nothing to run. Give Workload(init=..., "
            "batches=...), or call plan.verify(*args) from Python."
        )
    with working(f"running {made.data.step} planned and on one device"):
        found = made.verify(*workload.init(jax.random.key(args.seed)), next(workload.batches()))
    if args.json:
        _json.emit({"ok": found.ok, "leaves": found.leaves, "worst": found.worst})
    else:
        _print_doc(verify_doc(found))
    if args.html:
        _write_html(args.html, verify_doc(found))
    return HOLDS if found.ok else DOES_NOT_HOLD


def _with_program(args: Namespace) -> Any:
    """The plan of the file together with the step of its workload, traced again."""
    import meshplan as mp

    data = load(args.plan)
    text = args.workload or data.workload
    if not text:
        raise UsageError(f"{args.plan} does not say where its step comes from. Give --workload module:function.")
    _host_devices(data)
    with working(f"tracing {text}"):
        return mp.load(args.plan, WorkloadRef.parse(text).load())


def _host_devices(data: PlanData) -> None:
    """As many host devices as a plan for the CPU needs, where this process has not started any yet."""
    import jax

    if data.machine.partition(":")[0] in ("cpu", "cpu-calibrated"):
        try:
            jax.config.update("jax_num_cpu_devices", data.mesh.devices)
            jax.config.update("jax_platforms", "cpu")
        except RuntimeError:
            return  # started: a wrong number is an error of the plan's own, which names both


# --------------------------------------------------------------------------------------------- neither of the two


def solve(args: Namespace) -> int:
    from meshplan.solve import solve_instance

    with working(f"solving {Path(args.instance).name}", args.seconds):
        found = solve_instance(args.instance, args.seconds)
    if args.json:
        _json.emit(found)
    else:
        limit = "no limit" if found["usage_limit"] is None else f"{found['usage_limit']}"
        print(f"{found['name']}: {found['nodes']} nodes, {found['edges']} edges")
        print(f"  status      {found['status']}{'' if found['feasible'] else ', over the limit'}")
        print(f"  cost        {found['cost']}")
        print(f"  bound       {found['bound']:.10g}, gap {found['gap']:.3%}")
        print(f"  peak usage  {found['peak_usage']} of {limit}")
        print(f"  time        {format_seconds(found['seconds'])}")
    return HOLDS if found["feasible"] else DOES_NOT_HOLD


def machines(args: Namespace) -> int:
    from meshplan.machine import Machine

    if args.show is None:
        names = Machine.presets()
        if args.json:
            _json.emit([_json.plain_value({"example": n, "chip": Machine.preset(n).chip}) for n in names])
        else:
            for name in names:
                print(Machine.preset(name))
        return HOLDS
    name = _with_size(args.show, Machine.presets())
    machine = Machine.preset(name)
    if args.json:
        _json.emit(machine)
    else:
        print("\n".join(machine.describe()))
    return HOLDS


def calibrate(args: Namespace) -> int:
    from meshplan.cli._progress import counting
    from meshplan.machine import calibrate as measured

    if args.output:
        check_writable(args.output)
    if args.cpu_devices:
        _only_host_devices(args.cpu_devices)
    with counting() as progress:
        found = measured(quick=args.quick, progress=progress)
    for note in found.notes:
        print(note, file=sys.stderr)
    if args.output:
        write_atomically(found.toml().encode(), args.output)
        print(f"wrote {args.output}", file=sys.stderr)
    if args.json:
        _json.emit(found.machine())
    elif args.output:
        print("\n".join(found.machine().describe()))
    else:
        print(found.toml(), end="")
    return HOLDS


def _only_host_devices(count: int) -> None:
    import jax

    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # started: what counts is whether they are there
        pass
    found = len(jax.devices())
    if jax.default_backend() != "cpu" or found != count:
        raise UsageError(
            f"--cpu-devices {count}: this process has {found} {jax.default_backend()} devices already, perhaps by "
            "XLA_FLAGS. Leave one of the two away."
        )


def _with_size(name: str, examples: tuple[str, ...]) -> str:
    """`h100` stands for its example size; a name with a size, and a file of a machine, for itself."""
    if ":" in name or "+" in name or name.endswith(".toml"):
        return name
    known = {e.partition(":")[0]: e for e in examples}
    if name not in known:
        raise MachineError(f"machine '{name}' is unknown. {nearest(name, known)}")
    return known[name]
