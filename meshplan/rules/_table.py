"""The table: which rule belongs to which primitive.

Control flow and calls (scan, while, cond, jit, custom derivatives, checkpoint) are no operations with a
rule of their own; the program opens them. `coverage` lists what is left and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from meshplan.rules import _conv, _dot, _elementwise, _index, _kernels, _linalg, _random, _reduce, _scan_like, _shape
from meshplan.rules._kernels import rule_names
from meshplan.rules._notation import parse_rule
from meshplan.rules._rule import OpRule, OpView, RuleFn

_FAMILIES = (_elementwise, _dot, _reduce, _shape, _index, _conv, _scan_like, _random, _linalg, _kernels)

TABLE: Mapping[str, RuleFn] = MappingProxyType({name: fn for family in _FAMILIES for name, fn in family.RULES.items()})

UserRule = RuleFn | str | tuple[RuleFn | str, Callable[..., Any]]

_NOTHING: Mapping[str, UserRule] = MappingProxyType({})


def rule_for(view: OpView, extra: Mapping[str, UserRule] = _NOTHING) -> OpRule | None:
    """The rule of one operation, None where none is known.

    `extra` maps names to rules of the user's, which go before the table's: functions of an `OpView`, or text
    in the notation of `parse_rule`; or a pair of one and of the function that a shard runs on its parts.
    A name is a primitive's, or a kernel's: "ffi_call:target", "pallas_call:name". Raises `SpecError` where a text does
    not parse or does not fit the operation.
    """
    named = (extra[name] for name in rule_names(view) if name in extra)
    fn = next(named, TABLE.get(view.primitive))
    if fn is None:
        return None
    fn, on_shards = fn if isinstance(fn, tuple) else (fn, None)
    rule = parse_rule(fn)(view) if isinstance(fn, str) else fn(view)
    return replace(rule, on_shards=on_shards) if rule is not None and on_shards is not None else rule
