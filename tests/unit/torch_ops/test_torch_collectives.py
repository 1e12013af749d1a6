"""Collectives over gloo, in two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from bridges.torch_ops import compile_program
from isojax.errors import Unavailable
from isojax.program import trace

SIZE = 2


def test_collectives_move_bytes(tmp_path):
    script = Path(__file__).with_name("torch_ops_ranks.py")
    command = lambda r: [sys.executable, str(script), str(r), str(SIZE), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(command(r), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for r in range(SIZE)
    ]
    for process in ranks:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0 and "moved" in out, err[-3000:]


def test_a_missing_group_is_named():
    mesh = AbstractMesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    gather = lambda x: jax.lax.all_gather(x, "tp", axis=0, tiled=True)
    fn = jax.shard_map(gather, mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False)
    with pytest.raises(Unavailable, match="process group for axis 'tp'; given none"):
        compile_program(trace(fn, jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)), arch="cpu")
