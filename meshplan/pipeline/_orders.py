"""The order of work on one stage, schedule by schedule.

Every function gives the (kind, micro-batch, chunk) of one stage of `stages`, without second forwards and updates,
which `meshplan.pipeline.schedule` puts in. Sources: GPipe 1811.06965; 1F1B PipeDream-Flush 2006.09503; interleaved
Narayanan et al. 2104.04473; zero bubble Qi et al. 2401.10241; Merak 2206.04959; AxoNN 2110.13005; XPipe 1911.04610.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from meshplan.pipeline._slots import Slot


def gpipe(stages: int, stage: int, micros: Sequence[int]) -> list[Slot]:
    """All forwards, then all backwards, last micro-batch first."""
    return [Slot("forward", m) for m in micros] + [Slot("backward", m) for m in reversed(micros)]


def one_forward_one_backward(stages: int, stage: int, micros: Sequence[int]) -> list[Slot]:
    """Stage k runs stages - 1 - k forwards, then a forward and a backward in turn, then the other backwards."""
    return list(_alternate(
        [Slot("forward", m) for m in micros], [Slot("backward", m) for m in micros], stages - 1 - stage
    ))


def merak(stages: int, stage: int, micros: Sequence[int]) -> list[Slot]:
    """1F1B where the stage before the last runs its third forward before its first backward."""
    found = one_forward_one_backward(stages, stage, micros)
    if stage == stages - 2 and len(micros) > 2:
        third = Slot("forward", micros[2])
        found.remove(third)
        found.insert(found.index(Slot("backward", micros[0])), third)
    return found


def interleaved(stages: int, stage: int, micros: Sequence[int], chunks: int) -> list[Slot]:
    """1F1B over chunks: micro-batches in groups of `stages`, each group through all chunks of the stage in turn."""
    order = [
        (group + place, chunk) for group, chunk, place in product(
            range(0, len(micros), stages), range(chunks), range(stages)
        )
    ]
    forwards = [Slot("forward", micros[m], chunk) for m, chunk in order]
    backwards = [Slot("backward", micros[m], chunks - 1 - chunk) for m, chunk in order]
    return list(_alternate(forwards, backwards, interleaved_warm_up(stages, stage, chunks)))


def interleaved_warm_up(stages: int, stage: int, chunks: int) -> int:
    """Forwards before the first forward that a backward follows."""
    return 2 * (stages - 1 - stage) + (chunks - 1) * stages


def circular(stages: int, stage: int, micros: Sequence[int], chunks: int) -> list[Slot]:
    """All micro-batches through one chunk after the other, then all the way back: what a scan over ticks gives."""
    forwards = [Slot("forward", m, chunk) for chunk in range(chunks) for m in micros]
    return forwards + [Slot("backward", slot.micro_batch, slot.chunk) for slot in reversed(forwards)]


def zero_bubble_h1(stages: int, stage: int, micros: Sequence[int]) -> list[Slot]:
    """1F1B with the backward in two parts; stage k puts the weight part off by k backwards."""
    found: list[Slot] = []
    for slot in one_forward_one_backward(stages, stage, micros):
        found.append(slot)
        place = slot.micro_batch - micros[0] - stage
        if slot.kind == "backward" and place >= 0:
            found.append(Slot("weight", micros[place]))
    return found + [Slot("weight", m) for m in micros[max(0, len(micros) - stage):]]


def _alternate(forwards: list[Slot], backwards: list[Slot], warm_up: int) -> Iterator[Slot]:
    """`warm_up` forwards, then a forward and a backward in turn until the forwards end, then backwards."""
    warm_up = min(warm_up, len(forwards))
    yield from forwards[:warm_up]
    for place, backward in enumerate(backwards):
        if warm_up + place < len(forwards):
            yield forwards[warm_up + place]
        yield backward
