"""Products on the tensor cores that stay in flight: begun, and settled when their results are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

from isojax._jax_internals import interpreting
from isojax.pallas_kernels.interpretable import BLOCKS_OF_8
from isojax.pallas_kernels.warpgroup import registers as reg
from isojax.pallas_kernels.warpgroup.registers import f32

_LEFT = plgpu.Layout.WGMMA  # bf16, two a register
_TILED = plgpu.RefType(BLOCKS_OF_8)


def _opaque(ref: Any) -> Any:
    """The same memref, whose address the compiler does not know: it would compute all that a loop derives from it
    ahead of the loop, and hold that in registers."""
    i32_type = ir.IntegerType.get_signless(32)
    address = llvm.ptrtoint(i32_type, utils.memref_ptr(ref))
    address = llvm.inline_asm(i32_type, [address], "mov.b32 $0, $1;", "=r,r", has_side_effects=True, asm_dialect=0)
    old = ir.MemRefType(ref.type)
    plain = ir.MemRefType.get(old.shape, old.element_type, None, old.memory_space)
    return utils.ptr_as_memref(llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address), plain)


def begin_scores(q: Any, k: Any) -> jax.Array:
    """Start q k^T. q [panels, 64, 64] and k [panels, n, 64] bf16 in SMEM -> [64, n], to be settled."""
    n = k.shape[1]
    if interpreting():
        a, b = q[...], k[...]
        plgpu.commit_smem()  # these reads, unlike the wgmma's, are not ordered before a later copy
        return sum(jnp.dot(a[c], b[c].T, preferred_element_type=f32) for c in range(a.shape[0]))  # pyright: ignore

    @reg.inline(arg_types=(_TILED, _TILED), return_type=reg.acc(n))
    def run(_, q_ref, k_ref):
        acc = mgpu.WGMMAAccumulator.zero(64, n)
        q_ref = _opaque(q_ref)
        for c in range(ir.MemRefType(q_ref.type).shape[0]):
            transposed = utils.memref_transpose(utils.memref_slice(k_ref, c), (1, 0, 3, 2))
            acc = mgpu.wgmma(acc, utils.memref_slice(q_ref, c), transposed)
        nvvm.wgmma_commit_group_sync_aligned()
        return acc._value

    return run(q, k)


def narrow(p: jax.Array) -> jax.Array:
    """[64, n] rounded to bf16, as the left operand of a product."""
    if interpreting():
        return p.astype(jnp.bfloat16)
    returns: Any = plgpu.ShapeDtypeStruct(p.shape, jnp.bfloat16, layout=_LEFT)

    @reg.inline(arg_types=(reg.ACC,), return_type=returns)
    def run(_, x):
        return x.to_layout(mgpu.WGMMA_LAYOUT).astype(ir.BF16Type.get())

    return run(p)


def begin_weighted(acc: Sequence[jax.Array], p: jax.Array, v: Any) -> tuple[jax.Array, ...]:
    """Start acc + p v, one product. acc: panels [64, 64]; p [64, n] bf16; v [panels, n, 64] bf16 in SMEM."""
    if interpreting():
        b = v[...]
        plgpu.commit_smem()
        return tuple(x + jnp.dot(p, b[c], preferred_element_type=f32) for c, x in enumerate(acc))

    @reg.inline(arg_types=(*[reg.ACC] * len(acc), _LEFT, _TILED), return_type=tuple(reg.acc(64) for _ in acc))
    def run(_, *args):
        *sums, a, v_ref = args
        # [panels, n / 8, 1, 8, 64] as the operand [n / 8, panels, 8, 64]: panels lie side by side, a stride apart
        b = utils.memref_transpose(utils.memref_slice(v_ref, (slice(None), slice(None), 0)), (1, 0, 2, 3))
        whole = reg.value(np.concatenate([reg.scalars(x) for x in sums]))
        done = mgpu.wgmma(mgpu.WGMMAAccumulator.from_registers(whole), a, b)._value
        nvvm.wgmma_commit_group_sync_aligned()
        return tuple(reg.value(part) for part in np.split(reg.scalars(done), len(sums)))

    return run(*acc, p, v)


def settle(values: Sequence[jax.Array], pending: int = 0) -> tuple[jax.Array, ...]:
    """Wait until no more than `pending` groups of products are in flight; `values` may be used afterwards, as returned.

    What else is passed here is not computed with before the wait (a register that a product reads must not change).
    """
    return _held(values, lambda: nvvm.wgmma_wait_group_sync_aligned(pending))


def pin(values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """`values`, computed before whatever comes next."""
    return _held(values, lambda: None)


def _held(values: Sequence[jax.Array], wait: Callable[[], Any]) -> tuple[jax.Array, ...]:
    """`values` [64, n] or [64], of which nothing is used before `wait` nor computed after it."""
    values = tuple(values)
    if interpreting():
        return values

    types = tuple(reg.ROW if v.ndim == 1 else reg.ACC for v in values)
    returns = tuple(reg.ROW_OUT if v.ndim == 1 else reg.acc(v.shape[1]) for v in values)

    @reg.inline(arg_types=types, return_type=returns)
    def run(_, *args):
        wait()
        out = mgpu.fragmented_array.optimization_barrier(*args)
        return tuple(out) if len(args) > 1 else (out,)

    return run(*values)
