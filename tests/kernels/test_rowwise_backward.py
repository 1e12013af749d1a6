"""Backward kernels of embed, norms, mlp and attn.prep: interpreter to reference and float64; the sm_90a compile."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiles, interpret, reference, spec, ulps

from isojax.errors import Unsupported
from isojax.gates.accuracy import against_float64
from isojax.kernel_plan import Allocate, Fill, Launch, View, kernel_plan
from isojax.pallas_kernels import columns
from isojax.pallas_kernels.attn import gate_prep_bwd
from isojax.pallas_kernels.embed import frequent_sm90
from isojax.pallas_kernels.mlp import gate_bwd as mlp_gate
from isojax.pallas_kernels.norms import gate_bwd as norms_gate
from isojax.region import lookup

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
RMS, ADD_RMS, SWIGLU, PREP, EMBED = (
    lookup(n) for n in ("norms.rms_bwd", "norms.add_rms_bwd", "mlp.swiglu_bwd", "attn.prep_bwd", "embed.lookup_bwd")
)


def normal(rng, *shape, scale=1.0):
    return np.array(jnp.asarray(rng.standard_normal(shape) * scale, BF16))


def norm_operands(rng, rows, columns, cts):
    x = normal(rng, rows, columns)
    rstd = (1 / np.sqrt((x.astype(np.float64) ** 2).mean(1) + 1e-6)).astype(np.float32)
    return x, normal(rng, columns, scale=0.2), rstd, *[normal(rng, rows, columns) for _ in range(cts)]


@pytest.mark.parametrize("rows,width", ((3, 576), (33, 192), (65, 1024)))
def test_norms_match_reference_and_float64(rows, width):
    rng = np.random.default_rng(width)
    for region, cts, exact in ((RMS, 1, norms_gate.exact_rms_bwd), (ADD_RMS, 2, norms_gate.exact_add_rms_bwd)):
        args = norm_operands(rng, rows, width, cts)
        statics = {"zero_centered": cts == 2}
        (dx, dw), (want, want_dw) = interpret(region, args, statics), reference(region, args, statics)
        scale = np.abs(want.astype(np.float32)).max()
        far = ulps(dx, want) > 1  # where the terms cancel, an fp32 rounding is more than a bf16 step
        assert np.abs(dx.astype(np.float32) - want.astype(np.float32))[far].max(initial=0) <= scale * 2.0**-20
        np.testing.assert_allclose(dw, want_dw, rtol=0, atol=np.abs(want_dw).max() * 1e-5)
        for got, e in zip((dx, dw), exact(*args, **statics), strict=True):
            assert against_float64(got, e).relative <= (2.0**-8 if got.dtype == BF16 else 1e-5)


def test_rows_of_zeros_change_no_bit_of_a_sum():
    rng = np.random.default_rng(1)
    x, w, rstd, ct = norm_operands(rng, 40, 192, 1)
    (_, dw), (_, more) = (
        interpret(RMS, (x, w, rstd, ct), {"zero_centered": False}),
        interpret(
            RMS,
            (np.concatenate([x, x]), w, np.tile(rstd, 2), np.concatenate([ct, np.zeros_like(ct)])),
            {"zero_centered": False},
        ),
    )
    assert dw.tobytes() == more.tobytes()


@pytest.mark.parametrize("width", (200, 576, 2696))
def test_swiglu_matches_reference_and_float64(width):
    rng = np.random.default_rng(width)
    x, ct = normal(rng, 2, 2 * width, scale=3), normal(rng, 2, width)
    x[0, :2] = np.array([-120.0, 120.0], x.dtype)  # exp2 overflows, the sigmoid is 0 and 1
    (got,), (want,) = interpret(SWIGLU, (x, ct)), reference(SWIGLU, (x, ct))
    assert ulps(got, want).max() <= 1
    assert against_float64(got, mlp_gate.exact(x, ct)).relative <= 2.0**-8


def prep_operands(rng, tokens, head_dim, heads, kv_heads, norm, bias):
    width = (heads + 2 * kv_heads) * head_dim
    angle = rng.uniform(0, 6, (50, head_dim // 2))
    return (
        normal(rng, tokens, width),
        normal(rng, width) if bias else None,
        normal(rng, head_dim) if norm else None,
        normal(rng, head_dim) if norm else None,
        np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32),
        rng.integers(0, 50, tokens).astype(np.int32),
        normal(rng, tokens, heads, head_dim),
        normal(rng, tokens, kv_heads, 2 * head_dim),
    )


@pytest.mark.parametrize(
    "tokens,head_dim,heads,kv_heads,norm,bias",
    (
        (128, 64, 2, 1, False, False),
        (64, 64, 2, 1, True, True),
        (64, 128, 1, 1, True, False),
        (64, 128, 1, 1, False, True),
    ),
)
def test_prep_matches_reference_and_float64(tokens, head_dim, heads, kv_heads, norm, bias):
    args = prep_operands(np.random.default_rng(head_dim), tokens, head_dim, heads, kv_heads, norm, bias)
    statics = {"kv_heads": kv_heads, "head_dim": head_dim, "eps": 1e-6, "zero_centered": norm and bias}
    got, want = interpret(PREP, args, statics), reference(PREP, args, statics)
    exact = gate_prep_bwd.exact(*args, **statics)
    assert len(got) == 1 + bias + 2 * norm
    for g, w, e in zip(got, want, exact, strict=True):
        bound = 2.0**-8 if g.dtype == BF16 else 1e-5
        assert np.abs(g.astype(np.float64) - w.astype(np.float64)).max() <= bound * np.abs(e).max()
        assert against_float64(g, e).relative <= bound


@pytest.mark.parametrize("tokens,used", ((64, 50), (128, 3), (64, 1)))
def test_embedding_adds_in_the_reference_order(tokens, used):
    rng = np.random.default_rng(tokens)
    args = rng.integers(0, used, tokens).astype(np.int32), normal(rng, tokens, 200)
    (got,), (want,) = interpret(EMBED, args, {"vocab": 50}), reference(EMBED, args, {"vocab": 50})
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("tokens,used,into", ((192, 3, False), (192, 150, False), (128, 1, True)))
def test_frequent_tokens_are_added_in_the_reference_order(monkeypatch, tokens, used, into):
    monkeypatch.setattr(frequent_sm90, "FREQUENT", 64)
    monkeypatch.setattr(frequent_sm90, "BATCH", 16)  # batches come round the ring, and the last is not full
    rng = np.random.default_rng(used)
    args = rng.integers(0, used, tokens).astype(np.int32), normal(rng, tokens, 128)
    args += (rng.standard_normal((157, 128)).astype(np.float32),) if into else ()
    (got,), (want,) = interpret(EMBED, args, {"vocab": 157}), reference(EMBED, args, {"vocab": 157})
    assert got.tobytes() == want.tobytes()


def test_a_fresh_gradient_is_not_filled_before():
    args, kw = EMBED.bind((spec((512,), I32), spec((512, 256))), {"vocab": 5000})
    assert [type(op) for op in kernel_plan(EMBED, args, kw).ops] == [Launch] * 3


@pytest.mark.parametrize("chunks,groups", ((1, 4), (128, 4), (129, 8)))
def test_partials_are_padded_to_whole_groups(chunks, groups):
    assert columns.partials(chunks, 64).shape == (groups * columns.GROUP, 64)


@pytest.mark.parametrize("width", (576, 2048, 4096, 8192))
def test_rows_compile_without_spills(width):
    x, w, rstd = spec((64, width)), spec((width,)), spec((64,), F32)
    compiles(RMS, (x, w, rstd, x), {"zero_centered": False})
    compiles(ADD_RMS, (x, w, rstd, x, x), {"zero_centered": True})
    compiles(SWIGLU, (spec((64, 2 * width)), x))
    compiles(EMBED, (spec((64,), I32), x), {"vocab": 512})


@pytest.mark.parametrize(
    "head_dim,heads,kv_heads,norm,bias",
    ((64, 9, 3, False, False), (128, 16, 8, True, False), (128, 32, 8, False, True)),
)
def test_prep_compiles_without_spills(head_dim, heads, kv_heads, norm, bias):
    width, opt = (heads + 2 * kv_heads) * head_dim, lambda there, n: spec((n,)) if there else None
    args = (
        *(spec((64, width)), opt(bias, width), opt(norm, head_dim), opt(norm, head_dim)),
        *(spec((4096, head_dim), F32), spec((64,), I32)),
        *(spec((64, heads, head_dim)), spec((64, kv_heads, 2 * head_dim))),
    )
    statics = {"kv_heads": kv_heads, "head_dim": head_dim, "eps": 1e-6, "zero_centered": False}
    compiles(PREP, args, statics)


@pytest.mark.parametrize(
    "region,args,statics",
    (
        (RMS, (spec((64, 1024)), spec((1024,)), spec((64,), F32), spec((64, 1024))), {"zero_centered": False}),
        (EMBED, (spec((64,), I32), spec((64, 256))), {"vocab": 512}),
    ),
)
def test_nothing_is_left_to_xla(region, args, statics):
    args, kw = region.bind(args, statics)
    assert {type(op) for op in kernel_plan(region, args, kw).ops} <= {Launch, Fill, View, Allocate}


@pytest.mark.parametrize(
    "region,args,statics",
    (
        (RMS, (spec((64, 200)), spec((200,)), spec((64,), F32), spec((64, 200))), {"zero_centered": False}),
        (RMS, (spec((1 << 18, 64)),) * 2 + (spec((1 << 18,), F32), spec((1 << 18, 64))), {"zero_centered": False}),
        (SWIGLU, (spec((64, 512), F32), spec((64, 256), F32)), {}),
        (EMBED, (spec((40,), I32), spec((40, 256))), {"vocab": 512}),
        (EMBED, (spec((64,), I32), spec((64, 256))), {"vocab": (1 << 24) + 1}),
        (
            PREP,
            (
                *(spec((32, 192)), None, None, None, spec((16, 64), F32), spec((32,), I32)),
                *(spec((32, 1, 64)), spec((32, 1, 128))),
            ),
            {"kv_heads": 1, "head_dim": 64, "eps": 0.0, "zero_centered": False},
        ),
    ),
)
def test_unsupported_operands_are_refused(region, args, statics):
    with pytest.raises(Unsupported, match=region.name.replace(".", r"\.")):
        region.check("sm90", args, statics)
