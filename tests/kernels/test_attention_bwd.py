"""attn.core_bwd's kernels: interpreter against float64 and the reference, the work list, and the sm_90a compile."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiles, interpret, interpreted, reference, spec

from isojax.errors import Unsupported
from isojax.pallas_kernels.attn import bwd_tiles_sm90 as tiles
from isojax.pallas_kernels.attn import kernel_core_bwd_sm90 as kernels
from isojax.pallas_kernels.attn.gate_core_bwd import Heads, draw, exact, pack
from isojax.region import lookup

BWD = lookup("attn.core_bwd")


def batch(lens, heads, rows, seed=0):
    """(operands, statics, float64 dq and dkv); the rows that no request owns are NaN."""
    rng = np.random.default_rng(seed)
    requests = [draw(rng, heads, n, cancelling=False) for n in lens]
    _, _, dq, dkv = zip(*[exact(r.q, r.kv, r.ct) for r in requests], strict=True)
    want = np.concatenate(dq), np.concatenate(dkv)
    return pack(requests, len(lens), rows), {"scale": heads.dim**-0.5}, want


@pytest.mark.parametrize(
    "lens,heads,rows",
    [
        ((5, 65), Heads(2, 1, 64), 80),  # one row of a second query tile
        ((30, 70), Heads(8, 1, 64), 112),  # two chains, padding of less than a tile
        ((130,), Heads(2, 1, 128), 144),  # two tiles of 128
    ],
)
def test_matches_float64_and_reference(lens, heads, rows):
    args, statics, want = batch(lens, heads, rows)
    count = sum(lens)
    for got, ref, true in zip(interpret(BWD, args, statics), reference(BWD, args, statics), want, strict=True):
        assert not got[count:].view(np.uint16).any()  # rows of no request
        got, ref = got[:count].astype(np.float64), ref[:count].astype(np.float64)
        norm = np.linalg.norm(true)
        assert np.linalg.norm(got - true) < 6e-3 * norm  # probabilities, their gradients and the result are rounded
        assert np.linalg.norm(got - ref) < 3e-3 * norm


def test_other_tunings_compute_the_same():
    """Half the keys a step, and rings as short as they may be; the bits are compared on a GPU, by the gate."""
    args, statics, want = batch((130,), Heads(1, 1, 64), 144)
    tuned = kernels.Tuning(key_stages=2, keys=64, query_stages=1)
    outs = interpreted(lambda *a: kernels.gradients(*a, **statics, tuned=tuned), *args)
    for got, true in zip(outs, want, strict=True):
        assert np.linalg.norm(got[:130].astype(np.float64) - true) < 6e-3 * np.linalg.norm(true)


def test_work_list_has_the_longest_items_first():
    lens, rows = (1, 300, 128, 129, 0), 640
    s = tiles.Shape(rows, 1, 1, 64, len(lens))
    cu_q = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    plain = np.zeros((rows, 64), jnp.bfloat16)
    _, work = interpreted(kernels.prepare(s), plain, np.zeros((rows, 1), np.float32), plain, cu_q)
    want = [(1, 3), (1, 2), (3, 2), (0, 1), (1, 1), (2, 1), (3, 1), (5, 1)]  # (5, 1): the rows of no request
    assert work.tolist() == [list(w) for w in want] + [[-1, 0]] * (s.items - len(want))


def specs(heads, rows=256, requests=4):
    avals = (
        spec((rows, heads.q, heads.dim)),
        spec((rows, heads.kv, 2 * heads.dim)),
        spec((requests + 1,), jnp.int32),
        spec((rows, heads.q * heads.dim)),
        spec((rows, heads.q), jnp.float32),
        spec((rows, heads.q * heads.dim)),
    )
    return avals, {"scale": heads.dim**-0.5}


@pytest.mark.parametrize("heads,count", ((Heads(16, 8, 128), 3), (Heads(8, 1, 128), 4), (Heads(9, 3, 64), 3)))
def test_compiles_without_spills(heads, count):
    assert len(compiles(BWD, *specs(heads))) == count


@pytest.mark.parametrize(
    "change,named",
    [({"heads": Heads(4, 2, 96)}, "head size 96"), ({"rows": 48}, "48 query rows"), ({"rows": 200}, "200 query rows")],
)
def test_unsupported_names_the_limit(change, named):
    avals, statics = specs(**({"heads": Heads(4, 2, 64)} | change))
    args, bound = BWD.bind(avals, statics)
    with pytest.raises(Unsupported, match=named) as e:
        BWD.check("sm90", args, bound)
    assert e.value.region == "attn.core_bwd" and e.value.mend
