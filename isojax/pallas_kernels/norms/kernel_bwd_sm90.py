"""Hopper kernels of the norms' gradients: a warpgroup takes a chunk of rows, one after another.

Rows stream through a ring in shared memory, so that registers hold one row and the sums. The weight's gradient of a
chunk is added up in registers, row after row, and leaves as one fp32 partial row; isojax.pallas_kernels.columns adds
those.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.errors import Unsupported
from isojax.pallas_kernels.columns import add_chunks, partials
from isojax.pallas_kernels.interpretable import let_next_start
from isojax.pallas_kernels.strips import check_rows, load, store, strips

f32 = jnp.float32
LINE = 64  # columns of a line: TMA copies a row as lines, since an axis of a copy has at most 256 elements
CHUNK = 32  # rows whose weight gradients are added before they leave the chip: part of the order, not tunable
WIDEST = 1024  # columns that are computed at a time
NARROW = 2048  # columns up to which a third row in flight pays
MOST_ROWS = 1 << 17  # sums of groups of chunks have to fit in the shared memory of one block


def rms_bwd_supports(x, weight, rstd, ct, *, zero_centered):
    _check("norms.rms_bwd", x, weight, ct)


def add_rms_bwd_supports(h, weight, rstd, ct_h, ct_y, *, zero_centered):
    _check("norms.add_rms_bwd", h, weight, ct_h, ct_y)


def _check(region, x, *rest):
    rows, columns = x.shape
    check_rows(region, x, *rest, columns=columns)
    if columns % LINE:
        raise Unsupported(region, f"rows of {columns} columns", f"a multiple of {LINE}", "use the cpu arch")
    if rows > MOST_ROWS:
        raise Unsupported(region, f"{rows} rows", f"at most {MOST_ROWS}", "split the batch, and add the dweights")


def rms_bwd(x, weight, rstd, ct, *, zero_centered):
    return _gradients("norms_rms_bwd", x, weight, rstd, (ct,), zero_centered)


def add_rms_bwd(h, weight, rstd, ct_h, ct_y, *, zero_centered):
    return _gradients("norms_add_rms_bwd", h, weight, rstd, (ct_y, ct_h), zero_centered)


def _gradients(name, x, weight, rstd, cts, zero_centered):
    """x [T, D], weight [D], rstd [T], cts: of y, and where the norm is fused also of h, [T, D] -> dx, dweight."""
    rows, columns = x.shape
    cut = strips(columns, x.dtype, WIDEST)
    stages = 3 if columns <= NARROW else 2  # rows in flight: measured, and free to change

    def body(*refs):
        given, rest = refs[: 1 + len(cts)], refs[1 + len(cts) :]
        weight, rstd, dx, partial, *rings, arrived = rest
        c = lax.axis_index("chunk")
        first = c * CHUNK

        def fetch(i, slot):
            for ref, ring in zip(given, rings, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[first + i], ring.at[slot], arrived.at[slot])

        def read(k, slot, s):
            """Strip s of a row in ring k, fp32."""
            lines = rings[k].at[slot, pl.ds(s.start // LINE, s.width // LINE)]
            layout = plgpu.Layout.WG_STRIDED((s.width // LINE, LINE), s.vec)
            return plgpu.load(lines, layout=layout, optimized=False).reshape(s.width).astype(f32)

        def gamma(s):
            g = load(weight, s).astype(f32)
            return g + 1.0 if zero_centered else g

        def write(t, s, value):
            put = lambda: store(dx.at[t], s, value.astype(dx.dtype))
            pl.when(t < rows)(put) if rows % CHUNK else put()

        for i in range(stages):
            fetch(i, i)

        def step(i, dw):
            slot = lax.rem(i, stages)
            r = rstd[jnp.minimum(first + i, rows - 1)]  # past the end there are zeros
            plgpu.barrier_wait(arrived.at[slot])
            terms = [read(1, slot, s) * gamma(s) * (read(0, slot, s) * r) for s in cut]
            mean = _sum(terms, cut) * (1.0 / columns)
            d = []
            for w, s in zip(dw, cut, strict=True):  # read once more: holding the row would cost registers
                ct, hat = read(1, slot, s), read(0, slot, s) * r
                g = r * (ct * gamma(s) - hat * mean)
                write(first + i, s, read(2, slot, s) + g if len(cts) > 1 else g)
                d.append(w + ct * hat)
            plgpu.commit_smem()  # the row has been read
            pl.when(i + stages < CHUNK)(lambda: fetch(i + stages, slot))
            return tuple(d)

        dw = tuple(plgpu.layout_cast(jnp.zeros((s.width,), f32), s.layout) for s in cut)
        dw = lax.fori_loop(0, CHUNK, step, dw)
        let_next_start()
        for d, s in zip(dw, cut, strict=True):
            store(partial.at[c], s, d)

    chunks = -(-rows // CHUNK)
    lines = (rows, columns // LINE, LINE)
    body.__name__ = name
    dx, partial = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(x.shape, x.dtype), partials(chunks, columns)),
        scratch_types=(
            *[plgpu.SMEM((stages, *lines[1:]), x.dtype)] * (1 + len(cts)),
            plgpu.Barrier(num_arrivals=1 + len(cts), num_barriers=stages),
        ),
        grid=(chunks,),
        grid_names=("chunk",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(x.reshape(lines), *[c.reshape(lines) for c in cts], weight, rstd)
    return dx, *add_chunks((partial, chunks))


def _sum(terms, cut):
    """Sum of a row's strips: those of one width element by element, ascending, then each width's over the warpgroup."""
    by_width: dict[tuple[int, int], jax.Array] = {}
    for v, s in zip(terms, cut, strict=True):
        if s.seen:
            v = jnp.where(plgpu.broadcasted_iota(jnp.int32, (s.width,), 0, layout=s.layout) >= s.seen, v, 0.0)
        key = (s.width, s.seen)
        by_width[key] = by_width[key] + v if key in by_width else v
    return functools.reduce(jnp.add, [jnp.sum(v) for v in by_width.values()])
