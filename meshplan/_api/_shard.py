"""`@mp.shard`: plan at the first call, reshard, compile, remember per signature."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from meshplan._api._plan import Plan
from meshplan._api._planning import find_machine, plan
from meshplan._options import Options
from meshplan.core import ArgumentError, _jax
from meshplan.machine import Machine


class Sharded:
    """A step that plans itself. Called like the step; `plan(*args)` gives the plan alone."""

    def __init__(self, step: Callable[..., Any], given: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self._given = dict(given)
        self._known: dict[Any, tuple[Plan, Any, Any]] = {}

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes; arrays or ShapeDtypeStructs."""
        return self._planned(args, kwargs)[0]

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(...).lower`, of the planned function."""
        return self._planned(args, kwargs)[1].lower(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _jax.in_trace():
            name = getattr(self._step, "__name__", "step")
            raise ArgumentError(
                f"'{name}' is decorated with mp.shard and was called inside a jax transformation (jit, grad, vmap). "
                f"It compiles itself: call it from plain Python, or use the undecorated '{name}.__wrapped__' inside."
            )
        found, fn, shardings = self._planned(args, kwargs)
        static = found._need_call().static_argnums
        placed = list(args)
        dynamic = [i for i in range(len(args)) if i not in static]
        for i, wanted in zip(dynamic, shardings, strict=True):
            placed[i] = jax.device_put(args[i], wanted)
        return fn(*placed, **kwargs)

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Any, Any]:
        key = self._signature(args, kwargs)
        if key not in self._known:
            shapes = [
                a if i in self._static() else jax.tree.map(_shape, a) for i, a in enumerate(args)
            ]
            made = plan(self._step, *shapes, kwargs=kwargs, **self._given)
            mesh = made.mesh()
            wanted = made.in_shardings(mesh)
            self._known[key] = (made, made.jit(mesh), wanted[0] if kwargs else wanted)
        return self._known[key]

    def _static(self) -> tuple[int, ...]:
        static = self._given.get("static_argnums", ())
        return (static,) if isinstance(static, int) else tuple(static)

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dynamic = [a for i, a in enumerate(args) if i not in self._static()]
        leaves, tree = jax.tree.flatten((dynamic, kwargs))
        fixed = tuple(args[i] for i in self._static() if i < len(args))
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in map(_shape, leaves))
        return tree, shapes, fixed


def _shape(x: Any) -> Any:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.dtypes.canonicalize_dtype(jax.numpy.result_type(x)))


def shard(
    step: Callable[..., Any] | None = None,
    *,
    machine: Machine | str | None = None,
    mesh: Mapping[str, int] | None = None,
    pins: Mapping[str, Any] | None = None,
    memory_limit: float | None = None,
    donate_argnums: int | Sequence[int] = (0,),
    static_argnums: int | Sequence[int] = (),
    options: Options | None = None,
) -> Any:
    """Shaped like `jax.jit`: a step that plans itself for this process's devices, or for `machine`.

    The first call with arguments of new shapes plans, moves the arguments where the plan stores them, and compiles;
    later calls run. `donate_argnums` as in `jax.jit`, the first argument by default. Use bare (`@mp.shard`) or with
    arguments (`@mp.shard(pins={...})`). Arguments as in `meshplan.plan`.
    """
    given = {
        "mesh": mesh, "pins": pins, "memory_limit": memory_limit, "donate_argnums": donate_argnums,
        "static_argnums": static_argnums, "options": options,
    }

    def decorate(fn: Callable[..., Any]) -> Sharded:
        where = find_machine(machine) if isinstance(machine, str) else machine
        return Sharded(fn, {**given, "machine": where})

    return decorate if step is None else decorate(step)
