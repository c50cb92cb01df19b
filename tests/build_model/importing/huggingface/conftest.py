"""Small checkpoints of four types, made once, and copies to change."""

import shutil
from pathlib import Path

import pytest

from tests.build_model.importing.huggingface.small_models import Copies, Made, Makes


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Makes:
    """Checkpoints and runs by type, each made once. Copy before changing anything."""
    cache: dict[str, Made] = {}

    def make(kind: str) -> Made:
        if kind not in cache:
            cache[kind] = Made(kind, tmp_path_factory.mktemp(kind))
        return cache[kind]

    return make


@pytest.fixture
def copied(made: Makes, tmp_path: Path) -> Copies:
    """Copies a checkpoint, so that it may be changed."""
    return lambda kind: Path(shutil.copytree(made(kind).folder, tmp_path / "theirs"))
