from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.logits_processors import (
    ForcedPrefix,
    History,
    LogitsProcessor,
    MinLength,
    NoRepeatNGram,
    RepetitionPenalty,
    SuppressSequences,
    build_logits_processors,
    prompts_of,
    restrict,
)
from transferry.runtime.decoding.strategy import Request

EOS = 2
VOCABULARY = 8
PROMPT = np.array([[1]])
NOTHING_YET = History(
    np.zeros(1, np.int64), np.zeros(1, np.int64), np.empty((1, 0), np.int64), PROMPT
)


def built(options: GenerationOptions, *prefixes: tuple[int, ...]) -> list[LogitsProcessor]:
    requests = [Request(0, (1,), options.max_length, prefix) for prefix in prefixes]
    return build_logits_processors(options, requests, [EOS], has_encoder=True)


def active(processor: LogitsProcessor, *lengths: int) -> bool:
    return processor.active(np.array(lengths))


def allowed_tokens(
    processor: LogitsProcessor,
    history: list[list[int]],
    sentences: list[int] | None = None,
    prompts: list[list[int]] | None = None,
) -> list[list[int]]:
    lengths = np.array([len(row) for row in history])
    # The values behind a row would do most harm if they were read.
    past = np.array([[*row, *row, *[5] * 15][: lengths.max()] for row in history], np.int64)
    logits: NDArray[np.floating[Any]] = np.zeros((len(past), VOCABULARY), np.float32)
    owners = np.arange(len(past)) if sentences is None else np.array(sentences)
    before = prompts_of(prompts or [[1]] * (int(owners.max()) + 1))
    given = History(owners, lengths, past.reshape(len(history), -1), before)
    processor(logits, given, logits.copy())
    return [np.flatnonzero(row > -np.inf).tolist() for row in logits]


def test_min_length_forbids_the_end_of_each_row_until_it_is_reached() -> None:
    processor = MinLength([2] * 3, [EOS])
    assert [active(processor, length) for length in range(4)] == [True, True, False, False]
    assert allowed_tokens(processor, [[5]]) == [[0, 1, 3, 4, 5, 6, 7]]

    assert active(processor, 5, 1)
    assert not active(processor, 5, 2)
    forbidding = [EOS not in row for row in allowed_tokens(processor, [[5, 6, 7], [5], [5, 6]])]
    assert forbidding == [False, True, False]


@pytest.mark.parametrize(
    ("size", "history", "forbidden"),
    [
        (1, [3, 5, 3], {3, 5}),
        (2, [3, 5, 3], {5}),
        (2, [4, 4], {4}),
        (2, [3, 5, 3, 6, 3], {5, 6}),
        (2, [3, 5, 4], set()),
        (3, [3, 4, 5, 3, 4], {5}),
        (3, [3, 4, 5, 4, 3], set()),
    ],
)
def test_no_repeat_ngram_forbids_what_would_repeat(
    size: int, history: list[int], forbidden: set[int]
) -> None:
    processor = NoRepeatNGram(size)
    assert active(processor, len(history))
    assert allowed_tokens(processor, [history]) == [sorted(set(range(VOCABULARY)) - forbidden)]


def test_no_repeat_ngram_keeps_rows_apart() -> None:
    allowed = allowed_tokens(NoRepeatNGram(2), [[3, 5, 3], [3, 6, 3], [3, 6, 4]])
    assert [set(range(VOCABULARY)) - set(row) for row in allowed] == [{5}, {6}, set()]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_repeat_ngram_of_unequal_rows_is_that_of_each_alone(size: int) -> None:
    rng = np.random.default_rng(size)
    lengths = [7, 0, 3, 15, 1, 2, 11, 4, 9] * 5
    history = [rng.integers(3, 5, length).tolist() for length in lengths]
    processor = NoRepeatNGram(size)
    everything = list(range(VOCABULARY))
    alone = [
        allowed_tokens(processor, [row])[0] if active(processor, len(row)) else everything
        for row in history
    ]
    assert allowed_tokens(processor, history) == alone
    assert alone.count(everything) < len(alone) - 5
    assert [active(processor, 0, length) for length in (size - 1, size)] == [False, True]
    alone_active = [active(processor, length) for length in range(size + 2)]
    assert alone_active == [False] * size + [True] * 2


def test_forced_prefix_allows_one_token_for_each_sentence_until_its_prefix_is_over() -> None:
    processor = ForcedPrefix([(5, 6), (), (7,)])
    everything = list(range(VOCABULARY))
    rows = [2, 0, 1, 0]
    assert allowed_tokens(processor, [[]] * 4, rows) == [[7], [5], everything, [5]]
    assert allowed_tokens(processor, [[7], [5], [3], [5]], rows) == [
        everything,
        [6],
        everything,
        [6],
    ]
    assert [active(processor, length) for length in range(3)] == [True, True, False]
    # Rows of unequal lengths.
    assert allowed_tokens(processor, [[5, 6, 3], [], [7], [], [5]], [0, 1, 2, 2, 0]) == [
        everything,
        everything,
        everything,
        [7],
        [6],
    ]
    assert active(processor, 9, 1)


@pytest.mark.parametrize(
    ("options", "built_ones", "history"),
    [
        (
            GenerationOptions(no_repeat_ngram=1, min_length=3),
            3,
            History(np.array([0]), np.array([1]), np.array([[5]]), PROMPT),
        ),
        (GenerationOptions(suppress=(5,)), 2, NOTHING_YET),
    ],
)
def test_the_prefix_overrules_the_other_processors(
    options: GenerationOptions, built_ones: int, history: History
) -> None:
    processors = built(options, (5, 5))
    assert len(processors) == built_ones
    allowed = restrict(np.zeros((1, VOCABULARY), np.float32), processors, history)
    assert np.flatnonzero(allowed[0] > -np.inf).tolist() == [5]


def test_restrict_leaves_the_logits_and_keeps_their_type() -> None:
    logits = np.zeros((1, VOCABULARY))
    allowed = restrict(logits, [MinLength([1], [EOS])], NOTHING_YET)
    assert not logits.any()
    assert np.isneginf(allowed[0, EOS])
    assert allowed.dtype == logits.dtype


def test_suppressed_tokens_are_forbidden_at_every_step() -> None:
    (processor,) = built(GenerationOptions(suppress=(7, 0)), ())
    assert [active(processor, length) for length in (0, 1, 100)] == [True] * 3
    assert allowed_tokens(processor, [[5], [0]]) == [[1, 2, 3, 4, 5, 6]] * 2


def test_only_what_is_asked_for_is_built() -> None:
    assert built(GenerationOptions(), (), ()) == []


@pytest.mark.parametrize(
    ("size", "prompt", "history", "forbidden"),
    [
        (1, [3, 4], [], {3, 4}),
        (2, [3, 4, 3], [], {4}),
        (2, [3, 4], [3], {4}),
        (2, [4], [3], set()),
        (3, [5], [], set()),
        (3, [3, 4, 5], [6, 3, 4], {5}),
    ],
)
def test_ngrams_of_a_prompt_count_where_that_is_asked_for(
    size: int, prompt: list[int], history: list[int], forbidden: set[int]
) -> None:
    processor = NoRepeatNGram(size, prompt=True)
    # Beside a row with a longer prompt and a longer output.
    rows, prompts = [history, [6, 7, 6, 7, 6]], [prompt, [7, 6, 7, 6]]
    allowed = allowed_tokens(processor, rows, prompts=prompts)[0]
    assert set(range(VOCABULARY)) - set(allowed) == forbidden
    assert allowed_tokens(processor, [history], prompts=prompts[:1])[0] == allowed


def test_a_sequence_is_forbidden_where_it_would_be_completed() -> None:
    processor = SuppressSequences([(3, 4), (5, 3, 4), (6, 6, 7)])
    rows, prompts = [[3], [], [4, 5], [], [6]], [[1], [7, 3], [1], [6, 6], [5]]
    allowed = allowed_tokens(processor, rows, prompts=prompts)
    assert [set(range(VOCABULARY)) - set(row) for row in allowed] == [{4}, {4}, set(), {7}, set()]


def test_a_repeated_token_is_penalised_once_whatever_its_sign() -> None:
    logits = np.array([[2.0, -2.0, 4.0, -4.0, 6.0, 8.0]] * 2)
    history = History(
        np.array([0, 1]), np.array([3, 1]), np.array([[2, 2, 3], [4, 5, 5]]), prompts_of([[0], [1]])
    )
    found = restrict(logits, [RepetitionPenalty(2.0)], history)
    assert found.tolist() == [[1, -2, 2, -8, 6, 8], [2, -4, 4, -4, 3, 8]]
