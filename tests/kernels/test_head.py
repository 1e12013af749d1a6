"""The head on sm90: interpreter against reference, the two kinds of log-probability against each other, the compile."""

from __future__ import annotations

import functools
import itertools
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiles, interpret, reference, spec

from isojax.errors import Unsupported
from isojax.lowering import dumped
from isojax.pallas_kernels.chip import SMS
from isojax.pallas_kernels.head import gate, kernel_rows_sm90, kernel_sm90, leaf_sm90, plan_rows_sm90
from isojax.pallas_kernels.head.lse import leaf_tiles
from isojax.pallas_kernels.head.plan_rows_sm90 import Crew, Plan, crew
from isojax.pallas_kernels.linear.tiles import Tiles, for_vocabulary
from isojax.region import lookup
from isojax.schedule import LEAVES, padded

LOGITS, LOGPROB_ROWS, LOGPROB = (lookup(f"head.{n}") for n in ("logits", "logprob_rows", "logprob"))
F32, I32 = jnp.float32, jnp.int32
V = 1152  # leaves of 144 columns: a whole tile and one of 16
HIDDEN, VOCAB = 2048, 151936
ROWS_A_THREAD = 2  # of a [64, 128] block


@pytest.fixture
def short_ring(monkeypatch):
    """Two stages, so that even short chains go around the ring."""
    monkeypatch.setattr(kernel_sm90.tiles, "MAX_STAGES", 2)


def draw(rows, vocab=V, width=32):
    """Operands of head.logprob; every other row has temperature 0.7."""
    rng = np.random.default_rng(rows)
    hidden = np.asarray(rng.standard_normal((rows, width)), jnp.bfloat16)
    weight = np.asarray(rng.standard_normal((vocab, width)), jnp.bfloat16)
    targets = rng.integers(0, vocab, rows).astype(np.int32)
    targets[:2] = 0, vocab - 1
    return hidden, weight, targets, np.resize(np.array([1, 1 / 0.7], np.float32), rows)


def test_logits_match_reference():
    hidden, weight, *_ = draw(64, 96)
    (got,), (want,) = interpret(LOGITS, (hidden, weight)), reference(LOGITS, (hidden, weight))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_fused_equals_rows_of_the_same_logits(short_ring, one_cluster):
    """NumPy's products depend on the tile, so here both start from the logits that the fused kernel saw."""
    args = draw(64)
    logprob, lse, raw = interpret(LOGPROB, args, {"emit_logits": True})
    few = slice(0, 2)  # the interpreter is slow
    rows, lse_rows = interpret(LOGPROB_ROWS, (raw[few], args[3][few]))
    assert lse[few].tobytes() == lse_rows.tobytes()
    assert logprob[few].tobytes() == np.take_along_axis(rows, args[2][few, None], 1)[:, 0].tobytes()
    want = reference(LOGPROB, args, {"emit_logits": True})
    for got, ref in zip((logprob, lse, raw), want, strict=True):
        np.testing.assert_allclose(got, ref, rtol=0, atol=2e-5)


def test_emitting_logits_changes_no_bits(monkeypatch, short_ring):
    monkeypatch.setattr(kernel_sm90.tiles, "for_vocabulary", lambda *_, **__: Tiles(64, 128, 32, (1, 1)))
    args = draw(64)
    with_logits, without = interpret(LOGPROB, args, {"emit_logits": True}), interpret(LOGPROB, args)
    for a, b in zip(with_logits[:2], without, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("t", (Tiles(64, 128, 32, (2, 1)), Tiles(128, 128, 32, (1, 1))))
def test_taller_tiles(monkeypatch, short_ring, t):
    monkeypatch.setattr(kernel_sm90.tiles, "for_vocabulary", lambda *_, **__: t)
    args = draw(192, 64)  # a tile reaches past the last row; leaves of 8 columns
    for got, want in zip(interpret(LOGPROB, args), reference(LOGPROB, args), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


@pytest.fixture
def one_cluster(monkeypatch):
    """The interpreter has threads for one: use(plan) makes it that one."""

    def use(p):
        monkeypatch.setattr(kernel_rows_sm90, "crew", lambda *_: Crew(p, 1, late=1000))

    use(Plan(blocks=4, parts=2, warpgroups=2, slots=4))
    return use


@pytest.mark.parametrize(
    "p",
    (
        Plan(blocks=2, parts=2, warpgroups=4, slots=1),  # half of a row is fetched twice
        Plan(blocks=2, parts=2, warpgroups=2, slots=5),  # a part of the next row is there
        Plan(blocks=4, parts=2, warpgroups=2, slots=2),
        Plan(blocks=8, parts=1, warpgroups=1, slots=2),  # the whole next row
        Plan(blocks=4, parts=2, warpgroups=2, slots=7),  # three rows: statistics run ahead
        Plan(blocks=8, parts=1, warpgroups=1, slots=3),
    ),
)
def test_rows_follow_each_other_through_the_ring(one_cluster, p):
    one_cluster(p)
    z, inverse = np.random.default_rng(0).standard_normal((5, V)).astype(np.float32), np.full(5, 1 / 0.7, np.float32)
    got, lse = interpret(LOGPROB_ROWS, (z, inverse))
    alone, lse_alone = interpret(LOGPROB_ROWS, (z[4:], inverse[4:]))
    assert got[4:].tobytes() == alone.tobytes() and lse[4:].tobytes() == lse_alone.tobytes()
    for a, b in zip((got, lse), gate.exact_rows(z, inverse), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=4e-6)


def test_rows_with_extreme_logits(one_cluster):
    rng = np.random.default_rng(0)
    z = rng.standard_normal((6, V)).astype(np.float32)
    z[0] = -np.inf
    z[0, 1000] = 3.0  # certain
    z[1] = -3e4  # uniform, far down
    z[2, 5] = np.nan
    z[3, 7] = np.inf
    got, lse = interpret(LOGPROB_ROWS, (z, np.ones(6, np.float32)))
    assert lse[0] == 3.0 and got[0, 1000] == 0 and np.isneginf(got[0, :1000]).all()
    np.testing.assert_allclose(lse[1], -3e4 + np.log(V), rtol=1e-6)
    assert np.isnan(lse[2]) and np.isnan(lse[3]) and np.isfinite(got[4:]).all()
    exact = z[4:].astype(np.float64) - np.log(np.exp(z[4:].astype(np.float64)).sum(1, keepdims=True))
    np.testing.assert_allclose(got[4:], exact, rtol=0, atol=4e-6)


@pytest.mark.parametrize("rows", (64, 256, 4096))
def test_head_compiles_without_spills(rows):
    hidden, weight = spec((rows, HIDDEN)), spec((VOCAB, HIDDEN))
    targets, inverse = spec((rows,), I32), spec((rows,), F32)
    assert len(compiles(LOGITS, (hidden, weight))) == 1
    for vocab in (VOCAB, 128256):  # of the second one, blocks hold several rows
        assert len(compiles(LOGPROB_ROWS, (spec((rows, vocab), F32), inverse))) == 1
    assert len(compiles(LOGPROB, (hidden, weight, targets, inverse))) == 3


@pytest.mark.parametrize("vocab", (64, 1344, 32000, 128256, VOCAB, 262144, kernel_rows_sm90.MOST_VOCAB))
def test_every_vocabulary_has_a_plan(vocab):
    each = leaf_tiles(vocab)[1]
    for turns, blocks in itertools.product((1, 2, 3, 80), (2, 4, 8)):
        p = plan_rows_sm90.plan(turns, vocab, blocks)
        tiles = -(-each // p.parts)
        assert (p.parts - 1) * tiles < each <= p.parts * tiles and tiles <= leaf_sm90.MOST_TILES
        assert p.leaves * p.parts == p.mine * p.warpgroups and 1 <= p.slots * p.warpgroups <= 32
        ring = p.slots * p.warpgroups * math.prod(leaf_sm90.slot_shape(tiles))
        statistics = 2 * (1 + p.ahead) * p.leaves * padded(p.parts * tiles, 4)
        assert 4 * (ring + statistics) <= plan_rows_sm90.ROOM


@pytest.mark.parametrize("vocab", (1344, 128256, VOCAB, 262144))
def test_a_crew_fits_the_chip(vocab):
    for rows in range(1, 600):
        c = crew(rows, vocab)
        assert 1 <= c.clusters <= rows and c.plan.slots and c.plan.blocks * c.clusters <= SMS


@pytest.mark.parametrize("rows", (64, 256))
def test_emitting_compiles_without_spills(rows):
    args = spec((rows, HIDDEN)), spec((VOCAB, HIDDEN)), spec((rows,), I32), spec((rows,), F32)
    compiles(LOGPROB, args, {"emit_logits": True})


def arithmetic(fn, *avals):
    """How often each fp32 instruction that can round occurs in the PTX of fn's one kernel."""
    ptx = dumped("PTX", fn, *avals)
    assert ptx.count(".visible .entry") == 1
    found = re.findall(r"\b(add|sub|mul|fma|ex2)\.(?:rn\.|approx\.)?(?:ftz\.)?f32", ptx)
    return {op: found.count(op) for op in set(found)}


@pytest.mark.parametrize("rows,blocks", ((64, 1), (256, 2)))
def test_statistics_of_accumulators_are_not_contracted(rows, blocks):
    """A [64, 128] block costs 64 exponentials a thread, and no multiply meets an addition in an fma."""
    t = for_vocabulary(rows, HIDDEN)
    assert t.m // 64 * (t.n // 128) == blocks
    fused = arithmetic(
        functools.partial(kernel_sm90.product_stats, emit_logits=False, t=t),
        spec((rows, HIDDEN)),
        spec((VOCAB, HIDDEN)),
        spec((rows,), I32),
        spec((rows,), F32),
    )
    assert "fma" not in fused and fused["ex2"] == 64 * blocks


def test_rows_contract_only_where_leaves_meet():
    """The same for given logits; the fma of the seven nodes of the tree, and of the logarithm, are head.logprob's."""
    rows = arithmetic(kernel_rows_sm90.logprob_rows, spec((14, VOCAB), F32), spec((14,), F32))
    tree = arithmetic(kernel_sm90.log_sum_exp, *[spec((LEAVES * 149, 64), F32)] * 2)
    assert rows["fma"] * ROWS_A_THREAD == tree["fma"] and tree["fma"] >= 8


@pytest.mark.parametrize(
    "name,avals,limit",
    (
        ("head.logits", (spec((64, 64)), spec((100, 64))), "multiple of 8"),
        ("head.logprob_rows", (spec((64, 50257), F32), spec((64,), F32)), "multiple of 64"),
        ("head.logprob_rows", (spec((64, 1 << 21), F32), spec((64,), F32)), "at most"),
        ("head.logprob", (spec((64, 64)), spec((1000, 64)), spec((64,), I32), spec((64,), F32)), "multiple of 64"),
        ("head.logprob", (spec((64, 72)), spec((1024, 72)), spec((64,), I32), spec((64,), F32)), "multiple of 16"),
    ),
)
def test_unsupported_operands_are_refused(name, avals, limit):
    region = lookup(name)
    with pytest.raises(Unsupported, match=f"{name}.*{limit}"):
        region.check("sm90", *region.bind(avals, {}))
