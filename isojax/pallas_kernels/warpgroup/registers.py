"""A warpgroup's registers: how values lie in them, and the scalars that inline code computes with.

Values are fp32 [64, n] in `ACC`, a wgmma's own register layout, and [64] in `ROW`: thread t of a warpgroup holds, of
the rows 16 (t / 32) + t % 32 / 4 (half 0) and 8 below it (half 1), columns 8 i + 2 (t % 4) and the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

f32, i32 = jnp.float32, jnp.int32
ACC: Any = plgpu.Layout._WGMMA_ACC_32BIT  # one fp32 a register: pairs would be repacked around every wgmma
ROW = plgpu.Layout.WGMMA.reduce(1)
SCALAR: Any = plgpu.Layout.WG_SPLAT
PLAIN = plgpu.RefType()
ROW_OUT: Any = plgpu.ShapeDtypeStruct((64,), f32, layout=ROW)
inline: Any = plgpu.inline_mgpu  # which changes what a function takes, as its own types do not say
_WARP = 32


def acc(n: int) -> Any:
    """Type of a result [64, n]."""
    return plgpu.ShapeDtypeStruct((64, n), f32, layout=ACC)


# -- values as scalars -------------------------------------------------------------------------------------------------
def element(registers: Any, i: int) -> Any:
    """Scalar i of a vector, as one register of a value is."""
    return vector.extract(registers, [], ir.DenseI64ArrayAttr.get([i]))


def scalars(x: Any) -> np.ndarray:
    """The registers of an fp32 value as scalars: [n / 8, half, 2] of a matrix in ACC, [half] of a row."""
    flat = [element(r, 0) for r in x.registers.flat]
    out = np.empty(len(flat), object)
    out[:] = flat
    return out.reshape(-1, 2, 2) if len(x.shape) == 2 else out


def value(scalars: np.ndarray) -> Any:
    """A value in ACC or ROW from such scalars."""
    regs = np.empty(scalars.size, object)
    for i, s in enumerate(scalars.flat):
        regs[i] = vector.broadcast(ir.VectorType.get((1,), s.type), s)
    shape, layout = ((64,), ROW.to_mgpu()) if scalars.ndim == 1 else ((64, 8 * scalars.shape[0]), ACC.to_mgpu())
    return mgpu.FragmentedArray(_registers=regs.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None)


# -- arithmetic --------------------------------------------------------------------------------------------------------
def constant(x: float) -> Any:
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), x))


def integer(x: int) -> Any:
    return utils.c(x, ir.IntegerType.get_signless(32))


def _unary(instruction: str) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        return llvm.inline_asm(ir.F32Type.get(), [x], f"{instruction} $0, $1;", "=f,f", asm_dialect=0)

    return run


exp2, log2 = _unary("ex2.approx.ftz.f32"), _unary("lg2.approx.ftz.f32")
reciprocal = _unary("rcp.approx.ftz.f32")


def each(op: Callable[..., Any], *parts: np.ndarray) -> np.ndarray:
    out = np.empty(parts[0].shape, object)
    for at in np.ndindex(*out.shape):
        out[at] = op(*(p[at] for p in parts))
    return out


def over_quad(op: Callable[[Any, Any], Any], x: Any) -> Any:
    """Combine the four threads that share a row; every one of them gets the result."""
    for distance in (1, 2):
        x = op(x, utils.shfl_bfly(x, distance))
    return x


def below(a: Any, b: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


# -- places ------------------------------------------------------------------------------------------------------------
def thread() -> Any:
    """Index of the thread within its warpgroup. Read anew each time, or what follows from it would be held for long."""
    i32_type = ir.IntegerType.get_signless(32)
    t = llvm.inline_asm(i32_type, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True, asm_dialect=0)
    return arith.andi(t, integer(127))


def row(half: int) -> Any:
    """Row of this thread's registers of a half."""
    t = thread()
    inside = arith.divui(arith.remui(t, integer(_WARP)), integer(4))
    return arith.addi(arith.addi(arith.muli(arith.divui(t, integer(_WARP)), integer(16)), inside), integer(8 * half))


def column() -> Any:
    """Column, within each 8, of the first of this thread's two."""
    return arith.muli(arith.andi(thread(), integer(3)), integer(2))
