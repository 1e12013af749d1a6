"""Megatron-Core 0.19.2 on a machine without CUDA: torch.cuda's names answer for the CPU. A no-op where CUDA exists.

Megatron asks for the current CUDA device, CUDA generators, streams and literal device="cuda" in places that a dense
model reaches. Its bf16 optimizer accepts CUDA tensors only: on CPU use it in fp32, or torch.optim.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _Stream:
    """A stream or event where all work is done when the call returns."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: Any) -> None:
        pass

    def _done(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait = record = wait_stream = wait_event = synchronize = record_event = _done


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


@functools.cache
def install() -> bool:
    """Install the shim once, before a Megatron model is built. True if it was needed."""
    if torch.cuda.is_available():
        return False
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # jit_fuser would start a C++ compiler
    for name, value in {
        "current_device": lambda: _CPU,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *a, **k: torch.get_rng_state(),
        "set_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": lambda s: contextlib.nullcontext(),
    }.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = _nothing  # type: ignore[method-assign]

    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    return True


class _Here(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        return func(*args, **kwargs)


@contextlib.contextmanager
def optimizer_devices() -> Iterator[None]:
    """Megatron's optimizers say device="cuda" when they are built and at each step: on this machine, the CPU."""
    with contextlib.nullcontext() if torch.cuda.is_available() else _Here():
        yield
