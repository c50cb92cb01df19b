"""A common beginning is read once, and no bit of an answer shows it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.batching import LANES, BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.decoding.shared_prompts import SharedPrompts, copied_tokens, shared_prompts
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.generate import GenerationResult
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions

SYSTEM = list(range(100, 100 + 2 * LANES))  # two blocks
GREEDY = GenerationOptions(max_length=8, no_repeat_ngram=1)
SEARCHES = {
    "greedy": GREEDY,
    "screened": GenerationOptions(max_length=8, scores=False),
    "beam": GenerationOptions(max_length=8, no_repeat_ngram=1, beam=3, n_best=3),
    "sampling": GenerationOptions(max_length=8, sample=True, n_best=2, top_k=50, seed=3),
}


def found(prompts: list[list[int]]) -> SharedPrompts | None:
    return shared_prompts(*pad_sources(prompts, 0))


def sizes(prompts: list[list[int]]) -> tuple[int, int]:
    """The length that is shared, and the number of beginnings."""
    shared = found(prompts)
    assert shared is not None
    return shared.length, len(shared.first)


def own(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 350, count)]


def rows_of(prompts: list[list[int]]) -> tuple[int, list[int], list[int]] | None:
    shared = found(prompts)
    return None if shared is None else (shared.length, list(shared.first), list(shared.of_row))


def test_a_beginning_of_all_rows_is_read_once() -> None:
    prompts = [[*SYSTEM, *own(5, row)] for row in range(4)]
    assert rows_of(prompts) == (32, [0], [0, 0, 0, 0])
    assert copied_tokens([[*prompt, 7] for prompt in prompts]) == [0, 32, 32, 32]


def test_rows_that_begin_otherwise_read_their_own() -> None:
    other = [*SYSTEM[:3], 99, *SYSTEM[4:], 5]
    prompts = [other, [*SYSTEM, 5, 6], own(3), [*SYSTEM, 8, 9], [*SYSTEM, 10, 11]]
    shared = found(prompts)
    assert shared is not None
    assert shared.length == 32
    assert len(shared.first) == 3
    for row, prompt in enumerate(prompts):
        assert prompts[shared.first[shared.of_row[row]]][:32] == prompt[:32]
    assert copied_tokens([[*prompt, 7] for prompt in prompts]) == [0, 0, 0, 32, 32]


def test_several_beginnings_are_read_once_each() -> None:
    first, second = own(32, 1), own(32, 2)
    prompts = [[*first, 5], [*second, 6], [*first, 7], [*second, 8], [*first, 9]]
    # With both blocks, a single token would remain.
    assert rows_of(prompts) in [(16, [0, 1], [0, 1, 0, 1, 0]), (16, [1, 0], [1, 0, 1, 0, 1])]
    assert rows_of([[*prompt, 5] for prompt in prompts[:1]]) is None


def test_the_length_is_the_one_that_saves_most() -> None:
    # Few-shot examples of all, then one more of half of them.
    prompts = [[*SYSTEM[:16], *own(40, row % 5), *own(6, row)] for row in range(10)]
    # 5 rows spared 48 tokens each, against 9 rows 16 each.
    assert sizes(prompts) == (48, 5)


def test_equal_prompts_are_read_once_with_their_padding() -> None:
    prompts = [[*SYSTEM], [*SYSTEM], [*SYSTEM[:20]], [*SYSTEM[:20]]]
    assert sizes(prompts) == (32, 2)
    assert sorted(copied_tokens([[*prompt, 7] for prompt in prompts])) == [0, 0, 20, 32]


def test_a_prompt_is_not_taken_for_a_longer_one_that_it_begins() -> None:
    """Padding may have the id of a token."""
    assert sizes([[*SYSTEM[:20]], [*SYSTEM[:20], *[0] * 12, 5, 6]])[0] == 16


@pytest.mark.parametrize(
    "prompts",
    [
        [[*SYSTEM, 5]],
        [own(40, row) for row in range(3)],
        [[*SYSTEM[: LANES - 1], *own(9, row)] for row in range(3)],
        [[5], [6], [7]],
        [[], []],
        [[*SYSTEM[:16], *own(200, row)] for row in range(9)],
    ],
    ids=["one row", "nothing alike", "too short", "one token", "no token", "saves too little"],
)
def test_nothing_is_shared(prompts: list[list[int]]) -> None:
    assert found(prompts) is None
    assert copied_tokens([[*prompt, 7] for prompt in prompts]) == [0] * len(prompts)


def prompts_of_a_job() -> list[list[int]]:
    """Most begin with the same 36 tokens; one stops within, one is the beginning alone."""
    texts = [own(1 + row % 11, row) for row in range(14)]
    begun = [[*SYSTEM, 90, 91, 92, 93, *text] for text in texts]
    return [*begun, SYSTEM[:20], [*SYSTEM], own(9), own(45, 1), begun[3], [7], begun[2][:-1]]


def answers(engine: Engine, search: GenerationOptions, rows: int) -> list[GenerationResult]:
    engine.batches = BatchOptions(rows=rows)
    return list(engine.generate(prompts_of_a_job(), search))


def exact(results: list[GenerationResult]) -> list[Any]:
    return [[vars(one) for one in result.hypotheses] for result in results]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("variant", ["portable", "cpu-fp32"])
def test_answers_are_the_same_with_and_without(
    fast_writer_bundle_folder: Path, variant: str, search: str
) -> None:
    engine = Engine(fast_writer_bundle_folder, variant=variant, replicas=1)
    decoder = engine.decoder
    assert decoder.shares_prompts
    shared = answers(engine, SEARCHES[search], 64)
    few = answers(engine, SEARCHES[search], 5)
    tokens = [result.shared_prompt_tokens for result in shared]
    assert max(tokens) == 32
    assert sum(tokens) > 12 * 32
    decoder.shares_prompts = False
    whole = answers(engine, SEARCHES[search], 64)
    assert not any(result.shared_prompt_tokens for result in whole)
    # Scores are NaN where none were asked for.
    assert repr(exact(shared)) == repr(exact(whole)) == repr(exact(few))
    assert len({repr(answer) for answer in exact(whole)}) > 12


def test_a_beginning_read_wrongly_is_seen(fast_writer_bundle_folder: Path) -> None:
    """Rows are compared: the beginning of another row gives another answer."""
    engine = Engine(fast_writer_bundle_folder, variant="cpu-fp32", replicas=1)
    whole = answers(engine, GREEDY, 64)
    gather = engine.decoder._buffers.gather  # type: ignore[attr-defined]

    def exchanged(past: Any, slots: Any, *sizes: int) -> Any:
        return gather(past, slots[::-1].copy(), *sizes)

    engine.decoder._buffers.gather = exchanged  # type: ignore[attr-defined]
    assert exact(answers(engine, GREEDY, 64)) != exact(whole)


def test_only_kernels_that_compute_each_row_by_itself_share(bundle_folder: Path) -> None:
    assert SessionOptions().rows_are_independent
    assert not SessionOptions("cuda").rows_are_independent
    bundle = Bundle.load(bundle_folder)
    decoder = open_model(bundle, bundle.variant(), SessionOptions())
    assert not decoder.shares_prompts  # type: ignore[union-attr]


def test_a_job_says_how_many_tokens_were_copied(writer_bundle_folder: Path, tmp_path: Path) -> None:
    system = " ".join(pair.source for pair in builtin_pairs(2, seed=9))
    lines = [f"{system} {word}" for word in ("one", "two", "the cat", "the cat", "dogs")]

    def record(out: Path) -> dict[str, Any]:
        Job(engine, text, out, JobOptions(generation={"max_length": 5})).run()
        found: dict[str, Any] = json.loads(out.with_name(f"{out.name}.summary.json").read_bytes())
        return found

    text = tmp_path / "prompts.txt"
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    engine = Engine(writer_bundle_folder, replicas=1)
    shared = record(tmp_path / "shared.jsonl")
    # Of five rows one reads the beginning, and one is answered as an equal row was.
    assert shared["errors"] == {}
    assert shared["shared_prompt_tokens"] > 0
    assert shared["shared_prompt_tokens"] % (3 * LANES) == 0
    engine.decoder.shares_prompts = False
    assert record(tmp_path / "whole.jsonl")["shared_prompt_tokens"] == 0
    assert (tmp_path / "whole.jsonl").read_bytes() == (tmp_path / "shared.jsonl").read_bytes()
