"""attn.core's kernels compiled for sm_90a, and what they refuse: apart, since a file's tests run in one process."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from harness import compiles, fingerprint_elsewhere, spec

from isojax.errors import Unsupported
from isojax.lowering import fingerprint
from isojax.pallas_kernels.attn.work import tile_rows
from isojax.region import lookup

CORE = lookup("attn.core")
I32 = jnp.int32
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


@pytest.mark.parametrize("heads,kv_heads", ((8, 8), (4, 1), (2, 1), (2, 2)))
def test_groups_of_few_heads_compile_without_spills(heads, kv_heads):
    """Pages of 16 leave the fewest registers; a rank of a model may have one or two KV heads."""
    compiles(CORE, *specs(heads, kv_heads, 128, page=16))


def test_the_largest_page_compiles():
    """Pages of 16 are compiled above, for every model."""
    compiles(CORE, *specs(16, 8, 128, page=128))


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
        ({"page": 8}, "pages of 8"),
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
