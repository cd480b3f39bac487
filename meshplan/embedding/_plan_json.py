"""Embedding plans as JSON text: every field by its name, keys sorted, so that equal plans are equal bytes."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from meshplan.core import PlanFileError
from meshplan.embedding._plan_data import EmbeddingPlan

KIND, VERSION = "meshplan-embedding", 1
T = TypeVar("T")


def to_json(plan: EmbeddingPlan) -> str:
    body = {"kind": KIND, "version": VERSION, "plan": _plain(plan)}
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def load_embedding_plan(text: str) -> EmbeddingPlan:
    """The plan that `EmbeddingPlan.to_json` wrote, equal to it. Raises PlanFileError for any other text."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanFileError(f"this is no JSON ({error}); give the text of EmbeddingPlan.to_json.") from error
    if not isinstance(body, dict) or body.get("kind") != KIND:
        raise PlanFileError("this is no embedding plan; give the text of EmbeddingPlan.to_json.")
    if body.get("version") != VERSION:
        raise PlanFileError(
            f"the embedding plan is of version {body.get('version')}, this meshplan reads version {VERSION}; "
            "plan again, or take the meshplan that wrote it."
        )
    return cast(EmbeddingPlan, _built(EmbeddingPlan, body.get("plan"), "plan"))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def _built(kind: Any, value: Any, where: str) -> Any:
    """The value as its type says; PlanFileError where it is of another."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise PlanFileError(f"{where} of the embedding plan is no object; the file is damaged.")
        hints, names = typing.get_type_hints(kind), [f.name for f in dataclasses.fields(kind)]
        wrong = sorted(set(names) ^ set(value))
        if wrong:
            raise PlanFileError(f"{where} of the embedding plan lacks or adds {wrong[0]!r}; the file is damaged.")
        return cast(Any, kind)(**{n: _built(hints[n], value[n], f"{where}.{n}") for n in names})
    if origin is tuple and isinstance(value, list):
        return tuple(_built(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {k: _built(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is typing.Literal and value in args:
        return value
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _built(args[0], value, where)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise PlanFileError(f"{where} of the embedding plan is {value!r}, which cannot be; the file is damaged.")
