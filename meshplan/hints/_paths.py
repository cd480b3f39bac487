"""Paths of argument leaves, as a user types them: `state/params/layers/0/mlp/up`.

The name of the step function's argument comes first, then one entry per level: dict keys,
sequence indices, attributes. Entries that a framework adds around an array (`.value` of an
nnx Variable) are left out.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from meshplan.core import ArgumentError, PinError, nearest
from meshplan.hints._walk import walk


def argument_names(step: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Names of the first `count` positional arguments; `rest/0`, `rest/1` for those that `*rest` takes.

    A callable without a signature has `arg0`, `arg1`. Raises `ArgumentError` where the step takes fewer.
    """
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        return tuple(f"arg{i}" for i in range(count))
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    if count > len(positional) and not rest:
        raise ArgumentError(
            f"{getattr(step, '__name__', 'the step')} takes {len(positional)} positional arguments "
            f"({', '.join(positional)}), {count} were given. Pass as many as it takes."
        )
    return tuple(positional[i] if i < len(positional) else f"{rest[0]}/{i - len(positional)}" for i in range(count))


def leaf_paths(
    args: Sequence[Any], arg_names: Sequence[str], kwargs: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Path of every leaf of the positional `args`, then of `kwargs`, in `jax.tree.flatten` order.

    `arg_names` has one name per positional argument (see `argument_names`). Raises `ArgumentError` otherwise.
    """
    if len(args) != len(arg_names):
        raise ArgumentError(f"{len(args)} arguments, {len(arg_names)} names ({', '.join(arg_names)}): name each one.")
    named = [*zip(arg_names, args, strict=True), *sorted((kwargs or {}).items())]
    return tuple("/".join((name, *view.keys)) for name, arg in named for view in walk(arg))


def match(pattern: str, path: str) -> bool:
    """Whether the regex is the whole path or a whole end of it, from a `/` on.

    `batch.tokens` works (`.` is any character), and so do `params/.*/kernel` and `kernel`.
    Raises `PinError` for a malformed regex.
    """
    regex = _compiled(pattern)
    return any(regex.fullmatch(path, start) for start in _starts(path))


def find(pattern: str, paths: Sequence[str]) -> tuple[int, ...]:
    """Indices of the paths that the pattern matches. Raises `PinError` with the nearest paths where none does."""
    found = tuple(i for i, path in enumerate(paths) if match(pattern, path))
    if not found:
        raise PinError(f"pin {pattern!r} matches no argument. {nearest_paths(pattern, paths)}")
    return found


def nearest_paths(pattern: str, paths: Iterable[str], most: int = 3) -> str:
    """'Nearest: a, b.': the paths whose entries look most like the pattern's, metacharacters aside.

    Of paths that differ in numbers only (the layers of a model) the first is named.
    """
    wanted = _segments(pattern)
    kinds: dict[str, str] = {}
    for path in paths:
        kinds.setdefault(re.sub(r"\d+", "0", path), path)
    scored = [(_likeness(wanted, path), path) for path in kinds.values()]
    scored.sort(key=lambda pair: (-pair[0], pair[1].count("/")))
    close = [path for score, path in scored[:most] if wanted and score >= max(0.55, 0.85 * scored[0][0])]
    return f"Nearest: {', '.join(close)}." if close else nearest("", kinds.values(), most)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise PinError(f"pin {pattern!r} is no regular expression: {error}. Escape [ and ( with \\.") from error


def _starts(path: str) -> list[int]:
    return [0, *(i + 1 for i, c in enumerate(path) if c == "/")]


def _segments(pattern: str) -> list[str]:
    """Words of the pattern: escapes resolved, metacharacters dropped, cut at `/`, or at `.` where there is no `/`."""
    text = re.sub(r"\\[dDwWsSbBAZ]|\.[*+?]", " ", pattern)
    text = text if "/" in text else text.replace(".", "/")
    words = [re.sub(r"[^\w\-]", "", part.replace("\\", "")) for part in text.split("/")]
    return [word for word in words if word]


def _likeness(wanted: list[str], path: str) -> float:
    """0 to 1; the last word counts twice, against the path's last entry: that is what is looked for."""
    entries = path.split("/")
    if not wanted:
        return 0.0
    scores = [max(_alike(word, entry) for entry in entries) for word in wanted[:-1]]
    scores += [_alike(wanted[-1], entries[-1])] * 2
    return sum(scores) / len(scores)


@lru_cache(maxsize=65536)
def _alike(a: str, b: str) -> float:
    return 1.0 if a == b else difflib.SequenceMatcher(None, a, b).ratio()
