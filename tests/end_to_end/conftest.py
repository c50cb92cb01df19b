"""Folders of models, and the bundles that import and export make of them, each made once."""

from pathlib import Path

import pytest

from tests.commands import done
from tests.conftest import Once
from tests.end_to_end.ways import WAYS, Way, Ways
from tests.runtime.engine.tasks.loopback import pickled as pickled


@pytest.fixture(scope="session")
def ways(once: Once, traces: None) -> Ways:
    """Returns the independent way of a task, and the bundle of its folder."""

    def way(task: str) -> tuple[Way, Path]:
        folder = once(f"{task}-folder", WAYS[task].make)

        def make(bundle: Path) -> None:
            checkpoint = bundle.with_name(f"{task}-checkpoint")
            done("import", folder, "--out", checkpoint, "--quiet")
            done("export", checkpoint, "--out", bundle, "--variant", "portable", "--quiet")

        return WAYS[task](folder), once(f"{task}-bundle", make)

    return way
