"""Environment variables that vLLM reads at import: defaults for IsoJAX, never over the user's own values.

Call `prepare` before the first import of vLLM; child processes inherit what it sets.
"""

from __future__ import annotations

import os

COMMON = {
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the V2 runner needs Triton and CUDA
    "TORCH_COMPILE_DISABLE": "1",  # half a minute of g++ for helpers of the sampler
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "JAX_PLATFORMS": "cpu",
}
CUDA = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # vLLM measures what is free, JAX would take 75%
}


def defaults(arch: str) -> dict[str, str]:
    """Name -> value for 'cpu' or 'sm90'."""
    return COMMON | (CPU if arch == "cpu" else CUDA)


def prepare(arch: str) -> dict[str, str]:
    """Set the defaults that the environment lacks; returns what was set."""
    new = {name: value for name, value in defaults(arch).items() if name not in os.environ}
    os.environ.update(new)
    return new
