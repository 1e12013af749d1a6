"""Tile shapes of the sm90 matrix products, chosen by shape.

Nothing here changes a bit of any result (design rule 2: on Hopper a chain in ascending K gives the same bits whatever
the tile, the pipeline depth and the warpgroups; `isojax gate` rechecks it on each GPU kind). So all of it is free to
tune, per shape, and stays out of the contract.
"""

from __future__ import annotations

from dataclasses import dataclass

SMS = 132  # streaming multiprocessors of an H100 SXM or H200; a part with fewer just takes more waves
SMEM = 227 * 1024  # bytes of shared memory that one block can have
SLACK = 3 * 1024  # barriers and alignment
REGISTERS = 200  # fp32 accumulators that a consumer thread can hold next to its addresses, without spilling
MAX_STAGES = 8


@dataclass(frozen=True)
class Tiles:
    """How one product is cut: out [T, N] in block tiles of [rows, cols], K in steps of k.

    m, n: one consumer warpgroup's accumulator. groups: consumer warpgroups along M and N. cluster: blocks that share
    one operand by multicast, neighbours along N where `shared` is 'x', along M where it is 'w'. snake: block tiles side
    by side in the order of work, for locality in L2. split: each leaf of K is a work item of its own, its fp32 partial
    goes through memory and a second kernel adds the tree.
    """

    m: int
    n: int
    k: int
    groups: tuple[int, int]
    cluster: int = 1
    shared: str = "x"
    snake: int = 8
    split: bool = False

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
        levels = leaves.bit_length() - 1
        return max(0, levels - (REGISTERS // (self.m * self.n // 128) - 1))

    def stages(self, other_bytes: int) -> int:
        """Pipeline depth that fits next to `other_bytes` of shared memory."""
        return min(MAX_STAGES, (SMEM - SLACK - other_bytes) // ((self.rows + self.cols) * self.k * 2))


def step(width: int) -> int:
    """Columns of one pipeline step: the widest of 64, 32, 16 that divides a leaf of this width; 0 where none does."""
    return next((k for k in (64, 32, 16) if width % k == 0), 0)


def one_wave(t: int, n: int, rows: int) -> int:
    """Columns of a block tile such that the SMs get one tile each, as evenly as multiples of 16 allow; 16 to 256."""
    return min(256, max(16, -(-n * -(-t // rows) // SMS // 16) * 16))


def for_column(t: int, n: int, k: int) -> Tiles:
    """Tiles of a single chain over K: x [t, k], weight [n, k]."""
    if t > 256:
        big = t * n >= 256 * 128 * SMS
        return Tiles(128 if big else 64, 128, step(k), (2, 1))
    # Weights are streamed once; as many narrow tiles as there are SMs share that work.
    rows = 64 if t <= 64 else 128
    cols = one_wave(t, n, rows)
    if rows == 64 and cols >= 128:
        return Tiles(64, cols // 2, step(k), (1, 2))
    return Tiles(64, cols, step(k), (rows // 64, 1))


def for_row(t: int, n: int, k: int, leaves: int) -> Tiles:
    """Tiles of `leaves` chains and their tree; k / leaves is a multiple of 16."""
    if t > 256:
        return Tiles(64, 128, step(k // leaves), (2, 1))
    # One block a leaf: few rows still occupy all SMs, and the partials that a second kernel adds stay in L2.
    rows = 64 if t <= 64 else 128
    return Tiles(64, min(128, one_wave(t, n * leaves, rows)), step(k // leaves), (rows // 64, 1), split=True)


def for_vocabulary(t: int, k: int, emit_logits: bool = False) -> Tiles:
    """Tiles of the fused head: a warpgroup's accumulator is made of [64, 128] blocks of one vocabulary leaf."""
    if t % 128:
        return Tiles(64, 128, step(k), (1, 2))
    return Tiles(64 if t % 256 or emit_logits else 128, 128, step(k), (2, 1))
