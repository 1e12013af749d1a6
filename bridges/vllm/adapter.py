"""Holds the engine to a contract: installed after the weights are loaded, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import contract as contracts
from contract.adapter import Adapter
from isojax import profile
from isojax.errors import ConfigError

KEY = "isojax"  # of vLLM's additional_config, which reaches every process
CASES = ("engine_prefill", "engine_decode")


def options(vllm_config: Any) -> dict[str, Any]:
    """{'contract': path, 'identities': the other side's digests}, or less. Raises ConfigError for an unknown option."""
    extra = vllm_config.additional_config
    given = dict(extra.get(KEY) or {}) if isinstance(extra, Mapping) else {}
    unknown = sorted(set(given) - {"contract", "identities"})
    if unknown:
        raise ConfigError(f"additional_config[{KEY!r}] has {unknown}; allowed: contract, identities; remove the rest")
    return given


def degrees(parallel: Any) -> dict[str, int]:
    """The parallel degrees that this engine runs, by the contract's axes."""
    return {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": parallel.data_parallel_size,
        "cp": parallel.decode_context_parallel_size,
        "ep": parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1,
        "sp": 0,
    }


def install(vllm_config: Any, regions: list[str], arch: str) -> Adapter | None:
    """Install the contract that the configuration names, or return None where it names none.

    Raises: ContractError for a file that is no valid contract; AdapterRefusal for an uncovered region, other live
    arithmetic, an unclaimed degree, or identities that differ from the other side's.
    """
    given = options(vllm_config)
    if not given.get("contract"):
        if given.get("identities"):
            raise ConfigError("identities were given without a contract; pass engine_args(..., contract=path)")
        return None
    adapter = Adapter(
        "vllm", contracts.load(Path(given["contract"])), registry_view=profile.registry_view(arch, regions)
    )
    adapter.install(CASES, regions, degrees(vllm_config.parallel_config))
    if given.get("identities"):
        adapter.handshake(given["identities"])
    return adapter
