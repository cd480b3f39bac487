"""Chakra execution traces on disk: one file per device, `PREFIX.DEVICE.json` or `PREFIX.DEVICE.et`.

`.et` is binary protobuf, each message after its length as a varint, which simulators of that
ecosystem read; it needs the schema's generated module. That comes with MLCommons' chakra package
(`chakra.schema.protobuf.et_def_pb2`), which no registry has, or from `protoc` and `et_def.proto`.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshplan.core import ArgumentError, ProblemError
from meshplan.simulate._chakra import Message, chakra_text, to_chakra
from meshplan.simulate._chakra_read import from_chakra, read_chakra
from meshplan.simulate._task import Resource, Tasks

_SCHEMA = "chakra.schema.protobuf.et_def_pb2"


def write_chakra(
    tasks: Tasks, resources: Sequence[Resource], prefix: str | Path, *, binary: bool = False, schema: Any = None
) -> tuple[Path, ...]:
    """Write one trace per device and return the paths.

    `binary`: `.et` files; `schema`: the generated module of et_def.proto, default that of the
    chakra package. Raises ArgumentError where it is needed and not installed.
    """
    paths = []
    schema = _schema(schema) if binary else None
    for device, messages in to_chakra(tasks, resources).items():
        path = Path(f"{prefix}.{device}.{'et' if binary else 'json'}")
        if binary:
            path.write_bytes(_encoded(messages, schema))
        else:
            path.write_text(chakra_text(messages), encoding="utf-8")
        paths.append(path)
    return tuple(paths)


def load_chakra(
    prefix: str | Path, *, bytes_per_second: float | None = None, schema: Any = None
) -> tuple[Tasks, tuple[Resource, ...]]:
    """Read the files `PREFIX.DEVICE.json` or `.et` of all devices; arguments as in `from_chakra`, `write_chakra`.

    Raises ProblemError where there are none, or both forms.
    """
    prefix = Path(prefix)
    found = {
        suffix: {int(path.suffixes[-2][1:]): path for path in sorted(prefix.parent.glob(f"{prefix.name}.*{suffix}"))
                 if len(path.suffixes) > 1 and path.suffixes[-2][1:].isdigit()}
        for suffix in (".json", ".et")
    }
    if found[".json"] and found[".et"]:
        raise ProblemError(f"there are .json and .et traces of {prefix}; move those of one form away.")
    if not found[".json"] and not found[".et"]:
        raise ProblemError(f"there is no {prefix}.DEVICE.json or {prefix}.DEVICE.et; give the prefix that was written.")
    traces = {}
    for device, path in sorted((found[".json"] or found[".et"]).items()):
        if path.suffix == ".json":
            traces[device] = read_chakra(path.read_text(encoding="utf-8"))
        else:
            traces[device] = list(_decoded(path, _schema(schema)))
    return from_chakra(traces, bytes_per_second=bytes_per_second)


def _schema(given: Any) -> Any:
    if given is not None:
        return given
    try:
        return importlib.import_module(_SCHEMA)
    except ImportError as error:
        raise ArgumentError(
            f"binary Chakra traces need the schema's Python module, {_SCHEMA}, which is not installed; install "
            "MLCommons' chakra from its repository, give schema= your own build of et_def.proto, or use the JSON form."
        ) from error


def _encoded(messages: Sequence[Message], schema: Any) -> bytes:
    from google.protobuf.json_format import ParseDict

    out = io.BytesIO()
    for place, message in enumerate(messages):
        data = ParseDict(message, schema.Node() if place else schema.GlobalMetadata()).SerializeToString()
        length = len(data)
        while length > 0x7F:
            out.write(bytes([length & 0x7F | 0x80]))
            length >>= 7
        out.write(bytes([length]) + data)
    return out.getvalue()


def _decoded(path: Path, schema: Any) -> Iterator[Message]:
    from google.protobuf.json_format import MessageToDict

    data, place, first = path.read_bytes(), 0, True
    while place < len(data):
        length = shift = 0
        more = True
        while more and place < len(data):
            length |= (data[place] & 0x7F) << shift
            more, shift, place = data[place] > 0x7F, shift + 7, place + 1
        if more or place + length > len(data):
            raise ProblemError(f"the Chakra trace {path} ends in the middle of a message; write it again.")
        message = schema.GlobalMetadata() if first else schema.Node()
        message.ParseFromString(data[place : place + length])
        place, first = place + length, False
        yield MessageToDict(message)
