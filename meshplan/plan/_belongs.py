"""Is a plan for this program?"""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.core import PlanFileError
from meshplan.plan._data import PlanData
from meshplan.program import Leaf


def check_program(data: PlanData, fingerprint: str, arguments: Sequence[Leaf], name: str = "the plan") -> None:
    """Raises `PlanFileError` where the plan is for another program, naming what differs first.

    `fingerprint` and `arguments` are those of the program at hand: `fingerprint(program)`, `program.args`.
    """
    again = "Plan again for this program, or pass the arguments that were planned."
    planned = {a.path: a for a in data.arguments}
    found = {leaf.path: leaf for leaf in arguments}
    for leaf in arguments:
        have = planned.get(leaf.path)
        what = f"{leaf.aval.dtype}{list(leaf.aval.shape)}"
        if have is None:
            raise PlanFileError(f"{name} is for another program: it has no argument '{leaf.path}' ({what}). {again}")
        if tuple(have.shape) != tuple(leaf.aval.shape) or have.dtype != leaf.aval.dtype:
            raise PlanFileError(
                f"{name} is for another program: argument '{leaf.path}' is {what}, planned was "
                f"{have.dtype}{list(have.shape)}. {again}"
            )
    for path in planned:
        if path not in found:
            raise PlanFileError(
                f"{name} is for another program: the step has no argument '{path}', planned was one. {again}"
            )
    if tuple(planned) != tuple(found):
        raise PlanFileError(f"{name} is for another program: the same arguments in another order. {again}")
    if data.fingerprint != fingerprint:
        raise PlanFileError(
            f"{name} is for another program: the arguments are the same, the operations differ (planned "
            f"{data.fingerprint}, found {fingerprint}). The step has changed, or jax traces it differently: plan again."
        )
