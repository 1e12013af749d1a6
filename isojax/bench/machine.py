"""What a figure needs beside it: GPU, driver, clocks, versions, date."""

from __future__ import annotations

import datetime
import platform
import subprocess
from typing import Any

from isojax import doctor
from isojax.bench.result import Machine
from isojax.errors import Unavailable

PACKAGES = ("isojax", "jax", "jaxlib", "torch", "triton", "vllm", "megatron-core")
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


def describe(device: Any, copy_bytes_per_us: float, matmul_flops_per_us: float) -> Machine:
    """This machine now, with the clocks as they are."""
    import torch

    return Machine(
        gpu=torch.cuda.get_device_name(device),
        driver=smi(device, "driver_version")["driver_version"],
        cuda=str(torch.version.cuda),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"python": platform.python_version()} | {p: v for p in PACKAGES if (v := doctor.version(p))},
        copy_bytes_per_us=copy_bytes_per_us,
        matmul_flops_per_us=matmul_flops_per_us,
        clocks_before=smi(device, *CLOCKS),
    )
