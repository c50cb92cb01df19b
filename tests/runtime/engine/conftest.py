"""What all tests of the engine share."""

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]
