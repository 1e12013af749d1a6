"""Arguments for a vLLM engine that runs IsoForCausalLM.

    llm = LLM(**engine_args("path/to/checkpoint", contract="contract/profiles/dense.cpu.json"))

The same engine as a server:

    vllm serve path/to/checkpoint \
        --hf-overrides '{"architectures": ["IsoForCausalLM"]}' \
        --worker-cls bridges.vllm.worker.IsoWorker \
        --dtype bfloat16 \
        --additional-config '{"isojax": {"contract": "/absolute/path.json"}}'

with VLLM_USE_V2_MODEL_RUNNER=0 and `--enforce-eager` on CPU, and on CUDA `--compilation-config` with the JSON of
`graphs(max_num_batched_tokens, max_num_seqs)`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridges.vllm import environment
from bridges.vllm.adapter import KEY
from bridges.vllm.plugin import ARCHITECTURE
from isojax import doctor
from isojax.batch import buckets
from isojax.errors import ConfigError

WORKER = "bridges.vllm.worker.IsoWorker"
SIZES = {  # vLLM's own defaults make the profiling run of a CPU engine take minutes
    "cpu": {"max_num_batched_tokens": 512, "max_num_seqs": 16, "block_size": 16},
    "sm90": {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "block_size": 16},
}


def graphs(max_num_batched_tokens: int, max_num_seqs: int) -> dict[str, Any]:
    """compilation_config for FULL CUDA graphs, one per bucket and kind of step: no torch.compile, nothing piecewise.

    The largest decode and the largest mixed step have a graph too where they are no bucket.
    """
    sizes = {*buckets(max_num_batched_tokens, "sm90"), max_num_batched_tokens}
    if max_num_seqs <= max_num_batched_tokens:
        sizes.add(max_num_seqs)
    return {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": sorted(sizes)}


def engine_args(
    model: str | Path,
    contract: str | Path | None = None,
    *,
    identities: Mapping[str, Any] | None = None,
    arch: str | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM` or `EngineArgs`, and the environment that they need (set where it is not).

    Args:
      model: a Hugging Face checkpoint folder.
      contract: a contract file; the engine refuses to start unless it covers what would run.
      identities: the trainer's identities; the engine refuses to start unless they agree with the contract's.
      arch: 'cpu' or 'sm90'; by default what torch sees.
      overrides: any engine argument of vLLM's; they win, but for the three that make the engine ours.

    Raises: Unavailable without vLLM, ConfigError for an override of hf_overrides' architectures or worker_cls.
    """
    doctor.require_vllm()
    arch = arch or _arch()
    if arch not in SIZES:
        raise ConfigError(f"arch {arch!r} is unknown; allowed are {', '.join(SIZES)}")
    environment.prepare(arch)
    args: dict[str, Any] = {"model": str(model), "dtype": "bfloat16", "logprobs_mode": "raw_logprobs", **SIZES[arch]}
    args |= {k: v for k, v in overrides.items() if k not in ("hf_overrides", "additional_config", "worker_cls")}
    if overrides.get("worker_cls", WORKER) != WORKER:
        raise ConfigError(f"worker_cls is {WORKER}; to add methods to it use worker_extension_cls")
    hf = dict(overrides.get("hf_overrides") or {})
    if hf.setdefault("architectures", [ARCHITECTURE]) != [ARCHITECTURE]:
        raise ConfigError(f"hf_overrides asks for architectures {hf['architectures']}; call vllm.LLM for a stock model")
    args |= {"hf_overrides": hf, "worker_cls": WORKER}
    if arch == "cpu":
        args.setdefault("enforce_eager", True)
    elif not args.get("enforce_eager"):
        args.setdefault("compilation_config", graphs(args["max_num_batched_tokens"], args["max_num_seqs"]))
    extra = dict(overrides.get("additional_config") or {})
    if contract is not None or identities is not None:
        path = None if contract is None else str(Path(contract).resolve())  # workers may run elsewhere
        extra[KEY] = {"contract": path, "identities": None if identities is None else dict(identities)}
    return args | {"additional_config": extra}


def _arch() -> str:
    import torch

    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that vLLM may fork its engine afterwards
    forced = os.environ.get("VLLM_TARGET_DEVICE") == "cpu"
    return "sm90" if torch.cuda.is_available() and not forced else "cpu"
