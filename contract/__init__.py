"""The execution contract: which arithmetic both runtimes run, proved by digests that anyone can recompute.

Framework neutral: nothing here imports jax, torch, vllm or megatron.
"""

from contract.adapter import Adapter, Installed
from contract.canonical import canonical_bytes, decode_float, digest, encode_float, strict_loads
from contract.cases import CASES
from contract.degrees import AXES, check_degrees, neutral_degree
from contract.diff import Change, ContractDiff, differences
from contract.errors import AdapterRefusal, ContractError, Finding
from contract.frozen import Bounds, Constants, FrozenMap, Toolchain
from contract.identity import arranged, recompute, seal
from contract.ledger import Ledger, Record, verify
from contract.live import RegionView
from contract.schema import (
    SCHEMA_VERSION,
    CompositionEntry,
    Contract,
    Discharge,
    ExecutionCase,
    Identities,
    Implementation,
    StateClaim,
    ToleranceClaim,
    TopologyClaim,
)
from contract.store import load, save
from contract.validate import parse, validate

__all__ = [
    "AXES",
    "CASES",
    "SCHEMA_VERSION",
    "Adapter",
    "AdapterRefusal",
    "Bounds",
    "Change",
    "CompositionEntry",
    "Constants",
    "Contract",
    "ContractDiff",
    "ContractError",
    "Discharge",
    "ExecutionCase",
    "Finding",
    "FrozenMap",
    "Identities",
    "Implementation",
    "Installed",
    "Ledger",
    "Record",
    "RegionView",
    "StateClaim",
    "ToleranceClaim",
    "Toolchain",
    "TopologyClaim",
    "arranged",
    "canonical_bytes",
    "check_degrees",
    "decode_float",
    "differences",
    "digest",
    "encode_float",
    "load",
    "neutral_degree",
    "parse",
    "recompute",
    "save",
    "seal",
    "strict_loads",
    "validate",
    "verify",
]
