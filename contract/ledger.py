"""What a runtime really installed and launched: an append-only record, each line chained to the one before.

A record holds no clock and no process id, so two runtimes that did the same have the same ledger. The chain shows an
edited or missing line; that the end was cut off shows only against a `head` kept elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contract.canonical import canonical_bytes, digest, strict_loads
from contract.errors import ContractError, Finding
from contract.frozen import FrozenMap

GENESIS = "0" * 64


@dataclass(frozen=True, slots=True)
class Record:
    """One event. `hash` covers the other fields, `previous` is the hash of the record before."""

    seq: int
    event: str
    data: FrozenMap
    previous: str
    hash: str

    def line(self) -> bytes:
        return canonical_bytes({**_content(self), "hash": self.hash}) + b"\n"


def verify(records: Iterable[Record], *, source: str = "ledger") -> str:
    """The head of an unbroken chain. Raises ContractError at the first record that does not follow from the last."""
    head = GENESIS
    for seq, record in enumerate(records):
        if record.seq != seq or record.previous != head or record.hash != digest(_content(record)):
            raise _refusal(source, f"record {seq} does not follow from the one before: edited, removed or swapped")
        head = record.hash
    return head


class Ledger:
    """Appends events in memory and, if `path` is given, to a JSONL file, one file per process.

    Opening an existing file checks its chain and goes on from it. Raises ContractError if the chain is broken or
    another process writes to the same file.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._lock = threading.Lock()
        self._records: list[Record] = []
        self._launches: Counter[tuple[str, str, str]] = Counter()
        self._size = 0
        if self._path is not None and self._path.exists():
            self._resume(self._path)

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(self._records)

    @property
    def head(self) -> str:
        return self._records[-1].hash if self._records else GENESIS

    @property
    def launches(self) -> Mapping[tuple[str, str, str], int]:
        """(region, case, module hash) -> launches that this process made."""
        return dict(self._launches)

    def append(self, event: str, data: Mapping[str, Any]) -> Record:
        """Add one event. Raises ValueError for data that is not JSON, ContractError for a foreign write to the file."""
        with self._lock:
            return self._append(event, data)

    def launch(self, region: str, case: str, module: str) -> None:
        """Count a launch of the module with hash `module`; its first launch in this process becomes a record."""
        key = (region, case, module)
        with self._lock:
            if key not in self._launches:  # a record each would cost a hash and a write on the hot path
                self._append("launch", {"region": region, "case": case, "module": module})
            self._launches[key] += 1

    def _append(self, event: str, data: Mapping[str, Any]) -> Record:
        record = Record(len(self._records), event, FrozenMap(data), self.head, hash="")
        record = replace(record, hash=digest(_content(record)))
        if self._path is not None:
            self._write(self._path, record.line())
        self._records.append(record)
        return record

    def _write(self, path: Path, line: bytes) -> None:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_size != self._size:
                raise _refusal(str(path), "another process wrote to the file, or it was cut")
            file.write(line)
            file.flush()
        self._size += len(line)

    def _resume(self, path: Path) -> None:
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            raise _refusal(str(path), "the last line is incomplete")
        self._records = [_record(line, f"{path} line {n}") for n, line in enumerate(data.splitlines(), start=1)]
        self._size = len(data)
        verify(self._records, source=str(path))


def _content(record: Record) -> dict[str, Any]:
    return {"seq": record.seq, "event": record.event, "data": record.data, "previous": record.previous}


def _record(line: bytes, source: str) -> Record:
    fields = strict_loads(line, source=source)
    try:
        return Record(**{**fields, "data": FrozenMap(fields["data"])})
    except (TypeError, KeyError, ValueError, AttributeError):
        raise _refusal(source, "not a ledger record") from None


def _refusal(source: str, given: str) -> ContractError:
    mend = "keep this file as evidence and start a new ledger, one file per process"
    return ContractError([Finding(source, "ledger", given, "an append-only chain with one writer", mend)])
