"""Run by test_torch_collectives, once per rank: the collectives of a Program over gloo, against the global array."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from bridges.torch_ops import compile_program
from isojax.program import trace

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
world = dist.group.WORLD
assert world is not None
mesh = AbstractMesh((size,), ("tp",), axis_types=(AxisType.Auto,))


def local(x):
    ring = [(i, (i + 1) % size) for i in range(size)]
    return (
        jax.lax.all_gather(x, "tp", axis=0, tiled=True),
        jax.lax.all_gather(x, "tp", axis=1),
        jax.lax.all_to_all(x, "tp", split_axis=1, concat_axis=0, tiled=True),
        jax.lax.ppermute(x, "tp", ring),
        jax.lax.ppermute(x, "tp", ring[:1]),
        jax.lax.axis_index("tp") * 10,
    )


every = P("tp")
sharded = jax.shard_map(local, mesh=mesh, in_specs=every, out_specs=(*[every] * 5, P()), check_vma=False)
program = trace(sharded, jax.ShapeDtypeStruct((3 * size, 8), jnp.bfloat16))
compiled = compile_program(program, arch="cpu", groups={"tp": world})

whole = torch.randn(3 * size, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
whole.view(torch.int16)[0, 0] = 0x7FA1  # a NaN with a payload: bytes move, values are not touched
mine = lambda r: whole[3 * r : 3 * r + 3]
tiled, stacked, swapped, ring, single, index = compiled(mine(rank))
same = lambda a, b: np.array_equal(a.contiguous().view(torch.int16).numpy(), b.contiguous().view(torch.int16).numpy())
assert same(tiled, whole)
assert same(stacked, torch.stack([mine(r) for r in range(size)], 1))
width = 8 // size
assert same(swapped, torch.cat([mine(r)[:, rank * width : (rank + 1) * width] for r in range(size)]))
assert same(ring, mine((rank - 1) % size))
assert same(single, mine(0) if rank == 1 else torch.zeros(3, 8, dtype=torch.bfloat16))
assert index.item() == 10 * rank and index.dtype is torch.int32
del compiled, world  # a group held beyond its end may abort the process (std::terminate, seen once in many runs)
dist.destroy_process_group()
print("moved")
