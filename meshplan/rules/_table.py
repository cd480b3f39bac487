"""The table: which rule belongs to which primitive.

Control flow and calls (scan, while, cond, jit, custom derivatives, checkpoint) are no operations with a
rule of their own; the program opens them. `coverage` lists what is left and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from meshplan.rules import _conv, _dot, _elementwise, _index, _kernels, _linalg, _random, _reduce, _scan_like, _shape
from meshplan.rules._kernels import rule_names
from meshplan.rules._notation import parse_rule
from meshplan.rules._rule import OpRule, OpView, RuleFn

_FAMILIES = (_elementwise, _dot, _reduce, _shape, _index, _conv, _scan_like, _random, _linalg, _kernels)

TABLE: Mapping[str, RuleFn] = MappingProxyType({name: fn for family in _FAMILIES for name, fn in family.RULES.items()})

_NOTHING: Mapping[str, RuleFn | str] = MappingProxyType({})


def rule_for(view: OpView, extra: Mapping[str, RuleFn | str] = _NOTHING) -> OpRule | None:
    """The rule of one operation, None where none is known.

    `extra` maps names to rules of the user's, which go before the table's: functions of an `OpView`, or text
    in the notation of `parse_rule`. A name is a primitive's, or a kernel's: "ffi_call:target",
    "pallas_call:name". Raises `SpecError` where a text
    does not parse or does not fit the operation.
    """
    named = (extra[name] for name in rule_names(view) if name in extra)
    fn = next(named, TABLE.get(view.primitive))
    if fn is None:
        return None
    return parse_rule(fn)(view) if isinstance(fn, str) else fn(view)
