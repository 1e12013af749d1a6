"""Every entry of every shipped tuning table, compiled for sm_90a: a kernel, and no spill."""

from __future__ import annotations

import pytest
from harness import compiles, spec

from isojax import tuning
from isojax.region import lookup
from isojax.tuning.table import Entry, load

ENTRIES = [(path.stem, e) for path in sorted(tuning.FOLDER.glob("*.json")) for e in load(path).entries]


def name(entry: Entry) -> str:
    return f"{entry.region} {' '.join(f'{k}{v}' for k, v in entry.shape)} M{entry.rows}"


@pytest.mark.slow
@pytest.mark.parametrize("device,entry", ENTRIES, ids=[f"{d} {name(e)}" for d, e in ENTRIES])
def test_an_entry_compiles_without_spills(device, entry):
    n, k, leaves = (getattr(entry.shape, key) for key in ("n", "k", "leaves"))
    statics = {} if entry.region == "linear.column" else {"leaves": leaves}
    with tuning.forced(entry.choice.tiles):
        assert len(compiles(lookup(entry.region), (spec((entry.rows, k)), spec((n, k))), statics)) == 1
