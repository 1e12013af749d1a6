"""One in-process engine and one oracle for the module's tests; vLLM takes its environment at import."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bridges.vllm import environment
from tests.integration import models

environment.prepare("cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny(folder: Path) -> Path:
    return models.checkpoint(folder, "llama")
