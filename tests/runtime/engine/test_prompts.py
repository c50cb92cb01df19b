"""Chats and token ids are answered as any text of the same ids is."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.generate import GenerationResult
from transferry.runtime.errors import UsageError
from transferry.runtime.tokenizer.chat import ChatTemplate

pytest.importorskip("jinja2", reason="an extra, which is not installed")

OPTIONS = GenerationOptions(max_length=6)
SOURCE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}A:"
)
USER = {"role": "user", "content": "the cat"}


@pytest.fixture
def engine(writer_bundle_folder: Path) -> Engine:
    made = Engine(writer_bundle_folder)
    special = made.bundle.tokenizer.special
    made.bundle.tokenizer.chat = ChatTemplate(SOURCE, {"eos_token": "<e>"}, {"<e>": special.eos_id})
    return made


def answers(engine: Engine, sources: Sequence[Any], **options: Any) -> Iterator[GenerationResult]:
    return engine.generate(sources, OPTIONS, **options)


def test_ids_are_answered_as_the_text_is(engine: Engine) -> None:
    tokenizer = engine.bundle.tokenizer
    texts = ["the cat", "a day in", "the cat"]
    ids = [tokenizer.special.wrap(tokenizer.encode(text)) for text in texts]
    found, wanted = [*answers(engine, ids)], [*answers(engine, texts)]
    assert [row.hypotheses for row in found] == [row.hypotheses for row in wanted]
    assert [row.source_tokens for row in found] == [row.source_tokens for row in wanted]
    assert [json.loads(row.source) for row in found] == ids
    assert wanted[0].text


def test_what_cannot_be_answered_is_an_error_of_its_row(engine: Engine) -> None:
    size = engine.bundle.tokenizer.vocabulary_size
    long = [USER] * engine.max_positions
    rows = [
        [size],
        [-1],
        [True],
        [],
        [{"role": "tool", "content": ""}],
        [{"content": ""}],
        long,
        [USER],
    ]
    errors = [row.error for row in answers(engine, rows)]
    assert [error and error.kind for error in errors] == [*["prompt"] * 6, "too-long", None]
    assert errors[0] is not None
    assert errors[0].message == f"expected token ids from 0 to {size - 1}, found {size}"
    assert errors[4] is not None
    assert "no tools" in errors[4].message


def test_only_ids_are_truncated(engine: Engine) -> None:
    ids = [5] * (engine.max_positions + 3)
    cut, whole, chat = answers(
        engine, [ids, ids[: engine.max_positions], [USER] * 99], long_rows="truncate"
    )
    assert (cut.truncated, whole.truncated) == (True, False)
    assert cut.hypotheses == whole.hypotheses
    assert chat.error is not None
    assert chat.error.kind == "too-long"


def test_something_else_than_prompts_is_an_error_of_its_row(engine: Engine) -> None:
    sources: Any = [USER, 3, [1, "a"], [USER, 1], [{"role": object()}], "five"]
    *bad, good = answers(engine, sources)
    kinds = [found.error and found.error.kind for found in bad]
    assert kinds == [*["no-text"] * 4, "prompt"]
    assert good.error is None
    with pytest.raises(UsageError, match="texts must be several"):
        answers(engine, {"role": "user"})  # type: ignore[arg-type]


def test_messages_need_a_template(engine: Engine) -> None:
    engine.bundle.tokenizer.chat = None
    with pytest.raises(UsageError, match="the bundle has no chat template"):
        list(answers(engine, [[USER]]))
