"""The gates of every region on the cpu arch (quick), the harness's own controls, and accuracy against float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from isojax.errors import RegionError, Unavailable
from isojax.gates import rowgate
from isojax.gates.accuracy import against_float64
from isojax.gates.bits import compare, compare_all
from isojax.gates.case import Case, GateBroken, ill_conditioned
from isojax.gates.run import Jitted, cases, gated, run_gate
from isojax.region import forget, lookup, region

ROWWISE = ("embed.lookup", "norms.rms", "norms.add_rms", "residual.add", "mlp.swiglu", "attn.prep")


@pytest.mark.parametrize("name", gated())
def test_gate_on_cpu(name):
    results = run_gate(name, "cpu", quick=True)
    assert results
    for r in results:
        assert r.passed, f"{r.name}: {r.differing} of {r.checked} differ; {r.detail}"


def test_my_regions_are_gated():
    assert {*ROWWISE, "grad.accumulate"} <= set(gated())


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the arch exists")
def test_gates_on_sm90_need_a_gpu():
    with pytest.raises(Unavailable, match="GPU"):
        run_gate("residual.add", "sm90", quick=True)


def test_bits_count_nan_payloads_and_signed_zeros():
    a = np.array([0x7FC0, 0x0000, 0x3F80], np.uint16).view(jnp.bfloat16)
    b = np.array([0x7FC1, 0x8000, 0x3F80], np.uint16).view(jnp.bfloat16)
    diff = compare(a, b, "x")
    assert (diff.checked, diff.differing) == (3, 2) and "[0]" in diff.first and "0x7fc1" in diff.first
    assert compare(a, a.copy()).differing == 0
    assert compare(np.float32(np.nan), np.float32(np.nan)).differing == 0
    with pytest.raises(ValueError, match="cannot compare"):
        compare(a, a.astype(np.float32))
    with pytest.raises(ValueError, match="outputs"):
        compare_all([a], [a, a])


def test_layouts_place_rows_first_middle_last_and_alone():
    seen = {}
    for label, at, garbage in rowgate.layouts(300, 64, (1, 2, 65)):
        assert len(at) % 64 == 0 and garbage in rowgate.GARBAGE
        real = at[at != rowgate.PADDING]
        assert len(set(real)) == len(real)
        seen.setdefault(len(real), []).append((label, at))
    assert set(seen) == {1, 2, 65}
    probes = {int(at[at >= 0][0]) for _, at in seen[1]}
    first, middle, last = (at for _, at in seen[65])
    assert {first[0], middle[32], last[64]} <= probes


@pytest.fixture
def toy():
    r = region("gatetest.scale", rows=("x",))(lambda x: None)
    yield r
    forget("gatetest.scale")


def test_a_region_with_a_batch_dependent_sum_fails_its_gate(toy):
    def wrong(x):
        half = x.astype(jnp.float32)
        tree = half[:, ::2] + half[:, 1::2] if x.shape[0] > 64 else half[:, :4] + half[:, 4:]
        return (tree[:, 0] + tree[:, 1]) + (tree[:, 2] + tree[:, 3])

    toy.reference(wrong)
    toy.gate_cases(lambda rng, rows: Case("sum", (ill_conditioned(rng, rows, 8),)))
    (result,) = run_gate("gatetest.scale", quick=True)
    assert not result.passed and result.differing > 0 and "batch of 65" in result.detail


def test_a_gate_that_cannot_fail_is_reported_broken(toy):
    toy.reference(lambda x: x)
    toy.gate_cases(lambda rng, rows: Case("copy", (ill_conditioned(rng, rows, 8),), altered=lambda x: x))
    with pytest.raises(GateBroken, match="altered arithmetic"):
        run_gate("gatetest.scale", quick=True)


def test_a_region_without_gate_is_refused(toy):
    with pytest.raises(RegionError, match="has no gate"):
        run_gate("gatetest.scale")


@pytest.mark.parametrize("name", ROWWISE)
def test_reference_against_float64(name):
    """One fp32 evaluation and one rounding to bf16: 0.5 ulp, and a little for the fp32 part.

    attn.prep's rotation may cancel, so there the bound is relative to the largest element of the head.
    """
    execute, checked = Jitted("cpu"), 0
    for case in cases(name, np.random.default_rng(3), 64):
        if not isinstance(case, Case):
            continue
        assert case.exact is not None
        exact = case.exact(*case.args, **case.statics)
        got = execute(lookup(name), case.args, case.statics)
        for g, e in zip(got, exact if isinstance(exact, tuple) else (exact,), strict=True):
            accuracy = against_float64(g, e)
            if g.dtype == np.float32:
                assert accuracy.ulp <= 8, (case.name, accuracy)
            elif name == "attn.prep":
                assert accuracy.relative <= 2.0**-8, (case.name, accuracy)
            else:
                assert accuracy.ulp <= 0.502, (case.name, accuracy)
            checked += g.size
    assert checked
