"""Which operations of a program one kernel computes, as XLA fuses them: known before any strategy.

An elementwise operation is computed where it is read: in each of its readers' kernels if it is cheap, else in one, and
written for the others. A product takes in what makes its operands, and of what follows it the elementwise operations up
to the first value that is read twice. A sum over dims ends a kernel. What is read from memory is what
other kernels made; what is written is what others read, or what leaves its region.

Source of the rules: XLA's instruction fusion (producer into consumer, no duplication of expensive operations, several
results of one kernel), held against modules compiled for TPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshplan.program import CARRY, MERGE, PIN, SLICE, STACK, Op, Program

# Operations that give another name or shape to what is there.
RENAMES = frozenset({
    PIN, "copy", "copy_p", "expand_dims", "mesh_cast", "name", "optimization_barrier", "pvary", "reshape",
    "sharding_constraint", "squeeze", "stop_gradient",
})  # fmt: skip
PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})
# Kernels of their own, whatever is around them.
ALONE = (
    "all_", "approx_top_k", "cholesky", "custom_", "eig", "fft", "gather", "householder", "lu", "pallas", "psum", "qr",
    "ragged", "random_", "reduce_window", "rng", "scatter", "select_and", "shard_map", "sort", "svd", "threefry",
    "top_k", "triangular", "tridiagonal",
)  # fmt: skip
SUMS = ("arg", "cum", "reduce_")
# An operation is computed again for each reader where it reads no more than so many times the bytes that it makes.
MORE_READ = 3.0
LANES = 128  # of a TPU's tiles
# Elementwise operations after a product in which the value through which all of them pass is looked for.
LONGEST = 64


@dataclass(slots=True, eq=False)
class Kernel:
    """Operations computed together. `product`: the dot or convolution among them, or -1; `alone`: nothing fuses.

    `after`: the product and the operations that read what it makes; `spread`: the maxima of rows that others of them
    read for each element, as in a softmax. `reads`: (operation, operand index) of all places
    at which each value from outside is read; `writes`: the operations that make the results it leaves, by value.
    """

    ops: list[int]
    place: tuple[int, int]
    product: int = -1
    alone: bool = False
    after: frozenset[int] = frozenset()
    spread: frozenset[int] = frozenset()
    reads: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)


def relaid(program: Program, held: bool) -> frozenset[int]:
    """Reshapes that split or merge a dim along the lanes into parts that fill less than half of them.

    Seen on TPU: XLA moves them out of the way of what is computed, unless a sharding constraint or a barrier holds
    the parts where they are; then they lie filled up in memory, and nothing is fused with what brings them there.
    `held`: whether the values of the program have shardings.
    """
    barred = {v for op in program.ops if op.primitive == "optimization_barrier" for v in (*op.operands, *op.results)}
    return frozenset(
        op.index for op in program.ops
        if op.primitive == "reshape" and _breaks_lanes(op) and (held or barred & {*op.operands, *op.results})
    )


def _breaks_lanes(op: Op) -> bool:
    last = [next((n for n in reversed(a.shape) if n > 1), 1) for a in (op.view.operands[0], op.view.results[0])]
    return last[0] != last[1] and 2 * min(last) < LANES and op.view.results[0].size > LANES**2


def stands_alone(op: Op) -> bool:
    """Whether nothing is fused with it: a kernel of its own."""
    return op.primitive.startswith(ALONE)


def spreads_apart(op: Op) -> bool:
    """Whether it fills in between elements, which is a kernel of its own (seen on TPU)."""
    return op.primitive == "pad" and any(inside for _, _, inside in op.view.params["padding_config"])


def takes_every_other(op: Op) -> bool:
    """Whether it is a slice with a stride: it reads what lies in memory, all of it (seen on TPU)."""
    return op.primitive == "slice" and any(step > 1 for step in op.view.params["strides"] or ())


def fuse(
    program: Program, moved: frozenset[int] = frozenset(), *, tiled: bool = False, held: bool = False
) -> list[Kernel]:
    """The kernels in the order of their last operations. `moved`: values that a collective brings to their readers.

    `tiled`: with what was seen on TPU alone; `held`: whether the values have shardings, see `relaid`.
    """
    return _Fuser(program, moved, tiled, held).build()


class _Fuser:
    def __init__(self, program: Program, moved: frozenset[int], tiled: bool, held: bool) -> None:
        self.program, self.ops, self.tiled = program, program.ops, tiled
        self.relaid = relaid(program, held) if tiled else frozenset()
        self.root: dict[int, int] = {}  # value -> the value that it is another name of
        for op in self.ops:
            if self._renames(op):
                for v, of in zip(op.results, op.operands, strict=False):
                    if of is not None:
                        self.root[v] = self.find(of)
        self.readers: dict[int, list[tuple[int, int]]] = {}
        self.leaves = {self.find(leaf.value) for leaf in program.results if leaf.value is not None}
        self.moved = {self.find(v) for v in moved}
        self.moved |= {
            self.find(v) for op in self.ops if op.primitive == "optimization_barrier" for v in op.results
        }
        strided = (op.operands[0] for op in self.ops if tiled and takes_every_other(op))
        self.moved |= {self.find(v) for v in strided if v is not None}
        self.before = [0] * len(self.ops)  # bits: the operations that each one waits for
        for op in self.ops:
            self._link(op)
        self.kernels: list[Kernel] = []
        self.of: dict[int, list[Kernel]] = {}

    def find(self, value: int) -> int:
        """The value under its first name."""
        return self.root.get(value, value)

    def _renames(self, op: Op) -> bool:
        return op.primitive in RENAMES and op.index not in self.relaid

    def _alone(self, op: Op) -> bool:
        return stands_alone(op) or op.index in self.relaid or (self.tiled and spreads_apart(op))

    def _link(self, op: Op) -> None:
        if op.primitive in (CARRY, STACK):  # what makes a piece of a stack puts it there
            put = op.operands[1:] if op.primitive == CARRY else op.operands
            self.leaves.update(self.find(v) for v in put if v is not None)
        for k, v in enumerate(op.operands if not self._renames(op) else ()):
            if v is not None:
                self.readers.setdefault(self.find(v), []).append((op.index, k))
        mask = 0
        for v in op.operands:
            made = self.program.values[v].op if v is not None else -1
            if 0 <= made < op.index:
                mask |= self.before[made] | (1 << made)
        self.before[op.index] = mask

    # one kernel after the other

    def build(self) -> list[Kernel]:
        live = self._live()
        computed = [op for op in self.ops if op.index in live and not self._nothing(op)]
        for op in computed:
            if op.primitive in PRODUCTS:
                self._product(op)
            elif self._alone(op):
                self._start(op, alone=True)
        for op in reversed(computed):
            if op.index not in self.of:
                self._place(op)
        self._join()
        self._sum_beside_products()
        for kernel in self.kernels:
            self._borders(kernel)
        return sorted(self.kernels, key=lambda k: max(k.ops))

    def _live(self) -> set[int]:
        """Operations that some result of the step needs."""
        live: set[int] = set()
        for op in reversed(self.ops):
            roots = {self.find(v) for v in op.results}
            if op.primitive in (CARRY, MERGE, STACK) or roots & self.leaves or not roots:
                live.add(op.index)
            elif any(r in live for v in roots for r, _ in self.readers.get(v, ())):
                live.add(op.index)
        for v in [v for v, readers in self.readers.items() if any(r not in live for r, _ in readers)]:
            self.readers[v] = [use for use in self.readers[v] if use[0] in live]
        return live

    def _nothing(self, op: Op) -> bool:
        if op.primitive == STACK:
            return op.operands[0] is None or self._made_here(self.find(op.operands[0]), op)
        return op.primitive in (CARRY, MERGE, SLICE) or self._renames(op) or not op.results

    def _made_here(self, value: int, op: Op) -> bool:
        """Whether an operation of the same loop makes the value, not a collective."""
        made = self.program.values[value].op
        return made >= 0 and value not in self.moved and self.ops[made].region == op.region and not self._nothing(
            self.ops[made]
        )

    def _start(self, op: Op, alone: bool = False) -> Kernel:
        kernel = Kernel(ops=[op.index], place=(op.region, op.scope), alone=alone)
        self.kernels.append(kernel)
        self.of[op.index] = [kernel]
        return kernel

    def _product(self, op: Op) -> None:
        """A product with the elementwise operations after it, up to the last value through which all of them pass."""
        kernel = self._start(op)
        kernel.product = op.index
        taken: list[int] = []
        waiting = {self.find(op.results[0]): self._goes_on(op)}
        size = op.view.results[0].size
        while waiting and not self.moved & waiting.keys() and len(taken) < LONGEST:
            after = self.ops[min((r for rs in waiting.values() for r in rs), default=op.index)]
            if (
                after is op or not self._elementwise(after) or after.index in self.of or len(after.results) != 1
                or (after.region, after.scope) != (op.region, op.scope) or after.view.results[0].size != size
            ):
                break
            taken.append(after.index)
            for readers in waiting.values():
                readers.discard(after.index)
            made = self.find(after.results[0])
            waiting = {v: rs for v, rs in waiting.items() if rs}
            waiting[made] = self._goes_on(after)
            if len(waiting) == 1 and not self._widens(after):  # everything passes here
                self._take(kernel, taken)
                taken = []

    def _goes_on(self, op: Op) -> set[int]:
        """The operations that read the result, but for stacks, where it is put as it is made."""
        readers = (r for r, _ in self.readers.get(self.find(op.results[0]), ()))
        return {r for r in readers if self.ops[r].primitive != STACK}

    def _widens(self, op: Op) -> bool:
        """Whether it converts to a larger type, which is done where it is read."""
        return op.primitive == "convert_element_type" and op.view.results[0].itemsize > op.view.operands[0].itemsize

    def _take(self, kernel: Kernel, ops: list[int]) -> None:
        kernel.ops += ops
        self.of.update((o, [kernel]) for o in ops)

    def _elementwise(self, op: Op) -> bool:
        return not (
            self._nothing(op) or op.primitive in PRODUCTS or self._alone(op) or op.primitive.startswith(SUMS)
        )

    def _place(self, op: Op) -> None:
        """Into the kernels that read it, or one of its own."""
        place = (op.region, op.scope)
        roots = {self.find(v) for v in op.results}
        uses = [r for v in roots for r, _ in self.readers.get(v, ())]
        found: list[Kernel] = []
        for r in uses if not roots & self.moved else ():
            for kernel in self.of.get(r, ()):
                stacks = self.ops[kernel.ops[0]].primitive == STACK and kernel.place[0] == op.region
                if kernel not in found and not kernel.alone and (kernel.place == place or stacks):
                    found.append(kernel)
        elsewhere = bool(roots & (self.leaves | self.moved)) or any(
            not self.of.get(r) or any(k not in found for k in self.of[r]) for r in uses
        )
        if not found or not self._elementwise(op) or op.primitive == STACK:
            self._start(op)
        elif self._cheap(op) and not (elsewhere and all(k.product >= 0 for k in found)):
            self._enter(op, found)
        else:
            legal = [k for k in found if k.product < 0 and not self._cycle(op, k, uses)]
            if legal:
                self._enter(op, legal[-1:])
            else:
                self._start(op)

    def _enter(self, op: Op, kernels: list[Kernel]) -> None:
        for kernel in kernels:
            kernel.ops.append(op.index)
        self.of[op.index] = list(kernels)

    def _cheap(self, op: Op) -> bool:
        """Whether it is computed again in each kernel that reads it: what it reads is not much more than it makes."""
        values = self.program.values
        read = {v for v in op.operands if v is not None and values[v].aval.size > 1}
        return sum(values[v].aval.nbytes for v in read) <= MORE_READ * sum(values[v].aval.nbytes for v in op.results)

    def _cycle(self, op: Op, kernel: Kernel, uses: list[int]) -> bool:
        """Whether another kernel that reads the operation's result leads back to this one."""
        outside = 0
        for r in uses:
            if kernel not in self.of.get(r, ()):
                outside |= 1 << r
        return any(self.before[o] & outside for o in kernel.ops)

    # kernels with several results

    def _join(self) -> None:
        """Kernels over equally many elements that read the same become one, where neither waits for the other."""
        by_read: dict[tuple[int, tuple[int, int], int], list[Kernel]] = {}
        for kernel in self.kernels:
            if kernel.alone or kernel.product >= 0:
                continue
            size = self.size(kernel)
            for v in {v for v, _ in self._outside(kernel)}:
                if self.program.values[v].aval.size * 2 > size > 1:
                    by_read.setdefault((v, kernel.place, size), []).append(kernel)
        for group in by_read.values():
            for other in group[1:]:
                for first in group:
                    if first is other or other not in self.kernels:
                        break
                    if first in self.kernels and not self._waits(first, other):
                        self._merge(first, other)

    def _sum_beside_products(self) -> None:
        """A sum of what a product makes is taken beside it, where nothing in between waits for the product."""
        products = [k for k in self.kernels if k.product >= 0]
        for kernel in sorted(products, key=lambda k: -k.product):  # beside the last of those that it reads
            after = self._after(kernel)
            mask = sum(1 << o for o in after)
            made = {self.find(v) for o in after for v in self.ops[o].results} - self.moved
            reading = {k for v in made for r, _ in self.readers.get(v, ()) for k in self.of.get(r, ())}
            for other in [k for k in self.kernels if k in reading and k is not kernel]:
                if other.product >= 0 or other.alone or other.place != kernel.place:
                    continue
                sums = any(self.ops[o].primitive.startswith(SUMS) for o in other.ops)
                size = self.ops[kernel.product].view.results[0].size
                if sums and self.size(other) == size and not self._between(kernel, other, mask):
                    self._merge(kernel, other)
                    mask |= sum(1 << o for o in other.ops if self.before[o] >> kernel.product & 1)

    def _between(self, kernel: Kernel, other: Kernel, mask: int) -> bool:
        """Whether the second kernel waits for an operation of neither that waits for the first.

        What is known of whole rows of a batched product, as a softmax needs it, holds nothing up: its rows are there.
        """
        wait = 0
        for o in other.ops:
            wait |= self.before[o]
        own = {*kernel.ops, *other.ops}
        product = self.ops[kernel.product]
        rows = product.primitive == "dot_general" and product.view.params["dimension_numbers"][1][0]
        small = product.view.results[0].size // product.view.results[0].shape[-1] if rows else 0
        return any(
            self.before[o] & mask for o in range(min(kernel.ops), max(other.ops))
            if wait >> o & 1 and o not in own and not self._renames(self.ops[o])
            and max(a.size for a in self.ops[o].view.results) > small
        )

    def _waits(self, a: Kernel, b: Kernel) -> bool:
        one, two = set(a.ops), set(b.ops)  # what both compute, neither waits for
        ours, theirs = (sum(1 << o for o in ops) for ops in (one - two, two - one))
        return any(self.before[o] & theirs for o in one) or any(self.before[o] & ours for o in two)

    def _merge(self, a: Kernel, b: Kernel) -> None:
        a.ops += [o for o in b.ops if o not in a.ops]
        for o in b.ops:
            self.of[o] = [*dict.fromkeys(a if k is b else k for k in self.of[o])]
        self.kernels.remove(b)

    # what a kernel reads and writes

    def size(self, kernel: Kernel) -> int:
        """Elements that the kernel goes over."""
        avals = (a for o in kernel.ops for a in (*self.ops[o].view.operands, *self.ops[o].view.results))
        return max(a.size for a in avals)

    def _outside(self, kernel: Kernel) -> Iterator[tuple[int, tuple[int, int]]]:
        """Values read that no operation of the kernel makes, and where they are read."""
        inside = {v for o in kernel.ops for v in self.ops[o].results}
        for o in sorted(kernel.ops):
            for k, v in enumerate(self.ops[o].operands):
                if v is not None and self.find(v) not in inside and not self.program.values[v].constant:
                    yield self.find(v), (o, k)

    def _after(self, kernel: Kernel) -> list[int]:
        return [o for o in kernel.ops if o == kernel.product or self.before[o] >> kernel.product & 1]

    def _borders(self, kernel: Kernel) -> None:
        kernel.after = frozenset(self._after(kernel) if kernel.product >= 0 else ())
        maxima = [o for o in kernel.ops if self.ops[o].primitive == "reduce_max"]
        kernel.spread = frozenset(o for o in maxima if any(self.before[p] >> o & 1 for p in kernel.ops))
        for value, at in self._outside(kernel):
            kernel.reads.setdefault(value, []).append(at)
        for o in kernel.ops:
            if self.of[o][0] is not kernel:
                continue  # computed elsewhere as well, and written there
            for v in self.ops[o].results:
                if v in self.leaves or self.ops[o].primitive == STACK or self._read_elsewhere(o, v):
                    kernel.writes[v] = o

    def _read_elsewhere(self, op: int, value: int) -> bool:
        """Whether a kernel reads the value that does not compute it itself, or a collective moves it."""
        computed = self.of[op]
        return value in self.moved or any(
            not self.of.get(r) or any(k not in computed for k in self.of[r]) for r, _ in self.readers.get(value, ())
        )
