"""IsoJAX in vLLM 0.26: an opt-in architecture over vLLM's own scheduler, block manager and paged cache.

    from bridges.vllm import engine_args
    from vllm import LLM
    llm = LLM(**engine_args("path/to/checkpoint"))

Nothing is imported before it is asked for: vLLM loads this package in every process, also where a stock model runs.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {"engine_args": "engine", "plug": "plugged"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"bridges.vllm has no {name!r}; it has {', '.join(_HOME)}")
    return getattr(importlib.import_module(f"bridges.vllm.{_HOME[name]}"), name)
