"""Errors a user can meet. Each says what, where, what was found, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MeshplanError(Exception):
    """Base of every error that meshplan raises on purpose."""


class SpecError(MeshplanError, ValueError):
    """A spec that cannot be: unknown axis, one axis twice, indivisible dim."""


class PinError(MeshplanError, ValueError):
    """A pin that matches nothing or contradicts another."""


class MeshError(MeshplanError, ValueError):
    """Devices or a mesh that do not fit the plan or the machine."""


class MachineError(MeshplanError, ValueError):
    """An unknown or malformed machine description."""


class MemoryLimitError(MeshplanError):
    """No plan fits the memory limit; carries the least achievable peak."""


class ArgumentError(MeshplanError, TypeError):
    """Arguments other than the planned ones, or in a place where they cannot be."""


class TraceError(MeshplanError):
    """The step does not trace; JAX's own error is the cause."""


class PlanFileError(MeshplanError, ValueError):
    """A plan file that is damaged, newer, or for another program."""


class CompileError(MeshplanError, RuntimeError):
    """An ahead-of-time compiler failed, died or ran out of time."""


class ProblemError(MeshplanError, ValueError):
    """A malformed optimisation problem or instance file."""


def nearest(name: str, known: Iterable[str], most: int = 3) -> str:
    """'Nearest: a, b.' for an error, or the first few known names where nothing is near."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=most, cutoff=0.5)
    if close:
        return f"Nearest: {', '.join(close)}."
    shown = ", ".join(names[: most * 2])
    more = f" and {len(names) - most * 2} more" if len(names) > most * 2 else ""
    return f"Known: {shown}{more}." if names else "None are known."
