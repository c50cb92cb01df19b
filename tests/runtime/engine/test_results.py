"""The engine as Python sees it: a context manager, results for `for` and `async for`."""

import asyncio
import copy
import inspect
import itertools
import math
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

import transferry
from transferry import Engine, GenerationOptions, GenerationResult, UsageError
from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.engine.tasks.generate import Generate
from transferry.runtime.engine.tasks.score import Score
from transferry.runtime.engine.tasks.table import TASKS
from transferry.runtime.engine.tasks.task import Task
from transferry.runtime.settings import field_types

# A random model would say one token again and again.
GREEDY = GenerationOptions(max_length=12, no_repeat_ngram=1)


@pytest.fixture(scope="module")
def engine(bundle_folder: Path) -> Engine:
    return Engine(bundle_folder)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [pair.source for pair in builtin_pairs(20, seed=7)]


def answers(results: Sequence[GenerationResult]) -> list[str]:
    return [result.text for result in results]


def test_an_engine_closes_and_says_what_it_is(bundle_folder: Path) -> None:
    with Engine(bundle_folder, replicas=2) as engine:
        assert f"Engine({str(bundle_folder)!r}, variant='" in repr(engine)
        assert "replicas=2" in repr(engine)
        (result,) = engine.generate(["a"], GREEDY)
        assert result.text
    assert repr(engine) == f"Engine({str(bundle_folder)!r}, closed)"
    with pytest.raises(UsageError, match="load the bundle again"):
        engine.generate(["a"], GREEDY)


def test_a_folder_opens_by_the_class_itself(bundle_folder: Path, engine: Engine) -> None:
    opened = Engine.load(bundle_folder, replicas=2, device="cpu")  # as Engine(...)
    assert (opened.replicas, opened.certificate) == (2, engine.certificate)
    assert opened.model.describe() == engine.model.describe()
    assert list(opened.generate(["a"], GREEDY)) == list(engine.generate(["a"], GREEDY))
    with pytest.raises(UsageError, match="Engine has no devise, thread; write device, threads"):
        Engine(bundle_folder, thread=2, devise="cpu")
    for wrong in ("cuda:x", "tpu", "cpu:1"):
        with pytest.raises(UsageError, match=r"device|provider"):
            Engine(bundle_folder, device=wrong)


def test_a_call_shows_its_progress(bundle_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(bundle_folder, progress=True) as engine:
        assert len(list(engine.generate(["a", "b", ""], GREEDY))) == 3
        assert "3/3" in capsys.readouterr().err
        assert len(list(engine.score([("a", "b")] * 2))) == 2
        assert "2/2" in capsys.readouterr().err
        # The number of rows of a generator is unknown.
        assert len(list(engine.generate((text for text in "ab"), GREEDY))) == 2
        assert "2 rows" in capsys.readouterr().err
    list(Engine(bundle_folder).generate(["a"], GREEDY))
    assert capsys.readouterr() == ("", "")


def test_results_make_a_table(engine: Engine) -> None:
    pandas = pytest.importorskip("pandas")
    rows = pandas.Series(["a", None, "the cat"])
    found = list(engine.generate(rows, GREEDY))
    assert [each.error.kind if each.error else "" for each in found] == ["", "no-text", ""]
    frame = pandas.DataFrame(found)
    assert frame["text"].tolist() == answers(found)
    assert found[0].score == found[0].hypotheses[0].score == found[0].to_dict()["score"]
    assert math.isnan(found[1].score)


def test_rows_of_a_table_are_pairs(engine: Engine) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"source": ["a", "the cat"], "target": ["b", "c"]})
    pairs = list(zip(table["source"], table["target"], strict=True))
    assert list(engine.score(table.itertuples(index=False))) == list(engine.score(pairs))
    with pytest.raises(UsageError, match="found a table; give columns, such as"):
        engine.score(table)


def test_an_engine_is_not_copied(engine: Engine) -> None:
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="an engine cannot be copied or pickled"):
            copied(engine)


def test_columns_of_arrow_are_texts(engine: Engine) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows: list[Any] = ["a", None, "the cat"]
    plain = list(engine.generate(rows, GREEDY))
    for column in (pyarrow.array(rows), pyarrow.chunked_array([rows[:1], rows[1:]])):
        assert list(engine.generate(column, GREEDY)) == plain


def test_every_public_name_is_listed() -> None:
    assert {"Engine", "__version__", *transferry.runtime.__all__} == set(dir(transferry))
    assert set(dir(transferry.runtime)) == set(transferry.runtime.__all__)


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


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_no_option_takes_another_type(task: type[Task], request: pytest.FixtureRequest) -> None:
    alone = not issubclass(task, Generate | Score)
    engine = Engine(request.getfixturevalue(f"{'reader_' * alone}bundle_folder"), replicas=1)
    method = getattr(engine, task.name.replace("-", "_"))
    names = {*inspect.signature(method).parameters} & {*field_types(task.options)}
    if task is Generate:
        names |= {"options", "first_row", *field_types(GenerationOptions)}
    assert names >= {"long_rows"}
    for name in sorted(names):
        with pytest.raises(UsageError, match=rf"^{name} (must be|has no effect)|has no languages"):
            method([], **{name: object()})


def test_no_setting_of_an_engine_takes_another_type(bundle_folder: Path) -> None:
    for name in ("options", "variant", "batches", "replicas", "special_tokens", "threads"):
        with pytest.raises(UsageError, match=rf"^{name} must be "):
            Engine(bundle_folder, **cast(Any, {name: object()}))


def test_results_do_not_wait_for_themselves(engine: Engine) -> None:
    def rows() -> Iterator[str]:
        yield "a"
        yield next(results).text

    results = engine.generate(rows(), GREEDY)
    with pytest.raises(ValueError, match="already executing"):
        list(results)


def in_a_fork(work: Callable[[], object]) -> int:
    """Exit status of a child that does the work, within a minute."""
    if (child := os.fork()) == 0:
        try:
            signal.alarm(60)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_does_not_wait_for_results(
    engine: Engine, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two rows are read ahead, so that the others are not computed before the fork.
    monkeypatch.setattr(engine, "batches", replace(engine.batches, window=2))
    results = engine.generate(iter(texts * 9), GREEDY)
    next(results)

    def refused() -> None:
        with pytest.raises(UsageError, match="before this process was forked"):
            list(results)
        with pytest.raises(UsageError, match="was forked while an engine computed"):
            list(engine.generate(texts, GREEDY))

    assert in_a_fork(refused) == 0
    assert len(list(results)) == 9 * len(texts) - 1
    assert in_a_fork(lambda: list(engine.generate(texts, GREEDY))) == 0


def test_an_engine_verifies_itself(engine: Engine) -> None:
    assert engine.verify().passed


def test_no_ctrl_c_is_lost(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library in C may drop what Python raises in a function that it calls."""
    told, lost = list[Any](), list[str]()
    # Callbacks of weak references raise nothing; Python reports the error.
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    list(engine.generate(["a"], GREEDY))
    try:
        for place in range(1, 2000):
            calls, where = itertools.count(1), list[str]()

            def interrupt(frame: FrameType, event: str, argument: Any) -> None:
                if next(calls) == place:  # noqa: B023 - it is called in this turn alone
                    code = frame.f_code
                    where.append(f"{code.co_filename}, {code.co_qualname}")  # noqa: B023
                    signal.raise_signal(signal.SIGINT)

            told.clear()
            sys.settrace(interrupt)
            try:
                list(engine.generate(["a"], GREEDY))
                sys.settrace(None)
                lost += [] if told else where
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            if not where:  # no call is left
                break
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (lost, 100 < place < 1999) == ([], True), place
