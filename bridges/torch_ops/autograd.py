"""A whole traced function as one torch.autograd.Function: one layer of a trainer, say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridges.torch_ops.collectives import Groups
from bridges.torch_ops.compile import compile_program
from isojax.errors import Refused
from isojax.program import Program

OnGrad = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor | None]


def cast_to_leaf(index: int, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The default on_grad: what torch itself does with an fp32 gradient of a bf16 tensor, said out loud."""
    return grad.to(x.dtype)


class LayerFunction:
    """A differentiable torch function over a forward and a backward Program; see `layer_function`.

    Attributes: forward, backward (Compiled), n_out, diff.
    """

    def __init__(self, fwd: Any, bwd: Any, n_out: int, diff: tuple[int, ...]):
        self.forward, self.backward, self.n_out, self.diff = fwd, bwd, n_out, diff

    def __call__(self, *args: torch.Tensor, on_grad: OnGrad = cast_to_leaf) -> tuple[torch.Tensor, ...]:
        """The flat outputs. Inputs are flat, as compile_program takes them.

        on_grad(index, input, grad): called in backward for every flat input in `diff` that requires a gradient, with
        the gradient in the dtype of the backward region (fp32 for weights); what it returns goes to autograd. A trainer
        adds into `input.main_grad` there and returns what its own protocol wants. `input` is the caller's own tensor if
        it is a leaf, else an alias of it.
        """
        return _Layer.apply(self, on_grad, *args)  # type: ignore[no-any-return]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: LayerFunction, on_grad: OnGrad, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outs = layer.forward(*args)
        ctx.layer, ctx.on_grad = layer, on_grad
        kept, n = outs[layer.n_out :], len(outs) - layer.n_out
        ctx.n_kept = n
        # A residual that is an input or an output is that very tensor, so nothing is copied. The differentiated inputs
        # are saved as well, for on_grad: a leaf comes back as the same object, with its main_grad.
        ctx.save_for_backward(*kept, *[args[i] for i in layer.diff])
        ctx.mark_non_differentiable(*[o for o in outs[: layer.n_out] if not o.is_floating_point()])
        return outs[: layer.n_out]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cts: torch.Tensor) -> Any:
        layer, saved = ctx.layer, ctx.saved_tensors
        kept, inputs = saved[: ctx.n_kept], saved[ctx.n_kept :]
        # autograd may hand over an expanded scalar; the Program's inputs are contiguous
        grads = layer.backward(*kept, *[c.contiguous() for c in cts])
        full: list[Any] = [None] * len(ctx.needs_input_grad)
        for i, x, g in zip(layer.diff, inputs, grads, strict=True):
            if ctx.needs_input_grad[i + 2]:
                full[i + 2] = ctx.on_grad(i, x, g)
        return tuple(full)


def layer_function(
    fwd: Program,
    bwd: Program,
    *,
    diff: Sequence[int],
    n_out: int,
    arch: str,
    groups: Groups | None = None,
    device: torch.device | str | None = None,
) -> LayerFunction:
    """Compile the two Programs of `isojax.program.trace_vjp(fn, ...)` into one differentiable torch function.

    Its forward calls the very same regions whether or not a gradient is wanted.

    Args:
      fwd, bwd: from trace_vjp: inputs -> (outputs, residuals), and (residuals, cotangents) -> gradients.
      diff: flat positions of the inputs that bwd gives gradients for, in its output order (`diff_positions`).
      n_out: how many of fwd's outputs are fn's own; the rest are residuals.
      arch, groups, device: as for compile_program.

    Raises: Refused if the two do not fit together; and what compile_program raises.
    """
    kept = len(fwd.outputs) - n_out
    if n_out < 1 or len(bwd.inputs) != kept + n_out or len(bwd.outputs) != len(diff):
        raise Refused(
            f"forward gives {n_out} outputs and {kept} residuals, backward takes {len(bwd.inputs)} and gives "
            f"{len(bwd.outputs)} gradients for {len(diff)} inputs; pass the pair that trace_vjp returned"
        )
    run = lambda p: compile_program(p, arch=arch, groups=groups, device=device)
    return LayerFunction(run(fwd), run(bwd), n_out, tuple(diff))


def diff_positions(specs: Sequence[Any], diff: Sequence[int]) -> tuple[int, ...]:
    """Flat input positions of the arguments `diff` of trace_vjp(fn, *specs, diff=diff)."""
    import jax

    sizes = [len(jax.tree.leaves(s)) for s in specs]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(starts[i] + k for i in diff for k in range(sizes[i]))
