"""Gate of attn.core: a query row's bits depend on its own request's keys up to its position, and on nothing else.

Every claim is one comparison: requests computed whole, each alone, over contiguous keys, against the same rows computed
another way (in a batch, in chunks, over pages of another size, row by row). What lies outside a request is NaN.
The control feeds the same implementation the same keys in another order, which is a reassociation and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from isojax.gates.bits import Diff, compare, compare_all
from isojax.gates.case import Context, GateResult
from isojax.pallas_kernels.attn import core
from isojax.pallas_kernels.attn.work import capacity, tile_rows, work_list
from isojax.schedule import KV_PARTITION, KV_TILE

LENGTHS = (1, 2, 63, 64, 65, 129, 257, 1100)
QUICK_LENGTHS = (1, 63, 65, 258)
CUTS = (1, 63, 64, 65, 100)
QUICK_CUTS = (64, 65)
PAGES = (16, 32, 64, 128)
QUICK_PAGES = (16, 128)
# A call is padded to one of few sizes, as each one is compiled (2 to 3 s on a GPU); a row still meets several.
ROWS = 64, 512, 4096  # query rows
REQUESTS = 16
BF16 = jnp.dtype(jnp.bfloat16)


@dataclass(frozen=True)
class Heads:
    q: int
    kv: int
    dim: int


SHAPES = (Heads(4, 2, 64), Heads(3, 1, 128), Heads(8, 1, 128))


@dataclass(frozen=True)
class Request:
    """q [L, Hq, D] and kv [L, Hkv, 2 D] of one request; a Piece asks for its rows [start, stop)."""

    q: np.ndarray
    kv: np.ndarray


Piece = tuple[int, int, int]  # request, start, stop
Bits = dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]  # (request, row) -> out [Hq D], lse [Hq]


def draw(rng: np.random.Generator, heads: Heads, length: int) -> Request:
    """Scores of spread a few, so that a softmax is neither flat nor one-hot."""
    normal = lambda *shape: rng.standard_normal(shape).astype(BF16)
    return Request(normal(length, heads.q, heads.dim) * BF16.type(2), normal(length, heads.kv, 2 * heads.dim))


def padded(n: int) -> int:
    return next(rows for rows in ROWS if rows >= n)


def operands(requests: Sequence[Request], pieces: Sequence[Piece], page: int, tile: int, rng: np.random.Generator):
    """Operands of one call that computes `pieces`, in that order; page 0: contiguous keys, so pieces must be whole."""
    spare = [0] * (REQUESTS - len(pieces))  # requests without rows
    counts = [stop - start for _, start, stop in pieces] + spare
    stops = [stop for *_, stop in pieces] + spare
    rows = padded(sum(counts))
    q = np.full((rows, *requests[0].q.shape[1:]), np.nan, BF16)
    q[: sum(counts)] = np.concatenate([requests[r].q[start:stop] for r, start, stop in pieces])
    cu_q = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    work = work_list(np.array(counts), tile, capacity(rows, len(counts), tile) + 1)
    if not page:
        kv = np.full((rows, *requests[0].kv.shape[1:]), np.nan, BF16)
        kv[: sum(counts)] = np.concatenate([requests[r].kv[:stop] for r, _, stop in pieces])
        return q, kv, None, cu_q, np.array(stops, np.int32), work
    width = -(-max(LENGTHS) // page)
    ids = rng.permutation(len(counts) * width + 1)
    kv = np.full((len(ids), page, *requests[0].kv.shape[1:]), np.nan, BF16)
    table = np.full((len(counts), width), ids[-1], np.int32)
    for i, (r, _, stop) in enumerate(pieces):
        for j in range(-(-stop // page)):
            table[i, j] = ids[i * width + j]
            part = requests[r].kv[j * page : min((j + 1) * page, stop)]
            kv[table[i, j], : len(part)] = part
    return q, kv, table, cu_q, np.array(stops, np.int32), work


def compute(context: Context, requests, pieces: Sequence[Piece], page: int, tile: int) -> Bits:
    """The bits of every row in `pieces`, by one call."""
    args = operands(requests, pieces, page, tile, context.rng)
    out, lse = context.execute(core, args, {"scale": args[0].shape[-1] ** -0.5, "tile": tile})
    rows = [(r, row) for r, start, stop in pieces for row in range(start, stop)]
    return {row: (out[i], lse[i]) for i, row in enumerate(rows)}


def differ(got: Bits, want: Bits, label: str) -> Diff:
    total = Diff(0, 0)
    for row, values in got.items():
        for name, a, b in zip(("out", "lse"), values, want[row], strict=True):
            total = total + compare(a, b, f"{label}, request {row[0]} row {row[1]} {name} ")
    return total


def whole(requests: Sequence[Request]) -> list[Piece]:
    return [(r, 0, len(request.q)) for r, request in enumerate(requests)]


# -- the ways of computing the same rows -------------------------------------------------------------------------------
Way = tuple[str, list[list[Piece]], int, int]  # label, calls, page, tile


def batches(context, requests, tile) -> Iterator[Way]:
    everything = whole(requests)
    yield "all in one batch", [everything], 0, tile
    yield "batch in reverse", [everything[::-1]], 0, tile


def pages(context, requests, tile) -> Iterator[Way]:
    for page in QUICK_PAGES if context.quick else PAGES:
        yield f"pages of {page}", [whole(requests)], page, tile


def cuts(context, requests, tile) -> Iterator[Way]:
    for cut in QUICK_CUTS if context.quick else CUTS:
        late = [(r, cut, len(q.q)) for r, q in enumerate(requests) if len(q.q) > cut]
        early = [(r, 0, min(cut, len(q.q))) for r, q in enumerate(requests)]
        yield f"prefill cut at {cut}", [early, late], 16, tile
        # a hit computes only what follows the shared prefix, beside another request's cold prefill
        yield f"prefix hit of {cut}", [[*late, (0, 0, len(requests[0].q))]], 64, tile


def rows(context, requests, tile) -> Iterator[Way]:
    """Each request's last rows as decode steps, with the decode kernels and with the many-row ones."""
    last = lambda back: [(r, len(q.q) - back, len(q.q) - back + 1) for r, q in enumerate(requests) if len(q.q) >= back]
    for page in (16, 128):
        for decode in sorted({tile, tile_rows(context.arch, 1, longest=1)}):
            yield f"decode, pages of {page}, tile {decode}", [last(1), last(2)], page, decode
    yield "decode alone", [[piece] for piece in last(1)], 32, tile_rows(context.arch, 1, longest=1)


def tiles(context, requests, tile) -> Iterator[Way]:
    for other in (8, 64, 128) if context.arch == "sm90" else (32, 64):
        yield f"tile {other}", [whole(requests)], 0, other


def gate(ways: Callable[..., Iterator[Way]], name: str) -> Callable[[Context], GateResult]:
    def run(context: Context) -> GateResult:
        total, caught = Diff(0, 0), True
        for heads in SHAPES[:1] if context.quick else SHAPES:
            tile = tile_rows(context.arch, heads.q // heads.kv)
            requests = [draw(context.rng, heads, n) for n in (QUICK_LENGTHS if context.quick else LENGTHS)]
            want: Bits = {}
            for piece in whole(requests):
                want |= compute(context, requests, [piece], 0, tile)
            for label, calls, page, height in ways(context, requests, tile):
                for pieces in calls:
                    got = compute(context, requests, pieces, page, height)
                    total = total + differ(got, want, f"{heads} {label}")
            caught = caught and control(context, requests, want, page, height)
        return GateResult(f"attn.core/{name}", total.checked, total.differing, caught, total.first)

    return run


def control(context: Context, requests: Sequence[Request], want: Bits, page: int, tile: int) -> bool:
    """The last row of the longest request over the same keys, two tiles exchanged: it must differ from `want`.

    page, tile: of the gate's last way, so that the control goes through the same kernel.
    """
    r = max(range(len(requests)), key=lambda i: len(requests[i].q))
    request, last = requests[r], len(requests[r].q) - 1
    order = np.arange(last + 1)
    order[: 2 * KV_TILE] = np.roll(order[: 2 * KV_TILE], KV_TILE)
    moved = Request(request.q, request.kv[order])
    got = compute(context, [moved], [(0, last if tile == 1 else 0, last + 1)], page, tile)
    return differ({(r, last): got[0, last]}, want, "control").differing > 0


def crowd(context: Context) -> GateResult:
    """Decode of so many rows that one program takes a row's partitions one after another, where it has few places for
    tiles: against the many-row kernels, and against a few of the rows, whose partitions many programs share.

    All requests read the same pages, each as far as its own length. The control exchanges two tiles of keys.
    """
    count = 256 if context.arch == "sm90" else 32  # there are no such programs elsewhere
    few, length, page, heads = 8, 4 * KV_PARTITION + 100, 128, Heads(16, 8, 128)
    request = draw(context.rng, heads, length)
    lens = length - np.arange(count, dtype=np.int32) % 97
    q = context.rng.standard_normal((count, heads.q, heads.dim)).astype(BF16) * BF16.type(2)

    def run(kv: np.ndarray, rows: int, tile: int):
        paged = np.full((-(-length // page) * page, *kv.shape[1:]), np.nan, BF16)
        paged[:length] = kv
        paged = paged.reshape(-1, page, *kv.shape[1:])
        table = np.tile(np.arange(len(paged), dtype=np.int32), (rows, 1))
        padding = np.full((padded(rows) - rows, *q.shape[1:]), np.nan, BF16)
        work = work_list(np.ones(rows, np.int32), tile, capacity(padded(rows), rows, tile) + 1)
        cu_q = np.arange(rows + 1, dtype=np.int32)
        args = np.concatenate([q[:rows], padding]), paged, table, cu_q, lens[:rows], work
        return [x[:rows] for x in context.execute(core, args, {"scale": heads.dim**-0.5, "tile": tile})]

    decode, many = tile_rows(context.arch, 1, longest=1), tile_rows(context.arch, heads.q // heads.kv)
    want = run(request.kv, count, many)
    total = compare_all(run(request.kv, count, decode), want, f"{count} rows ")
    total = total + compare_all(run(request.kv, few, decode), [x[:few] for x in want], f"{few} rows ")
    order = np.arange(length)
    order[: 2 * KV_TILE] = np.roll(order[: 2 * KV_TILE], KV_TILE)
    caught = compare_all(run(request.kv[order], count, decode), want).differing > 0
    return GateResult("attn.core/decode of many", total.checked, total.differing, caught, total.first)


@core.gate_cases
def cases(rng, rows_wanted):
    return [
        ("alone and in batches", gate(batches, "alone and in batches")),
        ("page sizes", gate(pages, "page sizes")),
        ("chunked prefill and prefix hits", gate(cuts, "chunked prefill and prefix hits")),
        ("decode", gate(rows, "decode")),
        ("decode of many", crowd),
        ("tile heights", gate(tiles, "tile heights")),
    ]
