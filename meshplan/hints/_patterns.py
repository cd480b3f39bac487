"""Reading `batch seq embed -> batch seq embed`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshplan.core import SpecError

DimNames = tuple[str | None, ...]

_NAME = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True, slots=True)
class Group:
    """Names of one array: `text` as written, `names` (None = unnamed), `open`: any number of leading dims more."""

    text: str
    names: DimNames
    open: bool = False

    @property
    def is_blank(self) -> bool:
        """`_`: an argument that stays unnamed, of any rank or kind."""
        return self.text == "_"

    def expand(self, ndim: int) -> DimNames | None:
        """Names for an array of `ndim` dims, or None where the rank does not fit."""
        missing = ndim - len(self.names)
        if missing < 0 or (missing and not self.open):
            return None
        return (None,) * missing + self.names


@dataclass(frozen=True, slots=True)
class Signature:
    """A whole pattern of `dims`: groups of the arguments and of the results."""

    text: str
    arguments: tuple[Group, ...]
    results: tuple[Group, ...]


def parse_group(text: str, quoted: str) -> Group:
    """One group of names; `quoted` is the pattern that errors show. Raises `SpecError`."""
    words = text.split()
    if not words:
        raise SpecError(f"{quoted}: an empty group of names. Write _ for an array without names.")
    is_open = words[0] == "..."
    words = words[1:] if is_open else words
    for word in words:
        if word != "_" and not _NAME.fullmatch(word):
            raise SpecError(
                f"{quoted}: {word!r} is no name of a dim. Names are letters, digits and _, separated by spaces; "
                "_ alone is a dim without a name, a leading ... any number of them."
            )
        if word != "_" and words.count(word) > 1:
            raise SpecError(
                f"{quoted}: {word!r} names two dims of one array, and equal names get equal axes, "
                "which one array cannot have twice. Give one of them another name, or _."
            )
    return Group(" ".join(text.split()), tuple(None if w == "_" else w for w in words), is_open)


def parse_signature(text: str) -> Signature:
    """`a b, c d -> a d`: groups of arguments, an arrow, groups of results. Raises `SpecError`."""
    quoted = f"pattern {text!r}"
    sides = text.split("->")
    if len(sides) != 2:
        raise SpecError(f"{quoted}: {len(sides) - 1} arrows. Write 'names of arguments -> names of results'.")
    left, right = sides
    arguments = tuple(parse_group(g, quoted) for g in left.split(",")) if left.strip() else ()
    return Signature(text, arguments, tuple(parse_group(g, quoted) for g in right.split(",")))
