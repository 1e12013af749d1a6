"""attn.core's kernels: interpreter against reference, and decode against many rows."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from harness import interpret, interpreted, reference

from isojax.pallas_kernels.attn import kernel_decode_sm90, kernel_prefill_sm90
from isojax.pallas_kernels.attn.kernel_core_sm90 import shape_of
from isojax.pallas_kernels.attn.kernel_decode_sm90 import decode
from isojax.pallas_kernels.attn.kernel_prefill_sm90 import prefill
from isojax.pallas_kernels.attn.tiles_sm90 import Shape
from isojax.pallas_kernels.attn.work import tile_rows, work_list
from isojax.region import lookup
from isojax.schedule import KV_PARTITION

CORE = lookup("attn.core")


def batch(lens, rows, heads, kv_heads, d, *, page=0, tile=None, seed=0):
    """(operands, statics): request r has lens[r] keys, its last rows[r] are queries. All else is NaN."""
    rng, bf16 = np.random.default_rng(seed), jnp.dtype(jnp.bfloat16)
    normal = lambda *shape: rng.standard_normal(shape).astype(bf16)
    tile = tile or tile_rows("sm90", heads // kv_heads)
    count = sum(rows)
    q = np.full((count if page and tile == 1 else max(64, count), heads, d), np.nan, bf16)
    q[:count] = normal(count, heads, d)
    if page:
        width = -(-max(lens) // page)
        ids = rng.permutation(len(lens) * width + 2)
        kv, table = (
            np.full((len(ids), page, kv_heads, 2 * d), np.nan, bf16),
            np.full((len(lens), width), ids[-1], np.int32),
        )
        for r, n in enumerate(lens):
            for j in range(-(-n // page)):
                table[r, j] = ids[r * width + j]
                kv[table[r, j], : n - j * page] = normal(min(page, n - j * page), kv_heads, 2 * d)
    else:
        assert list(lens) == list(rows)
        kv, table = np.full((len(q), kv_heads, 2 * d), np.nan, bf16), None
        kv[:count] = normal(count, kv_heads, 2 * d)
    cu_q = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    work = work_list(np.array(rows), tile, sum(-(-n // tile) for n in rows) + 1)  # one item is unused
    return (q, kv, table, cu_q, np.array(lens, np.int32), work), {"scale": d**-0.5, "tile": tile}


def check(args, statics):
    """Both sides round P to bf16 and out once; their fp32 sums run in other orders, so a P may round the other way."""
    count = int(args[3][-1])
    (out, lse), (want, want_lse) = interpret(CORE, args, statics), reference(CORE, args, statics)
    out, want = (x[:count].astype(np.float32) for x in (out, want))
    np.testing.assert_allclose(out, want, rtol=2.0**-7, atol=2.0**-8)
    assert (out == want).mean() > 0.98
    np.testing.assert_allclose(lse[:count], want_lse[:count], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "lens,heads,kv_heads,d",
    [
        ((1, 63), 1, 1, 64),  # a partial tile, and one row
        ((20, 30), 4, 2, 128),  # two heads a tile
        ((65,), 3, 1, 64),  # the group does not fill the MMA rows; two KV tiles
        ((9, 8), 8, 1, 64),  # eight heads a tile, one partial tile
    ],
)
def test_contiguous_matches_reference(lens, heads, kv_heads, d):
    check(*batch(lens, lens, heads, kv_heads, d))


@pytest.mark.parametrize(
    "lens,rows,heads,kv_heads,d,page",
    [
        ((70, 16), (6, 16), 4, 2, 64, 16),  # a chunk after a prefix; garbage behind the request's end
        ((64,), (10,), 3, 1, 128, 32),  # ends with a tile and with a page
        ((65,), (3,), 2, 1, 64, 64),
        ((130,), (5,), 1, 1, 64, 128),  # a tile is half a page
    ],
)
def test_paged_matches_reference(lens, rows, heads, kv_heads, d, page):
    check(*batch(lens, rows, heads, kv_heads, d, page=page))


def test_a_kv_heads_last_block_may_have_fewer_heads():
    check(*batch((20,), (20,), 3, 1, 64, tile=32))


@pytest.mark.parametrize("heads,kv_heads,d", ((6, 2, 64), (7, 1, 128)))
def test_decode_matches_reference(heads, kv_heads, d):
    check(*batch((70, 1), (1, 1), heads, kv_heads, d, page=32, tile=1))


def test_decoding_fewer_rows_than_the_batch_is_padded_to():
    """As an engine pads: five work items of no row, and a table with room for more partitions than there are."""
    lens = (2 * KV_PARTITION + 1, 40)
    args, statics = batch(lens, (1, 1), 2, 1, 64, page=128, tile=1)
    want = run(decode, args, statics)
    q, kv, table, cu_q, lens, work = args
    assert table is not None
    padded = (
        np.concatenate([q, np.full((5, *q.shape[1:]), np.nan, q.dtype)]),
        kv,
        np.pad(table, ((0, 5), (0, 6))),
        np.pad(cu_q, (0, 5), mode="edge"),
        np.pad(lens, (0, 5)),
        np.concatenate([work[:2], np.tile(np.asarray([[-1, 0]], np.int32), (5, 1))]),
    )
    got = run(decode, padded, statics)
    assert [g.tobytes() for g in got] == [w.tobytes() for w in want]


def run(kernel, args, statics, **tuning):
    """One of the two kernels with other tuning, in the interpreter."""
    q, kv, table, cu_q, lens, work = args
    shape = shape_of(q, kv, table, work, statics["tile"])
    outs = interpreted(lambda *a: kernel(*a, scale=statics["scale"], shape=shape, **tuning), *args)
    return [o[: int(cu_q[-1])] for o in outs]


def test_ways_of_decoding_have_the_bits_of_many_rows():
    """Three partitions: by one program, by three; rings of five, three and seven places; as a row of prefill."""
    lens = (2 * KV_PARTITION + 1, KV_PARTITION + 1)
    args, statics = batch(lens, (1, 1), 2, 1, 64, page=128, tile=1)
    want = run(decode, args, statics, tuning=kernel_decode_sm90.Tuning(programs=1))
    many, tall = batch(lens, (1, 1), 2, 1, 64, page=128, tile=64)
    many = (np.concatenate([args[0], np.full((62, 2, 64), np.nan, args[0].dtype)]), *many[1:])
    others = [
        run(decode, args, statics, tuning=kernel_decode_sm90.Tuning(places=3, programs=100)),
        run(decode, args, statics, tuning=kernel_decode_sm90.Tuning(places=7)),
        run(prefill, many, tall),
    ]
    for got in others:
        for g, w in zip(got, want, strict=True):
            assert g.tobytes() == w.tobytes()
    for got, ref in zip(want, reference(CORE, args, statics), strict=True):
        np.testing.assert_allclose(got.astype(np.float32), ref[:2].astype(np.float32), rtol=2.0**-7, atol=2.0**-9)


def test_tuning_of_prefill_changes_no_bits():
    args, statics = batch((300,), (40,), 2, 1, 64, page=32)
    want = run(prefill, args, statics)
    tune = kernel_prefill_sm90.Tuning
    for tuning in (tune(turns=False), tune(grid=1), tune(grid=3, width=1)):
        got = run(prefill, args, statics, tuning=tuning)
        assert [g.tobytes() for g in got] == [w.tobytes() for w in want], tuning


@pytest.mark.parametrize(
    "lens,heads,d,tunings",
    [
        ((1537, 769, 100, 768), 2, 128, ({}, {"held": 8}, {"held": 128, "grid": 1})),  # opens a third; a second; in one
        ((900, 1, 1536), 1, 64, ({"grid": 1}, {"held": 64, "turns": False})),  # ends within a second; with it
    ],
)
def test_partitions_of_many_rows_have_the_bits_of_decoding(lens, heads, d, tunings):
    """Another kernel, which folds partitions column by column: whatever of the sum of all is held in registers."""
    rows = (1,) * len(lens)
    one, statics = batch(lens, rows, heads, 1, d, page=128, tile=1)
    q, kv, table, *_ = one
    assert table is not None
    kv[table[0, 0], 3, 0, d + 5] = np.inf
    kv[table[-1, 0], 0, 0, 7] = np.nan
    want = run(decode, one, statics)
    (_, _, _, *lists), tall = batch(lens, rows, heads, 1, d, page=128)
    many = (np.concatenate([q, np.full((64 - len(lens), heads, d), np.nan, q.dtype)]), kv, table, *lists)
    assert any(np.isnan(w.astype(np.float32)).any() for w in want)
    for tuning in tunings:
        got = run(prefill, many, tall, tuning=kernel_prefill_sm90.Tuning(**tuning))
        assert [g.tobytes() for g in got] == [w.tobytes() for w in want], tuning


def test_registers_are_no_more_than_launched():
    """One more, and a GPU waits forever."""
    shape = lambda page, d, group: Shape(256, 8 * group, 8, d, tile_rows("sm90", group), page, 4096, 16)
    for page, d, group in itertools.product((0, 16, 32, 64, 128, 256), (64, 128), (1, 2, 8)):
        s = shape(page, d, group)
        few, many = kernel_prefill_sm90.registers(s)
        assert few + kernel_prefill_sm90.WARPGROUPS * many <= 3 * 168 and few % 8 == many % 8 == 0
        assert 24 <= few and many <= 240 and kernel_prefill_sm90.held_of(s) % 8 == 0
    for held in (-8, 44):
        with pytest.raises(ValueError, match="in eights"):
            kernel_prefill_sm90.Tuning(held=held)


def test_every_program_is_dealt_once():
    for items, blocks, grid in ((1, 1, 1), (272, 8, 132), (5, 8, 132), (256, 3, 132), (7, 6, 4), (33, 1, 5)):
        width = int(kernel_prefill_sm90.width_of(jnp.int32(items), blocks, grid))
        rounds = -(-items * width // grid)
        k, block = np.indices((rounds * (blocks // width), grid)).astype(np.int32)
        dealt = kernel_prefill_sm90.dealt(k, block, jnp.int32(rounds), jnp.int32(width), blocks, grid)
        there = sorted((i, p) for i, p in zip(*(np.ravel(x).tolist() for x in dealt), strict=True) if i < items)
        assert there == [(i, p) for i in range(items) for p in range(blocks)]


def test_a_group_of_one_head_fills_both_warpgroups_with_rows():
    check(*batch((150,), (150,), 1, 1, 64))


def test_programs_of_decoding_fit_the_rows_that_are_there():
    shape = lambda items, positions: Shape(256, 16, 8, 128, 1, 16, positions, items)
    splits = lambda rows, positions: kernel_decode_sm90.splits_of(shape(256, positions), rows, 528)
    assert splits(256, 4096) == 1  # the programs fill the GPU as they are
    assert splits(1, KV_PARTITION) == 1  # one partition
    assert splits(1, 32768) == -(-32768 // KV_PARTITION)  # one program a partition: fewer than would fill the GPU
    assert splits(16, 32768) == 5
    for rows in (0, 1, 16, 65, 256):
        there = kernel_decode_sm90.splits_there(shape(256, 32768), jnp.int32(rows), 528)
        assert int(there) == splits(max(rows, 1), 32768)
    for items in (1, 8, 64, 256):
        grid = kernel_decode_sm90.grid_of(shape(items, 5120), 528)
        assert all(rows * 8 * splits(rows, 5120) <= grid for rows in range(1, items + 1))
    places = lambda items, positions: kernel_decode_sm90.places_of(
        kernel_decode_sm90.grid_of(shape(items, positions), 528)
    )
    assert (places(1, 4096), places(16, 768), places(17, 768)) == (5, 5, 3)  # alone on a multiprocessor, or in pairs


def test_keys_and_values_take_turns_in_an_odd_ring():
    for wrong in (1, 4):
        with pytest.raises(ValueError, match="odd number of places"):
            kernel_decode_sm90.Tuning(places=wrong)
