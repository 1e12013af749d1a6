"""Hopper kernel of the embedding: one warpgroup copies one row of the table."""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.strips import check_rows, load, store, strips

WIDEST = 4096  # elements of a strip: 64 bytes in flight per thread


def lookup_supports(table, tokens):
    check_rows("embed.lookup", table, columns=table.shape[1], widest=65536)


def lookup(table, tokens):
    rows, columns = tokens.shape[0], table.shape[1]
    cut = strips(columns, table.dtype, WIDEST)

    def embed_lookup(table, tokens, out):
        t = lax.axis_index("row")
        token = tokens[t]
        for s in cut:
            store(out.at[t], s, load(table.at[token], s))

    out = jax.ShapeDtypeStruct((rows, columns), table.dtype)
    return plgpu.kernel(embed_lookup, out_type=out, grid=(rows,), grid_names=("row",))(table, tokens)
