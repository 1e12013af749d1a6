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
from isojax.program import Program, accumulating, trace, trace_vjp

ALIGN = 16  # bytes: what a kernel asks of an operand's address


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
        self.traced: dict[Any, tuple[Program, Program | None]] = {}

    def __call__(self, *args: Any) -> Any:
        """The function's flat outputs, or its only one. Raises: Refused, Unsupported while compiling; InputError."""
        flat, tree = jax.tree.flatten(args)
        run = self._get(args, flat, tree, flat[0].device)
        outs = run(*flat, on_grad=_on_grad, into=_into) if isinstance(run, LayerFunction) else run(*flat)
        return outs[0] if len(outs) == 1 else outs

    def programs(self, *args: Any) -> list[Program]:
        """What a trainer runs for arguments of these shapes: the forward, and the backward that adds to main_grad."""
        forward, backward = self._trace(jax.tree.map(_spec, args))
        return [forward] if backward is None else [forward, accumulating(backward)[0]]

    def prepare(self, *args: Any, device: torch.device) -> None:
        """Compile `programs` on `device`, before the first call; meta tensors will do."""
        run = self._get(args, *jax.tree.flatten(args), device)
        if isinstance(run, LayerFunction):
            _ = run.adding or run.backward  # compiled where it is first asked for

    def forwards(self) -> list[Compiled]:
        """The forward Programs compiled so far, one for each set of shapes."""
        return [f.forward if isinstance(f, LayerFunction) else f for f in self.compiled.values()]

    def both_ways(self) -> list[Compiled]:
        """The forward and backward Programs compiled so far."""
        return [c for f in self.compiled.values() for c in (f.compiled() if isinstance(f, LayerFunction) else [f])]

    def _get(self, args: tuple[Any, ...], flat: list[Any], tree: Any, device: torch.device) -> LayerFunction | Compiled:
        key = (tree, device, *((x.shape, x.dtype) for x in flat))
        if key not in self.compiled:
            self.compiled[key] = self._compile(args, device)
        return self.compiled[key]

    def _compile(self, args: tuple[Any, ...], device: torch.device) -> LayerFunction | Compiled:
        arch = "cpu" if device.type == "cpu" else "sm90"
        specs = jax.tree.map(_spec, args)
        forward, backward = self._trace(specs)
        if backward is None:
            return compile_program(forward, arch=arch, device=device)
        n_out = forward.out_tree.children()[0].num_leaves
        diff = diff_positions(specs, self.diff)
        return layer_function(forward, backward, diff=diff, n_out=n_out, arch=arch, device=device)

    def _trace(self, specs: tuple[Any, ...]) -> tuple[Program, Program | None]:
        key = tuple(map(str, jax.tree.flatten(specs)))
        if key not in self.traced:
            both = trace_vjp(self.fn, *specs, diff=self.diff) if self.diff else (trace(self.fn, *specs), None)
            self.traced[key] = both
        return self.traced[key]


def _spec(x: torch.Tensor) -> jax.ShapeDtypeStruct:
    dtype = torch.int32 if x.dtype is torch.int64 else x.dtype  # narrowed at the Program's entry, checked
    return jax.ShapeDtypeStruct(tuple(x.shape), to_jax(dtype))


def _on_grad(index: int, leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return deliver(leaf, grad)


def _into(index: int, leaf: torch.Tensor) -> torch.Tensor | None:
    """Megatron's fp32 gradient buffer of a parameter: what a weight's gradient is added to where it is made."""
    main = getattr(leaf, "main_grad", None)
    if main is None or main.dtype is not torch.float32 or not main.is_contiguous() or main.shape != leaf.shape:
        return None
    return main if main.data_ptr() % ALIGN == 0 else None


def deliver(leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """What autograd gets for a leaf's gradient: the gradient, or a stand-in where main_grad has taken it.

    Megatron's protocol: a gradient added to `main_grad` (fp32, of its DistributedDataParallel) is announced by
    `grad_added_to_main_grad`, and a tensor is still returned, because DDP's hook must run on this thread. Where two
    layers share the parameter (`zero_out_wgrad`) DDP adds that tensor all the same, so it must hold zeros.
    """
    main = getattr(leaf, "main_grad", None)
    if main is None:
        return grad.to(leaf.dtype)
    if grad is not main:  # else the region that made the gradient has added it
        main.add_(grad)
    leaf.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    make = torch.zeros_like if getattr(leaf, "zero_out_wgrad", False) else torch.empty_like
    return make(leaf)
