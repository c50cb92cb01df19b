"""Fixtures of all tests of the engine."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.engine.engine import Engine


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


@pytest.fixture(scope="module")
def engine(bundle_folder: Path) -> Engine:
    return Engine(bundle_folder, replicas=2, batches=BatchOptions(rows=8, window=30))


@pytest.fixture(scope="module")
def bundle(engine: Engine) -> Bundle:
    return engine.bundle


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Sentences of 1 to some 30 tokens, none twice."""
    pairs = builtin_pairs(60, seed=7)
    return list(dict.fromkeys(["a", "two", *(pair.source for pair in pairs)]))
