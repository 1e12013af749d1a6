"""linear.column and linear.row on sm90: interpreter against reference, what fixes the bits, and the sm_90a compile."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiles, fingerprint_elsewhere, interpret, reference, spec, ulps
from jax.core import ShapedArray

from isojax.batch import bucket
from isojax.errors import Unsupported
from isojax.gates import shapes
from isojax.lowering import fingerprint
from isojax.pallas_kernels.linear import gemm, kernel_sm90, tiles
from isojax.pallas_kernels.linear.tiles import Tiles
from isojax.region import lookup
from isojax.schedule import LEAVES
from isojax.schedule import tree as schedule_tree

COLUMN, ROW = lookup("linear.column"), lookup("linear.row")


def draw(seed, *shape):
    rng = np.random.default_rng(seed)
    return np.asarray(rng.standard_normal(shape), jnp.bfloat16)


def bits(a):
    return np.asarray(a).view(np.uint16)


@pytest.fixture
def tile(monkeypatch):
    """Pins the tiles that the kernels choose."""

    def pin(t: Tiles, stages: int = 2):
        """Few stages, so that even short chains go around the ring."""
        monkeypatch.setattr(tiles, "MAX_STAGES", stages)
        for name in ("for_column", "for_row"):
            monkeypatch.setattr(tiles, name, lambda *_, **__: t)

    return pin


@pytest.mark.parametrize(
    "rows,n,k,t",
    (
        (64, 32, 128, Tiles(64, 16, 64, (1, 1))),
        (192, 136, 64, Tiles(64, 64, 64, (2, 1))),  # past the edge of T and of N, chunks of 8 columns
        (64, 96, 80, Tiles(64, 48, 16, (1, 2))),  # three chunks a tile, K in steps of 16
        (128, 64, 64, Tiles(128, 128, 64, (1, 1))),  # half of a tile's parts lie past the only chunk
        (256, 64, 64, Tiles(64, 32, 64, (1, 1), cluster=2, shared="w")),
        (64, 128, 64, Tiles(64, 32, 64, (1, 1), cluster=2, shared="x")),
    ),
)
def test_column_matches_reference(tile, rows, n, k, t):
    tile(t)
    args = draw(0, rows, k), draw(1, n, k)
    (got,), (want,) = interpret(COLUMN, args), reference(COLUMN, args)
    # NumPy adds one step's products in its own order, so a sum next to a rounding boundary may fall on its other side
    assert ulps(got, want).max() <= 1


@pytest.mark.parametrize(
    "rows,n,k,t",
    (
        (64, 64, 128, Tiles(64, 64, 16, (1, 1))),  # the whole tree in registers
        (64, 128, 256, Tiles(64, 128, 32, (1, 1))),  # half of its top in shared memory
        (64, 96, 256, Tiles(64, 96, 32, (1, 1))),  # its halves one after the other, all of it in registers
        (64, 64, 128, Tiles(64, 32, 16, (1, 1), split=2)),  # two blocks share the leaves of a tile
        (64, 64, 8 * 48, Tiles(64, 64, 16, (1, 1), split=2)),  # a leaf has more steps than the ring has stages
        (64, 64, 8 * 96, Tiles(64, 32, 64, (1, 1))),  # two leaves share a step
        (64, 128, 8 * 160, Tiles(64, 128, 64, (1, 1))),  # so do these, of three steps, with the tree's top parked
        (64, 64, 8 * 96, Tiles(64, 32, 64, (1, 1), split=2)),
    ),
)
def test_row_matches_reference(tile, rows, n, k, t):
    assert t.parked(LEAVES) == (t.n > 64) and t.kept(LEAVES) == {128: 64, 96: 96}.get(t.n, 0)
    tile(t)
    args = draw(0, rows, k), draw(1, n, k)
    (got,), (want,) = interpret(ROW, args), reference(ROW, args)
    assert ulps(got, want).max() <= 1


def test_tree_is_the_pinned_one(tile):
    """Leaves whose sum depends on the order: the balanced tree gives one value, every other grouping another."""
    values = np.array([2.0**24, 1.0, 1.0, -(2.0**24), 1.0, 2.0**24, -(2.0**24), 1.0], np.float32)
    balanced = schedule_tree(list(values), np.add)
    chain = functools.reduce(lambda a, b: np.float32(a + b), values)
    assert balanced != chain
    x, w = np.zeros((64, 128), jnp.bfloat16), np.zeros((128, 128), jnp.bfloat16)
    x[:, ::16], w[:, ::16] = values, 1
    parked, kept = Tiles(64, 128, 16, (1, 1)), Tiles(64, 96, 16, (1, 1))
    assert parked.kept(LEAVES) == 64 and kept.kept(LEAVES) == 96
    for t in (Tiles(64, 64, 16, (1, 1)), parked, kept, Tiles(64, 32, 16, (1, 1), split=2)):
        tile(t)
        (got,) = interpret(ROW, (x, w))
        assert (got.astype(np.float32) == balanced).all()


def test_bits_do_not_depend_on_tiles_or_batch(tile):
    x, w = draw(0, 128, 256), draw(1, 64, 256)
    every = []
    for t in (Tiles(64, 64, 32, (1, 1)), Tiles(64, 32, 32, (2, 1)), Tiles(64, 32, 32, (1, 1), split=2)):
        tile(t)
        every.append(bits(interpret(ROW, (x, w))[0]))
    tile(Tiles(64, 64, 32, (1, 1)))
    alone = np.full_like(x[:64], np.nan)
    alone[5] = x[100]
    assert all((e == every[0]).all() for e in every)
    assert (bits(interpret(ROW, (alone, w))[0])[5] == every[0][100]).all()


def test_an_even_grid_is_smaller_and_changes_no_bit(tile, monkeypatch):
    """Five tiles on four SMs take two turns, for which three blocks are enough."""
    x, w = draw(0, 320, 128), draw(1, 32, 128)
    tile(Tiles(64, 32, 64, (1, 1)))
    grids, real = [], gemm.plgpu.kernel
    monkeypatch.setattr(gemm.plgpu, "kernel", lambda *a, **kw: grids.append(kw["grid"]) or real(*a, **kw))
    whole = [bits(interpret(region, (x, w))[0]) for region in (COLUMN, ROW)]
    monkeypatch.setattr(gemm, "SMS", 4)
    assert all((bits(interpret(r, (x, w))[0]) == b).all() for r, b in zip((COLUMN, ROW), whole, strict=True))
    interpret(COLUMN, (x[:256], w))  # few rows: a block on every SM
    assert grids == [(5,), (5,), (3,), (3,), (4,)]


def test_rows_of_a_mixed_step_are_padded_as_an_engine_does():
    assert all(bucket(m, "sm90") == shapes.padded(m) for m in shapes.MIXED_ROWS)


@pytest.mark.parametrize("rows", (64, 256, 4096))
@pytest.mark.parametrize("n,k", ((4096, 2048), (12288, 2048)))
def test_column_compiles_without_spills(rows, n, k):
    compiles(COLUMN, (spec((rows, k)), spec((n, k))))


@pytest.mark.parametrize("rows", (64, 256, 4096))
@pytest.mark.parametrize("n,k", ((2048, 2048), (2048, 6144)))
def test_row_compiles_without_spills(rows, n, k):
    assert len(compiles(ROW, (spec((rows, k)), spec((n, k))))) == 1


@pytest.mark.parametrize(
    "region,rows,n,k,tile_",
    (
        (COLUMN, 1152, 6144, 4096, (64, 144, 3)),
        (COLUMN, 1280, 24576, 4096, (128, 192, 2)),
        (ROW, 1152, 4096, 4096, (64, 96, 2)),
        (ROW, 1280, 4096, 12288, (64, 112, 2)),
        (ROW, 896, 2560, 9728, (64, 80, 2)),
    ),
)
def test_rows_of_a_mixed_step_compile_without_spills(region, rows, n, k, tile_):
    t = tiles.for_row(rows, n, k, 1 if region is COLUMN else LEAVES)
    assert (t.m, t.n, t.groups[0]) == tile_
    compiles(region, (spec((rows, k)), spec((n, k))))


@pytest.mark.parametrize("rows", (64, 128, 192, 256, 4096))
def test_leaves_that_share_steps_compile_without_spills(rows):
    x, w = spec((rows, 11008)), spec((4096, 11008))
    assert tiles.for_row(rows, 4096, 11008, LEAVES).halves(11008 // LEAVES)
    compiles(ROW, (x, w))


def test_which_leaves_share_a_step():
    """Only pairs, in every block's half of the tree, and with a level of the tree in registers."""
    assert tiles.step(1376, 8) == 64 and tiles.step(1376, 4) == 64
    assert tiles.step(1376, 2) == 32 and tiles.step(1376, 8, 32) == 32
    assert tiles.step(32, 8) == 32 and tiles.step(1360, 8) == 16 and tiles.step(1408, 8, 128) == 128
    shape = dict(n=4096, k=11008)
    assert not tiles.misfit(Tiles(64, 128, 64, (2, 1)), **shape, leaves=8)
    assert "share" in tiles.misfit(Tiles(64, 64, 64, (1, 1), split=2), n=4096, k=2752, leaves=2)
    assert "share" in tiles.misfit(Tiles(64, 256, 64, (1, 1)), **shape, leaves=8)
    assert "launched" in tiles.misfit(Tiles(64, 64, 64, (2, 2)), **shape, leaves=1)
    assert "step of 128" in tiles.misfit(Tiles(64, 64, 128, (1, 1)), **shape, leaves=8)


def test_leaves_over_a_cluster_compile_without_spills(tile):
    for t in (Tiles(64, 64, 64, (2, 1), split=2), Tiles(64, 64, 128, (1, 1), split=2)):
        tile(t, 16)
        compiles(ROW, (spec((128, 6144)), spec((2048, 6144))))


def test_one_rank_of_tensor_parallel_compiles_without_spills():
    compiles(ROW, (spec((4096, 768)), spec((2048, 768))), {"leaves": 1})
    compiles(ROW, (spec((64, 1536)), spec((72, 1536))), {"leaves": 2})


def test_a_cluster_compiles_without_spills(tile):
    tile(Tiles(64, 128, 64, (2, 1), cluster=2, shared="w"))
    compiles(ROW, (spec((4096, 2048)), spec((2048, 2048))))


@pytest.mark.parametrize("rows", (64, 128, 192, 256, 320, 4096, 16384))
@pytest.mark.parametrize("n,k", ((24, 64), (2048, 768), (1280, 8192), (4096, 5504), (12288, 2048), (151936, 2048)))
def test_tiles_are_well_formed(rows, n, k):
    """Accumulators in registers, and at least two stages in shared memory."""
    for t, leaves in ((tiles.for_column(rows, n, k), 1), (tiles.for_row(rows, n, k, 4), 4)):
        assert tiles.misfit(t, n=n, k=k, leaves=leaves) == "" and t.rows % 64 == 0
        kernel_sm90.gemm.scratch(t, leaves, jnp.float32, kernel_sm90.gemm.chunk(t.n, n, jnp.float32))


def test_fingerprints_are_equal_across_processes():
    avals = spec((64, 1024)), spec((512, 1024))
    bound, kw = ROW.bind(avals, {})
    assert fingerprint_elsewhere("linear.row", avals) == fingerprint(ROW, bound, kw, "sm90")
    other, kw4 = ROW.bind(avals, {"leaves": 4})
    assert fingerprint(ROW, other, kw4, "sm90") != fingerprint(ROW, bound, kw, "sm90")


@pytest.mark.parametrize(
    "name,x,w,statics,limit",
    (
        ("linear.column", spec((63, 64)), spec((64, 64)), {}, "multiple of 64"),
        ("linear.column", spec((64, 64)), spec((63, 64)), {}, "multiple of 8"),
        ("linear.column", spec((64, 72)), spec((64, 72)), {}, "multiple of 16"),
        ("linear.column", spec((64, 64), jnp.float32), spec((64, 64)), {}, "bfloat16"),
        ("linear.row", spec((64, 576)), spec((64, 576)), {}, "multiple of 16"),  # SmolLM2: leaves of 72
        ("linear.row", spec((64, 384)), spec((64, 384)), {"leaves": 3}, "1, 2, 4"),
    ),
)
def test_unsupported_operands_are_refused(name, x, w, statics, limit):
    region = lookup(name)
    with pytest.raises(Unsupported, match=f"{name}.*{limit}"):
        region.check("sm90", *region.bind((x, w), statics))


def test_operands_need_no_copy():
    """One kernel reads the operands where they lie, and nothing is left to XLA."""
    from isojax.kernel_plan import Launch, kernel_plan

    args, kw = ROW.bind((spec((64, 2048)), spec((2048, 2048))), {})
    ops = kernel_plan(ROW, [ShapedArray(a.shape, a.dtype) for a in args], kw).ops
    assert [type(o) for o in ops] == [Launch]


def test_join_adds_the_balanced_tree():
    """Leaf after leaf, as `product` adds them: the schedule's tree, and never more sums than levels."""
    leaves = [jnp.asarray(v, jnp.float32) for v in draw(3, 8).astype(np.float32) * 10.0 ** np.arange(8)]
    sums = []
    for leaf in leaves:
        sums = gemm.join(sums, leaf)
        assert len(sums) <= 3 and [c for _, c in sums] == sorted({c for _, c in sums}, reverse=True)
    [(total, count)] = sums
    assert count == 8 and total == schedule_tree(leaves, jnp.add)


@pytest.mark.parametrize(
    "choose", (lambda: tiles.for_column(256, 7168, 8192), lambda: tiles.for_row(256, 2048, 6144, 8))
)
def test_row_blocks_that_share_weights_run_side_by_side(choose):
    t = choose()
    down = 256 // t.rows
    _, at = gemm.snake(t, down, 64)
    assert t.cluster == 1 and down > 1
    assert {int(at(jnp.int32(i))[1]) for i in range(down)} == {0}
