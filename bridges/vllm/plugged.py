"""One region in a stock vLLM model: `llm.apply_model(plug("model.layers.*.input_layernorm", call))`."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from isojax.errors import InputError, Unavailable


@dataclass(frozen=True)
class Plug:
    """Replaces the forward of every submodule whose dotted name matches `pattern` (shell style).

    call: `call(module, *args)` with the arguments of the module's forward; its result is the forward's result.
    Calling returns the names that were replaced. Raises: InputError where nothing matches; Unavailable where the model
    was compiled or captured, because the replacement would silently not run.
    """

    pattern: str
    call: Callable[..., Any]

    def __call__(self, model: nn.Module) -> list[str]:
        _check_eager(model)
        found = {n: m for n, m in model.named_modules() if n and fnmatch.fnmatchcase(n, self.pattern)}
        if not found:
            kinds = ", ".join(n for n, _ in list(model.named_modules())[1:12])
            raise InputError(f"no submodule of {type(model).__name__} matches {self.pattern!r}; its first are {kinds}")
        for module in found.values():
            module.forward = _Bound(self.call, module)
        return sorted(found)


@dataclass(frozen=True)
class _Bound:
    call: Callable[..., Any]
    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.module, *args, **kwargs)


def plug(pattern: str, region_call: Callable[..., Any]) -> Plug:
    """A function for `LLM.apply_model` that runs `region_call` in place of a stock model's submodules.

    With an engine in its own processes vLLM has to pickle it (VLLM_ALLOW_INSECURE_SERIALIZATION=1), so `region_call`
    is then a function of an importable module.
    """
    return Plug(pattern, region_call)


def _check_eager(model: nn.Module) -> None:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    compiled = [n for n, m in model.named_modules() if getattr(m, "do_not_compile", True) is False]
    captured = any(w.concrete_cudagraph_entries for w in CUDAGraphWrapper._all_instances)
    if compiled or captured:
        what = f"submodule {compiled[0]!r} was compiled" if compiled else "CUDA graphs were captured"
        raise Unavailable(f"{what}, so a replaced forward would not run; start the engine with enforce_eager=True")
