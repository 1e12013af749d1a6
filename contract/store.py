"""Contracts on disk. What is loaded is valid and unedited; what is saved is valid and whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

from contract import files
from contract.canonical import strict_loads
from contract.errors import ContractError, Finding
from contract.schema import Contract
from contract.validate import parse, validate


def load(path: str | os.PathLike[str]) -> Contract:
    """The valid contract in `path`.

    Raises ContractError if the file cannot be read, is no well-formed JSON, has another schema version, misspells a
    field, breaks a rule, or was edited after it was sealed.
    """
    source = os.fspath(path)
    try:
        data = Path(source).read_bytes()
    except OSError as error:
        raise ContractError(
            [
                Finding(
                    source,
                    "file",
                    f"cannot be read: {error.strerror or error}",
                    "a contract written by contract.save",
                    "correct the path or its permissions",
                )
            ]
        ) from error
    try:
        return validate(parse(strict_loads(data, source=source), source=source))
    except RecursionError:
        raise ContractError(
            [Finding(source, "json", "nested too deeply to read", "a contract's few levels", "restore the file")]
        ) from None


def save(contract: Contract, path: str | os.PathLike[str]) -> None:
    """Write `contract` so that a reader sees the old file or the new one, never a part of it.

    Raises ContractError, and writes nothing, unless `contract` is valid; OSError if the folder cannot be written.
    """
    validate(contract)
    text = json.dumps(contract.plain(), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    files.write(path, text)
