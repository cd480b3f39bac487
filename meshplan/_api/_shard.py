"""`@mp.shard`: plan at the first call, reshard, compile, remember per signature."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshplan._api._plan import Plan
from meshplan._api._planning import find_machine, plan
from meshplan._options import Options
from meshplan.core import ArgumentError, _jax
from meshplan.hints import parted, split
from meshplan.machine import Machine


class Sharded:
    """A step that plans itself. Called like the step; `plan(*args)` gives the plan alone."""

    def __init__(self, step: Callable[..., Any], given: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self._given = dict(given)
        self._known: dict[Any, tuple[Plan, Any, Any, Callable[[Any], Any]]] = {}

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes; arrays or ShapeDtypeStructs."""
        return self._planned(args, kwargs, self._halves(args))[0]

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(...).lower`, of the planned function."""
        halves = self._halves(args)
        return self._planned(args, kwargs, halves)[1].lower(*(arrays for arrays, _ in halves), **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _jax.in_trace():
            name = getattr(self._step, "__name__", "step")
            raise ArgumentError(
                f"'{name}' is decorated with mp.shard and was called inside a jax transformation (jit, grad, vmap). "
                f"It compiles itself: call it from plain Python, or use the undecorated '{name}.__wrapped__' inside."
            )
        halves = self._halves(args)
        found, fn, shardings, whole = self._planned(args, kwargs, halves)
        static = found._need_call().static_argnums
        placed = [arrays for arrays, _ in halves]
        dynamic = [i for i in range(len(args)) if i not in static]
        for i, wanted in zip(dynamic, shardings, strict=True):
            placed[i] = jax.device_put(placed[i], wanted)
        return whole(fn(*placed, **kwargs))

    def _planned(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], halves: Sequence[tuple[Any, Any]]
    ) -> tuple[Plan, Any, Any, Callable[[Any], Any]]:
        """(plan, the compiled step of the arrays, their shardings, what completes its results)."""
        key = self._signature(args, kwargs, halves)
        if key not in self._known:
            step, kept, whole = parted(self._step, args, self._static())
            shapes = [a if i in self._static() else jax.tree.map(_shape, a) for i, a in enumerate(kept)]
            made = plan(step, *shapes, kwargs=kwargs, **self._given)
            mesh = made.mesh()
            wanted = made.in_shardings(mesh)
            self._known[key] = (made, made.jit(mesh), wanted[0] if kwargs else wanted, whole)
        return self._known[key]

    def _halves(self, args: tuple[Any, ...]) -> list[tuple[Any, Any]]:
        """Of each argument its arrays, None in place of all else, and the other way round; static ones stay whole."""
        return [(a, None) if i in self._static() else split(a) for i, a in enumerate(args)]

    def _static(self) -> tuple[int, ...]:
        static = self._given.get("static_argnums", ())
        return (static,) if isinstance(static, int) else tuple(static)

    def _signature(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], halves: Sequence[tuple[Any, Any]]
    ) -> Any:
        """Structure and shapes of the arrays, and the values of all else."""
        split_up = [half for i, half in enumerate(halves) if i not in self._static()]
        dynamic, rest = [first for first, _ in split_up], [second for _, second in split_up]
        leaves, tree = jax.tree.flatten((dynamic, kwargs))
        fixed = tuple(args[i] for i in self._static() if i < len(args))
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in map(_shape, leaves))
        others, held = jax.tree.flatten(rest)
        return tree, shapes, fixed, held, tuple(others)


def _shape(x: Any) -> Any:
    """Shape, dtype and the sharding where it names axes: a pin, as in `meshplan.plan`."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        named = getattr(x, "sharding", None)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=named if isinstance(named, NamedSharding) else None)
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
    later calls run. Shardings over a mesh that the arguments of the first call have are pins; arguments of later calls
    are moved. Modules of equinox come back whole. `donate_argnums` as in `jax.jit`, the first argument by default. Use
    bare (`@mp.shard`) or with arguments (`@mp.shard(pins={...})`). Arguments as in `meshplan.plan`.
    """
    given = {
        "mesh": mesh, "pins": pins, "memory_limit": memory_limit, "donate_argnums": donate_argnums,
        "static_argnums": static_argnums, "options": options,
    }

    def decorate(fn: Callable[..., Any]) -> Sharded:
        where = find_machine(machine) if isinstance(machine, str) else machine
        return Sharded(fn, {**given, "machine": where})

    return decorate if step is None else decorate(step)
