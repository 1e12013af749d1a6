"""Holds a trainer to a contract: installed after the model is built, before its first forward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state

import contract as contracts
from bridges.megatron.logprob import CASES
from contract.adapter import Adapter
from isojax import profile

if TYPE_CHECKING:
    from bridges.megatron.model import IsoGPTModel


def degrees() -> dict[str, int]:
    """The parallel degrees that Megatron was initialised with, by the contract's axes."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "sp": 0,
    }


def install(
    model: IsoGPTModel, contract: contracts.Contract | str | Path, *, identities: Mapping[str, Any] | None = None
) -> Adapter:
    """Hold `model` to `contract` (or the file of one): both trainer cases, every region of the forward, every degree.

    identities: the other side's digests (Identities.plain()), to refuse a mismatch before anything is computed.

    Raises: AdapterRefusal for an uncovered region, other live arithmetic, an unclaimed degree, or identities that
    differ; ContractError where the contract is not valid.
    """
    if isinstance(contract, (str, Path)):
        contract = contracts.load(contract)
    regions = model.runtime.regions()
    view = profile.registry_view(model.runtime.arch, regions)
    adapter = Adapter("megatron", contract, registry_view=view)
    adapter.install(CASES, regions, degrees())
    if identities is not None:
        adapter.handshake(identities, other_runtime="vllm")
    model.adapter = adapter
    return adapter
