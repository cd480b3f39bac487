"""Names of dims, written on functions and on classes.

Both leave the program as it is. A name on a value travels through JAX as the `name`
primitive of `jax.ad_checkpoint.checkpoint_name`, an identity that survives jit, scan, remat
and differentiation; a name on a class is an attribute of the class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeVar

from jax.ad_checkpoint import checkpoint_name

from meshplan.core import ArgumentError, SpecError, nearest
from meshplan.hints._patterns import DimNames, Group, Signature, parse_group, parse_signature

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

TAG_PREFIX = "meshplan:"
PARAMS_ATTRIBUTE = "__meshplan_params__"


def dims(pattern: str) -> Callable[[F], F]:
    """Name the dims of a function's array arguments and results; equal names get equal axes.

    `@dims("batch seq embed, embed mlp -> batch seq mlp")`: one group per positional argument
    (`self` takes none; trailing arguments may be left out) and one per result. `_` is a dim
    without a name, `_` alone an argument or result without names, of any kind; a leading
    `...` stands for any number of unnamed dims. Values and gradients stay as they are.

    Raises `SpecError` for a malformed pattern, `ArgumentError` (at the call) for a rank that
    does not fit or a pytree where an array is named.
    """
    signature = parse_signature(pattern)

    def decorate(fn: F) -> F:
        places = _places(fn, signature)

        @functools.wraps(fn)
        def named(*args: Any, **kwargs: Any) -> Any:
            values = list(args)
            for index, name, group in places:
                if index < len(values):
                    values[index] = _tag(values[index], group, fn, f"argument {name!r}", pattern)
                elif name in kwargs:
                    kwargs[name] = _tag(kwargs[name], group, fn, f"argument {name!r}", pattern)
            return _tag_results(fn(*values, **kwargs), fn, signature)

        return named  # type: ignore[return-value]

    return decorate


def params(**patterns: str) -> Callable[[C], C]:
    """Name the dims of a class's array attributes: `@params(up="embed mlp", down="mlp embed")`.

    For any class whose objects are pytrees (dataclass, nnx.Module, equinox.Module). Nothing is
    wrapped: the names are stored in `cls.__meshplan_params__`, those of base classes included.
    An array with more dims than names (layers stacked for scan) has unnamed leading dims. An
    attribute below another is written with a dot: `@params(**{"proj.kernel": "embed mlp"})`.

    Raises `SpecError` for a malformed pattern or, on a dataclass, an attribute that is no field.
    """
    parsed = {attr: parse_group(text, f"params({attr}={text!r})") for attr, text in patterns.items()}
    names = {attr.replace(".", "/"): group.names for attr, group in parsed.items()}

    def decorate(cls: C) -> C:
        if not isinstance(cls, type):
            raise ArgumentError(f"params(...) names attributes of a class; {cls!r} is none. Use dims(...) for it.")
        fields = cls.__dict__.get("__dataclass_fields__", {})
        for attr in patterns if fields else ():
            if attr.split(".")[0] not in fields:
                raise SpecError(
                    f"params({attr}={patterns[attr]!r}): {cls.__name__} has no field {attr!r}. {nearest(attr, fields)}"
                )
        merged = {**params_of(cls), **names}
        setattr(cls, PARAMS_ATTRIBUTE, MappingProxyType(merged))
        return cls

    return decorate


def params_of(cls: type) -> dict[str, DimNames]:
    """What `params` stored on the class and its bases; the class nearest in the resolution order wins."""
    merged: dict[str, DimNames] = {}
    for base in reversed(cls.__mro__):
        merged.update(base.__dict__.get(PARAMS_ATTRIBUTE, {}))
    return merged


def tagged_names(name: str) -> DimNames | None:
    """Dim names in the parameter of a `name` equation, or None where the tag is not from `dims`."""
    if not name.startswith(TAG_PREFIX):
        return None
    return tuple(None if word == "_" else word for word in name[len(TAG_PREFIX) :].split())


def _places(fn: Callable[..., Any], signature: Signature) -> tuple[tuple[int, str, Group], ...]:
    """(position, parameter name, group) of every argument that gets names."""
    parameters = list(inspect.signature(fn).parameters.values())
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = 1 if positional[:1] == ["self"] else 0
    takes_rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    groups = signature.arguments
    if len(groups) > len(positional) - first and not takes_rest:
        raise SpecError(
            f"pattern {signature.text!r} has {len(groups)} groups of arguments, but {fn.__qualname__} takes "
            f"{len(positional) - first} ({', '.join(positional[first:])}). Write at most one group per argument."
        )
    labels = positional + [f"#{i}" for i in range(len(positional), first + len(groups))]
    return tuple((i + first, labels[i + first], group) for i, group in enumerate(groups) if not group.is_blank)


def _tag(value: Any, group: Group, fn: Callable[..., Any], where: str, pattern: str) -> Any:
    shape = getattr(value, "shape", None)
    if shape is None:
        raise ArgumentError(
            f"{fn.__qualname__}: {where} is a {type(value).__name__}, not an array, but the pattern {pattern!r} "
            f"names its dims {group.text!r}. Write _ for it."
        )
    names = group.expand(len(shape))
    if names is None:
        raise ArgumentError(
            f"{fn.__qualname__}: {where} has {len(shape)} dims, shape {tuple(shape)}, but the pattern {pattern!r} "
            f"names {len(group.names)}: {group.text!r}. Write one name per dim, _ for a dim without a name."
        )
    if not any(names):
        return value
    return checkpoint_name(value, TAG_PREFIX + " ".join(name or "_" for name in names))


def _tag_results(result: Any, fn: Callable[..., Any], signature: Signature) -> Any:
    groups = signature.results
    if len(groups) == 1:
        return result if groups[0].is_blank else _tag(result, groups[0], fn, "the result", signature.text)
    if not isinstance(result, tuple) or len(result) != len(groups):
        found = f"{len(result)} results" if isinstance(result, tuple) else f"one {type(result).__name__}"
        raise ArgumentError(
            f"{fn.__qualname__} returned {found}, but the pattern {signature.text!r} has {len(groups)} groups of "
            "results. Write one group per result."
        )
    tagged = [
        value if group.is_blank else _tag(value, group, fn, f"result {i}", signature.text)
        for i, (value, group) in enumerate(zip(result, groups, strict=True))
    ]
    return type(result)(*tagged) if hasattr(result, "_fields") else tuple(tagged)
