"""Tiles worth measuring for a product (isojax.tuning). What is listed here can change speed only."""

from __future__ import annotations

from collections.abc import Iterator

from isojax.pallas_kernels.chip import SMS
from isojax.pallas_kernels.linear.tiles import (
    COLUMN_KINDS,
    FEW,
    MANY,
    ROW_KINDS,
    Tiles,
    by_model,
    by_pace,
    misfit,
    share,
    step,
    stride,
)


def candidates(rows: int, *, n: int, k: int, leaves: int) -> list[Tiles]:
    """Distinct tiles for x [rows, k] @ weight[n, k].T in `leaves` leaves, the likeliest first."""
    make = many if rows > FEW else few
    found = dict.fromkeys(make(rows, n, k // leaves, leaves))
    return [t for t in found if not misfit(t, n=n, k=k, leaves=leaves)]


def many(rows: int, n: int, width: int, leaves: int) -> Iterator[Tiles]:
    """Many rows: large tiles, so that the tensor cores wait neither for shared memory nor for the L2."""
    k, half = step(width, leaves), stride(width, 32)
    kinds = COLUMN_KINDS if leaves == 1 else ROW_KINDS
    for kind in kinds:
        for m, cols, down in by_pace(rows, n, kind)[:2]:
            yield Tiles(m, cols, k, (down, 1))
            for order in (1, 4):
                yield Tiles(m, cols, k, (down, 1), snake=order)
    cols = by_model(rows, n, 256 if leaves == 1 else 128)[0][0] if rows >= MANY else by_pace(rows, n, kinds[0])[0][1]
    yield Tiles(64, cols, k, (2, 1))
    yield Tiles(64, cols, half, (2, 1))
    if leaves == 1:
        yield Tiles(64, cols, k, (2, 1), cluster=2, shared="w")
    else:
        yield Tiles(64, cols, k, (2, 1), snake=16)
    if rows <= 1024:
        yield Tiles(64, 64, k, (2, 1))


def few(rows: int, n: int, width: int, leaves: int) -> Iterator[Tiles]:
    """Few rows: one tile to an SM, each of which streams its share of the weights once; or two that share leaves."""
    half, k, twice = (step(width, leaves, most) for most in (32, 64, 128))
    one, two = share(n, SMS), share(n, SMS // 2)
    if rows <= 64:
        yield Tiles(64, one, k, (1, 1))
        yield Tiles(64, one, twice, (1, 1))
        if one >= 64:
            yield Tiles(64, one // 2, twice, (1, 2))
        yield Tiles(64, two, twice, (1, 1), split=2)
    elif rows <= 128:
        yield Tiles(64, one, k, (2, 1))
        yield Tiles(64, one, half, (2, 1))
        yield Tiles(64, two, twice, (1, 1))
        yield Tiles(64, two, twice, (1, 1), snake=1)
        yield Tiles(64, two, twice, (1, 1), cluster=2, shared="w")
        yield Tiles(64, two, k, (2, 1), split=2)
    else:
        cols, down, right = by_model(rows, n, 192 if leaves == 1 else 96, ((2, 1), (1, 1)))[0]
        yield Tiles(64, cols, k, (down, right))
        yield Tiles(64, cols, k, (down, right), snake=1)
        yield Tiles(64, cols, half, (down, right))
        yield Tiles(64, cols, k, (down, right), cluster=2, shared="w")
        yield Tiles(64, cols, twice, (down, right))
        yield Tiles(64, two, k, (2, 1))
        yield Tiles(64, two, half, (2, 1))
        yield Tiles(64, min(96, 2 * two), k, (2, 1), split=2)
        yield Tiles(64, min(96, 2 * two), half, (2, 1), split=2)
