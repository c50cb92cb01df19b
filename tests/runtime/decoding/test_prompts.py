"""A decoder-only bundle goes on with each prompt as it would with that prompt alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.generate import GenerationResult
from transferry.runtime.errors import UsageError
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions

GREEDY = GenerationOptions(max_length=12, no_repeat_ngram=1)


@pytest.fixture(scope="module")
def checkpoint(writer_run_folder: Path) -> Checkpoint:
    return load_checkpoint(writer_run_folder)


@pytest.fixture(scope="module")
def engine(writer_bundle_folder: Path) -> Engine:
    return Engine(writer_bundle_folder, replicas=2)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """Of 1 to some 30 tokens, none twice."""
    pairs = builtin_pairs(40, seed=5)
    return list(dict.fromkeys(["a", "two", *(pair.source for pair in pairs)]))


def outputs(results: list[GenerationResult]) -> list[list[tuple[int, ...]]]:
    return [[output.tokens for output in result.hypotheses] for result in results]


@pytest.mark.parametrize("prefix", ["", "a b"])
def test_a_prompt_cut_short_leaves_room_for_an_answer(engine: Engine, prefix: str) -> None:
    tokenizer = engine.bundle.tokenizer
    forced = tuple(tokenizer.encode_target(prefix))
    options = GenerationOptions(max_length=12, prefix=forced)
    text = "one two three " * 40
    error, *_ = engine.generate([text], options)
    assert error.error is not None
    result, short = engine.generate([text, "one"], options, long_rows="truncate")
    assert (result.error, result.truncated, short.truncated) == (None, True, False)
    assert result.source_tokens == 64 - len(forced)
    (output,) = result.hypotheses
    assert output.tokens[: len(forced)] == forced
    assert len(output.tokens) + (output.finish_reason == "end") == len(forced) + 1
    source = tokenizer.encode(text)[: 64 - len(forced)]
    fitted = engine.fitted(options, len(source))
    (hypotheses,) = search(engine.decoder, [source], fitted, tokenizer.special)
    assert outputs([result]) == [[hypotheses[0].tokens]]


def test_a_prompt_is_padded_beyond_the_positions_of_the_model(
    writer_bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest prompts leave less than a vector's lanes, and short ones beside them as much."""
    bundle = Bundle.load(writer_bundle_folder)
    monkeypatch.setitem(bundle.manifest.model, "max_positions", 60)
    decoder = PortableDecoder(bundle, bundle.variant(), SessionOptions())
    prompts = np.random.default_rng(0).integers(3, 200, (2, 59))
    both = decoder.start(prompts, np.arange(59) < np.array([[59], [5]]))
    assert both.past[0].shape()[2] == 64
    alone = decoder.start(prompts[1:, :5], np.ones((1, 5), np.bool_))
    assert alone.past[0].shape()[2] == 16
    for token in (7, 30, 41):
        output, both = decoder.step(np.full((2, 1), token), both)
        expected, alone = decoder.step(np.full((1, 1), token), alone)
        np.testing.assert_array_equal(output.all_logits[1], expected.all_logits[0])
    shapes = {tensor.shape[2] for tensor in decoder.tensors(both).values()}
    assert shapes == {59 + 3}, "as torch has it"


@torch.inference_mode()
def by_argmax(model: Transformer, prompt: Sequence[int], end: int, length: int) -> list[int]:
    """The tokens after one prompt: no cache, no padding, the ending token left out."""
    nothing, tokens = torch.zeros(1, 0, dtype=torch.bool), list(prompt)
    for _ in range(length):
        logits, _ = model.decode(torch.tensor([tokens]), nothing, [], model.empty_past(1))
        if (chosen := int(logits[0, -1].argmax())) == end:
            break
        tokens.append(chosen)
    return tokens[len(prompt) :]


def test_greedy_search_is_the_plain_loop_without_cache_and_padding(
    checkpoint: Checkpoint, engine: Engine, prompts: list[str]
) -> None:
    options, tokenizer = GenerationOptions(max_length=12), checkpoint.tokenizer
    expected = [
        by_argmax(checkpoint.model, tokenizer.encode(prompt), tokenizer.special.eos_id, 12)
        for prompt in prompts
    ]
    found = [list(result.hypotheses[0].tokens) for result in engine.generate(prompts, options)]
    assert found == expected
    assert len(set(map(tuple, found))) > len(prompts) // 2


def test_answers_end_where_the_positions_end(engine: Engine, prompts: list[str]) -> None:
    options = GenerationOptions(max_length=64, min_length=60, no_repeat_ngram=1)
    lengths = set()
    for result in engine.generate(prompts, options):
        (output,) = result.hypotheses
        room = 64 - result.source_tokens + 1
        assert len(output.tokens) == room
        assert output.finish_reason == "length"
        lengths.add(room)
    assert len(lengths) >= 12


def test_a_prompt_that_fills_the_positions_has_one_answer_left(engine: Engine) -> None:
    tokenizer = engine.bundle.tokenizer
    text = " ".join(["a"] * 100)
    ids = tokenizer.encode(text)
    fitting, longer = tokenizer.decode(ids[:64]), tokenizer.decode(ids[:65])
    assert (len(tokenizer.encode(fitting)), len(tokenizer.encode(longer))) == (64, 65)
    first, second = engine.generate([fitting, longer], GenerationOptions(max_length=9))
    assert len(first.hypotheses[0].tokens) <= 1
    assert second.error is not None
    assert (second.error.kind, second.hypotheses) == ("too-long", ())
    assert "65 tokens, but the model has 64 positions" in second.error.message


def test_a_prefix_that_does_not_fit_is_an_error_of_its_row(engine: Engine) -> None:
    text = engine.bundle.tokenizer.decode(engine.bundle.tokenizer.encode(" ".join("a" * 99))[:62])
    options = GenerationOptions(max_length=9, prefix=(5, 6, 7, 8))
    long, short = engine.generate([text, "a"], options)
    assert long.error is not None
    assert "62 tokens leave room for 3 in the model's 64 positions" in long.error.message
    assert short.hypotheses[0].tokens[:4] == (5, 6, 7, 8)


def test_an_encoder_s_tasks_are_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="architecture decoder-only, whose task is generate"):
        _ = engine.encoder
