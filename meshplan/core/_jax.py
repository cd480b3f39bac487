"""The only file that knows jax versions and jax's private names.

Everything here is a thin reader: jaxprs differ between jax 0.10 and 0.12 (closed jaxprs
became plain ones with constants inside; `scan` describes its operands by `ft_in` instead
of `num_consts` and `num_carry`), the rest of meshplan sees one form.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src import core as _core
from jax._src import source_info_util as _source_info
from jax.extend import core as jex

from meshplan.core._jax_pins import without_mesh, without_types

_PACKAGE = str(Path(__file__).parents[1])

Literal = jex.Literal
Var = jex.Var
ClosedJaxpr = jex.ClosedJaxpr

# call-like primitives whose body runs exactly once, in place
INLINE_CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "call_jaxpr", "call": "call_jaxpr", "eval_jaxpr": "jaxpr", "composite": "jaxpr",
    "xla_metadata_call": "jaxpr", "custom_vmap_call": "call", "linear_call": "callee", "custom_linear_solve": "jaxprs",
}
# of these the compiler would be told more than their bodies say
TOLD_CALLS = frozenset({"composite", "xla_metadata_call"})
REMAT_CALLS = frozenset({"remat2", "checkpoint", "remat"})


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr with `constvars`, `invars`, `eqns`, `outvars`; values of its constants)."""
    consts = getattr(jaxpr, "consts", ())
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, tuple(consts)


def call_body(eqn: Any) -> Any | None:
    """The body of an equation that only calls (jit, custom derivatives), else None."""
    name = eqn.primitive.name
    if name in INLINE_CALLS:
        params = eqn.params
        body = params.get(INLINE_CALLS[name]) or params.get("call_jaxpr") or params.get("jaxpr")
        return body.solve if name == "custom_linear_solve" else body
    return None


def call_operands(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Those of a call's operands that its body takes: of a `custom_linear_solve` the constants of its solve and `b`."""
    if eqn.primitive.name != "custom_linear_solve":
        return list(operands)
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return [*operands[first : first + lengths.solve], *operands[sum(lengths) :]]


def told_name(eqn: Any) -> str:
    """What a call tells the compiler besides its body: "composite 'name'", or the primitive's own name."""
    name = eqn.params.get("name")
    return f"{eqn.primitive.name} '{name}'" if isinstance(name, str) else eqn.primitive.name


def is_remat(eqn: Any) -> bool:
    return eqn.primitive.name in REMAT_CALLS


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """(number of constants, number of carries) of a `scan` equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def source_line(eqn: Any) -> str:
    """`file:line` of the user's code that made the equation, or ''; frames of this package are passed over.

    The file is named from its import root (`models/gpt.py`), so that it reads the same on every machine.
    """
    for frame in _source_info.user_frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(_PACKAGE):
            return f"{short_file(frame.file_name)}:{frame.start_line}"
    return ""


@functools.lru_cache(maxsize=4096)
def short_file(name: str) -> str:
    """A file's path below the folder it is imported from; its last two parts where that is unknown."""
    path = Path(name)
    roots = sorted((r for r in map(Path, sys.path) if r.parts and path.is_relative_to(r)), key=lambda r: -len(r.parts))
    below = path.relative_to(roots[0]) if roots else Path(*path.parts[-2:])
    return below.as_posix()


def name_stack(eqn: Any) -> str:
    return str(eqn.source_info.name_stack)


def user_name(eqn: Any) -> str | None:
    """The text of a `jax.ad_checkpoint.checkpoint_name` equation, else None."""
    if eqn.primitive.name == "name":
        return str(eqn.params.get("name"))
    return None


def constraint_sharding(eqn: Any) -> Any | None:
    """The sharding of a `with_sharding_constraint` equation, else None."""
    return eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None


def in_trace() -> bool:
    """Whether we are inside a jax transformation (jit, grad, vmap)."""
    return not _core.trace_ctx.is_top_level()


def abstract(aval: Any) -> Any:
    """A `ShapeDtypeStruct` like the abstract value, weak type kept."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def body_like(old: Any, new: Any, detached: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """A freshly traced (closed) body in the form of the old one: (body, its constants where they became operands).

    `detached`: the constants have to be operands, as those of a `checkpoint`, which jax 0.10 gives an open jaxpr.
    """
    inner, consts = open_jaxpr(new)
    if isinstance(old, jex.ClosedJaxpr) and not isinstance(old, jex.Jaxpr):
        return new, ()
    if isinstance(new, jex.Jaxpr) and not (detached and consts):  # jax 0.12: one kind of jaxpr
        return new, ()
    if consts:
        from jax._src.interpreters import partial_eval

        return partial_eval.convert_constvars_jaxpr(inner), tuple(consts)
    return inner, ()


def user_source(eqn: Any) -> Any:
    """A context in which new equations carry the source line of `eqn`."""
    return _source_info.user_context(eqn.source_info.traceback)


def bind(eqn: Any, args: Sequence[Any], changes: dict[str, Any], extra: Sequence[Any] = ()) -> Sequence[Any]:
    """Run one equation on new operands, some parameters exchanged; `extra` operands go first."""
    params = eqn.primitive.get_bind_params({**eqn.params, **without_types(eqn), **changes})
    names = _source_info.current_name_stack() + eqn.source_info.name_stack
    user = _source_info.user_context(eqn.source_info.traceback, name_stack=names)
    with user, eqn.ctx.manager, without_mesh(eqn):
        outs = eqn.primitive.bind(*extra, *args, **params)
    return outs if eqn.primitive.multiple_results else [outs]
