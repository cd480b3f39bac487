"""Known ways to train on many devices, as restrictions of the same graph.

dp: the batch is split, everything else whole. zero1: also the optimizer's states split.
fsdp: also the parameters as stored. megatron: one axis splits heads, mlp and vocab, the
activations between blocks stay whole over it; megatron_sp: they are split along the
sequence. tp_fsdp: megatron_sp inside, fsdp over the other axes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from meshplan.strategy._choices import UNREDUCED, UNUSED, Choices
from meshplan.strategy._classes import DimClasses
from meshplan.strategy._graph import Graph, Node

TEMPLATES = ("dp", "zero1", "fsdp", "megatron", "megatron_sp", "tp_fsdp")
TENSOR_TEMPLATES = frozenset({"megatron", "megatron_sp", "tp_fsdp"})

Mask = npt.NDArray[np.bool_]


def template_keep(name: str, graph: Graph, classes: DimClasses) -> Callable[[int, Node, Choices], Mask]:
    """Which strategies of a node the template allows; the last mesh axis is the tensor axis of those that have one."""
    moments, weights = _stored(graph)
    data = {n for i, n in graph.node_of_arg.items() if graph.program.args[i].pair < 0}

    def keep(node: int, about: Node, choices: Choices) -> Mask:
        n_axes = choices.assign.shape[1]
        tensor = n_axes - 1 if name in TENSOR_TEMPLATES else -1
        has_batch = any(classes.of[node, f] == classes.batch for f in range(len(about.sizes)))
        ok = np.ones(len(choices), bool)
        for a in range(n_axes):
            column = choices.assign[:, a]
            allowed = _allowed(name, a == tensor, node, about, classes, has_batch, weights, moments)
            ok &= np.isin(column, [*allowed, UNUSED, UNREDUCED])
        works = node in data or about.kind == "anchor"  # no product is computed whole after gathering the batch
        split = _must_split(name, node, weights, moments) or (works and has_batch)
        return _most_split(ok, choices, tensor) if split else ok

    return keep


def _stored(graph: Graph) -> tuple[set[int], set[int]]:
    """Nodes that store optimizer states (updated where they are read) and those that store parameters."""
    moments, weights = set(), set()
    for i, leaf in enumerate(graph.program.args):
        node = graph.node_of_arg[i]
        if leaf.pair >= 0 and leaf.aval.size > 1:
            (weights if graph.nodes[node].kind == "argument" else moments).add(node)
    return moments, weights


def _allowed(
    name: str, tensor: bool, node: int, about: Node, classes: DimClasses, has_batch: bool, weights: set[int],
    moments: set[int],
) -> list[int]:
    factors = range(len(about.sizes))
    kinds = {f: classes.of[node, f] for f in factors}
    if tensor:
        inner = [f for f in factors if kinds[f] not in (classes.batch, classes.sequence, classes.features)]
        between = name != "megatron" and about.kind in ("chain", "view", "crossing", "result")
        return inner + ([f for f in factors if kinds[f] == classes.sequence] if between else [])
    batch = [f for f in factors if kinds[f] == classes.batch]
    if has_batch or name in ("dp", "megatron", "megatron_sp"):
        return batch
    if name == "zero1" and node in weights:
        return []
    return list(factors)


def _must_split(name: str, node: int, weights: set[int], moments: set[int]) -> bool:
    if name == "zero1":
        return node in moments
    return name in ("fsdp", "tp_fsdp") and node in (weights | moments)


def _most_split(ok: Mask, choices: Choices, tensor: int) -> Mask:
    """Only the strategies that use most of the data axes."""
    used = choices.assign >= 0
    if tensor >= 0:
        used = np.delete(used, tensor, axis=1)
        sizes = np.delete(np.array(choices.mesh.sizes), tensor)
    else:
        sizes = np.array(choices.mesh.sizes)
    parts = np.where(used, sizes, 1).prod(axis=1)
    return ok & (parts == parts[ok].max()) if ok.any() else ok
