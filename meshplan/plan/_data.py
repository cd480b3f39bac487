"""The answer, as data: what a plan file holds.

Everything here is plain (tuples, strings, numbers), free of jax and of the traced program,
so that a plan can be saved, compared and shown where the program is not at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshplan.core import Axes, Collective, CollectiveKind, MeshShape, Spec

Path = tuple[Spec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlan:
    """One argument or result leaf. `spec` is how it is stored between steps; `used` the specs that the
    program wants it in (none where it is used as stored). `dims` are names of its dims, '' for none."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    used: tuple[Spec, ...] = ()
    dims: tuple[str, ...] = ()
    pair: int = -1
    pinned: bool = False
    moves: Path = ()

    @property
    def nbytes(self) -> int:
        total = _itemsize(self.dtype)
        for n in self.shape:
            total *= n
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlan:
    """One operation: the specs its results go through when made, those its operands go through before use."""

    index: int
    results: tuple[Path, ...] = ()
    uses: tuple[tuple[int, Path], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One mesh shape that the search looked at. `feasible`: it fits the memory limit."""

    mesh: MeshShape
    step_seconds: float
    peak_bytes: float
    feasible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """One of the largest things in memory at the peak."""

    what: str
    nbytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Collectives of one kind over some axes from one line of source, and how long a step waits for them in all.

    `runs`: how often one runs in a step.
    """

    kind: CollectiveKind
    axes: Axes
    source: str
    runs: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """A step on a timeline, modelled: computation in the program's order, collectives beside it where they may be.

    `busy_seconds`: computation, memory traffic included; `exposed_seconds`: collectives that nothing is computed
    beside; `hidden_seconds`: those beside computation. `waits`: what the exposed ones are, the longest first.
    """

    seconds: float
    busy_seconds: float
    exposed_seconds: float
    hidden_seconds: float
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanData:
    """All that a plan says. Seconds and bytes are predicted, per device and step.

    `pins` are patterns of the user's with their specs, `stated` the specs that the step itself states of values inside
    (constraints, `shard_map`), by the line where it does. `kept`: values that enter rematerialised blocks already
    moved, once for all of them, with the specs they go through. `ranked_by`: `Options.rank_by` of the search.
    """

    step: str
    fingerprint: str
    machine: str
    mesh: MeshShape
    arguments: tuple[ArrayPlan, ...]
    results: tuple[ArrayPlan, ...]
    ops: tuple[OpPlan, ...]
    collectives: tuple[Collective, ...]
    flops: float
    compute_seconds: float
    communication_seconds: float
    argument_bytes: float
    peak_bytes: float
    at_peak: tuple[HeldBytes, ...]
    memory_limit: float
    gap: float
    candidates: tuple[Candidate, ...] = ()
    pins: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    rules: tuple[tuple[str, tuple[str, ...]], ...] = ()
    template: str = ""
    workload: str = ""
    donated: tuple[int, ...] = field(default=())
    stated: tuple[tuple[str, str], ...] = ()
    kept: tuple[tuple[int, Path], ...] = ()
    timeline: StepTimeline | None = None
    ranked_by: str = "sum"

    @property
    def step_seconds(self) -> float:
        """What plans were ranked by: the simulated step, or computation and communication one after the other."""
        return self.timeline.seconds if self.simulated and self.timeline else self.serial_seconds

    @property
    def serial_seconds(self) -> float:
        """Computation at the peak rates and communication, one after the other."""
        return self.compute_seconds + self.communication_seconds

    @property
    def simulated(self) -> bool:
        """Whether `step_seconds` is the simulated step."""
        return self.ranked_by == "timeline" and self.timeline is not None


def _itemsize(dtype: str) -> int:
    import numpy as np

    try:
        return int(np.dtype(dtype).itemsize)
    except TypeError:
        import ml_dtypes  # comes with jax

        return int(np.dtype(getattr(ml_dtypes, dtype, np.uint64)).itemsize)
