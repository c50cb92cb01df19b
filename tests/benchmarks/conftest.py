"""torch's threads stay those of the test run: a benchmark takes all cores."""

from collections.abc import Iterator

import pytest

from tests.threads import torch_threads


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with torch_threads():
        yield
