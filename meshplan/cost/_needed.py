"""What the program waits for: operations on the way to a product of their region."""

from __future__ import annotations

from meshplan.program import CROSSINGS, PIN, STACK
from meshplan.strategy import Graph


def urgent_ops(graph: Graph) -> frozenset[int]:
    """Operations that are a product, lead to one in their region, or to what a loop carries on.

    What only others read is put away: gradients on their way to the optimizer, its norms and updates; stacks that
    leave a loop. A value that is pinned on the way is seen through.
    """
    products = {op for n in graph.nodes if n.kind == "anchor" and n.group is not None for op in n.group.ops}
    read: set[int] = set()
    urgent: set[int] = set()
    for op in reversed(graph.program.ops):
        if op.primitive in CROSSINGS and op.primitive != PIN:
            leads = op.primitive != STACK
        else:
            leads = op.index in products or any(v in read for v in op.results)
        if leads:
            urgent.add(op.index)
            read.update(v for v in op.operands if v is not None)
    return frozenset(urgent)
