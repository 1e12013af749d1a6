"""The entry point that vLLM calls in every one of its processes."""

from __future__ import annotations

ARCHITECTURE = "IsoForCausalLM"


def register() -> None:
    """Add the architecture name `IsoForCausalLM`, and nothing else: stock models stay stock. Idempotent.

    The class is named, not imported: vLLM imports it where a model asks for it.
    """
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"bridges.vllm.model:{ARCHITECTURE}")
