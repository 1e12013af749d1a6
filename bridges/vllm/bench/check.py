"""The engine's sampled rows against plain JAX: `python -m bridges.vllm.bench.check CHECKPOINT MEASURED OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bridges.vllm.endtoend import compare


def main(model: str, measured: str, out: str) -> int:
    sample = json.loads(Path(measured).read_text())["sample"]
    rows = [{int(p): digest for p, digest in r.items()} for r in sample["rows"]]
    Path(out).write_text(json.dumps(compare(model, sample["prompts"], sample | dict(rows=rows), packed=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
