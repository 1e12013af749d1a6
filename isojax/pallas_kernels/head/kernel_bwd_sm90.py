"""head.logprob_bwd on Hopper: gradients of the fused log-probability, [T, V] never formed.

The vocabulary falls into chunks of one pinned width; memory is O(T x chunk). For each chunk, in ascending order, three
products: the logits again, whose epilogue turns them into their gradient, bf16 [T, chunk]; that times the chunk's rows
of the weight, added to dhidden in fp32; and its transpose times hidden, the chunk's rows of dweight. Every chunk runs
the same modules: where it begins is an operand.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from isojax.errors import Unsupported
from isojax.pallas_kernels.head import lse as shared
from isojax.pallas_kernels.head.kernel_sm90 import rows_of
from isojax.pallas_kernels.head.lse import ROWS
from isojax.pallas_kernels.head.reference import chunk_width
from isojax.pallas_kernels.linear import gemm, tiles
from isojax.pallas_kernels.linear import kernel_grad_sm90 as grad
from isojax.pallas_kernels.linear import kernel_sm90 as linear
from isojax.pallas_kernels.linear.tiles import Tiles
from isojax.schedule import LOG2E, VOCAB_TILE

f32 = jnp.float32


def dlogits(hidden, weight, targets, inv_temperature, lse, ct, start, out, t: Tiles) -> None:
    """Gradient of the scaled logits of one chunk, rounded to bf16, into the ref `out` [T, chunk].

    ct / T (onehot - softmax), with softmax = exp2(logit (log2 e / T) - lse log2 e): one fma and one exp2. Columns past
    the vocabulary's end hold numbers that meet no row of the weight.
    """
    n, width = out.shape
    items, at = gemm.snake(t, -(-n // t.rows), -(-width // t.cols))

    def locate(i):
        r, c = at(i)
        return gemm.Item(r * t.rows, c * t.cols)

    def body(hidden, weight, targets, inv_temperature, lse, ct, start, out, s):
        begin = pl.multiple_of(start[0], grad.START)

        def block(row, col, raw):
            inv = rows_of(inv_temperature, row)
            scale, shift, size = inv * LOG2E, rows_of(lse, row) * LOG2E, rows_of(ct, row) * inv
            hit = shared.columns() == shared.along_rows(rows_of(targets, row) - begin - col)
            p = jnp.exp2(raw * shared.along_rows(scale) - shared.along_rows(shift))
            gemm.store(out, s, row, col, jnp.where(hit, 1.0 - p, -p) * shared.along_rows(size))

        def finish(_, row, col, acc):
            for i in range(0, t.m, ROWS):
                for j in range(0, t.n, VOCAB_TILE):

                    @pl.when((row + i < n) & (col + j < width))
                    def _(i=i, j=j):
                        block(row + i, col + j, acc[i : i + ROWS, j : j + VOCAB_TILE])

        w = weight.at[pl.ds(begin, width)]
        steps = hidden.shape[1] // t.k
        gemm.product(hidden, w, s, t, items=items, locate=locate, steps=steps, leaves=1, finish=finish)

    s = gemm.scratch(t, 1, out.dtype, gemm.chunk(VOCAB_TILE, width, out.dtype))
    gemm.launch(body, (), t, items, s)(hidden, weight, targets, inv_temperature, lse, ct, start, out)


def logprob_bwd(
    hidden,
    weight,
    targets,
    inv_temperature,
    lse,
    ct,
    into=None,
    *,
    vocab_chunk: int,
    cut: dict[str, Tiles] | None = None,
):
    """hidden [T, D], weight [V, D] bf16, targets [T] int32, inv_temperature, lse, ct [T] fp32 -> dhidden [T, D] bf16,
    dweight [V, D] fp32, added to `into` where that is given."""
    (n, d), vocab = hidden.shape, weight.shape[0]
    width = chunk_width(vocab, vocab_chunk)
    starts = range(0, vocab, width)
    cut = cut or tiles_of(n, d, width)
    dz, total = (jax.new_ref(lax.empty(*x)) for x in (((n, width), hidden.dtype), ((n, d), f32)))
    dweight = jax.new_ref(lax.empty((vocab, d), f32) if into is None else into)
    add_to = None if into is None else dweight
    rounded = jax.ShapeDtypeStruct((n, d), hidden.dtype)

    # jitted: the chunks then share one lowering of each kernel
    @jax.jit
    def shared_by_chunks(start):
        dlogits(hidden, weight, targets, inv_temperature, lse, ct, start, dz, cut["dlogits"])
        grad.multiply(dz, hidden, grad.WGRAD, cut["dweight"], dweight, add=add_to, start=start, moves="out")

    def to_dhidden(out, start, add=None):
        return grad.multiply(dz, weight, grad.DGRAD, cut["dhidden"], out, add=add, start=start, moves="b")

    further = jax.jit(lambda start: to_dhidden(total, start, add=total))
    dhidden = None
    for i, start in enumerate(starts):
        start = jnp.full((1,), start, jnp.int32)
        shared_by_chunks(start)
        if i == len(starts) - 1:
            dhidden = to_dhidden(rounded, start, add=total if i else None)
        elif i:
            further(start)
        else:
            to_dhidden(total, start)
    return dhidden, jax.freeze(dweight)


def tiles_of(n: int, d: int, width: int) -> dict[str, Tiles]:
    """Tiles of the three products; free to tune."""
    return dict(
        dlogits=Tiles(128 if n % 256 == 0 else 64, VOCAB_TILE, tiles.stride(d), (2, 1), snake=16),
        dweight=grad.tiles_of(width, d, n),
        dhidden=grad.tiles_of(n, d, width),
    )


def supports(hidden, weight, targets, inv_temperature, lse, ct, into=None, *, vocab_chunk) -> None:
    """What head.logprob_bwd takes on sm90; raises Unsupported."""
    linear.supports("head.logprob_bwd", hidden, weight)
    if weight.shape[0] % grad.START:
        mend = "use arch cpu; rows added to the vocabulary would enter the softmax"
        raise Unsupported("head.logprob_bwd", f"V = {weight.shape[0]}", f"a multiple of {grad.START} on sm90", mend)
