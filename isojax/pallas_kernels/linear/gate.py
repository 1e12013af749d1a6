"""Gates of the linear regions: rows, the tree, and that no cut of the output or of the work changes a bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from isojax.gates.bits import Diff, compare
from isojax.gates.case import Case, Context, GateResult, ill_conditioned, many
from isojax.gates.run import device
from isojax.pallas_kernels.linear import column, kernel_sm90, reference, row
from isojax.pallas_kernels.linear.tiles import Tiles
from isojax.schedule import LEAVES, tree

K, N = 1024, 160  # leaves of 128; N is no multiple of a tile
NARROW, TURNS = Tiles(64, 16, 32, (1, 1)), 6  # 192 rows so often make 180 items: two turns of 90 blocks

# What is free to tune and must not show: tile shapes, pipeline depth and step, warpgroups, clusters, order of work,
# blocks that share the leaves of a tile.
SINGLE = (
    Tiles(64, 16, 64, (1, 1)),
    Tiles(64, 32, 16, (2, 1)),
    Tiles(64, 128, 64, (1, 2), snake=1),
    Tiles(128, 128, 64, (2, 1)),
    Tiles(64, 256, 32, (1, 1)),
    Tiles(64, 64, 64, (2, 1), cluster=2, shared="x"),
    Tiles(64, 64, 64, (2, 1), cluster=2, shared="w"),
    Tiles(64, 32, 128, (1, 1)),
    Tiles(64, 96, 32, (2, 1), cluster=2, shared="w"),
    Tiles(64, 144, 64, (3, 1)),
    Tiles(128, 176, 64, (2, 1)),
)
LEAVED = (
    Tiles(64, 32, 64, (1, 1)),
    Tiles(64, 64, 16, (1, 2)),
    Tiles(64, 128, 64, (2, 1)),
    Tiles(64, 128, 32, (2, 1), cluster=2, shared="w"),
    Tiles(64, 96, 64, (1, 1), split=2),
    Tiles(64, 48, 128, (2, 1)),
    Tiles(64, 96, 64, (2, 1), snake=1),  # one half of the tree after the other, all in registers
    Tiles(64, 112, 64, (2, 1)),
    Tiles(64, 120, 64, (2, 1)),  # a fourth of it parked
)
SHARED = (  # of leaves of 96 columns: those with steps of 64 share every third one among two leaves
    Tiles(64, 32, 32, (1, 1)),
    Tiles(64, 32, 64, (1, 1)),
    Tiles(64, 128, 64, (2, 1)),
    Tiles(64, 64, 64, (2, 1), cluster=2, shared="w"),
    Tiles(64, 64, 64, (2, 1), split=2),
    Tiles(64, 96, 64, (2, 1)),
)


def _operands(rng, rows, k=K):
    """In the second half of the outputs leaves 4 to 7 take away what leaves 1, 2, 3, 0 add: only roundings are left, so
    that the order of every addition shows even after the rounding to bf16."""
    x, weight = (ill_conditioned(rng, n, LEAVES, k // LEAVES) for n in (rows, N))
    x[:, 4:] = x[:, [1, 2, 3, 0]]
    weight[N // 2 :, 4:] = -weight[N // 2 :, [1, 2, 3, 0]]
    return x.reshape(rows, k), weight.reshape(N, k)


def exact(x, weight, *, leaves=1):
    del leaves
    return x.astype(np.float64) @ weight.astype(np.float64).T


def _column_reassociated(x, weight):
    """Above the boundary K is two chains."""
    whole = reference.dot_t(x, weight)
    halves = reference.dot_t(x[:, : K // 2], weight[:, : K // 2]) + reference.dot_t(x[:, K // 2 :], weight[:, K // 2 :])
    return (halves if many(x) else whole).astype(x.dtype)


def _leaves(x, weight, leaves):
    a, w = reference.leaf_slices(x, leaves), reference.leaf_slices(weight, leaves)
    return [reference.dot_t(a[i], w[i]) for i in range(leaves)]


def _row_reassociated(x, weight, *, leaves):
    """Above the boundary leaves 1 and 2 change places in the tree."""
    parts = _leaves(x, weight, leaves)
    if many(x):
        parts[1], parts[2] = parts[2], parts[1]
    return tree(parts, jnp.add).astype(x.dtype)


def _row_rounded(x, weight, *, leaves):
    """Above the boundary the two halves are rounded before they are added, as ranks that send bf16 would."""
    parts = _leaves(x, weight, leaves)
    low, high = tree(parts[: leaves // 2], jnp.add), tree(parts[leaves // 2 :], jnp.add)
    if many(x):
        low, high = (v.astype(x.dtype).astype(jnp.float32) for v in (low, high))
    return (low + high).astype(x.dtype)


@column.gate_cases
def column_cases(rng, rows):
    return [
        Case("chain", _operands(rng, rows), {}, _column_reassociated, exact),
        ("any cut", functools.partial(any_cut, column, {}, SINGLE, kernel_sm90.column)),
    ]


@row.gate_cases
def row_cases(rng, rows):
    args, statics = _operands(rng, rows), {"leaves": LEAVES}
    return [
        Case("tree", args, statics, _row_reassociated, exact),
        Case("one rounding", args, statics, _row_rounded, exact),
        ("any cut", functools.partial(any_cut, row, statics, LEAVED, kernel_sm90.row)),
        ("any step", functools.partial(any_cut, row, statics, SHARED, kernel_sm90.row, k=LEAVES * 96, name="any step")),
    ]


def any_cut(region, statics, variants, kernel, context: Context, k=K, name="any cut") -> GateResult:
    """The output's bits do not depend on how it is cut: ranks of a column-parallel layer (weight rows, any number of
    them), rows of x, and on a GPU the tiles and the order of work (design rule 2, rechecked on each GPU kind)."""
    x, weight = _operands(context.rng, 192, k)
    run = lambda a, w, kw=statics: context.execute(region, (a, w), kw)[0]
    whole, total = run(x, weight), Diff(0, 0)
    for start, stop in ((0, 16), (8, 24), (80, 160), (136, 160), (0, 96)):
        total = total + compare(run(x, weight[start:stop]), whole[:, start:stop], f"weight[{start}:{stop}] ")
    for start, stop in ((0, 64), (128, 192), (64, 192)):
        total = total + compare(run(x[start:stop], weight), whole[start:stop], f"x[{start}:{stop}] ")
    if context.arch == "sm90":
        here = [jax.device_put(a, device("sm90")) for a in (x, weight)]
        for t in variants:
            got = jax.jit(functools.partial(kernel, t=t, **statics))(*here)
            total = total + compare(got, whole, f"{t} ")
        tall = jax.device_put(np.tile(x, (TURNS, 1)), device("sm90"))  # on a grid of fewer blocks than SMs
        got = np.asarray(jax.jit(functools.partial(kernel, t=NARROW, **statics))(tall, here[1]))
        total = total + compare(got, np.tile(whole, (TURNS, 1)), "several turns of a block ")
    # control: one reassociation, by the other region: K in twice as many chains, or in half as many
    more = context.execute(row, (x, weight), {"leaves": 2 if region is column else LEAVES // 2})[0]
    caught = compare(more, whole).differing > 0
    return GateResult(f"{region.name}/{name}", total.checked, total.differing, caught, total.first)
