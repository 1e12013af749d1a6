"""A whole traced function as one torch.autograd.Function: one layer of a trainer, say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import torch

from bridges.torch_ops.collectives import Groups
from bridges.torch_ops.compile import Compiled, compile_program
from isojax.errors import Refused
from isojax.program import Program, accumulating

OnGrad = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor | None]
Into = Callable[[int, torch.Tensor], torch.Tensor | None]


def cast_to_leaf(index: int, leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The default on_grad: what torch itself does with an fp32 gradient of a bf16 tensor, said out loud."""
    return grad.to(leaf.dtype)


def nowhere(index: int, leaf: torch.Tensor) -> None:
    """The default `into`: no buffer for any gradient."""


class LayerFunction:
    """A differentiable torch function over a forward and a backward Program; see `layer_function`.

    Attributes: forward, backward (Compiled), n_out, diff. adding: the backward that adds to buffers, and which of its
    gradients it adds (isojax.program.accumulating). Both backwards are compiled where they are first needed.
    """

    def __init__(
        self, forward: Compiled, backward: Program, n_out: int, diff: tuple[int, ...], compiled: Callable[..., Compiled]
    ):
        self.forward, self.n_out, self.diff = forward, n_out, diff
        self._backward, self._compiled = backward, compiled

    @functools.cached_property
    def backward(self) -> Compiled:
        return self._compiled(self._backward)

    @functools.cached_property
    def adding(self) -> tuple[Compiled, tuple[int, ...]] | None:
        program, added = accumulating(self._backward)
        return (self._compiled(program), added) if added else None

    def compiled(self) -> list[Compiled]:
        """The forward and those backwards that have been compiled so far."""
        made = (vars(self).get("backward"), (vars(self).get("adding") or (None,))[0])
        return [self.forward, *(c for c in made if c is not None)]

    def __call__(
        self, *args: torch.Tensor, on_grad: OnGrad = cast_to_leaf, into: Into = nowhere
    ) -> tuple[torch.Tensor, ...]:
        """The flat outputs, for flat inputs as compile_program takes them.

        on_grad(index, leaf, grad): called in backward for each input in `diff` that is a leaf and requires a gradient:
        a parameter, or the detached input of a recomputed segment. `leaf` is the caller's own tensor, `grad` has the
        dtype that the backward region gives (fp32 for weights). What it returns goes to autograd: a trainer adds into
        `leaf.main_grad` and returns what its own protocol wants. Gradients of other inputs are cast to their dtype.

        into(index, leaf): a contiguous fp32 buffer of the leaf's shape that the gradient is to be added to inside the
        region that makes it, or None. Then on_grad gets that buffer as the gradient: the sum is in it.
        """
        return _Layer.apply(self, on_grad, into, *args)  # type: ignore[no-any-return]

    def gradients(self, operands: Sequence[torch.Tensor], buffers: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """One gradient for each input in `diff`; where buffers has its position, the buffer with the gradient added."""
        if not buffers or self.adding is None or not all(self.diff[g] in buffers for g in self.adding[1]):
            return list(self.backward(*operands))
        run, added = self.adding
        grads = list(run(*operands, *[buffers[self.diff[g]] for g in added]))
        for g in added:
            buffer = buffers[self.diff[g]]
            if grads[g].data_ptr() != buffer.data_ptr():  # an arch whose regions do not write in place
                buffer.copy_(grads[g])
            grads[g] = buffer
        return grads


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: LayerFunction, on_grad: OnGrad, into: Into, *args: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outs = layer.forward(*args)
        kept, outs = outs[layer.n_out :], outs[: layer.n_out]
        ctx.layer, ctx.on_grad, ctx.into, ctx.n_kept = layer, on_grad, into, len(kept)
        ctx.dtypes = [args[i].dtype for i in layer.diff]
        ctx.leaves = [i for i in layer.diff if args[i].is_leaf and args[i].requires_grad]
        # Residuals that are inputs or outputs are those very tensors: nothing is copied. A saved leaf comes back as
        # the same object, with its main_grad.
        ctx.save_for_backward(*kept, *[args[i] for i in ctx.leaves])
        ctx.mark_non_differentiable(*[o for o in outs if not o.is_floating_point()])
        return outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cts: torch.Tensor) -> Any:
        layer, saved = ctx.layer, ctx.saved_tensors
        leaves = dict(zip(ctx.leaves, saved[ctx.n_kept :], strict=True))
        # autograd may hand over an expanded scalar, and regions take contiguous operands
        operands = [*saved[: ctx.n_kept], *[c.contiguous() for c in cts]]
        offered = {i: ctx.into(i, leaf) for i, leaf in leaves.items()}
        grads = layer.gradients(operands, {i: b for i, b in offered.items() if b is not None})
        full: list[Any] = [None] * len(ctx.needs_input_grad)
        for i, dtype, g in zip(layer.diff, ctx.dtypes, grads, strict=True):
            if ctx.needs_input_grad[i + 3]:
                full[i + 3] = ctx.on_grad(i, leaves[i], g) if i in leaves else g.to(dtype)
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
    form = lambda avals: [(tuple(a.shape), str(a.dtype)) for a in avals]
    takes = form(bwd.in_avals)
    if takes != form([*fwd.out_avals[n_out:], *fwd.out_avals[:n_out]]) or len(bwd.outputs) != len(diff):
        raise Refused(
            f"with n_out={n_out} and {len(diff)} differentiated inputs the backward Program does not fit the forward "
            f"one: it takes {len(takes)} values and gives {len(bwd.outputs)} gradients; pass trace_vjp's pair, n_out "
            "outputs of the function, and diff_positions(specs, diff)"
        )
    # JAX keeps every operand and output of a region; what no backward region reads need not live until then.
    read = {v for s in bwd.steps for v in s.ins if isinstance(v, int)} | {v for v in bwd.outputs if isinstance(v, int)}
    use = [i for i in range(kept) if bwd.inputs[i] in read]
    take = lambda xs: [*(xs[i] for i in use), *xs[kept:]]
    bwd = replace(bwd, inputs=take(bwd.inputs), in_avals=take(bwd.in_avals), input_names=[], in_tree=None)
    fwd = replace(fwd, outputs=[*fwd.outputs[:n_out], *(fwd.outputs[n_out + i] for i in use)], out_tree=None)
    run = lambda p: compile_program(p, arch=arch, groups=groups, device=device)
    return LayerFunction(run(fwd), bwd, n_out, tuple(diff), run)


def diff_positions(specs: Sequence[Any], diff: Sequence[int]) -> tuple[int, ...]:
    """Flat input positions of the arguments `diff` of trace_vjp(fn, *specs, diff=diff)."""
    sizes = [len(jax.tree.leaves(s)) for s in specs]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(starts[i] + k for i in diff for k in range(sizes[i]))
