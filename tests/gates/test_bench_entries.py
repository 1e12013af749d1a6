"""Bench entries are well formed: supported by the kernel, with a peer that computes the same thing on CPU."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import torch

from isojax.gates.bench import BenchResult, Timing
from isojax.region import REGISTRY, load_shipped, lookup

load_shipped()
BENCHED = sorted(n for n, r in REGISTRY.items() if r.bench is not None)
ROWWISE = (  # small enough for float32 on a CPU; products and attention meet their peers on the GPU, case by case
    "attn.prep",
    "attn.prep_bwd",
    "embed.lookup",
    "grad.accumulate",
    "mlp.swiglu",
    "mlp.swiglu_bwd",
    "norms.add_rms",
    "norms.add_rms_bwd",
    "norms.rms",
    "norms.rms_bwd",
    "residual.add",
)


@pytest.mark.parametrize("name", BENCHED)
def test_kernel_supports_the_shapes(name):
    region = lookup(name)
    assert region.bench is not None
    cases = region.bench()
    assert cases and len({c.name for c in cases}) == len(cases)
    for c in cases:
        avals, statics = region.bind(tuple(None if o is None else o.aval for o in c.operands), dict(c.statics))
        region.check("sm90", avals, statics)
        call = lambda *a, statics=statics: region.primitive.bind(*a, **statics)
        outs = sum(a.size * a.dtype.itemsize for a in jax.eval_shape(call, *avals))
        if "sequences" in c.at:  # of decoding: the rows that an engine pads with need not move
            outs *= c.at["sequences"] / avals[0].shape[0]
        assert c.bytes >= outs and c.flops >= 0


@pytest.mark.parametrize("name", ROWWISE)
def test_peer_computes_the_same(name):
    """A peer that did less work would flatter us. With fewer rows; bf16 peers round more often than we do."""
    region = lookup(name)
    assert region.bench is not None
    case = region.bench()[0]
    fewer = {16384: 16, 151936: 64, 40960: 64}  # rows, vocabulary, positions
    small = [
        o and o._replace(shape=tuple(fewer.get(n, n) for n in o.shape), high=fewer.get(o.high, o.high))
        for o in case.operands
    ]
    case = dataclasses.replace(case, operands=tuple(small))
    tensors = [None if o is None else o.tensor(torch, "cpu") for o in case.operands]
    assert case.peer is not None
    peer = case.peer(torch, *tensors)()
    peer = peer if isinstance(peer, tuple) else (peer,)
    args = [None if t is None else t.float().numpy() if t.dtype == torch.bfloat16 else t.numpy() for t in tensors]
    ours = region.all_outputs(*args, **case.statics)  # float32: the mathematics, not the bits
    for p, o in zip(peer, ours, strict=False):
        got, want = p.float().numpy(), np.asarray(o)
        assert np.abs(got - want).max() <= 2.0**-6 * np.abs(want).max()


def test_ratios():
    peer = Timing(12.0, 0.0, 30, ratio=0.8)
    result = BenchResult("x", Timing(10.0, 0.0, 30, ratio=1.0), peer, bytes_us=8.0, flops_us=1.0)
    assert (result.speedup, result.efficiency) == (1.25, 0.8)  # by rounds, not of the medians
