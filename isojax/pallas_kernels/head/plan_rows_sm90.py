"""Who computes which rows in head.logprob_rows: clusters of blocks, and what each of their blocks holds.

All of it changes speed, never bits. Half of the clusters start late, to read while the others write.
"""

from __future__ import annotations

from typing import NamedTuple

from isojax.pallas_kernels.head import leaf_sm90
from isojax.pallas_kernels.head.lse import leaf_tiles
from isojax.schedule import LEAVES, padded

EIGHTS, PAIRS = 14, 66  # clusters of eight and of two blocks, each in one GPC, that an H200 runs at a time
MANY = 5  # turns of clusters of eight from which on a late start pays
LATE = 1000  # ns, of clusters of eight
READS = 6000  # bytes of logits a ns, measured: pairs start about as late as half of the rows take to come
ROOM = 224 << 10  # bytes of shared memory for the ring and the statistics
MOST_BARRIERS = 32  # that Mosaic has in one array


class Plan(NamedTuple):
    """Blocks of a cluster, parts of a leaf, warpgroups of a block, slots of a warpgroup."""

    blocks: int
    parts: int
    warpgroups: int
    slots: int

    @property
    def leaves(self) -> int:
        """Of a block."""
        return LEAVES // self.blocks

    @property
    def mine(self) -> int:
        """Parts of a row that a warpgroup has."""
        return self.leaves * self.parts // self.warpgroups

    @property
    def again(self) -> int:
        """Of these, first, those that are fetched twice."""
        return max(0, self.mine - self.slots)

    @property
    def ahead(self) -> int:
        """Rows whose statistics are computed before a row is finished: where yet another one is on its way then."""
        return int(self.slots >= 3 * self.mine)


class Crew(NamedTuple):
    """Clusters of one plan, which take the rows in turns; half of them start `late` ns late."""

    plan: Plan
    clusters: int
    late: int = 0


def fit(turns: int, vocab: int, blocks: int, parts: int, warpgroups: int) -> Plan:
    """As many slots as there is room for, and use for in so many rows of a cluster."""
    each = leaf_tiles(vocab)[1]
    leaves, tiles = LEAVES // blocks, -(-each // parts)
    pieces, pitch = leaf_sm90.slot_shape(tiles)
    room = (ROOM - 16 * leaves * padded(parts * tiles, 4)) // (4 * pieces * pitch)
    return Plan(blocks, parts, warpgroups, min(room, leaves * parts * turns, MOST_BARRIERS) // warpgroups)


def plan(turns: int, vocab: int, blocks: int) -> Plan:
    """For clusters of so many blocks that take so many rows each."""
    each = leaf_tiles(vocab)[1]
    least = -(-each // leaf_sm90.MOST_TILES)
    found = [
        fit(turns, vocab, blocks, parts, warpgroups)
        for parts in range(least, min(least + 3, each + 1))
        for warpgroups in (4, 3, 2, 1)
        if LEAVES // blocks * parts % warpgroups == 0 and (parts - 1) * -(-each // parts) < each  # no part is empty
    ]
    best = lambda p: (p.warpgroups < 2, p.again / p.mine, p.slots <= p.mine, -p.warpgroups, p.parts)
    return min((p for p in found if p.slots), key=best)


def crew(rows: int, vocab: int) -> Crew:
    """Pairs where they take all rows at a time and eights would need five turns, which pairs are faster than."""
    turns, pair = -(-rows // EIGHTS), plan(1, vocab, 2)
    if turns < MANY:
        return Crew(plan(turns, vocab, 8), min(rows, EIGHTS))
    if rows <= PAIRS and 3 * pair.again <= pair.mine:  # which fetch the least part of a row twice
        return Crew(pair, rows, late=2 * rows * vocab // READS)
    return Crew(plan(turns, vocab, 8), EIGHTS, LATE)
