"""The sm90 matrix product that the linear and head families share: x [T, K] @ w[N, K].T, as chains in ascending K.

A persistent, warp-specialised kernel (the plan of JAX's own hopper_matmul_mgpu, and CUTLASS's cooperative kernels): one
producer warpgroup streams tiles of x and w through a ring in shared memory by TMA, consumer warpgroups run wgmma. The
ring runs on across work items, so that the producer fetches the next item while the consumers finish the last one.

Numerics: a leaf is one fp32 accumulator over ascending K; leaves are added by a balanced tree, lower leaf on the left,
on chip. Tiles past the edge of T, N or K read zeros (TMA) and are clipped when stored; zeros after the end of a chain
are exact no-ops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax._jax_internals import interpreting
from isojax.pallas_kernels.chip import SMS
from isojax.pallas_kernels.linear.tiles import PRODUCER_REGISTERS, Tiles


class Item(NamedTuple):
    """One work item: first row of x, first row of w, first column of both, and a leaf for finish to know."""

    row: Any
    col: Any
    depth: Any = 0
    leaf: Any = 0


class Stored(NamedTuple):
    """How the operands lie in memory: as [rows, K], or with the contraction first, as [K, rows].

    chunk: columns of a swizzled block, at most; wgmma wants the same for both, so it must divide every warpgroup's
    share and every total of an operand that is stored [K, rows]. 64 (128 bytes) is best, 16 is the least.
    """

    x_first: bool = False
    w_first: bool = False
    chunk: int = 64


ROWS_FIRST = Stored()


class Scratch(NamedTuple):
    """Shared memory of one block, as kernel scratch: see `scratch`."""

    x: Any  # [stages, rows, k], or [stages, k, rows]
    w: Any  # [stages, cols, k], or [stages, k, cols]
    full: Any  # a stage is filled
    free: Any  # a stage may be overwritten
    stage: Any  # [warpgroups, slots, 64, wide]: output on its way to TMA; absent where nothing is stored
    park: Any  # [warpgroups, levels, m, n - kept] fp32: upper levels of the tree; absent where registers suffice
    x_half: Any = None  # x and w once more, for steps half as wide: [2 * stages, rows, k / 2], stage i at 2 * i
    w_half: Any = None
    meet: Any = None  # what meet_sm90 adds: leaves of a tile that lie in several blocks


def tiled(cols: int, dtype: Any) -> tuple[Any, ...]:
    """Transforms that store a [.., rows, cols] buffer as wgmma and TMA want it: 8-row tiles, widest swizzle."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(cols * size * 8)
    tiling = plgpu.TilingTransform((8, swizzle // size))  # pyright: ignore[reportAbstractUsage]
    if swizzle == 16:
        return (tiling,)
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def chunk(n: int, total: int, dtype: Any) -> int:
    """Columns stored at a time: 128 bytes, or less where that divides neither a warpgroup's n nor the output's total.

    Mosaic's TMA sees the output as whole [8, chunk] tiles, so both the origin and the size must be multiples.
    """
    both = math.gcd(n, total)
    return min(128 // jnp.dtype(dtype).itemsize, both & -both)


def parking(*shape: int) -> Any:
    """fp32 sums [.., m, n] in shared memory, in tiles that a warpgroup reads and writes without bank conflicts."""
    return plgpu.SMEM(shape, jnp.float32, transforms=(plgpu.TilingTransform((8, 8)),))  # pyright: ignore[reportAbstractUsage]


def scratch(
    t: Tiles,
    leaves: int,
    out_dtype: Any = None,
    wide: int = 0,
    stored: Stored = ROWS_FIRST,
    reserved: int = 0,
    halves: bool = False,
) -> Scratch:
    """The scratch types of a product with these tiles, None where absent. wide: columns stored at a time, or 0.

    reserved: bytes of shared memory that the caller uses besides. halves: some steps are half as wide (`product`).
    """
    groups, stage, park, used = t.warpgroups, None, None, reserved
    slots, part = 2, 64 * wide * jnp.dtype(out_dtype or jnp.int8).itemsize
    levels, apart = t.parked(leaves), t.n - t.kept(leaves)
    if parked := levels * t.m * apart:
        park = parking(groups, levels, t.m, apart)
        used += groups * parked * 4
        slots = parked * 4 // part if wide else 0
    if wide:
        stage = plgpu.SMEM((groups, slots, 64, wide), out_dtype, transforms=tiled(wide, out_dtype))
        used += 0 if parked else groups * slots * part
    stages = t.stages(used)
    if stages < 2:
        raise ValueError(f"{t} leaves no room for two pipeline stages in shared memory")
    operand = lambda shape, cols: plgpu.SMEM(shape, jnp.bfloat16, transforms=tiled(cols, jnp.bfloat16))
    ring = lambda shape: operand(shape, min(t.k, stored.chunk))
    half = lambda rows: operand((2 * stages, rows, t.k // 2), t.k // 2) if halves else None
    shape = lambda first, rows: (stages, t.k, rows) if first else (stages, rows, t.k)
    if t.cluster == 1:
        free = plgpu.Barrier(num_arrivals=groups, num_barriers=stages)
    else:
        free = plgpu.ClusterBarrier(collective_axes=("peer",), num_arrivals=groups, num_barriers=stages)
    return Scratch(
        ring(shape(stored.x_first, t.rows)),
        ring(shape(stored.w_first, t.cols)),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        free,
        stage,
        park,
        half(t.rows),
        half(t.cols),
    )


def launch(
    body: Callable[..., None], out_type: Any, t: Tiles, items: int, s: Scratch, even: bool = False
) -> Callable[..., Any]:
    """A persistent plgpu.kernel over `items` work items. body(*operands, *outputs, scratch).

    even: the fewest blocks that need no more turns than one on every SM: as fast by count, and each has more power and
    bandwidth (0.5 to 2% measured on an H200 where products bind).
    """
    places = SMS // t.blocks
    blocks = -(-items // -(-items // places)) if even else min(items, places)
    present = {k: v for k, v in s._asdict().items() if v is not None}
    absent = dict.fromkeys(s._fields)
    # One memory: when a warpgroup stores a total, nothing of it is parked any more. Its shares are equally large.
    unions = [("park", "stage")] if s.park is not None and s.stage is not None else []
    if s.x_half is not None and not interpreting():  # its race detector takes all stages of a union for one place
        unions += [("x", "x_half"), ("w", "w_half")]
    for a, b in unions:
        present[a] = plgpu.RefUnion(present[a], present.pop(b))

    def with_scratch(*refs: Any, **kw: Any) -> None:
        for a, b in unions:
            kw[a], kw[b] = kw[a]
        body(*refs, Scratch(**{**absent, **kw}))

    return plgpu.kernel(
        with_scratch,
        out_type=out_type,
        scratch_types=present,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=t.warpgroups + 1,
        thread_name="wg",
        cluster=(t.blocks,) if t.blocks > 1 else (),
        cluster_names=("peer",) if t.blocks > 1 else (),
    )


def snake(t: Tiles, rows: int, cols: int) -> tuple[int, Callable[[Any], tuple[Any, Any]]]:
    """(work items, item -> (block row, block column)) over a [rows, cols] grid of block tiles, in L2-friendly order.

    In a cluster one item is that many neighbouring tiles, and each block takes its own.
    """
    if t.cluster > 1:
        rows, cols = (rows, -(-cols // t.cluster)) if t.shared == "x" else (-(-rows // t.cluster), cols)

    def locate(i: Any) -> tuple[Any, Any]:
        r, c = plgpu.planar_snake(i, (rows, cols), 1, t.snake)
        if t.cluster > 1:
            peer = lax.axis_index("peer")
            r, c = (r, c * t.cluster + peer) if t.shared == "x" else (r * t.cluster + peer, c)
        return r, c

    return rows * cols, locate


def opaque(n: int) -> jax.Array:
    """n, as a value that the compiler cannot see: a loop up to it is not unrolled, which saves registers and time."""
    return lax.optimization_barrier(jnp.int32(n))


def join(sums: list[tuple[jax.Array, int]], value: jax.Array) -> list[tuple[jax.Array, int]]:
    """Sums of a balanced tree, each with its count of leaves, after one more leaf: equal neighbours are added.

    Pinned where they are made: LLVM would put them off until after later leaves and keep every leaf alive.
    """
    count = 1
    while sums and sums[-1][1] == count:
        *sums, (left, _) = sums
        value, count = lax.optimization_barrier(left + value), 2 * count
    return [*sums, (value, count)]


def product(
    x: Any,
    w: Any,
    s: Scratch,
    t: Tiles,
    *,
    items: int,
    locate: Callable[[Any], Item],
    steps: int,
    leaves: int,
    finish: Callable[..., None],
    stored: Stored = ROWS_FIRST,
) -> None:
    """Run work items: `leaves` chains of `steps` steps each, from locate(item), then finish.

    With s.x_half a leaf ends in the middle of a step, and the next one starts there: of the step that two leaves share
    each loads and multiplies its half.
    finish(item, row, col, *parts): called in each consumer warpgroup with its [m, n] fp32 total, in one part or, where
    registers kept some columns of a parked sum, in two side by side; and with where it starts in the output.
    """
    stages = s.x.shape[0]
    halves = s.x_half is not None
    every = steps * leaves  # ring steps of an item
    behind = min(max(1, 64 // t.k), steps - 1, stages // 2)  # steps that multiply while the next one is issued
    wg = lax.axis_index("wg")

    def share(operand: str) -> Any:
        return ("peer",) if t.cluster > 1 and t.shared == operand else None

    def window(first: bool, rows: Any, k: Any) -> tuple[Any, Any]:
        return (k, rows) if first else (rows, k)

    def matrix(ref: Any, first: bool, slot: Any, rows: Any) -> Any:
        """`rows` of a stage, as a [rows, k] matrix."""
        return ref.at[slot, :, rows].T if first else ref.at[slot, rows]

    @pl.when(wg == t.warpgroups)
    def _produce():
        if t.warpgroups > 1:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def stream(operand: str) -> None:
            """Load all of one operand, in one warp: two warps issue copies twice as fast as one warpgroup."""
            first, source, target = (stored.x_first, x, s.x) if operand == "x" else (stored.w_first, w, s.w)
            target_half = s.x_half if operand == "x" else s.w_half

            @plgpu.nd_loop((items,), collective_axes="block")
            def _item(info):
                at = locate(info.index[0])
                rows = pl.ds(at.row, t.rows) if operand == "x" else pl.ds(at.col, t.cols)

                def load(i, _):
                    slot = lax.rem(info.local_index * every + i, stages)
                    plgpu.barrier_wait(s.free.at[slot])

                    def copy(start, k, to):
                        part = source.at[window(first, rows, pl.ds(at.depth + start, k))]
                        plgpu.copy_gmem_to_smem(part, to, s.full.at[slot], collective_axes=share(operand))

                    if not halves:
                        copy(i * t.k, t.k, target.at[slot])
                        return
                    j = lax.rem(i, jnp.int32(2 * steps))  # step of the pair of leaves
                    odd = jnp.where(j >= steps, 1, 0)
                    whole = lax.div(i, jnp.int32(2 * steps)) * (2 * steps - 1) + j - odd

                    @pl.when((j == steps - 1) | (j == steps))
                    def _():
                        copy((2 * whole + odd) * (t.k // 2), t.k // 2, target_half.at[2 * slot])

                    @pl.when((j < steps - 1) | (j > steps))
                    def _():
                        copy(whole * t.k, t.k, target.at[slot])

                lax.fori_loop(0, every, load, None)

            # Wait until every stage was read, here and in the cluster: no block may leave while peers write to it.
            for i in range(stages):
                plgpu.barrier_wait(s.free.at[i])

        @plgpu.warp_map
        def _warp(warp):
            pl.when(warp == 0)(functools.partial(stream, "x"))
            pl.when(warp == 1)(functools.partial(stream, "w"))

    @pl.when(wg < t.warpgroups)
    def _consume():
        if t.warpgroups > 1:
            plgpu.set_max_registers(t.budget, action="increase")
        down, right = wg // t.groups[1], lax.rem(wg, t.groups[1])
        for i in range(stages):  # all stages begin free
            plgpu.barrier_arrive(s.free.at[i])

        @plgpu.nd_loop((items,), collective_axes="block")
        def _item(info):
            at = locate(info.index[0])

            def some(low: Any, count: int) -> jax.Array:
                """The sum of `count` leaves from `low`, in registers. A leaf's first steps run before the last ones of
                the leaf before it have ended, so that the tensor cores wait for no sum; its accumulator is one that
                the tree has room for then."""
                first: dict[int, Any] = {}  # ring step of each leaf
                # LLVM would keep every leaf's address alive; where sums leave no room for that, each waits for its leaf
                tight = halves or (leaves > 4 and t.n > 64 and not t.parked(leaves))
                pinned = lax.optimization_barrier if tight else lambda i: i

                def mma(acc, j, i, half=False):
                    slot = lax.rem(first[j] + i, stages)
                    plgpu.barrier_wait(s.full.at[slot])
                    x, w, slot = (s.x_half, s.w_half, 2 * slot) if half else (s.x, s.w, slot)
                    a = matrix(x, stored.x_first, slot, pl.ds(down * t.m, t.m))
                    b = matrix(w, stored.w_first, slot, pl.ds(right * t.n, t.n))
                    plgpu.wgmma(acc, a, b.T)

                def release(j, i):
                    plgpu.barrier_arrive(s.free.at[lax.rem(first[j] + i, stages)])

                def rest(acc, j):
                    def step(i, _, half=False):
                        mma(acc, j, i, half)
                        plgpu.wgmma_wait(behind)
                        release(j, i - behind)

                    whole = steps - (halves and j % 2 == 0)
                    lax.fori_loop(behind, opaque(whole), step, None)
                    if whole < steps:
                        step(whole, None, half=True)

                def ended(acc, j, running):
                    """Leaf j's sum, when at most `running` steps of the next one are under way."""
                    value = lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc, wait_n=running))
                    for i in range(steps - behind, steps):
                        release(j, i)
                    return value

                def leaf(j, before, sums):
                    first[j] = pinned(info.local_index * every + (low + j) * steps)

                    def run(acc):
                        for i in range(behind):
                            mma(acc, j, i, half=halves and j % 2 == 1 and i == 0)
                        done = join(sums, ended(before, j - 1, behind)) if j else sums
                        rest(acc, j)
                        if j + 1 < count:
                            return leaf(j + 1, acc, done)
                        [(total, _)] = join(done, ended(acc, j, 0))
                        return total

                    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((t.m, t.n), jnp.float32))

                return leaf(0, None, [])

            def add(low: Any, count: int, level: int) -> list[jax.Array]:
                if level >= t.parked(leaves):
                    return [some(low, count)]
                half = functools.partial(add, count=count // 2, level=level + 1)
                kept = 0 if level else t.kept(leaves)
                park = s.park.at[wg, level] if kept < t.n else None

                def each(i, before):  # a loop: half as much code as both halves written out, and fewer registers
                    [part] = half(low + i * (count // 2))

                    if park is not None:

                        @pl.when(i == 0)
                        def _(park=park):
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last total has left this memory
                            park[...] = part[:, kept:]

                    return [part, *(b[:, :kept] for b in before[:1] if kept)]

                nothing = lambda n: plgpu.layout_cast(jnp.zeros((t.m, n), jnp.float32), plgpu.Layout.WGMMA)
                both = [nothing(n) for n in (t.n, kept) if n]
                right, *left = lax.fori_loop(0, opaque(2), each, both)
                sums = [a + right[:, :kept] for a in left]
                if park is not None:
                    sums.append(park[...] + right[:, kept:])
                return [lax.optimization_barrier(a) for a in sums]

            finish(at, at.row + down * t.m, at.col + right * t.n, *add(0, leaves, 0))

        plgpu.wait_smem_to_gmem(0)


def store(out: Any, s: Scratch, row: Any, col: Any, *values: jax.Array, limit: Any = None) -> None:
    """Round values [m, n], side by side, to out's dtype and write them to out[row:, col:], 64 rows of a chunk a time.

    What lies past the edge of out is clipped. limit: columns from there on are left alone; a multiple of the chunk.
    """
    wg = lax.axis_index("wg")
    m = values[0].shape[0]
    slots, wide = s.stage.shape[1], s.stage.shape[-1]
    if out.shape[-1] == wide:  # Mosaic drops the coordinate of an axis with one chunk: parts past the edge would hit it
        limit = wide
    values = tuple(v.astype(out.dtype) for v in values)
    pieces = [v[:, j : j + wide] for v in values for j in range(0, v.shape[1], wide)]

    def part(slot: int, i: int, j: int) -> None:
        buffer = s.stage.at[wg, slot % slots]
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)  # the copy that was last in it has read this buffer
        buffer[...] = pieces[j][i : i + 64]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, out.at[pl.ds(row + i, 64), pl.ds(col + j * wide, wide)])

    # All buffers are free, however many parts the last call had; and all of the warpgroup has read what was parked.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    order = [(i, j) for i in range(0, m, 64) for j in range(len(pieces))]
    if limit is not None:
        order.sort(key=lambda at: at[1])  # what is left out comes last: a slot's turn counts the copies before it
    for slot, (i, j) in enumerate(order):
        write = functools.partial(part, slot, i, j)
        write() if limit is None else pl.when(col + j * wide < limit)(write)
