"""Functions of regions as torch functions with gradients, and where the gradients of parameters go.

A function is traced and compiled once for each set of operand shapes. Forward and backward are Programs: the forward
calls the same regions whether gradients are wanted or not, so scoring and training run the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch

from bridges.torch_ops import Compiled, compile_program
from bridges.torch_ops.dtypes import to_jax
from isojax.program import trace_vjp


@dataclass(frozen=True)
class _Pair:
    """forward: flat inputs -> outputs, residuals. backward: residuals, cotangents -> gradients of inputs[diff]."""

    forward: Compiled
    backward: Compiled
    outputs: int
    diff: tuple[int, ...]


class Call:
    """`fn` over pytrees of torch tensors, run as Programs.

    Args:
      fn: a function that isojax.program.trace_vjp can trace.
      diff: arguments that have gradients. A parameter's gradient is cast to its dtype, or, where it has a `main_grad`,
        added to that without a rounding in between (see `deliver`).
    """

    def __init__(self, fn: Callable[..., Any], diff: Sequence[int]):
        self.fn, self.diff = fn, tuple(diff)
        self._pairs: dict[Any, _Pair] = {}

    def __call__(self, *args: Any) -> Any:
        """Raises: Refused, Unsupported while compiling; InputError for tensors on different devices."""
        flat, tree = jax.tree.flatten(args)
        pair = self._pairs.get(key := self._key(flat, tree)) or self._pairs.setdefault(key, self._compile(args, flat))
        outs = _Run.apply(pair, *flat)
        return outs[0] if pair.outputs == 1 else outs

    def pair(self, *args: Any) -> _Pair:
        """The compiled forward and backward for operands of these shapes, for gates."""
        flat, tree = jax.tree.flatten(args)
        return self._pairs[self._key(flat, tree)]

    @staticmethod
    def _key(flat: list[torch.Tensor], tree: Any) -> Any:
        return tree, flat[0].device, *((x.shape, x.dtype) for x in flat)

    def _compile(self, args: tuple[Any, ...], flat: list[torch.Tensor]) -> _Pair:
        device = flat[0].device
        arch = "cpu" if device.type == "cpu" else "sm90"
        forward, backward = trace_vjp(self.fn, *jax.tree.map(_spec, args), diff=self.diff)
        sizes = [len(jax.tree.leaves(a)) for a in args]
        starts = [sum(sizes[:i]) for i in range(len(args))]
        diff = tuple(p for i in self.diff for p in range(starts[i], starts[i] + sizes[i]))
        assert forward.out_tree is not None
        outputs = forward.out_tree.children()[0].num_leaves
        compiled = (compile_program(p, arch=arch, device=device) for p in (forward, backward))
        return _Pair(*compiled, outputs, diff)


def _spec(x: torch.Tensor) -> jax.ShapeDtypeStruct:
    dtype = torch.int32 if x.dtype is torch.int64 else x.dtype
    return jax.ShapeDtypeStruct(tuple(x.shape), to_jax(dtype))


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pair: _Pair, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs = pair.forward(*flat)
        ctx.pair, ctx.count = pair, len(flat)
        # The parameters themselves, not saved copies: main_grad is an attribute of the object.
        ctx.parameters = [flat[i] if isinstance(flat[i], torch.nn.Parameter) else None for i in pair.diff]
        ctx.save_for_backward(*outs[pair.outputs :])
        return outs[: pair.outputs]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        pair: _Pair = ctx.pair
        grads = pair.backward(*ctx.saved_tensors, *(c.contiguous() for c in cotangents))
        out: list[Any] = [None] * ctx.count
        for i, parameter, grad in zip(pair.diff, ctx.parameters, grads, strict=True):
            if ctx.needs_input_grad[1 + i]:
                out[i] = grad if parameter is None else deliver(parameter, grad)
        return (None, *out)


def deliver(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """What autograd gets for a parameter's gradient: the gradient, or a stand-in where main_grad has taken it.

    Megatron's protocol: a gradient added to `main_grad` (fp32, of its DistributedDataParallel) is announced by
    `grad_added_to_main_grad`, and a tensor is still returned, because DDP's hook must run on this thread. Where two
    layers share the parameter (`zero_out_wgrad`) DDP adds that tensor all the same, so it must hold zeros.
    """
    main = getattr(parameter, "main_grad", None)
    if main is None:
        return grad.to(parameter.dtype)
    main.add_(grad)
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    make = torch.zeros_like if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like
    return make(parameter)
