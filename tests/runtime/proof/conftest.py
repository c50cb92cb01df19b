"""Copies of a bundle, without a certificate and with one."""

import shutil
from pathlib import Path

import pytest

from tests.runtime.proof.certified import verified


@pytest.fixture
def plain(bundle_folder: Path, tmp_path: Path) -> Path:
    """A copy of the bundle, not verified."""
    return Path(shutil.copytree(bundle_folder, tmp_path / "plain"))


@pytest.fixture
def folder(plain: Path) -> Path:
    """A copy of the bundle, verified."""
    verified(plain)
    return plain
