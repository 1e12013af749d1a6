"""What a region's kernel implementation launches, in order, and with which buffers: read off its lowering.

A launcher needs no XLA then: it allocates, fills and launches (bridges.torch_ops.cuda). Works on any host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isojax.errors import Unsupported
from isojax.lowering import MOSAIC_CALL, lower
from isojax.region import Region

_DTYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8E4M3FN": "float8_e4m3fn",
    "f8E5M2": "float8_e5m2",
    "i32": "int32",
    "ui32": "uint32",
    "i16": "int16",
    "i8": "int8",
    "ui8": "uint8",
    "i1": "bool",
}


@dataclass(frozen=True)
class Buffer:
    """Shape and dtype name of a contiguous buffer."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Allocate:
    """out: uninitialised scratch."""

    out: int


@dataclass(frozen=True)
class Fill:
    """out: every element `value`. fresh: a kernel writes into it, so it is filled anew for each call."""

    out: int
    value: float | int | bool
    fresh: bool = False


@dataclass(frozen=True)
class Constant:
    """out: small data, uploaded once; where a kernel writes into it, `fresh` asks for a copy for each call."""

    out: int
    data: np.ndarray
    fresh: bool = False


@dataclass(frozen=True)
class View:
    """out: the memory of `source`, from byte `offset` on, with another shape."""

    out: int
    source: int
    offset: int = 0


@dataclass(frozen=True)
class Copy:
    """out: a copy of `source`, which a kernel would overwrite while somebody still reads it."""

    out: int
    source: int


@dataclass(frozen=True)
class Launch:
    """One kernel. aliases: (result, operand) pairs that are one buffer. Its pointers are operands, then results.

    module: the serialized Mosaic module, or what it was compiled to (isojax.aot.Binary).
    """

    module: Any
    operands: tuple[int, ...]
    outs: tuple[int, ...]
    aliases: tuple[tuple[int, int], ...]


Op = Allocate | Fill | Constant | View | Copy | Launch


@dataclass(frozen=True)
class KernelPlan:
    """buffers[i] describes value i; the first `arguments` are the region's operands."""

    region: str
    arguments: int
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    returns: tuple[int, ...]

    def launches(self) -> list[Launch]:
        """The kernels, in order."""
        return [op for op in self.ops if isinstance(op, Launch)]


def kernel_plan(region: Region, avals: Sequence[Any], statics: dict[str, Any]) -> KernelPlan:
    """The plan of one region call on sm90.

    Raises: Unsupported where the implementation is no kernel, rejects these operands, or leaves work to XLA.
    """
    kind = region.implementation("sm90").kind
    if kind != "kernel":
        raise Unsupported(region.name, f"an sm90 implementation of kind {kind!r}", "'kernel'", "run it with jax.jit")
    region.check("sm90", avals, statics)
    return _own_writes(_read(region.name, lower(region, avals, statics, "cuda").compiler_ir()), region.owned(statics))


def _read(name: str, module: Any) -> KernelPlan:
    import jax.experimental.mosaic.gpu as mgpu
    from jax._src.lib.mlir import ir, passmanager  # type: ignore[attr-defined]
    from jax._src.lib.mlir.dialects import hlo

    with module.context:
        mgpu.dialect.register_inliner_extensions(module.context)  # type: ignore[attr-defined]
        passmanager.PassManager.parse("builtin.module(inline{default-pipeline=})").run(module.operation)
        [main] = [f for f in module.body.operations if f.name.value == "main"]
        [block] = main.body.blocks
        ids: dict[Any, int] = {}
        buffers: list[Buffer] = []
        scalars: dict[int, Any] = {}
        ops: list[Op] = []
        returns: tuple[int, ...] = ()

        def define(value: Any) -> int:
            kind = ir.RankedTensorType(value.type)
            element = str(kind.element_type)
            if element not in _DTYPES:
                raise Unsupported(name, f"a buffer of {element}", ", ".join(_DTYPES), "use a 32-bit type or smaller")
            ids[value] = len(buffers)
            buffers.append(Buffer(tuple(kind.shape), _DTYPES[element]))
            return ids[value]

        for argument in block.arguments:
            define(argument)
        for op in block.operations:
            kind, operands = op.operation.name, [ids[o] for o in op.operands]
            if kind == "stablehlo.custom_call":
                kind = op.attributes["call_target_name"].value
            if kind in ("func.return", "sdy.return"):
                returns = tuple(operands)
            elif kind == "AllocateBuffer":
                ops.append(Allocate(define(op.results[0])))
            elif kind == MOSAIC_CALL:
                config = op.attributes["mhlo.backend_config"]
                for flag in ("use_custom_barrier", "uses_xla_collective_metadata"):
                    if flag in config and str(config[flag]) != "false":
                        raise Unsupported(
                            name, f"a kernel with {flag}", "none", "move bytes between ranks outside kernels"
                        )
                aliases = []
                for a in [hlo.OutputOperandAlias(a) for a in op.attributes["output_operand_aliases"]]:
                    aliases.append(((a.output_tuple_indices or [0])[0], a.operand_index))
                outs = tuple(map(define, op.results))
                ops.append(Launch(config["module"].value_bytes, tuple(operands), outs, tuple(aliases)))
            elif kind == "stablehlo.constant":
                dense = ir.DenseElementsAttr(op.attributes["value"])
                out = define(op.results[0])
                if dense.is_splat:
                    splat: Any = dense.get_splat_value()
                    scalars[out] = splat.value
                    ops.append(Fill(out, scalars[out]))
                elif buffers[out].dtype in ("float32", "int32"):
                    ops.append(Constant(out, np.array(dense)))
                else:
                    raise Unsupported(name, f"a {buffers[out].dtype} constant", "float32 or int32", "use one of those")
            elif kind == "stablehlo.broadcast_in_dim" and operands[0] in scalars:
                ops.append(Fill(define(op.results[0]), scalars[operands[0]]))
            elif kind in ("stablehlo.reshape", "stablehlo.optimization_barrier"):
                for source, result in zip(operands, op.results, strict=True):
                    ops.append(View(define(result), source))
            elif kind == "stablehlo.slice" and (offset := _leading_slice(op, buffers[operands[0]])) is not None:
                ops.append(View(define(op.results[0]), operands[0], offset))
            else:
                raise Unsupported(
                    name,
                    f"{kind} between its kernels",
                    "kernels, constants, reshapes and slices of leading rows",
                    "do it inside a kernel, or in the Program",
                )
    return KernelPlan(name, len(list(block.arguments)), tuple(buffers), tuple(ops), returns)


def _leading_slice(op: Any, source: Buffer) -> int | None:
    """Byte offset of a slice that is contiguous, else None."""
    start, limit, stride = (list(op.attributes[f"{n}"]) for n in ("start_indices", "limit_indices", "strides"))
    if any(s != 1 for s in stride):
        return None
    widths = [b - a for a, b in zip(start, limit, strict=True)]
    cut = [d for d, (w, n) in enumerate(zip(widths, source.shape, strict=True)) if w != n]
    if cut and any(w != 1 for w in widths[: cut[-1]]):
        return None
    import ml_dtypes

    size = np.dtype(getattr(ml_dtypes, source.dtype, source.dtype)).itemsize
    return int(np.ravel_multi_index(start, source.shape)) * size if source.shape else 0


def _own_writes(plan: KernelPlan, owned: int | None = None) -> KernelPlan:
    """Give every buffer that a kernel writes through an alias to that kernel alone.

    A kernel may overwrite an operand only if nobody else reads it afterwards. So arguments are copied first, and so is
    a value that is read again later; constants are made fresh. Operands and constants that are returned are copied too:
    results never share memory with operands, nor with each other. The exception is `owned`, the argument that the
    region adds to (Region.adds): it is written where it lies, and returned as it is.
    """
    buffers, ops = list(plan.buffers), []
    root = list(range(len(buffers)))  # value -> the value whose memory it is
    made: dict[int, int] = {}  # constants and fills: value -> index in ops
    fresh: set[int] = set()

    def copy_of(v: int) -> int:
        buffers.append(buffers[v])
        root.append(len(root))
        ops.append(Copy(len(buffers) - 1, v))
        return len(buffers) - 1

    for k, op in enumerate(plan.ops):
        if isinstance(op, View):
            root[op.out] = root[op.source]
        elif isinstance(op, Fill | Constant):
            made[op.out] = len(ops)
        elif isinstance(op, Launch):
            operands = list(op.operands)
            for out, i in op.aliases:
                r = root[operands[i]]
                shared = _read_later(plan, k, r, root) or sum(root[v] == r for v in op.operands) > 1
                if shared or (r < plan.arguments and r != owned):
                    operands[i] = copy_of(operands[i])
                elif r in made:
                    fresh.add(r)
                root[op.outs[out]] = root[operands[i]]
            op = Launch(op.module, tuple(operands), op.outs, op.aliases)
        ops.append(op)
    for v in fresh:
        op = ops[made[v]]
        ops[made[v]] = Fill(v, op.value, True) if isinstance(op, Fill) else Constant(v, op.data, True)
    returns: list[int] = []
    for v in plan.returns:
        shared = (root[v] < plan.arguments and root[v] != owned) or (root[v] in made and root[v] not in fresh)
        returns.append(copy_of(v) if shared or any(root[v] == root[w] for w in returns) else v)
    return KernelPlan(plan.region, plan.arguments, tuple(buffers), tuple(ops), tuple(returns))


def _read_later(plan: KernelPlan, k: int, r: int, root: list[int]) -> bool:
    """Whether memory r is read after op k, by a kernel or by the caller."""
    late = {v for v, x in enumerate(root) if x == r}
    for op in plan.ops[k + 1 :]:
        if isinstance(op, View) and op.source in late:
            late.add(op.out)
        elif isinstance(op, Launch) and late & set(op.operands):
            return True
    return bool(late & set(plan.returns))
