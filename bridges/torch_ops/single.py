"""One region on torch tensors of any row count: padding, shapes, forward and vjp. ops.py registers it with torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import torch
from jax.core import ShapedArray

from bridges.torch_ops import backend as backends
from bridges.torch_ops.compile import Compiled, compile_program, narrow
from bridges.torch_ops.dtypes import to_jax, to_torch
from isojax import schedule
from isojax.errors import InputError, RegionError, Unsupported
from isojax.program import Program, trace
from isojax.region import Region, Residuals

ROW_TILE = {"cpu": schedule.ROW_TILE, "sm90": 64}
PROBES = (3 * 64, 5 * 64)  # two row counts, both multiples of every arch's tile: what changes between them is rows

Operand = Any  # torch.Tensor, or None where it is absent


class Out(NamedTuple):
    """An output: its shape (the row count may be symbolic), dtype, and whether it has one row per row operand's row."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    by_row: bool


def bucket(rows: int, tile: int) -> int:
    """Rows after padding: a multiple of the tile up to 16 tiles, then of an eighth of the power of two below.

    So a process that meets every batch size compiles few shapes, and pads at most an eighth.
    """
    step = max(tile, 1 << max(0, (rows - 1).bit_length() - 4))
    return max(1, -(-rows // step)) * step


class Single:
    """A region as a torch function. Operands are listed in the signature's order, None where absent."""

    def __init__(self, region: Region):
        self.region = region
        self._forwards: dict[Any, tuple[Callable[..., list[torch.Tensor]], list[bool]]] = {}
        self._vjps: dict[Any, tuple[Compiled, tuple[int, ...]]] = {}
        self._traced: dict[Any, tuple[Program, tuple[int, ...]]] = {}

    def forward(self, operands: Sequence[Operand], statics: Mapping[str, Any]) -> list[torch.Tensor]:
        """All outputs of the region. Raises: InputError, Refused, Unsupported, Unavailable."""
        operands, arch, device, rows, padded = self._prepare(operands)
        key = (device, *statics.values(), *(None if x is None else (x.shape, x.dtype) for x in operands))
        if key not in self._forwards:
            by_row = [o.by_row for o in self.outs(operands, statics)]
            self._forwards[key] = self._build(operands, arch, device, statics), by_row
        run, by_row = self._forwards[key]
        return self._cut(run(operands), by_row, rows, padded)

    def vjp(
        self,
        operands: Sequence[Operand],
        outs: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor],
        statics: Mapping[str, Any],
    ) -> list[torch.Tensor]:
        """Gradients of the operands at `grad_positions`, each in its operand's dtype. Raises as forward does."""
        shapes = self.outs(operands, statics)
        operands, arch, device, rows, padded = self._prepare(operands)
        pad = lambda x, o: self._pad(x, padded) if o.by_row and padded is not None else x
        outs = [pad(x, o) for x, o in zip(outs, shapes, strict=True)]
        primary = shapes[: self.region.outputs]
        cotangents = [pad(x, o).contiguous() for x, o in zip(cotangents, primary, strict=True)]
        key = (device, *statics.values(), *(None if x is None else (x.shape, x.dtype) for x in operands))
        if key not in self._vjps:
            program, positions = self._trace_vjp(self._avals(operands, None), statics)
            self._vjps[key] = compile_program(program, arch=arch, device=device), positions
        run, positions = self._vjps[key]
        grads = run(*[x for x in operands if x is not None], *outs, *cotangents)
        grads = self._cut(list(grads), [self._is_row(i) for i in positions], rows, padded)
        return [g.to(operands[i].dtype) for g, i in zip(grads, positions, strict=True)]

    def outs(self, operands: Sequence[Operand], statics: Mapping[str, Any]) -> list[Out]:
        """Every output, by the region's own shape function; works on fake tensors with a symbolic row count."""
        rows = self._rows(operands)
        probes = []
        for count in PROBES if rows is not None else (None,):
            args, bound = self.region.bind(tuple(self._avals(operands, count)), dict(statics))
            probes.append(self.region.out_avals(_shaped(args), bound))
        found = []
        for a, b in zip(probes[0], probes[-1], strict=True):
            moving = [d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
            if moving not in ([], [0]) or (moving and a.shape[0] != PROBES[0]):
                raise RegionError(f"region {self.region.name}: output {a.shape} does not have one row per operand row")
            shape = tuple(rows if d in moving else n for d, n in enumerate(a.shape))
            found.append(Out(shape, to_torch(a.dtype), bool(moving)))
        return found

    def grad_positions(self, operands: Sequence[Operand], statics: Mapping[str, Any]) -> tuple[int, ...]:
        """Which operands the region's vjp gives gradients for. Raises Unsupported where there is no vjp."""
        count = PROBES[0] if self._rows(operands) is not None else None
        return self._trace_vjp(self._avals(operands, count), statics)[1]

    # -- inside -----------------------------------------------------------------------------------------------------
    def _is_row(self, i: int) -> bool:
        return not self.region.variadic and self.region.operands[i] in self.region.rows

    def _rows(self, operands: Sequence[Operand]) -> Any:
        heights = [x.shape[0] for i, x in enumerate(operands) if x is not None and self._is_row(i)]
        if any(h != heights[0] for h in heights):
            raise InputError(
                f"region {self.region.name}: operands {self.region.rows} have heights {heights}; equal ones fit"
            )
        return heights[0] if heights else None

    def _prepare(self, operands: Sequence[Operand]) -> tuple[list[Operand], str, torch.device, Any, Any]:
        """(operands narrowed and padded, arch, device, rows, padded rows)."""
        name = self.region.name
        devices = {x.device for x in operands if x is not None}
        if len(devices) != 1:
            raise InputError(f"region {name}: operands on {sorted(map(str, devices))}; one device fits")
        [device] = devices
        arch = "cpu" if device.type == "cpu" else "sm90"
        rows = self._rows(operands)
        padded = None if rows is None else bucket(rows, ROW_TILE[arch])
        out: list[Operand] = []
        for i, x in enumerate(operands):
            if x is not None and x.dtype is torch.int64:
                x = narrow(x, f"region {name}, operand {i}")
            out.append(self._pad(x, padded) if x is not None and self._is_row(i) else x)
        return out, arch, backends.resolve(arch, device), rows, padded

    @staticmethod
    def _pad(x: torch.Tensor, rows: Any) -> torch.Tensor:
        return x if x.shape[0] == rows else torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])

    @staticmethod
    def _cut(outs: list[torch.Tensor], by_row: Sequence[bool], rows: Any, padded: Any) -> list[torch.Tensor]:
        return outs if rows == padded else [x[:rows] if r else x for x, r in zip(outs, by_row, strict=True)]

    def _avals(self, operands: Sequence[Operand], rows: int | None) -> list[Any]:
        """Shapes and dtypes as the region sees them; `rows` replaces the row count, which may be symbolic."""
        out: list[Any] = []
        for i, x in enumerate(operands):
            if x is None:
                out.append(None)
                continue
            swap = rows is not None and self._is_row(i)
            shape = tuple(rows if swap and d == 0 else int(n) for d, n in enumerate(x.shape))
            out.append(jax.ShapeDtypeStruct(shape, to_jax(torch.int32 if x.dtype is torch.int64 else x.dtype)))
        return out

    def _build(
        self, operands: Sequence[Operand], arch: str, device: torch.device, statics: Mapping[str, Any]
    ) -> Callable[[Sequence[Operand]], list[torch.Tensor]]:
        backend = backends.make(arch, device, lambda: None)
        args, bound = self.region.bind(tuple(self._avals(operands, None)), dict(statics))
        fn = backend.region(self.region, args, bound)
        enter = [
            (i, backend.enter if self._is_row(i) else backend.enter_input)
            for i, x in enumerate(operands)
            if x is not None
        ]
        return lambda xs: [backend.leave(o) for o in fn(*[form(xs[i]) for i, form in enter])]

    def _trace_vjp(self, avals: list[Any], statics: Mapping[str, Any]) -> tuple[Program, tuple[int, ...]]:
        """(the vjp as a Program of operands, outputs and cotangents; the operands that it gives gradients for)."""
        key = (*statics.values(), *avals)
        if key not in self._traced:
            self._traced[key] = self._trace_vjp_anew(avals, statics)
        return self._traced[key]

    def _trace_vjp_anew(self, avals: list[Any], statics: Mapping[str, Any]) -> tuple[Program, tuple[int, ...]]:
        region, found, backward = self.region, [], self.region.backward
        if backward is None:
            raise Unsupported(region.name, "a gradient", "no gradient", f"define it with {region.name}.vjp(...)")
        args, bound = region.bind(tuple(avals), dict(statics))
        outs = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in region.out_avals(_shaped(args), bound)]

        def pull(args: Any, outs: Any, cts: Any) -> list[Any]:
            full, user = region.expand(args, bound)
            grads = backward(Residuals(tuple(full), tuple(outs)), cts[0] if region.outputs == 1 else tuple(cts), **user)
            found[:] = [i for i, g in enumerate(grads) if g is not None and full[i] is not None]
            return [grads[i] for i in found]

        return trace(pull, list(args), outs, outs[: region.outputs], backward=True), tuple(found)


def _shaped(avals: Sequence[Any]) -> list[Any]:
    return [ShapedArray(a.shape, a.dtype) for a in avals]
