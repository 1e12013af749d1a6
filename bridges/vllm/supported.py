"""Which vLLM configurations run. Everything else is refused by the name of its option, before weights are loaded."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from isojax.errors import ConfigError
from isojax.schedule import KV_TILE

CACHE_DTYPES = ("auto", "bfloat16")
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"


def check(vllm_config: Any, arch: str) -> None:
    """Raises: ConfigError, naming the option, its value, what is allowed and a mend."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if getattr(parallel, name, 1) != 1:
            _refuse(name, getattr(parallel, name), "1", "run one rank per engine")
    if os.environ.get(BREAKABLE, "0") == "1":  # piecewise graphs without a step's metadata, which would be no step
        _refuse(BREAKABLE, 1, "0, in the environment", "graphs are FULL here (bridges.vllm.engine.graphs)")
    if parallel.use_ubatching:
        _refuse("enable_dbo", True, "False", "leave micro-batching off")
    if vllm_config.lora_config is not None:
        _refuse("enable_lora", True, "False", "merge the adapter into the checkpoint")
    if model.quantization is not None:
        _refuse("quantization", model.quantization, "None", "dequantise the checkpoint to bfloat16 first")
    if vllm_config.speculative_config is not None:
        _refuse("speculative_config", "set", "None", "leave speculative decoding off")
    if vllm_config.kv_transfer_config is not None:
        _refuse("kv_transfer_config", "set", "None", "leave KV connectors off")
    if cache.cache_dtype not in CACHE_DTYPES:
        _refuse("kv_cache_dtype", cache.cache_dtype, " or ".join(CACHE_DTYPES), "keep keys and values in bfloat16")
    if cache.cache_dtype != "auto" and str(model.dtype) != f"torch.{cache.cache_dtype}":
        _refuse("kv_cache_dtype", cache.cache_dtype, f"the model's dtype, {model.dtype}", "use auto")
    block = cache.block_size
    if (KV_TILE % block and block % KV_TILE) or (arch == "sm90" and block < 16):
        least = ", 16 at least" if arch == "sm90" else ""
        _refuse("block_size", block, f"a divisor or multiple of {KV_TILE}{least}", "use 16, 32 or 64")
    if model.runner_type != "generate":
        _refuse("runner", model.runner_type, "generate", "use vLLM's own architecture for pooling")
    if model.enable_prompt_embeds:
        _refuse("enable_prompt_embeds", True, "False", "send token ids")
    if model.logprobs_mode != "raw_logprobs":
        _refuse("logprobs_mode", model.logprobs_mode, "raw_logprobs", "processed log-probabilities are not covered yet")
    dtypes = ("bfloat16", "float32") if arch == "cpu" else ("bfloat16",)
    if str(model.dtype).removeprefix("torch.") not in dtypes:
        _refuse("dtype", model.dtype, " or ".join(dtypes), "pass dtype='bfloat16'")


def check_length(longest: int, positions: int) -> None:
    """Raises ConfigError where max_model_len leaves the checkpoint's positions."""
    if longest > positions:
        _refuse("max_model_len", longest, f"at most max_position_embeddings = {positions}", "shorten it")


def _refuse(option: str, given: Any, allowed: str, mend: str) -> NoReturn:
    raise ConfigError(
        f"vLLM option {option} = {given!r} is not supported by IsoForCausalLM; allowed: {allowed}; {mend}"
    )
