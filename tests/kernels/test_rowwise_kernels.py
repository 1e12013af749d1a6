"""Kernels of embed, norms, residual, mlp, attn.prep and grad: interpreter against reference, and the sm_90a compile."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiles, fingerprint_elsewhere, interpret, reference, spec, ulps
from hypothesis import given
from hypothesis import strategies as st

from isojax.errors import Unsupported
from isojax.lowering import dumped, fingerprint
from isojax.pallas_kernels.attn import kernel_prep_sm90
from isojax.pallas_kernels.attn.kernel_prep_sm90 import ALONE, AT_ONCE
from isojax.pallas_kernels.attn.prep_heads_sm90 import TOKENS, Block
from isojax.region import lookup

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
WIDTHS = (576, 2048, 4096, 8192)
# 576 is SmolLM2's; 200 and 1336 end in a strip that overlaps, 1992 in strips of every access width.
CUTS = (128, 200, 576, 1336, 1992)


def draw(rng, *shape, dtype=BF16):
    """Ill-conditioned values: magnitudes log-uniform over 2^-12 .. 2^6, signs at random."""
    x = np.exp2(rng.uniform(-12, 6, shape)) * rng.choice([-1.0, 1.0], shape)
    return np.array(jnp.asarray(x, dtype))


def same_or_next(got, want, most=1):
    """Equal up to `most` bf16 values: both sides compute in fp32 and round once, in different fp32 orders."""
    apart = ulps(got, want)
    assert apart.max() <= most, f"{apart.max()} bf16 values apart at {np.unravel_index(apart.argmax(), apart.shape)}"


@pytest.mark.parametrize("columns", CUTS)
def test_norms_match_reference(columns):
    rng = np.random.default_rng(columns)
    x, d, w = draw(rng, 3, columns), draw(rng, 3, columns), draw(rng, columns)
    for zero_centered in (False, True):
        statics = {"eps": 1e-6, "zero_centered": zero_centered}
        for region, args in ((lookup("norms.rms"), (x, w)), (lookup("norms.add_rms"), (x, d, w))):
            got, want = interpret(region, args, statics), reference(region, args, statics)
            for g, r in zip(got[:-1], want[:-1], strict=True):
                same_or_next(g, r)
            # fp32 sums of n terms in two orders: n 2^-24 bounds the distance, a few ulps are seen
            np.testing.assert_allclose(got[-1], want[-1], rtol=columns * 2.0**-24)


def test_fused_norm_has_the_bits_of_its_parts():
    rng = np.random.default_rng(0)
    x, d, w = draw(rng, 3, 576), draw(rng, 3, 576), draw(rng, 576)
    h, y, rstd = interpret(lookup("norms.add_rms"), (x, d, w), {"eps": 1e-6})
    (h2,) = interpret(lookup("residual.add"), (x, d))
    y2, rstd2 = interpret(lookup("norms.rms"), (h2, w), {"eps": 1e-6})
    assert h.tobytes() == h2.tobytes() and y.tobytes() == y2.tobytes() and rstd.tobytes() == rstd2.tobytes()


@pytest.mark.parametrize("columns", CUTS)
def test_residual_and_embed_are_exact(columns):
    rng = np.random.default_rng(columns)
    x, d = draw(rng, 3, columns), draw(rng, 3, columns)
    x[0, :4] = np.array([np.nan, np.inf, -0.0, 0.0], x.dtype)
    d[0, :4] = np.array([1.0, -np.inf, -0.0, -0.0], x.dtype)
    tokens = np.array([2, 0, 2, 1], np.int32)
    for region, args in ((lookup("residual.add"), (x, d)), (lookup("embed.lookup"), (x, tokens))):
        (got,), (want,) = interpret(region, args), reference(region, args)
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
        assert (np.signbit(got) == np.signbit(want))[~np.isnan(want.astype(np.float32))].all()


@pytest.mark.parametrize("columns", (200, 576, 2696))
def test_swiglu_matches_reference(columns):
    x = draw(np.random.default_rng(columns), 2, 2 * columns)
    x[0, :2] = np.array([-120.0, 120.0], x.dtype)  # exp2 overflows, the sigmoid is 0 and 1
    (got,), (want,) = interpret(lookup("mlp.swiglu"), (x,)), reference(lookup("mlp.swiglu"), (x,))
    same_or_next(got, want)


@pytest.mark.parametrize("dtype", (BF16, F32))
@pytest.mark.parametrize("shape", ((130,), (3, 700), (2, 3, 1000)))
def test_accumulate_matches_reference(shape, dtype):
    rng = np.random.default_rng(1)
    parts = [draw(rng, *shape, dtype=dtype) for _ in range(3)]
    (got,), (want,) = interpret(lookup("grad.accumulate"), parts), reference(lookup("grad.accumulate"), parts)
    assert got.tobytes() == want.tobytes()  # the order is the same: the bits are


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("norm", (False, True))
@pytest.mark.parametrize("head_dim,heads,kv_heads", ((64, 3, 1), (128, 4, 2)))
def test_prep_matches_reference(head_dim, heads, kv_heads, norm, bias):
    rng = np.random.default_rng(head_dim)
    width = (heads + 2 * kv_heads) * head_dim
    angle = rng.uniform(0, 6, (50, head_dim // 2))
    rope = np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
    args = (
        draw(rng, 32, width),
        draw(rng, width) if bias else None,
        draw(rng, head_dim) if norm else None,
        draw(rng, head_dim) if norm else None,
        rope,
        rng.integers(0, 50, 32).astype(np.int32),
    )
    statics = {"kv_heads": kv_heads, "head_dim": head_dim, "eps": 1e-6, "zero_centered": norm and bias}
    for got, want in zip(*(f(lookup("attn.prep"), args, statics) for f in (interpret, reference)), strict=True):
        # A rotation cancels: where the result is small, an fp32 rounding of its two products is more than a bf16 step.
        scale = np.abs(want.astype(np.float32)).max()
        far = ulps(got, want) > 1
        assert np.abs(got.astype(np.float32) - want.astype(np.float32))[far].max(initial=0) <= scale * 2.0**-22


@pytest.mark.parametrize("columns", WIDTHS)
def test_rows_compile_without_spills(columns):
    x, w = spec((64, columns)), spec((columns,))
    compiles(lookup("norms.rms"), (x, w), {"eps": 1e-6})
    compiles(lookup("norms.add_rms"), (x, x, w), {"eps": 1e-6, "zero_centered": True})
    compiles(lookup("residual.add"), (x, x))
    compiles(lookup("embed.lookup"), (spec((512, columns)), spec((64,), I32)))
    compiles(lookup("mlp.swiglu"), (spec((64, 2 * columns)),))
    compiles(lookup("grad.accumulate"), (x, x, x))


@pytest.mark.parametrize("rows", (64, 1040, 16384))  # a block has one head, some heads, all heads
@pytest.mark.parametrize("head_dim,heads,kv_heads", ((64, 9, 3), (128, 16, 8), (128, 32, 8)))
def test_prep_compiles_without_spills(head_dim, heads, kv_heads, rows):
    width = (heads + 2 * kv_heads) * head_dim
    args = (
        spec((rows, width)),
        spec((width,)),
        spec((head_dim,)),
        spec((head_dim,)),
        spec((4096, head_dim), F32),
        spec((rows,), I32),
    )
    compiles(lookup("attn.prep"), args, {"kv_heads": kv_heads, "head_dim": head_dim, "eps": 1e-6})


@given(st.integers(1, 2048), st.integers(3, 96))
def test_blocks_of_prep_cover_all_tokens_and_heads(tiles, heads):
    tokens = tiles * TOKENS
    b = kernel_prep_sm90.block(tokens, heads)
    assert tokens % b.tokens == 0 and heads % b.heads == 0 and b.heads % b.warpgroups == 0
    assert b.warpgroups == 1 or heads > ALONE


def test_blocks_of_prep_all_run_at_once_where_they_can():
    for tokens, heads, alone in ((1024, 32, 2), (1024, 48, 3), (4096, 32, 8), (8192, 48, 24), (16384, 10, 10)):
        assert kernel_prep_sm90.block(tokens, heads) == Block(2, alone, 1)
        assert tokens // 32 * heads // alone <= AT_ONCE
    assert kernel_prep_sm90.block(16384, 48) == Block(2, 48, 2)  # two warpgroups share as many heads


def test_fingerprints_are_equal_across_processes():
    region, avals, statics = lookup("norms.add_rms"), (spec((64, 576)), spec((64, 576)), spec((576,))), {"eps": 1e-6}
    bound, kw = region.bind(avals, statics)
    assert fingerprint_elsewhere("norms.add_rms", avals, statics) == fingerprint(region, bound, kw, "sm90")
    other = fingerprint(region, bound, {**kw, "zero_centered": True}, "sm90")
    assert other != fingerprint(region, bound, kw, "sm90")


@pytest.mark.parametrize(
    "name,args,statics",
    (
        ("norms.rms", (spec((64, 580)), spec((580,))), {"eps": 1e-6}),
        ("norms.rms", (spec((64, 576), F32), spec((576,))), {"eps": 1e-6}),
        ("residual.add", (spec((64, 120)), spec((64, 120))), {}),
        ("mlp.swiglu", (spec((64, 1160), F32),), {}),
        ("grad.accumulate", (spec((64,)), spec((64,))), {}),
        ("grad.accumulate", (spec((640,)), spec((640,), F32)), {}),
        (
            "attn.prep",
            (spec((64, 288)), None, None, None, spec((16, 96), F32), spec((64,), I32)),
            {"kv_heads": 1, "head_dim": 96},
        ),
        (
            "attn.prep",
            (spec((24, 192)), None, None, None, spec((16, 64), F32), spec((24,), I32)),
            {"kv_heads": 1, "head_dim": 64},
        ),
    ),
)
def test_unsupported_operands_are_refused(name, args, statics):
    region = lookup(name)
    with pytest.raises(Unsupported, match=name.replace(".", r"\.")):
        region.check("sm90", *region.bind(args, statics))


@pytest.mark.parametrize("name", ("norms.rms", "mlp.swiglu"))
def test_a_row_has_the_same_bits_alone_and_in_a_batch(name):
    x, w = draw(np.random.default_rng(5), 5, 1152), draw(np.random.default_rng(6), 1152)
    args = lambda rows: (rows, w) if name == "norms.rms" else (rows,)
    statics = {"eps": 1e-6} if name == "norms.rms" else {}
    batch = interpret(lookup(name), args(x), statics)
    alone = interpret(lookup(name), args(x[3:4]), statics)
    turned = interpret(lookup(name), args(np.roll(x, 1, 0)), statics)
    for b, a, t in zip(batch, alone, turned, strict=True):
        assert b[3:4].tobytes() == a.tobytes() and np.roll(b, 1, 0).tobytes() == t.tobytes()


@pytest.mark.parametrize("tiles", (1, 2))
@pytest.mark.parametrize("norm", (False, True))
def test_prep_fuses_only_what_it_names(tiles, norm):
    """16 elements a thread in q and in k: a rotation's fma each, and where normed 8 of the square and one of its mean.

    A further fma would be the compiler's own, and could be in one block's form and not in another's.
    """
    norms = (spec((128,)),) * 2 if norm else (None, None)
    args = (spec((64, 384)), None, *norms, spec((4096, 128), jnp.float32), spec((64,), jnp.int32))
    some = [a for a in args if a is not None]

    def prep(*given):
        it = iter(given)
        full = [None if a is None else next(it) for a in args]
        statics = {"kv_heads": 1, "head_dim": 128, "eps": 1e-6, "zero_centered": False}
        return kernel_prep_sm90.prep(*full, **statics, b=Block(tiles, 1, 1))

    ptx = dumped("PTX", prep, *some)
    assert ptx.count("fma.rn.f32") == tiles * 2 * (16 + norm * 9)


def test_prep_reads_the_table_by_position_and_not_by_row():
    rng = np.random.default_rng(8)
    rope, qkv = rng.uniform(-1, 1, (40, 64)).astype(np.float32), draw(rng, 16, 192)
    statics = {"kv_heads": 1, "head_dim": 64}
    first = interpret(lookup("attn.prep"), (qkv, None, None, None, rope, np.arange(16, dtype=np.int32) + 20), statics)
    order = rng.permutation(16)
    second = interpret(lookup("attn.prep"), (qkv[order], None, None, None, rope, order.astype(np.int32) + 20), statics)
    for a, b in zip(first, second, strict=True):
        assert a[order].tobytes() == b.tobytes()
