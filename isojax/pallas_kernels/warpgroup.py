"""Steps of one warpgroup written below Pallas, for what Pallas cannot say: products left in flight, one rounding named
per instruction, a copy of many boxes behind one arrival. Each has a substitute for Mosaic's GPU interpreter, which
cannot run inline code; on a GPU the gates recheck them (isojax.pallas_kernels.interpretable lists the others).

Values are fp32 [64, n] in `ACC`, a wgmma's own register layout, and [64] in `ROW`: thread t of a warpgroup holds, of
the rows 16 (t / 32) + t % 32 / 4 (half 0) and 8 below it (half 1), columns 8 i + 2 (t % 4) and the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, nvvm, vector

from isojax._jax_internals import barrier_address, interpreting

f32, i32 = jnp.float32, jnp.int32
ACC: Any = plgpu.Layout._WGMMA_ACC_32BIT  # one fp32 a register: pairs would be repacked around every wgmma
ROW = plgpu.Layout.WGMMA.reduce(1)
LEFT = plgpu.Layout.WGMMA  # bf16, two a register
_SCALAR: Any = plgpu.Layout.WG_SPLAT
_SWIZZLE = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
_TILED = plgpu.RefType((plgpu.TilingTransform((8, 64)), _SWIZZLE))  # pyright: ignore[reportAbstractUsage]
_ROWS = plgpu.RefType((plgpu.TilingTransform((1, 64)), _SWIZZLE))  # pyright: ignore[reportAbstractUsage]
_PLAIN = plgpu.RefType()
_inline: Any = plgpu.inline_mgpu  # which changes what a function takes, as its own types do not say
_WARP = 32
LOWEST = -1e30  # a maximum of nothing: finite, so that a row without a key stays free of NaN


def _acc(n: int) -> Any:
    return plgpu.ShapeDtypeStruct((64, n), f32, layout=ACC)


_ROW_OUT: Any = plgpu.ShapeDtypeStruct((64,), f32, layout=ROW)


# -- registers ---------------------------------------------------------------------------------------------------------
def _scalars(x: Any) -> np.ndarray:
    """The registers of an fp32 value as scalars: [n / 8, half, 2] of a matrix in ACC, [half] of a row."""
    flat = [vector.extract(r, [], ir.DenseI64ArrayAttr.get([0])) for r in x.registers.flat]
    out = np.empty(len(flat), object)
    out[:] = flat
    return out.reshape(-1, 2, 2) if len(x.shape) == 2 else out


def _value(scalars: np.ndarray) -> Any:
    """A value in ACC or ROW from such scalars."""
    regs = np.empty(scalars.size, object)
    for i, s in enumerate(scalars.flat):
        regs[i] = vector.broadcast(ir.VectorType.get((1,), s.type), s)
    shape, layout = ((64,), ROW.to_mgpu()) if scalars.ndim == 1 else ((64, 8 * scalars.shape[0]), ACC.to_mgpu())
    return mgpu.FragmentedArray(_registers=regs.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None)


def _constant(x: float) -> Any:
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), x))


def _integer(x: int) -> Any:
    return utils.c(x, ir.IntegerType.get_signless(32))


def _unary(instruction: str) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        return llvm.inline_asm(ir.F32Type.get(), [x], f"{instruction} $0, $1;", "=f,f", asm_dialect=0)

    return run


_exp2, _log2 = _unary("ex2.approx.ftz.f32"), _unary("lg2.approx.ftz.f32")
_reciprocal = _unary("rcp.approx.ftz.f32")


def _each(op: Callable[..., Any], *parts: np.ndarray) -> np.ndarray:
    out = np.empty(parts[0].shape, object)
    for at in np.ndindex(*out.shape):
        out[at] = op(*(p[at] for p in parts))
    return out


def _over_quad(op: Callable[[Any, Any], Any], x: Any) -> Any:
    """Combine the four threads that share a row; every one of them gets the result."""
    for distance in (1, 2):
        x = op(x, utils.shfl_bfly(x, distance))
    return x


def _thread() -> Any:
    """Index of the thread within its warpgroup. Read anew each time, or what follows from it would be held for long."""
    i32_type = ir.IntegerType.get_signless(32)
    t = llvm.inline_asm(i32_type, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True, asm_dialect=0)
    return arith.andi(t, _integer(127))


TURNS = 4  # first of the hardware's barriers that Mosaic leaves alone: it has 0, and one for each of three warpgroups


def pass_turn(barrier: Any, to: jax.Array) -> None:
    """Let warpgroup `to` (0 or 1) go on from `take_turn`. barrier: a plgpu.Barrier for each, for the interpreter."""
    if interpreting():
        plgpu.barrier_arrive(barrier.at[to])
        return

    @_inline(arg_types=(_SCALAR,))
    def run(_, w):
        name = arith.addi(w.registers.item(), _integer(TURNS))
        utils.inline_ptx("bar.arrive $0, 256;", name, has_side_effects=True)

    run(to)


def take_turn(barrier: Any, mine: jax.Array) -> None:
    """Wait for the other warpgroup's `pass_turn`."""
    if interpreting():
        plgpu.barrier_wait(barrier.at[mine])
        return

    @_inline(arg_types=(_SCALAR,))
    def run(_, w):
        name = arith.addi(w.registers.item(), _integer(TURNS))
        utils.inline_ptx("bar.sync $0, 256;", name, has_side_effects=True)

    run(mine)


def _opaque(ref: Any) -> Any:
    """The same memref, whose address the compiler does not know: it would compute all that a loop derives from it
    ahead of the loop, and hold that in registers."""
    i32_type = ir.IntegerType.get_signless(32)
    address = llvm.ptrtoint(i32_type, utils.memref_ptr(ref))
    address = llvm.inline_asm(i32_type, [address], "mov.b32 $0, $1;", "=r,r", has_side_effects=True, asm_dialect=0)
    old = ir.MemRefType(ref.type)
    plain = ir.MemRefType.get(old.shape, old.element_type, None, old.memory_space)
    return utils.ptr_as_memref(llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address), plain)


# -- products ----------------------------------------------------------------------------------------------------------
def begin_scores(q: Any, k: Any) -> jax.Array:
    """Start q k^T. q [panels, 64, 64] and k [panels, n, 64] bf16 in SMEM -> [64, n], to be settled."""
    n = k.shape[1]
    if interpreting():
        a, b = q[...], k[...]
        plgpu.commit_smem()  # these reads, unlike the wgmma's, are not ordered before a later copy
        return sum(jnp.dot(a[c], b[c].T, preferred_element_type=f32) for c in range(a.shape[0]))  # pyright: ignore

    @_inline(arg_types=(_TILED, _TILED), return_type=_acc(n))
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
    returns: Any = plgpu.ShapeDtypeStruct(p.shape, jnp.bfloat16, layout=LEFT)

    @_inline(arg_types=(ACC,), return_type=returns)
    def run(_, x):
        return x.to_layout(mgpu.WGMMA_LAYOUT).astype(ir.BF16Type.get())

    return run(p)


def begin_weighted(acc: Sequence[jax.Array], p: jax.Array, v: Any) -> tuple[jax.Array, ...]:
    """Start acc + p v, one product. acc: panels [64, 64]; p [64, n] bf16; v [panels, n, 64] bf16 in SMEM."""
    if interpreting():
        b = v[...]
        plgpu.commit_smem()
        return tuple(x + jnp.dot(p, b[c], preferred_element_type=f32) for c, x in enumerate(acc))

    @_inline(arg_types=(*[ACC] * len(acc), LEFT, _TILED), return_type=tuple(_acc(64) for _ in acc))
    def run(_, *args):
        *sums, a, v_ref = args
        # [panels, n / 8, 1, 8, 64] as the operand [n / 8, panels, 8, 64]: panels lie side by side, a stride apart
        b = utils.memref_transpose(utils.memref_slice(v_ref, (slice(None), slice(None), 0)), (1, 0, 2, 3))
        whole = _value(np.concatenate([_scalars(x) for x in sums]))
        done = mgpu.wgmma(mgpu.WGMMAAccumulator.from_registers(whole), a, b)._value
        nvvm.wgmma_commit_group_sync_aligned()
        return tuple(_value(part) for part in np.split(_scalars(done), len(sums)))

    return run(*acc, p, v)


def settle(values: Sequence[jax.Array], pending: int = 0) -> tuple[jax.Array, ...]:
    """Wait until no more than `pending` groups of products are in flight; `values` may be used afterwards, as returned.

    What else is passed here is not computed with before the wait (a register that a product reads must not change).
    """
    values = tuple(values)
    if interpreting():
        return values

    @_inline(arg_types=(ACC,) * len(values), return_type=tuple(_acc(v.shape[1]) for v in values))
    def run(_, *args):
        nvvm.wgmma_wait_group_sync_aligned(pending)
        out = mgpu.fragmented_array.optimization_barrier(*args)
        return tuple(out) if len(args) > 1 else (out,)

    return run(*values)


def pin(values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """`values`, computed before whatever comes next."""
    values = tuple(values)
    if interpreting():
        return values

    @_inline(arg_types=(ACC,) * len(values), return_type=tuple(_acc(v.shape[1]) for v in values))
    def run(_, *args):
        out = mgpu.fragmented_array.optimization_barrier(*args)
        return tuple(out) if len(args) > 1 else (out,)

    return run(*values)


# -- elementwise, one rounding an instruction --------------------------------------------------------------------------
def zeros(n: int) -> jax.Array:
    """[64, n]."""
    if interpreting():
        return jnp.zeros((64, n), f32)
    return plgpu.layout_cast(jnp.zeros((64, n), f32), ACC)


def full_row(value: float) -> jax.Array:
    """[64]."""
    return plgpu.layout_cast(jnp.full((64,), value, f32), ROW)


def visible(scores: jax.Array, last: jax.Array, tile: int) -> jax.Array:
    """scores [64, n], with -inf where a column is past last + r % tile, r being the row. last: int32; tile: 2^k."""
    n = scores.shape[1]
    if interpreting():
        limit = last + jnp.arange(64, dtype=i32) % tile
        return jnp.where(jnp.arange(n, dtype=i32) <= limit[:, None], scores, -jnp.inf)

    @_inline(arg_types=(ACC, _SCALAR), return_type=_acc(n))
    def run(_, s, last_):
        x, first = _scalars(s), arith.subi(last_.registers.item(), _column())
        room = [arith.addi(first, arith.andi(_row(half), _integer(tile - 1))) for half in range(2)]
        hidden = _constant(-np.inf)
        for i, half, e in np.ndindex(*x.shape):
            seen = arith.cmpi(arith.CmpIPredicate.sge, room[half], _integer(8 * i + e))
            x[i, half, e] = arith.select(seen, x[i, half, e], hidden)
        return _value(x)

    return run(scores, last)


def weigh(scores: jax.Array, m: jax.Array, den: jax.Array, factor: float, anew: jax.Array) -> tuple[jax.Array, ...]:
    """One step of the online softmax in base 2: scores [64, n], m [64], den [64] -> p [64, n], m, den, alpha [64].

    m: running maximum of the scores times `factor`, rounded. p = 2^(scores factor - m), the exponent rounded once.
    den: running sum of p; on a GPU each of the four threads of a row holds that of its own columns (see row_sum).
    anew: whether this is the first step: m is then taken as LOWEST, so that alpha is 0 and what den held is dropped.
    """
    n = scores.shape[1]
    if interpreting():
        m = jnp.where(anew, LOWEST, m)
        top = jnp.maximum(m, scores.max(1) * f32(factor))
        alpha, p = jnp.exp2(m - top), jnp.exp2(scores * f32(factor) - top[:, None])
        return p, top, den * alpha + p.sum(1), alpha

    @_inline(arg_types=(ACC, ROW, ROW, _SCALAR), return_type=(_acc(n), _ROW_OUT, _ROW_OUT, _ROW_OUT))
    def run(_, s, m_row, den_part, first):
        x, sums = _scalars(s), _scalars(den_part)
        c, lowest = _constant(factor), _constant(LOWEST)
        before = _each(lambda m: arith.select(first.registers.item(), lowest, m), _scalars(m_row))
        tops, alphas, lows = np.empty(2, object), np.empty(2, object), np.empty(2, object)
        for half in range(2):
            pair = [x[0, half, 0], x[0, half, 1]]
            for i in range(1, x.shape[0]):
                pair = [arith.maxnumf(a, x[i, half, e]) for e, a in enumerate(pair)]
            top = _over_quad(arith.maxnumf, arith.maxnumf(*pair))
            tops[half] = arith.maxnumf(before[half], arith.mulf(top, c))
            alphas[half] = _exp2(arith.subf(before[half], tops[half]))
            lows[half] = arith.negf(tops[half])
        total = np.empty((2, 2), object)
        for i, half, e in np.ndindex(*x.shape):
            x[i, half, e] = _exp2(math.fma(x[i, half, e], c, lows[half]))
            total[half, e] = x[i, half, e] if i == 0 else arith.addf(total[half, e], x[i, half, e])
        for half in range(2):
            sums[half] = math.fma(sums[half], alphas[half], arith.addf(total[half, 0], total[half, 1]))
        return _value(x), _value(tops), _value(sums), _value(alphas)

    return run(scores, m, den, jnp.asarray(anew))


def row_sum(den: jax.Array) -> jax.Array:
    """The sums of a row's four threads added by one tree: `weigh`'s den as a value like any other. [64] -> [64]."""
    if interpreting():
        return den

    @_inline(arg_types=(ROW,), return_type=_ROW_OUT)
    def run(_, part):
        return _value(_each(lambda x: _over_quad(arith.addf, x), _scalars(part)))

    return run(den)


def rescale(acc: Sequence[jax.Array], alpha: jax.Array) -> tuple[jax.Array, ...]:
    """Panels [64, n] times alpha [64]."""
    if interpreting():
        return tuple(a * alpha[:, None] for a in acc)
    returns = tuple(_acc(a.shape[1]) for a in acc)

    @_inline(arg_types=(*[ACC] * len(acc), ROW), return_type=returns)
    def run(_, *args):
        *panels, row = args
        by, out = _scalars(row), []
        for panel in panels:
            x = _scalars(panel)
            for i, half, e in np.ndindex(*x.shape):
                x[i, half, e] = arith.mulf(x[i, half, e], by[half])
            out.append(_value(x))
        return tuple(out)

    return run(*acc, alpha)


def _meet(big_m: Any, big_den: Any, m: Any, den: Any) -> tuple[Any, Any, Any, Any]:
    """Scalars: maximum and denominator of two sets of keys together, and the factors of the sums of both."""
    top = arith.maxnumf(big_m, m)
    old, new = _exp2(arith.subf(big_m, top)), _exp2(arith.subf(m, top))
    return top, math.fma(big_den, old, arith.mulf(den, new)), old, new


def meet(big_m: jax.Array, big_den: jax.Array, m: jax.Array, den: jax.Array) -> tuple[jax.Array, ...]:
    """Rows of two sets of keys together -> maximum, denominator, and the factors of the first sum and of the second."""
    if interpreting():
        top = jnp.maximum(big_m, m)
        old, new = jnp.exp2(big_m - top), jnp.exp2(m - top)
        return top, big_den * old + den * new, old, new

    @_inline(arg_types=(ROW,) * 4, return_type=(_ROW_OUT,) * 4)
    def run(_, *rows):
        met = [_meet(*x) for x in zip(*map(_scalars, rows), strict=True)]
        return tuple(_value(np.array([half[k] for half in met], object)) for k in range(4))

    return run(big_m, big_den, m, den)


def fold(sums: Any, old: jax.Array, acc: Sequence[jax.Array], new: jax.Array, *, keep: bool) -> tuple[jax.Array, ...]:
    """old times what is in `private` memory, plus new times acc (panels), the second product rounded, the sum fused.

    keep: the sum goes back there, and nothing is returned; else panels of it. A few registers at a time: two sums do
    not fit. sums None stands for zeros.
    """
    count = len(acc)
    if interpreting():
        total = [jnp.zeros_like(a) for a in acc] if sums is None else get(sums, count)
        both = tuple(t * old[:, None] + a * new[:, None] for t, a in zip(total, acc, strict=True))
        if keep:
            put(sums, both)
        return () if keep else both
    refs = () if sums is None else (sums,)
    returns = () if keep else tuple(_acc(64) for _ in acc)

    @_inline(arg_types=((ACC,) * count, ROW, ROW, *[_PLAIN] * len(refs)), return_type=returns)
    def run(_, accs, old_row, new_row, *smem):
        a, b = _scalars(old_row), _scalars(new_row)
        x = np.concatenate([_scalars(part) for part in accs])
        slots = _slots(smem[0], len(x)) if smem else [None] * len(x)
        for first in range(0, len(x), 4):
            some = range(first, first + 4)
            before = [[_constant(0.0)] * 4 if slots[i] is None else _load4(slots[i]) for i in some]
            for i, four in zip(some, before, strict=True):
                for (half, e), t in zip(np.ndindex(2, 2), four, strict=True):
                    x[i, half, e] = math.fma(t, a[half], arith.mulf(x[i, half, e], b[half]))
                if keep:
                    _store4(list(x[i].flat), slots[i])
        return () if keep else tuple(_value(part) for part in np.split(x, count))

    return run(tuple(acc), old, new, *refs)


def finish(acc: Sequence[jax.Array], m: jax.Array, den: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """-> panels of the output in bf16 [64, 64], log-sum-exp in base 2 [64]; of a row without a key, 0 and m."""
    if interpreting():
        some = jnp.where(den > 0.0, den, 1.0)
        inverse = jnp.where(den > 0.0, 1.0 / some, 0.0)
        return tuple((a * inverse[:, None]).astype(jnp.bfloat16) for a in acc), m + jnp.log2(some)
    panel: Any = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @_inline(arg_types=((ACC,) * len(acc), ROW, ROW), return_type=((panel,) * len(acc), _ROW_OUT))
    def run(_, accs, m_row, den_row):
        ends = [_end(*x) for x in zip(_scalars(m_row), _scalars(den_row), strict=True)]
        out = []
        for a in accs:
            x = _scalars(a)
            for i, half, e in np.ndindex(*x.shape):
                x[i, half, e] = arith.mulf(x[i, half, e], ends[half][0])
            out.append(_value(x).to_layout(mgpu.WGMMA_LAYOUT).astype(ir.BF16Type.get()))
        return (*out, _value(np.array([lse for _, lse in ends], object)))

    return run(tuple(acc), m, den)


def _end(m: Any, den: Any) -> tuple[Any, Any]:
    """Scalars: 1 / den (0 where den is 0), and the log-sum-exp."""
    some = arith.cmpf(arith.CmpFPredicate.OGT, den, _constant(0.0))
    safe = arith.select(some, den, _constant(1.0))
    return arith.select(some, _reciprocal(safe), _constant(0.0)), arith.addf(m, _log2(safe))


# -- memory ------------------------------------------------------------------------------------------------------------
def private(panels: int) -> Any:
    """SMEM for fp32 panels of one warpgroup that only the thread that put a register there gets it back."""
    return plgpu.SMEM((panels * 64 * 64,), f32)


def _slots(ref: Any, count: int) -> list[Any]:
    """Addresses of the 16 bytes that this thread owns of each 2 KiB of `private`: no bank is hit twice."""
    f32_type, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(64)
    first = arith.extui(i64, arith.muli(_thread(), _integer(4)))
    mine = utils.getelementptr(utils.memref_ptr(ref), [first], f32_type)
    return [utils.getelementptr(mine, [512 * i], f32_type) for i in range(count)]


def put(ref: Any, acc: Sequence[jax.Array]) -> None:
    """Keep panels [64, 64] in `private` memory."""
    if interpreting():
        ref[...] = jnp.stack(list(acc)).reshape(-1)
        return

    @_inline(arg_types=(_PLAIN, *[ACC] * len(acc)))
    def run(_, smem, *args):
        regs = [x for a in args for x in _scalars(a).flat]
        for i, slot in enumerate(_slots(smem, len(regs) // 4)):
            _store4(regs[4 * i : 4 * i + 4], slot)

    run(ref, *acc)


def get(ref: Any, panels: int) -> tuple[jax.Array, ...]:
    """What `put` kept, in the interpreter; on a GPU only `fold` reads it."""
    return tuple(ref[...].reshape(panels, 64, 64)[c] for c in range(panels))


def _load4(slot: Any) -> list[Any]:
    """Volatile, as is the store: loads of what is needed much later would take registers that are not there."""
    loaded = llvm.load(ir.VectorType.get((4,), ir.F32Type.get()), slot, volatile_=True)
    return [vector.extract(loaded, [], ir.DenseI64ArrayAttr.get([e])) for e in range(4)]


def _store4(scalars: list[Any], slot: Any) -> None:
    llvm.store(vector.from_elements(ir.VectorType.get((4,), ir.F32Type.get()), scalars), slot, volatile_=True)


Index = Any  # of one GMEM dimension: a scalar, or (start, size)


def arrivals(boxes: int) -> int:
    """Arrivals that a barrier expects of one `fetch` of so many boxes."""
    return boxes if interpreting() else 1


def fetch(barrier: Any, boxes: Sequence[tuple[Any, tuple[Index, ...], Any]]) -> None:
    """Start TMA copies (GMEM ref, its indices, SMEM of blocks of one row: `landing`), all behind one arrival.

    One thread issues them: it must know that nobody reads the SMEM any more.
    """
    if interpreting():
        for source, at, into in boxes:
            plgpu.copy_gmem_to_smem(
                source.at[tuple(pl.ds(*i) if isinstance(i, tuple) else i for i in at)], into, barrier
            )
        return
    refs = list({id(source): source for source, *_ in boxes}.values())
    which = [next(k for k, r in enumerate(refs) if r is source) for source, *_ in boxes]
    starts = [jnp.asarray(i[0] if isinstance(i, tuple) else i, i32) for _, at, _ in boxes for i in at]
    total = sum(int(np.prod(into.shape)) * into.dtype.itemsize for *_, into in boxes)
    types = (_SCALAR, *[_PLAIN] * len(refs), *[_ROWS] * len(boxes), *[_SCALAR] * len(starts))

    @_inline(arg_types=types)
    def run(context, address, *args):
        sources, targets = args[: len(refs)], args[len(refs) : len(refs) + len(boxes)]
        scalars = iter([_index(x) for x in args[len(refs) + len(boxes) :]])
        pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address.registers.item())
        ready = utils.BarrierRef(pointer, _integer(0), None, 1)  # pyright: ignore
        with utils.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            ready.arrive(127)  # with the next line, the 128 that Mosaic expects of a warpgroup
            ready.arrive_expect_tx(total)
            for k, (_, at, _), target in zip(which, boxes, targets, strict=True):
                where = [(next(scalars), i) for i in at]
                context.async_copy(
                    src_ref=sources[k],
                    dst_ref=target,
                    gmem_slice=tuple(utils.DynamicSlice(x, i[1]) if isinstance(i, tuple) else x for x, i in where),
                    gmem_transform=(mgpu.TileTransform((1, 64)),),
                    swizzle=128,
                    barrier=ready,
                    arrive=False,
                    predicate=None,
                )

    run(barrier_address(barrier), *refs, *[into for *_, into in boxes], *starts)


def _index(x: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), x.registers.item())


def warpgroup_barrier() -> None:
    """Every thread of the warpgroup has come here."""
    if interpreting():
        return

    @_inline()
    def run(_):
        utils.warpgroup_barrier()

    run()


def _row(half: int) -> Any:
    """Row of this thread's registers of a half."""
    t = _thread()
    inside = arith.divui(arith.remui(t, _integer(_WARP)), _integer(4))
    return arith.addi(arith.addi(arith.muli(arith.divui(t, _integer(_WARP)), _integer(16)), inside), _integer(8 * half))


def _below(a: Any, b: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def _all(*conditions: Any) -> Any:
    out = conditions[0]
    for c in conditions[1:]:
        out = arith.andi(out, c)
    return out


def _column() -> Any:
    """Column, within each 8, of the first of this thread's two."""
    return arith.muli(arith.andi(_thread(), _integer(3)), _integer(2))


def _at(base: Any, index: Any) -> Any:
    return utils.getelementptr(base, [arith.extsi(ir.IntegerType.get_signless(64), index)], ir.F32Type.get())


def put_rows(values: jax.Array, ref: Any, start, head, valid, heads, tile: int) -> None:
    """ref[start + r, head + h] = values[h tile + r], for r < valid and h < heads. ref: fp32 [T, H] in GMEM."""
    if interpreting():

        @pl.loop(0, heads)
        def _(h):
            @pl.loop(0, valid)
            def _(r):
                ref[start + r, head + h] = jax.lax.dynamic_index_in_dim(values, h * tile + r, keepdims=False)

        return
    width, shift = ref.shape[1], tile.bit_length() - 1

    @_inline(arg_types=(ROW, _PLAIN, *[_SCALAR] * 4))
    def run(_, rows, out, *scalars):
        base = utils.memref_ptr(out)
        first, head_, valid_, heads_ = (x.registers.item() for x in scalars)
        owner = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(_thread(), _integer(3)), _integer(0))
        for half, value in enumerate(_scalars(rows)):
            row = _row(half)
            r, h = arith.andi(row, _integer(tile - 1)), arith.shrui(row, _integer(shift))
            with utils.when(_all(owner, _below(r, valid_), _below(h, heads_))):
                line = arith.muli(arith.addi(first, r), _integer(width))
                llvm.store(value, _at(base, arith.addi(line, arith.addi(head_, h))))

    run(values, ref, start, head, valid, heads)


def put_state(acc: Sequence[jax.Array], m: jax.Array, den: jax.Array, sums: Any, ends: Any) -> None:
    """The first rows of a partition's state into GMEM: sums [rows, D] of acc, ends [2, rows] of m and den; fp32."""
    rows = sums.shape[0]
    if interpreting():
        sums[...] = jnp.concatenate(list(acc), 1)[:rows]
        ends[0], ends[1] = m[:rows], den[:rows]
        return
    width, count = sums.shape[1], len(acc)

    @_inline(arg_types=((ACC,) * count, ROW, ROW, _PLAIN, _PLAIN))
    def run(_, accs, m_row, den_row, sums_ref, ends_ref):
        row = _row(0)
        out, tail = utils.memref_ptr(sums_ref), utils.memref_ptr(ends_ref)
        with utils.when(_below(row, _integer(rows))):
            first = arith.addi(arith.muli(row, _integer(width)), _column())
            for c, a in enumerate(accs):
                x = _scalars(a)
                for i in range(8):
                    two = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), [x[i, 0, 0], x[i, 0, 1]])
                    llvm.store(two, _at(out, arith.addi(first, _integer(64 * c + 8 * i))))
            owner = arith.cmpi(arith.CmpIPredicate.eq, _column(), _integer(0))
            with utils.when(owner):
                for k, value in enumerate((_scalars(m_row)[0], _scalars(den_row)[0])):
                    llvm.store(value, _at(tail, arith.addi(row, _integer(k * rows))))

    run(tuple(acc), m, den, sums, ends)


# -- the same on vectors of 128 elements, one a thread: whole heads side by side ---------------------------------------
LINE: Any = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
_LINE_OUT: Any = plgpu.ShapeDtypeStruct((128,), f32, layout=LINE)


def line(value: float) -> jax.Array:
    """[128]."""
    return plgpu.layout_cast(jnp.full((128,), value, f32), LINE)


def _only(x: Any) -> Any:
    [r] = x.registers.flat
    return vector.extract(r, [], ir.DenseI64ArrayAttr.get([0]))


def _line(x: Any) -> Any:
    regs = np.empty((1,), object)
    regs[0] = vector.broadcast(ir.VectorType.get((1,), x.type), x)
    return mgpu.FragmentedArray(_registers=regs, _layout=LINE.to_mgpu(), _is_signed=None)


def fold_line(total: jax.Array, big_m, big_den, part: jax.Array, ends: Sequence[tuple[jax.Array, jax.Array]]):
    """`fold` of lines: 128 / D heads side by side, each with its own (m, den) in `ends` -> total, big_m, big_den."""
    width = 128 // len(ends)
    if interpreting():
        m, den = (jnp.repeat(jnp.stack([e[k] for e in ends]), width) for k in range(2))
        top = jnp.maximum(big_m, m)
        old, new = jnp.exp2(big_m - top), jnp.exp2(m - top)
        return total * old + part * new, top, big_den * old + den * new

    @_inline(arg_types=((LINE,) * 4, (_SCALAR,) * 2 * len(ends)), return_type=(_LINE_OUT,) * 3)
    def run(_, lines, scalars):
        head = arith.divui(_thread(), _integer(width))
        m, den = scalars[0].registers.item(), scalars[1].registers.item()
        for k in range(1, len(ends)):
            mine = arith.cmpi(arith.CmpIPredicate.eq, head, _integer(k))
            m = arith.select(mine, scalars[2 * k].registers.item(), m)
            den = arith.select(mine, scalars[2 * k + 1].registers.item(), den)
        sums, m0, den0, more = map(_only, lines)
        top, both, old, new = _meet(m0, den0, m, den)
        return tuple(map(_line, (math.fma(sums, old, arith.mulf(more, new)), top, both)))

    return run((total, big_m, big_den, part), tuple(x for e in ends for x in e))


def put_line(total: jax.Array, m: jax.Array, den: jax.Array, out: Any, lse: Any, row, head, heads, d: int) -> None:
    """`finish` of lines, into row `row` of out [T, Hq D] bf16 and lse [T, Hq], for heads from `head`, below `heads`."""
    if interpreting():
        some = jnp.where(den > 0.0, den, 1.0)
        values = (total * jnp.where(den > 0.0, 1.0 / some, 0.0)).astype(jnp.bfloat16)
        ends = m + jnp.log2(some)
        for k in range(128 // d):

            @pl.when(head + k < heads)
            def _(k=k):
                out[row, pl.ds((head + k) * d, d)] = values[k * d : (k + 1) * d]
                lse[row, head + k] = ends[k * d]

        return
    columns, q_heads = out.shape[1], lse.shape[1]

    @_inline(arg_types=((LINE,) * 3, _PLAIN, _PLAIN, *[_SCALAR] * 3))
    def run(_, lines, out_ref, lse_ref, *scalars):
        row_, head_, heads_ = (x.registers.item() for x in scalars)
        sums, m_, den_ = map(_only, lines)
        inverse, end = _end(m_, den_)
        t = _thread()
        mine = arith.addi(head_, arith.divui(t, _integer(d)))
        bf16, i64 = ir.BF16Type.get(), ir.IntegerType.get_signless(64)
        wide = lambda x: arith.extsi(i64, x)
        with utils.when(_below(mine, heads_)):
            at = arith.addi(
                arith.muli(wide(row_), utils.c(columns, i64)), wide(arith.addi(arith.muli(head_, _integer(d)), t))
            )
            value = arith.truncf(bf16, arith.mulf(sums, inverse))
            llvm.store(value, utils.getelementptr(utils.memref_ptr(out_ref), [at], bf16))
            first = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(t, _integer(d)), _integer(0))
            with utils.when(first):
                at = arith.addi(arith.muli(wide(row_), utils.c(q_heads, i64)), wide(mine))
                llvm.store(end, utils.getelementptr(utils.memref_ptr(lse_ref), [at], ir.F32Type.get()))

    run((total, m, den), out, lse, row, head, heads)
