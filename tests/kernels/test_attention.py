"""attn.core's kernels: interpreter against reference, decode against many rows, and the sm_90a compile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import _Races, compiles, fingerprint_elsewhere, interpret, reference, spec
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.errors import Unsupported
from isojax.lowering import fingerprint
from isojax.pallas_kernels.attn import kernel_decode_sm90, kernel_prefill_sm90
from isojax.pallas_kernels.attn.kernel_core_sm90 import shape_of
from isojax.pallas_kernels.attn.kernel_decode_sm90 import decode
from isojax.pallas_kernels.attn.kernel_prefill_sm90 import prefill
from isojax.pallas_kernels.attn.tiles_sm90 import Shape
from isojax.pallas_kernels.attn.work import tile_rows, work_list
from isojax.region import lookup
from isojax.schedule import KV_PARTITION

CORE = lookup("attn.core")
I32 = jnp.int32


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


def run(kernel, args, statics, **tuning):
    """One of the two kernels with other tuning, in the interpreter."""
    q, kv, table, cu_q, lens, work = args
    shape = shape_of(q, kv, table, work, statics["tile"])
    call = lambda *a: kernel(*a, scale=statics["scale"], shape=shape, **tuning)
    params = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    gpu_callbacks.reset_gpu_interpret_mode_state()
    with _Races() as races, plgpu.force_gpu_interpret_mode(params):
        out = jax.block_until_ready(jax.jit(call)(*[jnp.asarray(a) for a in args]))
    assert races.states and not any(s.races_found for s in races.states)
    return [np.asarray(o)[: int(cu_q[-1])] for o in out]


def test_ways_of_decoding_have_the_bits_of_many_rows():
    """Three partitions: by one program, by three; rings of three and four places; and as a one-row tile of prefill."""
    lens = (2 * KV_PARTITION + 1, KV_PARTITION + 1)
    args, statics = batch(lens, (1, 1), 2, 1, 64, page=128, tile=1)
    want = run(decode, args, statics, tuning=kernel_decode_sm90.Tuning(programs=1))
    many, tall = batch(lens, (1, 1), 2, 1, 64, page=128, tile=64)
    many = (np.concatenate([args[0], np.full((62, 2, 64), np.nan, args[0].dtype)]), *many[1:])
    others = [
        run(decode, args, statics, tuning=kernel_decode_sm90.Tuning(places=4, programs=100)),
        run(prefill, many, tall),
    ]
    for got in others:
        for g, w in zip(got, want, strict=True):
            assert g.tobytes() == w.tobytes()
    for got, ref in zip(want, reference(CORE, args, statics), strict=True):
        np.testing.assert_allclose(got.astype(np.float32), ref[:2].astype(np.float32), rtol=2.0**-7, atol=2.0**-9)


@pytest.mark.parametrize("overlap,turns", ((True, False), (False, True), (False, False)))
def test_tuning_of_prefill_changes_no_bits(overlap, turns):
    args, statics = batch((300,), (40,), 2, 1, 64, page=32)
    want = run(prefill, args, statics)
    got = run(prefill, args, statics, tuning=kernel_prefill_sm90.Tuning(overlap=overlap, turns=turns))
    assert [g.tobytes() for g in got] == [w.tobytes() for w in want]


def test_a_group_of_one_head_fills_both_warpgroups_with_rows():
    check(*batch((150,), (150,), 1, 1, 64))


def test_the_way_of_decoding_follows_from_shapes():
    shape = lambda items, positions: Shape(256, 16, 8, 128, 1, 16, positions, items)
    splits = lambda items, positions: kernel_decode_sm90.splits_of(shape(items, positions), 528)
    assert splits(256, 4096) == 1  # the programs fill the GPU as they are
    assert splits(1, KV_PARTITION) == 1  # one partition
    assert splits(1, 32768) == -(-32768 // KV_PARTITION)  # one program a partition: fewer than would fill the GPU
    assert splits(16, 32768) == 5


MODELS = ((16, 8, 128), (32, 8, 128), (8, 1, 128), (9, 3, 64))  # Qwen3-1.7B, Qwen3-8B, Llama-70B TP8, SmolLM2


def specs(heads, kv_heads, d, *, page=0, tile=None, rows=256, requests=8, width=256):
    tile = tile or tile_rows("sm90", heads // kv_heads)
    kv = (512, page, kv_heads, 2 * d) if page else (rows, kv_heads, 2 * d)
    avals = (
        spec((rows, heads, d)),
        spec(kv),
        spec((requests, width), I32) if page else None,
        spec((requests + 1,), I32),
        spec((requests,), I32),
        spec((16, 2), I32),
    )
    return avals, {"scale": d**-0.5, "tile": tile}


@pytest.mark.parametrize("heads,kv_heads,d", MODELS)
def test_compiles_without_spills(heads, kv_heads, d):
    compiles(CORE, *specs(heads, kv_heads, d))
    compiles(CORE, *specs(heads, kv_heads, d, page=16))
    # decoding is two kernels: the partitions, and their fold
    assert len(compiles(CORE, *specs(heads, kv_heads, d, page=16, tile=1, rows=16))) == 2


@pytest.mark.parametrize("page", (32, 64, 128))
def test_page_sizes_compile(page):
    compiles(CORE, *specs(16, 8, 128, page=page))


def test_fingerprint_is_the_same_elsewhere():
    avals, statics = specs(9, 3, 64)
    bound, named = CORE.bind(avals, statics)
    assert fingerprint(CORE, bound, named, "sm90") == fingerprint_elsewhere("attn.core", avals, statics)


@pytest.mark.parametrize(
    "change,named",
    [
        ({"d": 96}, "head size 96"),
        ({"tile": 21}, "tile 21"),
        ({"rows": 32, "tile": 16}, "32 query rows"),
        ({"page": 20}, "pages of 20"),
    ],
)
def test_unsupported_names_the_limit(change, named):
    avals, statics = specs(**({"heads": 4, "kv_heads": 2, "d": 64} | change))
    args, bound = CORE.bind(avals, statics)
    with pytest.raises(Unsupported, match=named) as e:
        CORE.check("sm90", args, bound)
    assert e.value.region == "attn.core" and e.value.mend


def test_unsupported_dtype():
    avals, statics = specs(4, 2, 64)
    args, bound = CORE.bind((spec(avals[0].shape, jnp.float32), *avals[1:]), statics)
    with pytest.raises(Unsupported, match="float32"):
        CORE.check("sm90", args, bound)
