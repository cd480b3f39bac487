"""Small programs compiled ahead of time: the compiler's cycles against the compute model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshplan as mp
from meshplan.cost._compute import compute_parts
from meshplan.lower._hlo_cycles import count_cycles
from tests._cycles import F32, TARGETS, Sweep, arg, chosen_of

PROGRAMS = (
    Sweep("layer", "product", lambda x, w, b: jnp.tanh(x @ w + b), (arg(3000, 700), arg(700, 1500), arg(1500))),
    Sweep("update", "elementwise", lambda p, m, g: (p - 0.1 * (m + g), m + g), (arg(12000, 4000, dtype=F32),) * 3),
)


@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_modelled_seconds_are_within_forty_percent_of_the_compilers_cycles(program: Sweep, name: str) -> None:
    chosen = chosen_of(program.fn, program.args, TARGETS[name])
    everywhere = NamedSharding(AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,)), P())
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere) for a in program.args]
    audit = mp.audit(jax.jit(program.fn), *args, target=TARGETS[name])
    cycles, clock = count_cycles(audit.module_text), chosen.model.machine.chip.clock_hertz
    assert cycles is not None
    assert clock is not None
    modelled = sum(p.seconds * p.count for p in compute_parts(chosen) if p.estimated)
    assert modelled == pytest.approx(cycles.seconds(clock), rel=0.4)
