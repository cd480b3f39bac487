"""Reading a machine file: every key by kind, and where one is missing or wrong, by file and line.

`tomllib` tells no lines, so the text is read a second time for the line of each table and key.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

from meshplan.core import MachineError, nearest

Path = tuple[str | int, ...]
_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_DECODE = re.compile(r"(.*) \(at line (\d+), column \d+\)", re.DOTALL)
_LONG = ('"""', "'''")


def key_lines(text: str) -> dict[Path, int]:
    """The line, from 1, of each table header and each key; entries of an array of tables are numbered from 0."""
    found: dict[Path, int] = {}
    entries: dict[Path, int] = {}
    table: Path = ()
    closing = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if closing:
            closing = "" if closing in line else closing
            continue
        if header := _HEADER.match(line):
            table = _table_path(_split(header[2]), entries, header[1] == "[[")
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault((*table, *_split(key[1])), number)
        closing = next((q for q in _LONG if line.count(q) % 2), "")
    return found


def _split(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]


def _table_path(parts: list[str], entries: dict[Path, int], another: bool) -> Path:
    path: Path = ()
    for i, part in enumerate(parts):
        path = (*path, part)
        if another and i == len(parts) - 1:
            entries[path] = entries.get(path, -1) + 1
        if path in entries:
            path = (*path, entries[path])
    return path


class Reader:
    """One table of a machine file; `done` says that every key was known."""

    def __init__(self, table: Any, file: str, lines: dict[Path, int], path: Path = ()) -> None:
        self.file, self.lines, self.path = file, lines, path
        if not isinstance(table, dict):
            raise self._error(path, f"'{_dotted(path)}' is {table!r}; it must be a table")
        self.table: dict[str, Any] = dict(table)
        self.known: list[str] = []

    @classmethod
    def of_text(cls, text: str, file: str) -> Reader:
        """The file's outermost table; MachineError where it is not TOML."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            told = _DECODE.fullmatch(str(error))
            where, problem = (f", line {told[2]}", told[1]) if told else ("", str(error))
            raise MachineError(f"machine file {file}{where}: it is not TOML: {problem}.") from error
        return cls(data, file, key_lines(text))

    def _error(self, path: Path, problem: str) -> MachineError:
        tries = [(*path, 0), *(path[:n] for n in range(len(path), 0, -1))]  # an array of tables: its first entry
        at = next((self.lines[p] for p in tries if p in self.lines), 1)
        return MachineError(f"machine file {self.file}, line {at}: {problem}.")

    def wrong(self, name: str, problem: str) -> MachineError:
        return self._error((*self.path, name), f"key '{_dotted((*self.path, name))}' {problem}")

    def has(self, name: str) -> bool:
        self.known.append(name)
        return name in self.table

    def take(self, name: str, what: str) -> Any:
        if not self.has(name):
            raise self.wrong(name, f"is missing; give {what}")
        return self.table.pop(name)

    def text(self, name: str, default: str | None = None) -> str:
        if default is not None and not self.has(name):
            return default
        value = self.take(name, "a text")
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise self.wrong(name, f"is {value!r}; it must be a text")
        return value

    def texts(self, name: str, what: str) -> tuple[str, ...]:
        value = self.take(name, what)
        if not isinstance(value, list) or not all(isinstance(k, str) for k in value):
            raise self.wrong(name, f"is {value!r}; it must be a list of texts")
        return tuple(value)

    def choice(self, name: str, allowed: tuple[str, ...]) -> Any:
        value = self.take(name, f"one of {', '.join(allowed)}")
        if value not in allowed:
            raise self.wrong(name, f"is {value!r}; it must be one of {', '.join(allowed)}")
        return value

    def choices(self, name: str, allowed: tuple[str, ...]) -> tuple[Any, ...]:
        """One of the allowed, or a list of them."""
        if not isinstance(self.table.get(name), list):
            return (self.choice(name, allowed),)
        value = self.take(name, f"some of {', '.join(allowed)}")
        wrong = [v for v in value if v not in allowed]
        if wrong or not value:
            found = repr(wrong[0]) if wrong else "an empty list"
            raise self.wrong(name, f"has {found}; it must be one of {', '.join(allowed)}")
        return tuple(value)

    def figure(self, name: str) -> tuple[float, str]:
        """A positive number and its source."""
        entry = self.take(name, '{ value = ..., source = "..." }')
        if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
            raise self.wrong(name, 'must be written { value = ..., source = "..." }')
        value, source = entry["value"], entry["source"]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(name, f"is {value!r}; it must be a positive number")
        if not isinstance(source, str) or not source.strip():
            raise self.wrong(name, "has an empty source; say where the number is from")
        return value, source

    def count(self, name: str) -> int:
        value = self.take(name, "a positive whole number")
        if type(value) is not int or value < 1:
            raise self.wrong(name, f"is {value!r}; it must be a positive whole number")
        return value

    def sizes(self, name: str, length: int | None = None) -> tuple[int, ...]:
        value = self.take(name, "a list of sizes")
        good = isinstance(value, list) and all(type(v) is int and v > 0 for v in value)
        if not good or (length is not None and len(value) != length):
            count = "" if length is None else f"{length} "
            raise self.wrong(name, f"is {value!r}; it must be a list of {count}positive sizes")
        return tuple(value)

    def table_at(self, name: str) -> Reader:
        return Reader(self.take(name, "a table"), self.file, self.lines, (*self.path, name))

    def tables_at(self, name: str) -> list[Reader]:
        """The entries of an array of tables, [[name]]; none where the key is missing."""
        if not self.has(name):
            return []
        value = self.table.pop(name)
        if not isinstance(value, list) or not value:
            raise self.wrong(name, "must be a list of tables, outermost first")
        return [Reader(entry, self.file, self.lines, (*self.path, name, i)) for i, entry in enumerate(value)]

    def done(self) -> None:
        for name in self.table:
            near = nearest(name, dict.fromkeys(self.known))
            hint = f" ({near.rstrip('.')})" if near.startswith("Nearest") else ""
            raise self.wrong(name, f"is not a key of a machine file; remove it or correct its spelling{hint}")


def _dotted(path: Path) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
