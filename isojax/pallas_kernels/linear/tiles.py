"""Tile shapes of the sm90 matrix products, chosen by shape.

Nothing here changes a bit of any result (design rule 2: on Hopper a chain in ascending K gives the same bits whatever
the tile, the pipeline depth and the warpgroups; `isojax gate` rechecks it on each GPU kind). So all of it is free to
tune, per shape, and stays out of the contract.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from isojax.pallas_kernels.chip import SMS

SMEM = 227 * 1024  # bytes of shared memory that one block can have
SLACK = 3 * 1024  # barriers and alignment
REGISTERS = 200  # fp32 accumulators of a consumer thread, at most
PRODUCER_REGISTERS = 24  # of a producer thread; Hopper's least
ADDRESSES = 16  # registers of a consumer thread that hold no accumulator, at least
MOST_GROUPS = 3  # consumer warpgroups: a fifth warpgroup in all leaves each 96 registers, and none to hand over
MAX_STAGES = 16
FEW = 256  # rows up to which weights are streamed once, and bind
MANY = 4096  # rows from which the last wave counts for little
PAUSE = 80  # cycles that a step of many rows takes beside its products; measured on an H200
# Many rows: rows of a warpgroup, warpgroups along M, columns. Sums of several leaves have less room.
COLUMN_KINDS = ((64, 2, range(16, 257, 16)), (64, 3, range(128, 193, 16)), (128, 2, range(128, 193, 16)))
ROW_KINDS = ((64, 2, range(16, 129, 16)),)


@dataclass(frozen=True)
class Tiles:
    """How one product is cut: out [T, N] in block tiles of [rows, cols], K in steps of k.

    m, n: one consumer warpgroup's accumulator. groups: consumer warpgroups along M and N. cluster: blocks that share
    one operand by multicast, neighbours along N where `shared` is 'x', along M where it is 'w'. snake: block tiles side
    by side in the order of work, for locality in L2. split: blocks of a cluster that share the leaves of one tile
    (meet_sm90), with cluster 1. `misfit` refuses clusters of more than two blocks, which no gate ever ran.
    """

    m: int
    n: int
    k: int
    groups: tuple[int, int]
    cluster: int = 1
    shared: str = "x"
    snake: int = 8
    split: int = 1

    @property
    def blocks(self) -> int:
        """Blocks of a cluster."""
        return self.cluster * self.split

    @property
    def rows(self) -> int:
        return self.m * self.groups[0]

    @property
    def cols(self) -> int:
        return self.n * self.groups[1]

    @property
    def warpgroups(self) -> int:
        return self.groups[0] * self.groups[1]

    def parked(self, leaves: int) -> int:
        """Levels of a tree over `leaves` leaves that wait in shared memory, the topmost; the others are registers."""
        levels, size = leaves.bit_length() - 1, self.m * self.n // 128
        held = min(levels, self.registers // size - 1)
        if held > 2 and (held + 1) * size > 160:  # eight chains in one piece of code need more addresses
            held = 2
        return levels - held

    def kept(self, leaves: int) -> int:
        """Columns that registers hold of a sum that else waits in shared memory: all or at least half, where they can.

        What is not parked is time: tiles of 96 and 112 columns wait for it, those of 128 are bound by that memory.
        """
        if self.parked(leaves) != 1 or self.blocks != 1:  # a cluster needs more addresses
            return 0
        size, piece = self.m * self.n // 128, min(64, self.n & -self.n)  # of what is stored at a time
        room = self.budget - ADDRESSES - (leaves.bit_length() - 1) * size  # beside what they hold anyway
        fits = min(self.n, room * 128 // self.m // piece * piece)
        return fits if 2 * fits >= self.n else 0

    @property
    def budget(self) -> int:
        """Registers of a consumer thread."""
        return 255 if self.warpgroups == 1 else (512 - PRODUCER_REGISTERS) // self.warpgroups // 8 * 8

    @property
    def registers(self) -> int:
        """fp32 accumulators that a consumer thread can hold next to its addresses, without spilling."""
        return min(REGISTERS, 480 // self.warpgroups - 40)

    def halves(self, width: int) -> bool:
        """Whether leaves of `width` columns end in the middle of a step, so that two of them share it."""
        return self.k == 64 < width and width % 64 == 32

    def steps(self, width: int) -> int:
        """Steps of a leaf of `width` columns, of which one is half as wide where they `halves`."""
        return -(-width // self.k)

    def stages(self, other_bytes: int) -> int:
        """Pipeline depth that fits next to `other_bytes` of shared memory."""
        return min(MAX_STAGES, (SMEM - SLACK - other_bytes) // ((self.rows + self.cols) * self.k * 2))


def misfit(t: Tiles, *, n: int, k: int, leaves: int) -> str:
    """Why no kernel can have these tiles for a product over k in `leaves` leaves, or ''. n: columns of the output."""
    del n  # edges are clipped
    if t.m not in (64, 128) or t.n % 8 or not 16 <= t.n <= 256 or t.k not in (16, 32, 64, 128, 256):
        return f"no tile is {t.m} x {t.n} x {t.k}"
    if min(t.groups) < 1 or t.warpgroups > MOST_GROUPS or t.snake < 1:
        return f"{t.groups} warpgroups cannot be launched"
    if t.shared not in ("x", "w") or t.blocks not in (1, 2) or min(t.cluster, t.split) > 1:
        return f"no cluster shares {t.shared!r} among {t.cluster} blocks and leaves among {t.split}"
    if leaves % t.split or t.n // t.split < 16 or t.n % (8 * t.split):
        return f"{t.split} blocks cannot share {leaves} leaves and {t.n} columns"
    if t.m * t.n // 128 > t.registers:
        return f"accumulators of {t.m} x {t.n} do not fit into the registers of {t.warpgroups} warpgroups"
    halves = leaves >= 1 and k % leaves == 0 and t.halves(k // leaves)
    if halves and (leaves // t.split % 2 or t.parked(leaves // t.split) == (leaves // t.split).bit_length() - 1):
        return f"no pairs of leaves of {k} / {leaves} share steps of {t.k} in registers"
    if leaves < 1 or k % leaves or (k // leaves % t.k and not halves):
        return f"a step of {t.k} does not divide a leaf of {k} / {leaves}"
    return ""


def stride(width: int, most: int = 64) -> int:
    """Columns of one pipeline step, at most `most`, that divide a leaf of this width; 0 where 16 does not."""
    return next((k for k in (128, 64, 32, 16) if k <= most and width % k == 0), 0)


def step(width: int, leaves: int, most: int = 64) -> int:
    """`stride`, or 64 where leaves end in the middle of a step and come in pairs, also in half of the tree."""
    paired = width % 64 == 32 and width > 64 and leaves % 4 == 0
    return 64 if paired and most >= 64 else stride(width, most)


def share(n: int, tiles: int) -> int:
    """Columns of each of `tiles` tiles that are as equal as multiples of 16 allow; 16 to 256."""
    return min(256, max(16, -(-n // tiles // 16) * 16))


def waves(t: int, n: int, rows: int, cols: int) -> int:
    """How many tiles follow each other on an SM."""
    return -(-(-(-t // rows) * -(-n // cols)) // SMS)


def cost(t: int, n: int, m: int, cols: int, down: int, right: int) -> int:
    """Cycles by a model of x [t, k], weight [n, k], a step of 64 at a time; down x right warpgroups of [m, cols].

    A step is bound by the tensor cores, or by shared memory: operands come in once and go out to each warpgroup, 128
    bytes a cycle; and no step takes less than 160 cycles.
    """
    rows_, cols_ = m * down, cols * right
    out = 4 * down * right * (m // 64) * (2048 + 32 * cols)
    cycles = max(160, rows_ * cols_ // 32, ((rows_ + cols_) * 128 + out) // 128)
    if down * right == 1:  # nobody multiplies while it waits or stores
        cycles = cycles * 5 // 4
    return waves(t, n, rows_, cols_) * cycles


def by_model(
    t: int, n: int, most: int, groups: tuple[tuple[int, int], ...] = ((2, 1),), m: int = 64
) -> list[tuple[int, int, int]]:
    """(columns, groups along M, along N) of tiles for x [t, k], weight [n, k], the fastest first by `cost`.

    most: columns of a warpgroup, which has m rows.
    """
    options = [(c, *g) for g in groups for c in range(16, most + 1, 16)]
    return sorted(options, key=lambda o: (cost(t, n, m, *o), -m * o[0] * o[1] * o[2]))


def by_pace(t: int, n: int, *kinds: tuple[int, int, range]) -> list[tuple[int, int, int]]:
    """(rows of a warpgroup, columns, warpgroups along M) of tiles for many rows, x [t, k] and weight [n, k].

    kinds: rows of a warpgroup, warpgroups, columns. The fastest first by a model: a step of 64 takes what the tensor
    cores take, and PAUSE cycles.
    """
    options = [(m, c, down) for m, down, cols in kinds for c in cols]
    cycles = lambda m, c, down: waves(t, n, m * down, c) * (m * down * c // 32 + PAUSE)
    return sorted(options, key=lambda o: (cycles(*o), -o[0] * o[1] * o[2]))


def for_column(t: int, n: int, k: int) -> Tiles:
    """Tiles of a single chain over K: x [t, k], weight [n, k]; k a multiple of 16."""
    if t <= 128:  # weights are streamed once; as many narrow tiles as there are SMs share that work
        cols, down = share(n, SMS), -(-t // 64)
        if cols > 192:
            return Tiles(64, 128, stride(k), (down, 2 if t <= 64 else 1))
        if down == 2 and cols < 32:  # the latency of a chain counts: wide steps
            return Tiles(64, 32, stride(k, 128), (1, 1), snake=1)
        if down == 2 and (pair := share(n, SMS // 2)) <= 128:
            return Tiles(64, pair, stride(k), (1, 1), cluster=2, shared="w")
        return Tiles(64, cols, stride(k, 128 if t <= 64 else 64), (down, 1))
    if t <= FEW:
        cols, *groups = by_model(t, n, 192, ((2, 1), (1, 1)))[0]
        wide = groups == [1, 1] and cols <= 64
        return Tiles(64, cols, stride(k, 128 if wide else 64), (groups[0], groups[1]), snake=1)  # neighbours share w
    if t < MANY:
        m, cols, down = by_pace(t, n, *COLUMN_KINDS)[0]
    else:  # power binds: taller tiles gain nothing unless they fill the last wave much better
        flat, tall = by_model(t, n, 256)[0], by_model(t, n, 192, m=128)[0]
        wins = cost(t, n, 128, *tall) < 0.97 * cost(t, n, 64, *flat)
        m, cols, down = (128, *tall[:2]) if wins else (64, *flat[:2])
    order = 4 if t <= 1024 else 8  # 1280 x 8192 at 1,024 rows, one wave: in order 8 33 or 37 us, call by call; in 4 33
    if (m, down) == (64, 2) and t % 256 == 0 and cols >= 128:  # narrower ones lose more by going in step
        return Tiles(m, cols, stride(k), (down, 1), cluster=2, shared="w", snake=order)
    return Tiles(m, cols, stride(k), (down, 1), snake=order)


def for_row(t: int, n: int, k: int, leaves: int) -> Tiles:
    """Tiles of `leaves` chains and their tree; k / leaves is a multiple of 16."""
    if leaves == 1:
        return for_column(t, n, k)
    width = k // leaves
    steps = functools.partial(step, width, leaves)
    tall, halves = -(-t // 128), steps() > stride(width)
    pair = max(32, min(128, share(n, max(1, SMS // 2 // tall))))  # columns of a tile that two blocks share
    if t <= 64:
        if leaves % 2 == 0 and width >= 768:
            return Tiles(64, pair, steps(128), (1, 1), split=2)
        return Tiles(64, min(96, share(n, SMS)), steps(128), (1, 1))
    if t <= FEW:
        order = 8 if tall == 1 else 1  # neighbours in time share weights
        if halves and t == FEW:  # two blocks to a tile spill
            return Tiles(64, min(128, share(n, SMS // 4)), 64, (1, 1), snake=order)
        if leaves % 2 == 0 and width >= (384 if tall == 1 else 1024) and not (halves and tall == 2):
            return Tiles(64, pair, steps(), (2, 1), split=2)
        cols, *groups = by_model(t, n, 96, ((2, 1), (1, 1)))[0]
        k_step = steps(128 if groups[0] * 64 + cols <= 128 else 64)
        return Tiles(64, cols, k_step, (groups[0], groups[1]), snake=order)
    m, cols, down = by_pace(t, n, *ROW_KINDS)[0]
    order = 1 if t <= 1024 else 16 if n * k <= 1 << 22 else 8  # neighbours in time share weights; 8 MiB stay in the L2
    return Tiles(m, cols, steps(), (down, 1), snake=order)


def for_vocabulary(t: int, k: int, emit_logits: bool = False) -> Tiles:
    """Tiles of the fused head: a warpgroup's accumulator is made of [64, 128] blocks of one vocabulary leaf."""
    if t % 128:
        return Tiles(64, 128, stride(k), (1, 2))
    return Tiles(64 if t % 256 or emit_logits else 128, 128, stride(k), (2, 1))
