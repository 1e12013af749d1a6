"""One region as an opaque torch op, with its gradient: what a user plugs into a stock vLLM or Megatron model.

`region_op("norms.rms")` registers `torch.ops.isojax.norms_rms(Tensor x, Tensor weight, *, float eps, ...) -> Tensor[]`
and `torch.ops.isojax.norms_rms_vjp`. torch.compile knows their shapes and never looks inside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bridges.torch_ops.single import Single
from isojax.errors import RegionError, Unavailable
from isojax.region import Region, lookup

NAMESPACE = "isojax"
STATICS = {"int": "int", "float": "float", "bool": "bool", "str": "str", "tuple[int, ...]": "int[]"}
_ops: dict[str, _Op] = {}


def region_op(region: str | Region, *, arch: str | None = None) -> Callable[..., Any]:
    """A torch function for one region, with the region's own signature: `f(*operands, **statics)`.

    Operands are torch tensors on one device, which decides the arch: CPU or CUDA. Those named in the region's `rows`
    may have any height: they are padded with zero rows and the results are cut back, which changes no bit. int64
    operands are narrowed to int32, checked. Gradients flow by the region's vjp, each in its operand's dtype. The result
    is the region's primary output, or the tuple of them.

    Every padded shape is compiled when first seen; on CUDA that has to happen before a graph is captured.

    Args:
      region: its name, or the Region.
      arch: 'cpu' or 'sm90', to refuse tensors elsewhere; by default either runs.

    Raises: RegionError for an unknown region or a static that no torch schema holds. When called: InputError, Refused,
    Unsupported, Unavailable.
    """
    r = lookup(region) if isinstance(region, str) else region
    op = _ops.get(r.name)
    if op is None or op.region is not r:
        if op is not None:  # the region was defined anew, in a notebook or a test
            op.library._destroy()
        op = _ops[r.name] = _Op(r)
    return op.function(arch)


class _Op:
    """The registration of one region with torch.library."""

    def __init__(self, region: Region):
        self.region, self.single = region, Single(region)
        self.library = torch.library.Library(NAMESPACE, "FRAGMENT")
        params = region.signature.parameters
        self.operands = [n for n, p in params.items() if p.kind is not p.KEYWORD_ONLY]
        self.defaults = {n: p.default for n, p in params.items() if p.default is not inspect.Parameter.empty}
        optional = [n for n in self.operands if "None" in str(params[n].annotation)]
        self.defaults |= {n: None for n in optional}

        tensors = [f"Tensor{'?' if n in optional else '[]' if region.variadic else ''} {n}" for n in self.operands]
        statics = [f"{_static_type(region, n)} {n}" for n in region.statics]
        tail = ["*", *statics] if statics else []
        name = region.name.replace(".", "_")
        self.forward = self._define(name, [*tensors, *tail], self._forward, self._forward_fake)
        self.vjp = self._define(
            f"{name}_vjp", [*tensors, "Tensor[] outputs", "Tensor[] cotangents", *tail], self._vjp, self._vjp_fake
        )
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}", self._backward, setup_context=self._save, lib=self.library
        )

    def _define(self, name: str, args: list[str], run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        self.library.define(f"{name}({', '.join(args)}) -> Tensor[]")
        self.library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=self.library)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    def function(self, arch: str | None) -> Callable[..., Any]:
        """What users call. Plain Python, since torch.compile traces it down to the op."""
        name, op, operands, defaults = self.region.name, self.forward, self.operands, self.defaults
        n_out, variadic, allowed = self.region.outputs, self.region.variadic, [*self.operands, *self.region.statics]

        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(defaults)
            given.update({operands[0]: list(args)} if variadic else dict(zip(operands, args)))  # noqa: B905
            given.update(kwargs)
            extra = not variadic and len(args) > len(operands)
            if extra or len(given) != len(allowed) or any(k not in given for k in allowed):
                raise RegionError(f"region {name} takes {allowed}; given {len(args)} operands and {list(kwargs)}")
            if arch is not None and args[0].is_cuda != (arch != "cpu"):
                raise Unavailable(f"this op of region {name} is for {arch}; its operand is on {args[0].device}")
            outs = op(*[given.pop(k) for k in operands], **given)
            return outs[0] if n_out == 1 else tuple(outs[:n_out])

        call.__name__ = call.__qualname__ = name.replace(".", "_")
        call.__doc__ = self.region.__doc__
        return call

    # -- what torch calls ---------------------------------------------------------------------------------------------
    def _list(self, operands: Sequence[Any]) -> list[Any]:
        return list(operands[0]) if self.region.variadic else list(operands)

    def _forward(self, *operands: Any, **statics: Any) -> list[torch.Tensor]:
        return self.single.forward(self._list(operands), _plain(statics))

    def _forward_fake(self, *operands: Any, **statics: Any) -> list[torch.Tensor]:
        xs = self._list(operands)
        first = next(x for x in xs if x is not None)
        return [first.new_empty(o.shape, dtype=o.dtype) for o in self.single.outs(xs, _plain(statics))]

    def _vjp(self, *args: Any, **statics: Any) -> list[torch.Tensor]:
        *operands, outs, cts = args
        return self.single.vjp(self._list(operands), outs, cts, _plain(statics))

    def _vjp_fake(self, *args: Any, **statics: Any) -> list[torch.Tensor]:
        xs = self._list(args[:-2])
        return [xs[i].new_empty(xs[i].shape) for i in self.single.grad_positions(xs, _plain(statics))]

    def _save(self, ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
        operands = self._list(inputs)
        ctx.statics = dict(keyword_only_inputs or {})
        ctx.save_for_backward(*operands, *output)

    def _backward(self, ctx: Any, cts: Sequence[Any]) -> Any:
        n_out = len(cts)
        operands, outs = list(ctx.saved_tensors[:-n_out]), list(ctx.saved_tensors[-n_out:])
        given = [
            torch.zeros_like(o) if c is None else c for c, o in zip(cts, outs[: self.region.outputs], strict=False)
        ]
        args = [operands] if self.region.variadic else operands
        found = self.vjp(*args, outs, given, **ctx.statics)
        grads: list[Any] = [None] * len(operands)
        for i, g in zip(self.single.grad_positions(operands, _plain(ctx.statics)), found, strict=True):
            grads[i] = g
        return grads if self.region.variadic else tuple(grads)


def _plain(statics: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in statics.items()}


def _static_type(region: Region, name: str) -> str:
    annotation = region.signature.parameters[name].annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    base = text.removesuffix(" | None")
    if base not in STATICS:
        raise RegionError(f"region {region.name}: static {name}: {text} fits no torch schema; use {', '.join(STATICS)}")
    return STATICS[base] + ("?" if base != text else "")
