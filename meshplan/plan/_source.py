"""A plan as Python source that a person could have written, independent of meshplan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from meshplan.core import Axes, Spec, format_bytes, format_seconds
from meshplan.plan._data import ArrayPlan, PlanData
from meshplan.plan._group import grouped

LogicalRule = tuple[str, str | tuple[str, ...] | None]

HELPERS = '''\
def make_mesh(devices=None):
    """The plan's mesh over these devices, by default all of this process's."""
    types = (AxisType.Auto,) * len(MESH)
    return jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=types, devices=devices)


def path_of(name, keys):
    """'state/params/embed' for an array of the argument `name`."""
    return "/".join([name, *(jax.tree_util.keystr((key,), simple=True) for key in keys)])


def spec_of(path, specs):
    """The path's own entry, or the one whose * stand for its numbers."""
    for name in (path, path.rpartition("/")[0]):  # a framework's box around an array adds an entry at the end
        if name in specs:
            return specs[name]
        for pattern, spec in specs.items():
            if re.fullmatch(re.escape(pattern).replace(r"\\*", r"\\d+"), name):
                return spec
    raise KeyError(f"the plan has no spec for {path}")


def shardings(trees, specs, mesh):
    """NamedShardings for a dict of pytrees by name, in the same structure."""
    return {
        name: jax.tree_util.tree_map_with_path(
            lambda keys, _, name=name: NamedSharding(mesh, spec_of(path_of(name, keys), specs)), tree
        )
        for name, tree in trees.items()
    }


def in_shardings(args, mesh):
    """For the positional arguments of the step, arrays or ShapeDtypeStructs."""
    return tuple(shardings(dict(zip(NAMES, args, strict=True)), ARGUMENTS, mesh).values())


def out_shardings(results, mesh):
    """For the step's results, as `jax.eval_shape(step, *args)` gives them."""
    if type(results) is tuple:
        return tuple(shardings({str(i): r for i, r in enumerate(results)}, RESULTS, mesh).values())
    return shardings({"0": results}, RESULTS, mesh)["0"]


def jit(step, args, mesh):
    """The step with the plan's shardings of arguments and results, and its donation."""
    return jax.jit(
        step, in_shardings=in_shardings(args, mesh), out_shardings=out_shardings(jax.eval_shape(step, *args), mesh),
        donate_argnums=DONATED,
    )
'''

CONSTRAIN = '''

# Axes of the named dims, for the values inside the step: constrain(x, mesh, "batch", "seq", "embed")
DIMS = {rules}


def constrain(x, mesh, *names):
    """`x` split as the plan splits dims of these names; None for a dim without one, each axis once, leftmost first."""
    used, entries = set(), []
    for name in names:
        axes = tuple(a for a in DIMS.get(name, ()) if a not in used)
        used.update(axes)
        entries.append(axes or None)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*entries)))
'''


def to_source(data: PlanData) -> str:
    """Python source that applies the plan by hand: its mesh, the stored specs of arguments and results, and the
    axes of named dims for constraints inside the step.

    It needs jax alone. Repeated layers stand once, with `*` for their numbers. The operations' own
    constraints are not in it (`Plan.jit` places them), so XLA may move more than the plan says.
    """
    roots = tuple(dict.fromkeys(a.path.split("/")[0] for a in data.arguments))
    lines = [
        f'"""Shardings of {_plain(data.step) or "a step"} for {_plain(data.machine)}, mesh {data.mesh}.',
        "",
        f"Predicted: {format_seconds(data.step_seconds)} a step, {format_bytes(data.peak_bytes)} on each device at the "
        "peak.",
        "",
        "    mesh = make_mesh()",
        "    fn = jit(step, args, mesh)",
        '"""',
        "",
        "import re",
        "",
        "import jax",
        "from jax.sharding import AxisType, NamedSharding",
        "from jax.sharding import PartitionSpec as P",
        "",
        f"MESH = {_dict((n, repr(s)) for n, s in data.mesh.axes)}",
        f"NAMES = {_tuple(roots)}  # of the step's arguments",
        f"DONATED = {data.donated!r}",
        "",
        *_table("ARGUMENTS", data.arguments),
        "",
        *_results_table(data),
        "",
    ]
    text = "\n".join(lines) + "\n\n" + HELPERS
    if data.rules:
        text += CONSTRAIN.replace("{rules}", _dict((name, _tuple(axes)) for name, axes in data.rules))
    return text


def logical_axis_rules(data: PlanData) -> tuple[LogicalRule, ...]:
    """Axes of every named dim in flax's form, for `flax.linen.logical_axis_rules`: name to axis, axes, or None.

    Names of the data's dims come first, its leading dim before the others: on a value inside the step the first of two
    rules keeps an axis that they share.
    """
    place: dict[str, int] = {}
    for a in data.arguments:
        for d, name in enumerate(a.dims if a.pair < 0 else ()):
            place[name] = min(d, place.get(name, d))
    ordered = sorted(data.rules, key=lambda rule: place.get(rule[0], len(data.rules) + len(place)))
    return tuple((name, _flat(axes)) for name, axes in ordered)


def _flat(axes: Axes) -> str | tuple[str, ...] | None:
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def _table(name: str, arrays: Sequence[ArrayPlan], copied: Iterable[str] = ()) -> list[str]:
    rows = [f"{name} = {{", *copied]
    for path, spec, a in _entries(arrays):
        shape = f"{a.dtype}[{', '.join(map(str, a.shape))}]"
        rows.append(f"    {_quoted(path)}: {spec_source(spec)},  # {shape}")
    return [*rows, "}"]


def _results_table(data: PlanData) -> list[str]:
    renamed = _renamed_roots(data)
    copied = [
        f'    **{{path.replace("{root}/", "{out}/", 1): spec for path, spec in ARGUMENTS.items() '
        f'if path.startswith("{root}/")}},'
        for out, root in renamed.items()
    ]
    return _table("RESULTS", [r for r in data.results if r.path.partition("/")[0] not in renamed], copied)


def _entries(arrays: Sequence[ArrayPlan]) -> list[tuple[str, Spec, ArrayPlan]]:
    """(path or pattern, spec, an example); layers whose specs differ stand by their own paths."""
    found: list[tuple[str, Spec, ArrayPlan]] = []
    for group in grouped(arrays, lambda a: a.path, lambda a: a.spec):
        regex = re.compile(re.escape(group.pattern).replace(r"\*", r"\d+"))
        if len(group.members) > 1 and sum(bool(regex.fullmatch(a.path)) for a in arrays) == len(group.members):
            found.append((group.pattern, group.first.spec, group.first))
        else:
            found += [(a.path, a.spec, a) for a in group.members]
    return found


def _renamed_roots(data: PlanData) -> dict[str, str]:
    """Roots of results ("0") that hold the same leaves, stored the same, as a root of the arguments ("state")."""
    leaves: dict[str, dict[str, Spec]] = {}
    for side, arrays in (("in", data.arguments), ("out", data.results)):
        for a in arrays:
            root, _, rest = a.path.partition("/")
            leaves.setdefault(f"{side} {root}", {})[rest] = a.spec
    found = {}
    for out, its in leaves.items():
        same = [root for root, theirs in leaves.items() if root.startswith("in ") and theirs == its and "" not in its]
        if out.startswith("out ") and same:
            found[out[4:]] = same[0][3:]
    return found


def spec_source(spec: Spec) -> str:
    """`P('data', None, ('fsdp', 'model'))`, in double quotes, trailing unsplit dims dropped."""
    entries = ["None" if not d else _quoted(d[0]) if len(d) == 1 else _tuple(d) for d in spec.dims]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def _quoted(text: str) -> str:
    return '"' + repr(text)[1:-1].replace('"', '\\"') + '"'


def _dict(items: Iterable[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{_quoted(k)}: {v}" for k, v in items) + "}"


def _tuple(items: Sequence[str]) -> str:
    return f"({', '.join(map(_quoted, items))}{',' if len(items) == 1 else ''})"


def _plain(text: str) -> str:
    """Safe inside a docstring."""
    return re.sub(r'["\\\n]', " ", text)
