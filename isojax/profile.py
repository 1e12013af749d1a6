"""Contracts from the registry: what this installation would run, and the profiles that ship."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import contract as contracts
from isojax import lowering, precompile, store
from isojax.errors import RegionError
from isojax.region import REGISTRY, Region, load_shipped, lookup

PROFILES = Path(contracts.__file__).parent / "profiles"
TOOLCHAIN = {"cpu": ("jax", "jaxlib"), "sm90": ("jax", "jaxlib", "jax-cuda13-plugin")}
BODY = "attn.core attn.prep embed.lookup linear.column linear.row mlp.swiglu norms.add_rms norms.rms".split()
TRAINER = sorted([*BODY, "residual.add", "head.logprob"])
ENGINE = sorted([*BODY, "head.logits", "head.logprob_rows"])
HEAD_GATE = "gate head.logprob/equals logits then logprob_rows"
DISCHARGES = {  # regions that not every case runs: the gate that shows the other way to have the same bits
    "head.logits": HEAD_GATE,
    "head.logprob_rows": HEAD_GATE,
    "head.logprob": HEAD_GATE,
    "residual.add": "gate norms.add_rms/equals residual.add then norms.rms",
}
CASES: dict[str, tuple[dict[str, str], list[str]]] = {
    "trainer_fwd": (dict(runtime_role="trainer", grad_mode="grad", state_mode="none"), TRAINER),
    "trainer_score": (dict(runtime_role="trainer", grad_mode="no_grad", state_mode="none"), TRAINER),
    "engine_prefill": (dict(runtime_role="engine", grad_mode="no_grad", state_mode="prefill"), ENGINE),
    "engine_decode": (dict(runtime_role="engine", grad_mode="no_grad", state_mode="decode"), ENGINE),
    "jax_reference": (
        dict(runtime_role="reference", grad_mode="no_grad", state_mode="none"),
        sorted({*ENGINE, "head.logprob"}),
    ),
}


@functools.cache
def artifact(name: str, arch: str, state: str | None = None) -> str:
    """SHA-256 over the lowered modules of a region's canonical calls. Raises RegionError where it declares none.

    Lowering takes seconds, so with a `state` of code and toolchain (precompile.state) the digest is kept under it.
    """
    region = lookup(name)
    if region.canonical is None:
        raise RegionError(
            f"region {name} declares no canonical calls, so no contract can name it; see docs/tutorial.md"
        )
    key = None
    if state is not None and precompile.keepable(region, arch):
        key = store.key_of("artifact", name, arch, state)
        if (known := store.get(key)) is not None:
            return known.decode()
    digest = hashlib.sha256()
    for args, statics in region.canonical():
        avals, bound = region.bind(args, statics)
        digest.update(lowering.fingerprint(region, avals, bound, arch).encode())
    if key is not None:
        store.put(key, digest.hexdigest().encode())
    return digest.hexdigest()


def implementation_id(region: Region, arch: str) -> str:
    """'kernel/norms.rms', 'reference/norms.rms', or 'xla/...' for a declared stand-in."""
    return f"{region.implementation(arch).kind}/{region.name}"


def region_view(name: str, arch: str, state: str | None = None) -> Any:
    """What this installation runs for one region; state: see artifact."""
    region = lookup(name)
    impl = contracts.Implementation(id=implementation_id(region, arch), version=region.version, arch=arch)  # type: ignore[arg-type]
    return contracts.RegionView(impl, region.constants, artifact(name, arch, state), toolchain(arch))


def registry_view(arch: str, names: Iterable[str] | None = None) -> Mapping[str, Any]:
    """RegionView of every forward region (or of `names`) on an arch, for contract.Adapter."""
    load_shipped()
    if names is None:
        names = [n for n, r in REGISTRY.items() if arch in r.impl and not r.is_backward and r.canonical is not None]
    now = precompile.state()
    return {n: region_view(n, arch, now) for n in sorted(set(names))}


def toolchain(arch: str) -> dict[str, str]:
    """Versions that can change bits."""
    return {name: importlib.metadata.version(name) for name in TOOLCHAIN[arch]}


def build(family: str, arch: str) -> Any:
    """The sealed contract of a model family, generated from the registry. Only 'dense' exists so far."""
    if family != "dense":
        raise RegionError(f"no profile {family!r}; available: dense")
    regions = sorted({r for _, used in CASES.values() for r in used})
    views = registry_view(arch, regions)
    composition = [
        contracts.CompositionEntry(
            region=name,
            cases=tuple(sorted(case for case, (_, used) in CASES.items() if name in used)),  # type: ignore[arg-type]
            impl=views[name].implementation,
            constants=views[name].constants,
            artifact=views[name].artifact,
            discharge=contracts.Discharge(kind="gate", ref=DISCHARGES[name]) if name in DISCHARGES else None,
        )
        for name in regions
    ]
    single = [
        contracts.TopologyClaim(axis=axis, kind="pinned", degrees=(0 if axis == "sp" else 1,), plan="one rank")
        for axis in ("tp", "sp", "ep", "cp", "pp", "dp")
    ]
    draft = contracts.Contract(
        name=f"dense.{arch}",
        model_family="dense",
        arch=arch,  # type: ignore[arg-type]
        cases=tuple(contracts.ExecutionCase(id=case, **about) for case, (about, _) in CASES.items()),  # type: ignore[arg-type]
        composition=tuple(composition),
        topology=tuple(single),
        state=(
            contracts.StateClaim(
                state_id="kv_cache",
                invalidated_by=("weight sync",),
                replay_safe=True,
                ref="gate attn.core/chunked prefill and prefix hits; preemption: tests/integration/vllm",
            ),
        ),
        toolchain=toolchain(arch),  # type: ignore[arg-type]
    )
    return contracts.validate(contracts.seal(draft))


def path(family: str, arch: str) -> Path:
    """Where a shipped profile lies."""
    return PROFILES / f"{family}.{arch}.json"


def shipped(family: str, arch: str) -> Any:
    """The shipped contract, validated. Raises ContractError."""
    return contracts.load(path(family, arch))
