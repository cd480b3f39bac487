"""When each value is in memory: positions in the order of the operations, loops respected.

A value that a loop's body reads from outside lives to the end of the loop; a stacked result
is allocated when its loop starts. Elementwise chains keep only what leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.program import CARRY, STACK, Program
from meshplan.strategy import Graph, kernels


@dataclass(frozen=True, slots=True)
class Liveness:
    """`span[v]`: first and last position at which value v is held. `end`: one past the last operation."""

    span: tuple[tuple[int, int], ...]
    end: int


def kernel_ends(graph: Graph) -> list[int]:
    """For each operation the last one of the fused kernel it is part of: what it reads is held until then."""
    ends = list(range(len(graph.program.ops)))
    for node in graph.nodes:
        if node.kind != "chain" or node.group is None:
            continue
        level = kernels(node.group, graph.program)
        last: dict[int, int] = {}
        for index, k in level.items():
            last[k] = max(last.get(k, 0), index)
        for index, k in level.items():
            ends[index] = last[k]
    return ends


def liveness(graph: Graph) -> Liveness:
    """When every value is held; arguments, constants and results until the end of the step."""
    program, ends_at = graph.program, kernel_ends(graph)
    ops, regions = program.ops, program.regions
    end = len(ops)
    spans = [[end, -1] for _ in regions]
    for op in ops:
        region = op.region
        while region >= 0:
            spans[region][0] = min(spans[region][0], op.index)
            spans[region][1] = max(spans[region][1], op.index)
            region = regions[region].parent
    ancestors = [_ancestors(program, r) for r in range(len(regions))]
    held: list[tuple[int, int]] = []
    kept = {leaf.value for leaf in program.results}
    for v, value in enumerate(program.values):
        if value.op < 0:
            held.append((0, end))
            continue
        producer = ops[value.op]
        home = producer.region
        birth = value.op
        if producer.primitive in (STACK, CARRY):
            birth = spans[home][0]
            home = regions[home].parent
        death = birth if producer.primitive != CARRY else spans[producer.region][1]
        if producer.primitive == STACK:
            death = spans[producer.region][1]
        for use, _ in program.consumers[v]:
            death = max(death, _until(ops[use].region, home, ends_at[use], ancestors, spans))
        held.append((birth, end if v in kept else death))
    return Liveness(tuple(held), end)


def _ancestors(program: Program, region: int) -> list[int]:
    chain = [region]
    while program.regions[chain[-1]].parent >= 0:
        chain.append(program.regions[chain[-1]].parent)
    return chain


def _until(use_region: int, home: int, use: int, ancestors: list[list[int]], spans: list[list[int]]) -> int:
    """End of the outermost loop below `home` that contains the use; the use itself in the same region."""
    last = use
    for region in ancestors[use_region]:
        if region == home:
            return last
        last = spans[region][1]
    return last


