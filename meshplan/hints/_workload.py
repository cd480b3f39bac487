"""A step function with the shapes it runs on: what the models hand to the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from meshplan.core import ArgumentError


@dataclass(frozen=True, slots=True)
class Workload:
    """A train or serve step, the shapes of its arguments, and ways to make real ones.

    `step(*args)` is an ordinary function of pytrees. `args` holds one abstract pytree
    (leaves: `jax.ShapeDtypeStruct`) per positional argument; the last one is the batch.
    `donate_argnums` index `args`. `init(key)` returns a tuple of real arrays with the
    structure of `args[:-1]` (everything but the batch). `batches()` returns a fresh
    iterator, the same at every call, of real batches with the structure of `args[-1]`.

    Raises `ArgumentError` where `args` is no tuple or an index points beyond it.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    donate_argnums: tuple[int, ...] = ()
    init: Callable[[jax.Array], tuple[Any, ...]] | None = None
    batches: Callable[[], Iterator[Any]] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.args, tuple):
            raise ArgumentError(
                f"Workload {self.name!r}: args is a {type(self.args).__name__}, not a tuple. "
                "Write args=(state, batch), one abstract pytree per positional argument of the step."
            )
        beyond = [i for i in self.donate_argnums if not 0 <= i < len(self.args)]
        if beyond:
            raise ArgumentError(
                f"Workload {self.name!r}: donate_argnums {self.donate_argnums} holds {beyond[0]}, "
                f"but there are {len(self.args)} arguments. Use indices 0 to {len(self.args) - 1}."
            )
