"""Kernels that are set up while the kernel before them in the stream ends: programmatic dependent launch.

Every kernel of the shipped families keeps three rules. (1) Every block waits for the kernel before it, at the latest
before it ends. (2) Until then it reads nothing that kernel may write, and writes nothing that kernel may read or write.
(3) Only after its own wait does it let the next one start. So when a kernel starts, all but its direct predecessor have
ended, and what they wrote is in the L2, which a block that starts reads. A kernel launched without this ends before the
next one starts; XLA's own are launched with it, and wait first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.interpretable import await_previous, let_next_start


def begin() -> None:
    """Wait for the kernel before this one, then let the next one start. The first step of a kernel, in each thread."""
    await_previous()
    let_next_start()


def kernel(body: Callable[..., None], **how: Any) -> Callable[..., Any]:
    """plgpu.kernel(body, **how), with `begin` before the body."""

    @functools.wraps(body)
    def chained(*refs: Any, **scratch: Any) -> None:
        begin()
        body(*refs, **scratch)

    return plgpu.kernel(chained, **how)
