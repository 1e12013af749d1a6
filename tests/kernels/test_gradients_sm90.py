"""linear.dgrad, linear.wgrad and head.logprob_bwd on sm90: interpreter against reference, and the sm_90a compile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiles, interpret, interpreted, reference, spec, ulps

from isojax.errors import Unsupported
from isojax.gates.accuracy import against_float64
from isojax.kernel_plan import Allocate, Copy, Launch, kernel_plan
from isojax.pallas_kernels.head import gate_bwd, kernel_bwd_sm90
from isojax.pallas_kernels.linear import kernel_grad_sm90, tiles
from isojax.pallas_kernels.linear.gate_grad import exact_dgrad, exact_wgrad
from isojax.pallas_kernels.linear.tiles import Tiles
from isojax.region import lookup

DGRAD, WGRAD, HEAD = lookup("linear.dgrad"), lookup("linear.wgrad"), lookup("head.logprob_bwd")
F32, I32 = jnp.float32, jnp.int32
SHAPES = ((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144), (1280, 8192), (576, 1536))  # [N, K] of weights


def draw(seed, *shape):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


@pytest.fixture
def tile(monkeypatch):
    """Pins the tiles, with few stages, so that even short chains go around the ring."""

    def pin(t: Tiles):
        monkeypatch.setattr(tiles, "MAX_STAGES", 2)
        monkeypatch.setattr(kernel_grad_sm90, "tiles_of", lambda *_: t)

    return pin


CUTS = (
    Tiles(64, 64, 32, (2, 1)),
    Tiles(128, 64, 64, (1, 2)),
    Tiles(64, 32, 16, (1, 1)),  # blocks of 16 columns
    Tiles(64, 128, 32, (1, 1)),
    Tiles(64, 32, 32, (2, 1), cluster=2, shared="x"),
    Tiles(64, 64, 32, (1, 1), cluster=2, shared="w"),
)


@pytest.mark.parametrize("t", CUTS)
def test_linear_gradients_match_reference(tile, t):
    tile(t)
    rows, n, k = 128, 192, 96  # past the edge of every output
    ct, weight, x = draw(0, rows, n), draw(1, n, k), draw(2, rows, k)
    (got,), (want,) = interpret(DGRAD, (ct, weight)), reference(DGRAD, (ct, weight))
    assert ulps(got, want).max() <= 1
    assert against_float64(got, exact_dgrad(ct, weight)).relative < 2**-8
    (got,) = interpret(WGRAD, (ct, x))
    assert against_float64(got, exact_wgrad(ct, x)).relative < 1e-6


def test_narrow_widths(tile):
    """Widths of 16 and 48: swizzled blocks as narrow as wgmma takes them."""
    tile(Tiles(64, 64, 16, (1, 1)))
    ct, weight, x = draw(0, 64, 48), draw(1, 48, 16), draw(2, 64, 16)
    assert ulps(interpret(DGRAD, (ct, weight))[0], reference(DGRAD, (ct, weight))[0]).max() <= 1
    assert against_float64(interpret(WGRAD, (ct, x))[0], exact_wgrad(ct, x)).relative < 1e-6


@pytest.mark.parametrize(
    "rows,n,k",
    (
        (64, 2048, 2048),
        (1024, 4096, 2048),
        (1024, 12288, 2048),
        (1024, 8192, 1024),
        (8192, 2048, 6144),
        (16384, 1280, 8192),
    ),
)
def test_linear_gradients_compile_without_spills(rows, n, k):
    compiles(DGRAD, (spec((rows, n)), spec((n, k))))
    compiles(WGRAD, (spec((rows, n)), spec((rows, k))))


@pytest.mark.parametrize("rows", (64, 192, 1024, 4096, 16384))
@pytest.mark.parametrize("n,k", (*SHAPES, (16, 16), (48, 80), (24576, 4096)))
def test_tiles_are_well_formed(rows, n, k):
    """For dgrad, then for wgrad: registers, two stages, and steps that divide the contraction."""
    for first, (m, cols, depth), dtype in (
        (kernel_grad_sm90.DGRAD, (rows, k, n), jnp.bfloat16),
        (kernel_grad_sm90.WGRAD, (n, k, rows), F32),
    ):
        t = kernel_grad_sm90.tiles_of(m, cols, depth)
        assert t.m % 64 == 0 and t.n <= 256 and depth % t.k == 0 and t.m * t.n // 128 <= tiles.REGISTERS
        stored = kernel_grad_sm90.storage(first, t, m, cols)
        assert stored.chunk >= 16
        kernel_grad_sm90.gemm.scratch(t, 1, dtype, kernel_grad_sm90.gemm.chunk(t.n, cols, dtype), stored)


@pytest.mark.parametrize("added", (False, True))
def test_products_into_part_of_a_buffer(tile, added):
    """`start`, and the sum of product and accumulator with one rounding, in place."""
    t = Tiles(64, 64, 32, (1, 1))
    a, b, old = draw(0, 64, 128), draw(1, 64, 96), np.asarray(draw(2, 128, 96), np.float32)

    def fn(a, b, old):
        out = jax.new_ref(old)
        kernel_grad_sm90.multiply(a, b, kernel_grad_sm90.WGRAD, t, out, add=out if added else None)
        return jax.freeze(out)

    [got] = interpreted(fn, a, b, old)
    np.testing.assert_allclose(got, exact_wgrad(a, b) + added * old, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name,args,limit", (
    ("linear.dgrad", (spec((63, 64)), spec((64, 64))), "multiple of 64"),
    ("linear.dgrad", (spec((64, 64)), spec((64, 72))), "multiples of 16"),
    ("linear.wgrad", (spec((64, 72)), spec((64, 64))), "multiples of 16"),
    ("linear.wgrad", (spec((64, 64), F32), spec((64, 64))), "bfloat16"),
))  # fmt: skip
def test_unsupported_operands_are_refused(name, args, limit):
    region = lookup(name)
    with pytest.raises(Unsupported, match=f"{name}.*{limit}"):
        region.check("sm90", *region.bind(args, {}))


# -- the head ----------------------------------------------------------------------------------------------------------
def head_specs(rows, vocab, width):
    per_row = [spec((rows,), F32)] * 3
    return spec((rows, width)), spec((vocab, width)), spec((rows,), I32), *per_row


@pytest.mark.parametrize("chunk", (256, 1024))  # several chunks, or all at once
def test_head_matches_reference(monkeypatch, chunk):
    monkeypatch.setattr(tiles, "MAX_STAGES", 2)
    t = Tiles(64, 128, 32, (1, 1))
    monkeypatch.setattr(kernel_bwd_sm90, "tiles_of", lambda *_: dict(dlogits=t, dweight=t, dhidden=t))
    args, statics = gate_bwd.operands(np.random.default_rng(0), 64), {"vocab_chunk": chunk}
    got, want = interpret(HEAD, args, statics), reference(HEAD, args, statics)
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-5)
    for g, e in zip(got, gate_bwd.exact(*args), strict=True):
        assert against_float64(g[1::2], e[1::2]).relative < 2**-6


def test_head_compiles_without_spills_into_few_kernels():
    args = head_specs(8192, 151936, 2048)
    bound, kw = HEAD.bind(args, {})
    plan = kernel_plan(HEAD, list(bound), kw)
    launches = plan.launches()
    assert len({op.module for op in launches}) == 5 and len(launches) == 3 * 10
    assert not any(isinstance(op, Copy) for op in plan.ops)
    made = [plan.buffers[op.out].shape for op in plan.ops if isinstance(op, Allocate)]
    assert sorted(made) == [(8192, 2048), (8192, 15232), (151936, 2048)]  # memory: no [T, V]
    assert all(isinstance(op, Launch) for op in launches)
    compiles(HEAD, args)


def test_head_refuses_a_vocabulary_off_its_grid():
    with pytest.raises(Unsupported, match="head.logprob_bwd.*multiple of 64"):
        HEAD.check("sm90", *HEAD.bind(head_specs(64, 1000, 64), {}))
