"""`mp.plan`: trace, search, answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshplan._api._plan import Plan
from meshplan._options import Options
from meshplan.core import ArgumentError
from meshplan.hints import Workload, arrays_only
from meshplan.machine import Machine
from meshplan.plan import (
    Found,
    Given,
    Search,
    fixed_mesh,
    gather_pins,
    names_decide,
    over,
    pin_texts,
    plan_data,
    prepare,
)
from meshplan.program import Call, trace

if TYPE_CHECKING:
    from meshplan._api._tables import GivenTables


def plan(
    step: Callable[..., Any] | Workload,
    *args: Any,
    machine: Machine | str | None = None,
    mesh: Mapping[str, int] | None = None,
    pins: Given | None = None,
    memory_limit: float | None = None,
    donate_argnums: int | Sequence[int] = (0,),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: Options | None = None,
    tables: GivenTables | None = None,
) -> Plan:
    """Choose a mesh shape and a spec for every argument, result and intermediate value of a step.

    Args:
      step: the whole training step (forward, backward, update), an ordinary function; or a
        `Workload`, whose arguments and donation are then used.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s in any pytrees, shapes global.
      machine: what to plan for: a `Machine`, a preset's name such as "h100:4x8", or None for
        the devices of this process.
      mesh: axis names and sizes; None searches all mesh shapes of up to `options.max_axes` axes.
      pins: regular expressions over argument paths ("params/.*/kernel") to `PartitionSpec`s that
        must hold as stored (over paths of results for those that are no donated argument's). Or a sequence of
        (pattern, `PartitionSpec`), of which the first found in a path wins (EasyLM, scalax), or a sequence of
        (name of a dim, axis, axes or None), read as flax reads it, for all arrays with named dims (flax, MaxText).
      memory_limit: bytes per device; default: the chip's memory times `options.memory_fraction`.
      donate_argnums, static_argnums, static_argnames: as in `jax.jit`.
      kwargs: keyword arguments of the step.
      tables: embedding tables among the arguments, {path or pattern: `mp.embedding.Table`}, "find", or
        `mp.embedding.StepTables`: they are placed by their own planner, in replicas and shards, and the rest of the
        step is planned on the same mesh (`Plan.embedding`, `Plan.embeddings`).

    Returns: a `Plan`, with predicted seconds and bytes.

    Raises: TraceError, PinError, SpecError, MeshError, MachineError, MemoryLimitError; all before
    anything is compiled.
    """
    began = time.perf_counter()
    call = make_call(step, args, donate_argnums, static_argnums, static_argnames, kwargs)
    options = options or Options()
    if tables is not None:
        from meshplan._api._tables import plan_with_tables

        return plan_with_tables(call, tables, machine, mesh, pins or {}, memory_limit, options)
    search = make_search(call, machine, pins or {}, memory_limit, options)
    meshes = [fixed_mesh(mesh, search.machine)] if mesh is not None else search.meshes()
    found, tried = search.best(meshes)
    made = answer(search, call, found, tried, pins or {}, options, time.perf_counter() - began)
    return replace(made, given_mesh=dict(mesh) if mesh is not None else None)


def plan_again(old: Plan, pins: Mapping[str, Any]) -> Plan:
    """The plan of the same step with further pins."""
    call = old._need_call()
    began = time.perf_counter()
    together = over(old.pins, pins)
    if old.tables is not None:
        from meshplan._api._tables import plan_tables_again

        return plan_tables_again(old, old.tables, together)
    limit = old.data.memory_limit
    search = make_search(call, old.machine, together, limit, old.options)
    meshes = [fixed_mesh(old.given_mesh, search.machine)] if old.given_mesh else search.meshes()
    found, tried = search.best(meshes)
    made = answer(search, call, found, tried, together, old.options, time.perf_counter() - began)
    return replace(made, given_mesh=old.given_mesh).with_workload(old.data.workload)


def make_call(
    step: Callable[..., Any] | Workload,
    args: Sequence[Any],
    donate_argnums: int | Sequence[int],
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Call:
    name = ""
    if isinstance(step, Workload):
        name = step.name
        if args:
            raise ArgumentError("a Workload brings its own arguments: give either a Workload or a step with arguments.")
        step, args, donate_argnums = step.step, step.args, step.donate_argnums
    if not callable(step):
        raise ArgumentError(f"the first argument must be the step function, found {type(step).__name__}.")
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    beyond = [d for d in donated if args and not 0 <= d < len(args)]
    if beyond:
        raise ArgumentError(
            f"donate_argnums names argument {beyond[0]}, the step was given {len(args)}: 0 to {len(args) - 1}."
        )
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    step, args = arrays_only(step, args, static)
    return Call(
        step=step, args=args, kwargs=dict(kwargs or {}), static_argnums=static, static_argnames=names,
        donate_argnums=tuple(d for d in donated if d < len(args)), name=name or getattr(step, "__name__", "step"),
    )


def find_machine(machine: Machine | str | None) -> Machine:
    if machine is None:
        return Machine.detect()
    if isinstance(machine, str):
        return Machine.preset(machine)
    if not isinstance(machine, Machine):
        raise ArgumentError(f"machine is a {type(machine).__name__}; give a name like 'h100:1x8', a Machine, or None.")
    return machine


def make_search(
    call: Call, machine: Machine | str | None, pins: Given, memory_limit: float | None, options: Options
) -> Search:
    where = find_machine(machine)
    if memory_limit is not None and not memory_limit > 0:
        raise ArgumentError(f"memory_limit is {memory_limit!r}; give bytes per device above 0, or None for the chip's.")
    program = trace(call, rules=options.rules, follow=options.follow_shardings, cut_names=names_decide(pins))
    return prepare(program, where, gather_pins(pins, program), memory_limit, options)


def answer(
    search: Search, call: Call, found: Found, tried: Sequence[Found], pins: Given, options: Options,
    seconds: float, template: str = "",
) -> Plan:
    data = plan_data(
        search, found, tried, step=call.name,
        pins=pin_texts(pins, search.program, search.pins), donated=call.donate_argnums, template=template,
    )
    return Plan(
        data=data, search_seconds=seconds, program=search.program, call=call, machine=search.machine, pins=pins,
        options=options,
    )
