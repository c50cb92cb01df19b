"""The engine as Python sees it: a context manager, results for `for` and `async for`."""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from transferry import Engine, GenerationOptions, GenerationResult, UsageError
from transferry.build_model.train.corpus import builtin_pairs

# A random model would say one token again and again.
GREEDY = GenerationOptions(max_length=12, no_repeat_ngram=1)


@pytest.fixture(scope="module")
def engine(bundle_folder: Path) -> Engine:
    return Engine.load(bundle_folder)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [pair.source for pair in builtin_pairs(20, seed=7)]


def answers(results: Sequence[GenerationResult]) -> list[str]:
    return [result.text for result in results]


def test_an_engine_closes_and_says_what_it_is(bundle_folder: Path) -> None:
    with Engine.load(bundle_folder, replicas=2) as engine:
        assert f"Engine({str(bundle_folder)!r}, variant='" in repr(engine)
        assert "replicas=2" in repr(engine)
        (result,) = engine.generate(["a"], GREEDY)
        assert result.text
    assert repr(engine) == f"Engine({str(bundle_folder)!r}, closed)"
    with pytest.raises(UsageError, match="load the bundle again"):
        engine.generate(["a"], GREEDY)


def test_results_are_read_asynchronously_too(engine: Engine, texts: list[str]) -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    async def read() -> list[GenerationResult]:
        beating = asyncio.create_task(beat())
        found = [result async for result in engine.generate(texts, GREEDY)]
        beating.cancel()
        return found

    assert answers(asyncio.run(read())) == answers(list(engine.generate(texts, GREEDY)))
    assert beats > len(texts), "the event loop stood still"


def test_a_reader_that_is_cancelled_stops_the_engine(engine: Engine, texts: list[str]) -> None:
    async def read() -> None:
        results = engine.generate(itertools.cycle(texts), GREEDY)
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.2):
                async for _ in results:
                    pass
        results.close()
        assert [result async for result in results] == []

    asyncio.run(read())


def test_an_engine_verifies_itself(engine: Engine) -> None:
    assert engine.verify().passed
