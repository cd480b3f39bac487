"""What is measured: small programs, each device of a mesh doing the same at the same time.

A kernel runs in a loop on the device whose number of turns is an argument, so that the time of a turn is the
difference between many and few turns: neither the call nor the first touch of memory is in it. Each turn writes one
element of the first array from what the turn before made, or the compiler would compute all once; of one array alone,
for the compiler copies two. And each turn runs the kernel on several copies of its arrays, so that caches help as
little as in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshplan.core import KINDS, CollectiveKind
from meshplan.machine._calibrate_fit import Work
from meshplan.machine._chip import KernelKind

Function = Callable[..., Any]
# What a turn goes over on each device, and at most so many arrays. So much on eight devices is in no cache, if "cold".
TURN_BYTES, MOST_COPIES = 4 << 20, 16
COLD = "cold"
COLD_BYTES = 32 << 20
CHAIN = 4  # how often a map's primitive is applied, so that arithmetic and not memory is measured


@dataclass(frozen=True, slots=True)
class Input:
    """One array on each device. Whole numbers are below `below`, in no order; others are all 0.5."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    below: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProbe:
    kind: KernelKind
    name: str = ""
    dtype: str = "float32"
    work: Work
    function: Function
    inputs: tuple[Input, ...]
    looped: bool = True
    single: bool = False

    @property
    def copies(self) -> int:
        """How often a turn runs the kernel, each time on other arrays."""
        nbytes = sum(math.prod(i.shape) * (2 if i.dtype == "bfloat16" else 4) for i in self.inputs)
        wanted = COLD_BYTES if self.name == COLD else TURN_BYTES
        return max(1, min(MOST_COPIES, wanted // nbytes)) if self.looped and not self.single else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveProbe:
    """`mesh`: sizes of the axes of the mesh, `axis`: which of them the groups lie along."""

    kind: CollectiveKind
    mesh: tuple[int, ...]
    axis: int
    nbytes: int

    @property
    def size(self) -> int:
        return self.mesh[self.axis]

    @property
    def copies(self) -> int:
        """Large ones run on several arrays in turn; small ones alone, or compilers would combine them."""
        return max(1, 2 * TURN_BYTES // self.nbytes) if self.nbytes >= 1 << 20 else 1


def kernel_probes(quick: bool, devices: int = 8) -> tuple[KernelProbe, ...]:
    """Every kernel that is measured, in a fixed order."""
    parts = [_calls(quick), _products(quick), _convolutions(quick), _maps(quick), _reductions(quick), _moves(quick)]
    parts += [_apart(quick)] if devices > 1 else []
    return tuple(probe for part in parts for probe in part)


def collective_probes(devices: int, quick: bool) -> tuple[CollectiveProbe, ...]:
    """Each kind over all devices and over groups, neighbours and strided ones."""
    meshes: list[tuple[int, ...]] = [(devices,)]
    meshes += [(n, devices // n) for n in range(2, devices) if devices % n == 0][: 1 if quick else None]
    sizes = (1 << 12, 1 << 20) if quick else (1 << 10, 1 << 20, 1 << 22, 1 << 23)
    return tuple(
        CollectiveProbe(kind=kind, mesh=mesh, axis=axis, nbytes=nbytes)
        for kind in KINDS for mesh in meshes for axis in range(len(mesh)) for nbytes in sizes
    )  # fmt: skip


def _calls(quick: bool) -> Iterator[KernelProbe]:
    one, few = Input((1,)), Input((256,))
    for leaves in (1, 16):
        yield KernelProbe(
            kind="dispatch", work=Work(batches=leaves), function=lambda *xs: tuple(x + 1 for x in xs),
            inputs=(one,) * leaves, looped=False,
        )
    for links in (8, 40):
        yield KernelProbe(
            kind="kernel", work=Work(batches=2 * links), function=_sums(links), inputs=(few,), looped=False
        )
    for name, n in (("", 1 << 21), ("", 1 << 22), ("large", 12 << 20)):
        if not quick or n != 1 << 22:
            yield KernelProbe(
                kind="first-touch", name=name, work=Work(nbytes=4 * n), function=lambda x: x + 1,
                inputs=(Input((n,)),), looped=False,
            )


def _sums(links: int) -> Function:
    """Two kernels a link, each of which waits for the one before: a sum, and what is added to every element."""

    def chained(x: Any) -> Any:
        for _ in range(links):
            x = x * 0.5 + x.sum()
        return x

    return chained


def _products(quick: bool) -> Iterator[KernelProbe]:
    import jax.numpy as jnp

    squares = [(1, n, n, n) for n in ((64, 256) if quick else (32, 64, 128, 256, 512))]
    thin = [(1, 512, 32, 512), (1, 512, 512, 32), (1, 32, 512, 512), (1, 2048, 64, 256), (1, 2048, 256, 64)]
    many = [(32, 64, 16, 64), (32, 64, 64, 16), (8, 128, 32, 128), (64, 32, 32, 32)]
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        shapes = [*squares, *thin[:1], *many[:1]] if quick or dtype != "float32" else [*squares, *thin, *many]
        for b, m, k, n in shapes:
            yield KernelProbe(
                kind="matmul", dtype=dtype, function=jnp.matmul,
                work=Work(flops=2.0 * b * m * k * n, nbytes=size * b * (m * k + k * n + m * n), batches=b),
                inputs=(Input((b, m, k)[b == 1:], dtype), Input((b, k, n)[b == 1:], dtype)),
            )  # fmt: skip


def _convolutions(quick: bool) -> Iterator[KernelProbe]:
    import jax
    from jax import lax

    def forward(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def of_kernel(x: Any, w: Any, g: Any) -> Any:
        return jax.vjp(lambda k: forward(x, k), w)[1](g)[0]

    for b, side, c, out in ((2, 8, 16, 16),) if quick else ((2, 8, 16, 16), (4, 16, 16, 16), (2, 16, 32, 64)):
        x, w, g = Input((b, side, side, c)), Input((3, 3, c, out)), Input((b, side, side, out))
        arrays = 4 * sum(float(np.prod(i.shape)) for i in (x, w, g))
        work = Work(flops=2.0 * b * side * side * 9 * c * out, nbytes=arrays)
        yield KernelProbe(kind="convolution", work=work, function=forward, inputs=(x, w), single=True)
        yield KernelProbe(
            kind="convolution", name="kernel-gradient", work=work, function=of_kernel, inputs=(x, w, g), single=True
        )


def _maps(quick: bool) -> Iterator[KernelProbe]:
    import jax.numpy as jnp
    from jax import lax

    for n in (1 << 10, 1 << 18) if quick else (1 << 8, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 21):
        x = Input((n,))
        yield KernelProbe(kind="map", work=Work(nbytes=8 * n), function=lambda x: x * 0.25, inputs=(x,))
    n = 1 << 20
    yield KernelProbe(
        kind="map", name=COLD, work=Work(nbytes=8 * n), function=lambda x: x * 0.25, inputs=(Input((n,)),)
    )
    primitives: dict[str, Function] = {
        "mul": lambda x: (x * x - 0.3) * (x + 0.7), "exp": jnp.exp, "log": jnp.log, "tanh": jnp.tanh,
        "logistic": lax.logistic, "erf": lax.erf, "sin": jnp.sin, "rsqrt": lax.rsqrt, "sqrt": jnp.sqrt,
        "div": lambda x: 1.5 / (x + 1.0), "pow": lambda x: x**1.7, "select_n": lambda x: jnp.where(x > 0.6, x, 0.4),
    }  # fmt: skip
    n = 1 << 16
    for name, f in primitives.items() if not quick else [(k, primitives[k]) for k in ("mul", "exp", "div")]:
        times = CHAIN * (4 if name == "mul" else 1)
        yield KernelProbe(
            kind="map", name=name, work=Work(elements=times * n), function=_chain(f), inputs=(Input((n,)),)
        )


def _chain(f: Function) -> Function:
    def chained(x: Any) -> Any:
        for _ in range(CHAIN):
            x = f(x) * 0.25 + 0.5
        return x

    return chained


def _apart(quick: bool) -> Iterator[KernelProbe]:
    """A product, a small all-reduce, and the two after each other (see `alone`)."""
    import jax.numpy as jnp
    from jax import lax

    for n in (128, 256) if quick else (64, 128, 256, 384):
        x = Input((n, n))
        parts: dict[str, Function] = {
            "product": jnp.matmul, "sum": lambda x, y: lax.psum(x[:1, :64], "a"),
            "both": lambda x, y: lax.psum((x @ y)[:1, :64], "a"),
        }  # fmt: skip
        for name, f in parts.items():
            yield KernelProbe(kind="apart", name=f"{name} {n}", work=Work(), function=f, inputs=(x, x), single=True)


def _reductions(quick: bool) -> Iterator[KernelProbe]:
    import jax.numpy as jnp

    for m, n in ((512, 128),) if quick else ((64, 64), (512, 128), (2048, 256), (128, 4096)):
        x, work = Input((m, n)), Work(elements=m * n)
        yield KernelProbe(kind="reduce", name="minor", work=work, function=lambda x: x.sum(1), inputs=(x,))
        yield KernelProbe(kind="reduce", name="major", work=work, function=lambda x: x.sum(0), inputs=(x,))
    x, work = Input((512, 128)), Work(elements=512 * 128)
    others: dict[str, Function] = {
        "argmax": lambda x: jnp.argmax(x, 1), "cumsum": lambda x: jnp.cumsum(x, 1), "sort": lambda x: jnp.sort(x, 1),
    }  # fmt: skip
    for name, f in others.items() if not quick else ():
        yield KernelProbe(kind="reduce", name=name, work=work, function=f, inputs=(x,))


def _moves(quick: bool) -> Iterator[KernelProbe]:
    import jax.numpy as jnp

    for m, n in ((256, 256),) if quick else ((64, 64), (256, 256), (1024, 512)):
        yield KernelProbe(
            kind="transpose", work=Work(nbytes=8.0 * m * n), function=lambda x: x.T, inputs=(Input((m, n)),)
        )
    for rows, width in ((256, 64),) if quick else ((32, 64), (512, 64), (512, 256)):
        table, at, new = Input((512, width)), Input((rows,), "int32", 512), Input((rows, width))
        work = Work(batches=rows, nbytes=8.0 * rows * width)
        yield KernelProbe(
            kind="gather", work=work, function=lambda t, i: jnp.take(t, i, axis=0, mode="clip"), inputs=(table, at)
        )
        yield KernelProbe(
            kind="scatter", work=work, function=lambda t, i, x: t.at[i].add(x), inputs=(table, at, new)
        )


def looped(function: Function, mesh: Any, inputs: int, copies: int = 1) -> Function:
    """`(turns, *arrays)`: so many turns on every device of a mesh over all its axes; jitted.

    A turn is the function of each of the `copies` groups of arrays.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import PartitionSpec

    whole, split = PartitionSpec(), PartitionSpec(mesh.axis_names)

    def touched(array: Any, made: Any) -> Any:
        one = jnp.clip(made.reshape(-1)[0], 0, 0.5).astype(array.dtype)
        return lax.dynamic_update_slice(array, one.reshape((1,) * array.ndim), (0,) * array.ndim)

    def local(turns: Any, *arrays: Any) -> Any:
        def turn(_: Any, state: Any) -> Any:
            first = [touched(a, jax.tree.leaves(m)[0]) for a, m in zip(*state, strict=True)]
            return first, [function(a, *others) for a, (_, *others) in zip(first, groups, strict=True)]

        groups = [tuple(a[0] for a in arrays[i : i + inputs]) for i in range(0, len(arrays), inputs)]
        one = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(function, *groups[0]))
        _, made = lax.fori_loop(0, turns, turn, ([g[0] for g in groups], [one] * copies))
        return jax.tree.map(lambda x: x.reshape(-1)[:1], made)

    given = (whole, *(split,) * (inputs * copies))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=given, out_specs=split, check_vma=False))


def called(function: Function, mesh: Any, inputs: int) -> Function:
    """`(turns, *arrays)`: the function once; turns are for `repeat` to make by calls."""
    import jax
    from jax.sharding import PartitionSpec

    split = PartitionSpec(mesh.axis_names)
    once = jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=(split,) * inputs, out_specs=split, check_vma=False)
    )

    def calls(turns: Any, *arrays: Any) -> None:
        for _ in range(int(turns)):
            jax.block_until_ready(once(*arrays))

    return calls


def collective_function(kind: CollectiveKind, axis: str, size: int) -> Function:
    """The collective over one axis of a mesh, of an array of one dim."""
    from jax import lax

    if kind == "all-reduce":
        return lambda x: lax.psum(x, axis)
    if kind == "all-gather":
        return lambda x: lax.all_gather(x, axis, tiled=True)
    if kind == "reduce-scatter":
        return lambda x: lax.psum_scatter(x, axis, tiled=True)
    if kind == "all-to-all":
        return lambda x: lax.all_to_all(x, axis, 0, 0, tiled=True)
    return lambda x: lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


def collective_input(probe: CollectiveProbe) -> Input:
    """What each device has before: a part of `nbytes` where they are gathered."""
    elements = probe.nbytes // 4
    return Input((max(1, elements // probe.size) if probe.kind == "all-gather" else elements,))


def array(given: Input, devices: Sequence[Any], mesh: Any) -> Any:
    """The input on every device, behind a first dim that is split over the whole mesh."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    shape = (len(devices), *given.shape)
    if given.dtype == "int32":
        values = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape) * 7919 % given.below
    else:
        values = np.full(shape, 0.5, np.float32)
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.device_put(values.astype(given.dtype if given.dtype != "bfloat16" else np.float32), sharding).astype(
        given.dtype
    )
