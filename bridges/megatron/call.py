"""Functions of regions as torch functions with gradients, and where the gradients of parameters go.

A function is traced and compiled once for each set of operand shapes. Forward and backward are Programs: the forward
calls the same regions whether gradients are wanted or not, so scoring and training run the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from bridges.torch_ops import Compiled, compile_program
from bridges.torch_ops.autograd import LayerFunction, diff_positions, layer_function
from bridges.torch_ops.dtypes import to_jax
from isojax.program import trace, trace_vjp


class Call:
    """`fn` over pytrees of torch tensors, run as Programs.

    Args:
      fn: a function that isojax.program.trace_vjp can trace.
      diff: arguments that have gradients, none for a function without. A parameter's gradient is cast to its dtype, or,
        where it has a `main_grad`, added to that without a rounding in between (see `deliver`).
    """

    def __init__(self, fn: Callable[..., Any], diff: Sequence[int] = ()):
        self.fn, self.diff = fn, tuple(diff)
        self.compiled: dict[Any, LayerFunction | Compiled] = {}

    def __call__(self, *args: Any) -> Any:
        """The function's flat outputs, or its only one. Raises: Refused, Unsupported while compiling; InputError."""
        flat, tree = jax.tree.flatten(args)
        key = (tree, flat[0].device, *((x.shape, x.dtype) for x in flat))
        if key not in self.compiled:
            self.compiled[key] = self._compile(args, flat[0].device)
        run = self.compiled[key]
        outs = run(*flat, on_grad=_on_grad) if isinstance(run, LayerFunction) else run(*flat)
        return outs[0] if len(outs) == 1 else outs

    def forwards(self) -> list[Compiled]:
        """The forward Programs compiled so far, one for each set of shapes."""
        return [f.forward if isinstance(f, LayerFunction) else f for f in self.compiled.values()]

    def _compile(self, args: tuple[Any, ...], device: torch.device) -> LayerFunction | Compiled:
        arch = "cpu" if device.type == "cpu" else "sm90"
        specs = jax.tree.map(_spec, args)
        if not self.diff:
            return compile_program(trace(self.fn, *specs), arch=arch, device=device)
        forward, backward = trace_vjp(self.fn, *specs, diff=self.diff)
        n_out = forward.out_tree.children()[0].num_leaves
        diff = diff_positions(specs, self.diff)
        return layer_function(forward, backward, diff=diff, n_out=n_out, arch=arch, device=device)


def _spec(x: torch.Tensor) -> jax.ShapeDtypeStruct:
    dtype = torch.int32 if x.dtype is torch.int64 else x.dtype  # narrowed at the Program's entry, checked
    return jax.ShapeDtypeStruct(tuple(x.shape), to_jax(dtype))


def _on_grad(index: int, leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return deliver(leaf, grad)


def deliver(leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """What autograd gets for a leaf's gradient: the gradient, or a stand-in where main_grad has taken it.

    Megatron's protocol: a gradient added to `main_grad` (fp32, of its DistributedDataParallel) is announced by
    `grad_added_to_main_grad`, and a tensor is still returned, because DDP's hook must run on this thread. Where two
    layers share the parameter (`zero_out_wgrad`) DDP adds that tensor all the same, so it must hold zeros.
    """
    main = getattr(leaf, "main_grad", None)
    if main is None:
        return grad.to(leaf.dtype)
    main.add_(grad)
    leaf.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    make = torch.zeros_like if getattr(leaf, "zero_out_wgrad", False) else torch.empty_like
    return make(leaf)
