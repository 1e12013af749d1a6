"""A small dense model of shipped regions, toy kernels for the launcher, and bit comparison."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.region import forget, lookup, region

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
Spec = jax.ShapeDtypeStruct


def torch_of(a) -> torch.Tensor:
    return torch.from_dlpack(jnp.asarray(a)).clone()


def bits(x) -> bytes:
    if isinstance(x, torch.Tensor):
        return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.asarray(x).tobytes()


def same(torch_side, jax_side) -> bool:
    pairs = list(zip(torch_side, jax.tree.leaves(jax_side), strict=True))
    return all(tuple(a.shape) == b.shape and bits(a) == bits(b) for a, b in pairs)


def random(spec, seed: int = 0, high: int = 7):
    keys = iter(jax.random.split(jax.random.key(seed), 200))

    def make(s):
        if jnp.issubdtype(s.dtype, jnp.integer):
            return jax.random.randint(next(keys), s.shape, 0, high, s.dtype)
        return jax.random.normal(next(keys), s.shape, s.dtype)

    return jax.tree.map(make, spec)


def layer(x, delta, w):
    """Two sub-layers of a dense decoder without attention."""
    norm, gate_up, down = w
    h, y = lookup("norms.add_rms")(x, delta, norm, eps=1e-6)
    a = lookup("mlp.swiglu")(lookup("linear.column")(y, gate_up))
    return h, lookup("linear.row")(a, down)


def layer_specs(rows: int = 32, width: int = 64, inner: int = 128):
    x = Spec((rows, width), BF16)
    weights = Spec((width,), BF16), Spec((2 * inner, width), BF16), Spec((width, inner), BF16)
    return x, x, weights


BLOCK = 128


def scaled(x, by):
    """One kernel: x * by[0], x a vector."""

    def body(x_ref, by_ref, o_ref):
        at = pl.ds(lax.axis_index("i") * BLOCK, BLOCK)
        o_ref[at] = x_ref[at] * by_ref[0]

    out = Spec(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=out, grid=(x.size // BLOCK,), grid_names=("i",))(x, by)


def overwritten(x, y):
    """One kernel that writes y into x's own memory."""
    ref = jax.new_ref(x)

    def body(x_ref, y_ref):
        at = pl.ds(lax.axis_index("i") * BLOCK, BLOCK)
        x_ref[at] = y_ref[at]

    plgpu.kernel(body, out_type=(), grid=(x.size // BLOCK,), grid_names=("i",))(ref, y)
    return jax.freeze(ref)


def counted(x):
    """One kernel with a semaphore in global memory, which has to be zero when it starts."""

    def body(x_ref, o_ref, arrived):
        pl.semaphore_signal(arrived)
        at = pl.ds(lax.axis_index("i") * BLOCK, BLOCK)
        o_ref[at] = x_ref[at]

    scratch = [plgpu.SemaphoreType.REGULAR]
    grid = (x.size // BLOCK,)
    return plgpu.kernel(body, out_type=Spec(x.shape, x.dtype), scratch_types=scratch, grid=grid, grid_names=("i",))(x)


def toy(name: str, kernel, reference, kind: str = "kernel", **kw):
    """A fresh region `toy.<name>` over one operand."""
    forget(f"toy.{name}")

    @region(f"toy.{name}", **kw)
    def signature(x): ...

    signature.reference(reference)
    signature.kernel("sm90", kernel, kind=kind)
    return signature
