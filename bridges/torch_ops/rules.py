"""How torch moves data and counts indices: one rule per primitive that a Program may hold outside regions.

A rule gets the step and the device and returns a function of torch tensors. Rules never touch a floating value: they
copy bits or compute integers. Literal operands arrive as 0-d tensors on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from bridges.torch_ops.dtypes import to_torch
from isojax import _jax_internals as internals
from isojax.errors import Refused
from isojax.program import Step

Rule = Callable[[Step, torch.device], Callable[..., Any]]
RULES: dict[str, Rule] = {}
WIDEST = 16  # bytes of torch's largest element


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the primitives of these names."""

    def register(f: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, f))
        return f

    return register


def literal(step: Step, i: int) -> Any:
    """The Python value of operand i, or None where it is a variable."""
    v = step.ins[i]
    return None if isinstance(v, int) else internals.literal_value(v)


def refuse(step: Step, why: str) -> Refused:
    return Refused(f"{step.name} at {step.where}: {why}")


# -- views ----------------------------------------------------------------------------------------------------------
@rule("reshape", "squeeze", "expand_dims")
def _reshape(s, device):
    shape = tuple(s.out_avals[0].shape)
    if s.name == "reshape" and s.params.get("dimensions") is not None:
        raise refuse(s, "a reshape that permutes; transpose first")
    return lambda x: x.reshape(shape)


@rule("transpose")
def _transpose(s, device):
    order = tuple(s.params["permutation"])
    return lambda x: x.permute(order)


@rule("slice")
def _slice(s, device):
    p = s.params
    steps = p["strides"] or (1,) * len(p["start_indices"])
    index = tuple(map(slice, p["start_indices"], p["limit_indices"], steps))
    return lambda x: x[index]


@rule("broadcast_in_dim")
def _broadcast(s, device):
    shape, value = tuple(s.out_avals[0].shape), literal(s, 0)
    if value is not None:
        dtype = to_torch(s.out_avals[0].dtype)
        return lambda _: torch.full(shape, value, dtype=dtype, device=device)
    view = [1] * len(shape)
    for d, n in zip(s.params["broadcast_dimensions"], s.in_avals[0].shape, strict=True):
        view[d] = n
    return lambda x: x.reshape(view).expand(shape)


@rule("split")
def _split(s, device):
    sizes, axis = [int(n) for n in s.params["sizes"]], s.params["axis"]
    return lambda x: x.split(sizes, axis)


@rule("unstack")
def _unstack(s, device):
    axis = s.params["axis"]
    return lambda x: x.unbind(axis)


@rule("pvary", "pbroadcast", "copy", "copy_p", "reduced_vary_cast_p", "optimization_barrier", "stop_gradient", "name")
def _identity(s, device):
    return (lambda x: x) if len(s.outs) == 1 else (lambda *x: x)


@rule("dynamic_slice")
def _dynamic_slice(s, device):
    # JAX clamps the start, so do we; the start stays on the device, since .item() would wait for the GPU.
    cuts = []
    for d, (n, full) in enumerate(zip(s.params["slice_sizes"], s.in_avals[0].shape, strict=True)):
        if n != full:
            fixed = literal(s, d + 1)
            at = None if fixed is None else min(max(fixed, 0), full - n)
            cuts.append((d, n, full - n, at, torch.arange(n, dtype=torch.int32, device=device)))

    def take(x, *starts):
        for d, n, limit, at, offsets in cuts:
            if at is None:
                x = x.index_select(d, offsets + starts[d].clamp(0, limit))
            else:
                x = x.narrow(d, at, n)
        return x

    return take


# -- copies ---------------------------------------------------------------------------------------------------------
@rule("concatenate")
def _concatenate(s, device):
    axis = s.params["dimension"]
    return lambda *xs: torch.cat(xs, axis)


@rule("stack")
def _stack(s, device):
    axis = s.params["axis"]
    return lambda *xs: torch.stack(xs, axis)


@rule("rev")
def _rev(s, device):
    dims = tuple(s.params["dimensions"])
    return lambda x: x.flip(dims)


@rule("tile")
def _tile(s, device):
    reps = tuple(s.params["reps"])
    return lambda x: x.repeat(reps)


@rule("pad")
def _pad(s, device):
    edges, value = s.params["padding_config"], literal(s, 1)
    if value is None or any(lo < 0 or hi < 0 or inner for lo, hi, inner in edges):
        raise refuse(s, "only edge padding with a constant is data movement")
    flat = [n for lo, hi, _ in reversed(edges) for n in (lo, hi)]
    return lambda x, _: torch.nn.functional.pad(x, flat, value=value)


@rule("select_n")
def _select(s, device):
    if len(s.ins) != 3:
        raise refuse(s, "a choice among more than two arrays; nest jnp.where")
    return lambda which, a, b: torch.where(which.bool(), b, a)


@rule("gather")
def _gather(s, device):
    d, x, i = s.params["dimension_numbers"], s.in_avals[0], s.in_avals[1]
    n = len(d.start_index_map)
    leading = tuple(range(n))
    if (
        d.start_index_map != leading
        or d.collapsed_slice_dims != leading
        or d.operand_batching_dims
        or i.shape[-1] != n
        or tuple(s.params["slice_sizes"][n:]) != tuple(x.shape[n:])
        or d.offset_dims != tuple(range(len(i.shape) - 1, len(s.out_avals[0].shape)))
    ):
        raise refuse(s, "only x[i], x[i, j], ... over leading axes; use isojax.program.rows")
    shape = tuple(s.out_avals[0].shape)
    if n == 1:
        return lambda x, i: x.index_select(0, i.reshape(-1)).reshape(shape)
    return lambda x, i: x[tuple(i.unbind(-1))]


def scatter(s: Step, inplace: bool) -> Callable[..., torch.Tensor]:
    d, i = s.params["dimension_numbers"], s.in_avals[1]
    n = len(d.scatter_dims_to_operand_dims)
    leading = tuple(range(n))
    if (
        d.scatter_dims_to_operand_dims != leading
        or d.inserted_window_dims != leading
        or d.operand_batching_dims
        or i.shape[-1] != n
        or d.update_window_dims != tuple(range(len(i.shape) - 1, len(s.in_avals[2].shape)))
    ):
        raise refuse(s, "only x.at[i].set, x.at[i, j].set, ... over leading axes; use isojax.program.put")

    def put(x, i, v):
        x = x if inplace else x.clone()
        if n == 1:
            rows, new = _wide(x, v.reshape(-1, *x.shape[1:]))
            rows.index_copy_(0, i.reshape(-1), new)
            return x
        return x.index_put_(tuple(i.unbind(-1)), v)

    return put


def _wide(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same rows as 16-byte elements where that can be: torch copies an element a thread, whatever its size."""
    row = xs[0].nbytes // max(len(xs[0]), 1)
    if row % WIDEST or not row or any(not x.is_contiguous() or x.data_ptr() % WIDEST for x in xs):
        return xs
    return tuple(x.view(len(x), -1).view(torch.complex128) for x in xs)


@rule("convert_element_type")
def _convert(s, device):
    dtype = to_torch(s.out_avals[0].dtype)
    return lambda x: x.to(dtype)


# -- index arithmetic ------------------------------------------------------------------------------------------------
def _plain(fn: Callable[..., Any]) -> Rule:
    return lambda s, device: fn


for _name, _fn in {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "rem": torch.fmod,
    "neg": torch.neg,
    "sign": torch.sign,
    "abs": torch.abs,
    "max": torch.maximum,
    "min": torch.minimum,
    "clamp": lambda lo, x, hi: torch.minimum(torch.maximum(x, lo), hi),
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}.items():
    RULES[_name] = _plain(_fn)


@rule("shift_left", "shift_right_arithmetic", "shift_right_logical")
def _shift(s, device):
    bits = 8 * s.in_avals[0].dtype.itemsize
    if s.name != "shift_right_logical":
        op = torch.bitwise_left_shift if s.name == "shift_left" else torch.bitwise_right_shift
        return op
    dtype, mask = to_torch(s.out_avals[0].dtype), (1 << bits) - 1
    return lambda x, n: torch.bitwise_right_shift(x.long() & mask, n).to(dtype)


@rule("iota")
def iota(s: Step, device: torch.device) -> Callable[..., torch.Tensor]:
    shape, d = tuple(s.out_avals[0].shape), s.params["dimension"]
    line = torch.arange(shape[d], dtype=to_torch(s.out_avals[0].dtype), device=device)
    full = line.reshape([shape[d] if i == d else 1 for i in range(len(shape))]).expand(shape)
    return lambda: full


@rule("cumsum")
def _cumsum(s, device):
    axis, back = s.params["axis"], s.params["reverse"]
    dtype = to_torch(s.out_avals[0].dtype)
    run = lambda x: torch.cumsum(x, axis, dtype=dtype)
    return (lambda x: run(x.flip(axis)).flip(axis)) if back else run


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_or", "reduce_and")
def _reduce(s, device):
    axes, dtype = tuple(s.params["axes"]), to_torch(s.out_avals[0].dtype)
    if not axes:
        return lambda x: x
    if s.name in ("reduce_or", "reduce_and"):
        if dtype is not torch.bool:
            raise refuse(s, "bitwise reductions only of booleans")
        return (lambda x: x.any(axes)) if s.name == "reduce_or" else (lambda x: x.all(axes))
    if math.prod(s.in_avals[0].shape) == 0 and s.name != "reduce_sum":
        raise refuse(s, "the maximum of nothing")
    if s.name == "reduce_sum":
        return lambda x: torch.sum(x, axes, dtype=dtype)
    return (lambda x: x.amax(axes)) if s.name == "reduce_max" else (lambda x: x.amin(axes))
