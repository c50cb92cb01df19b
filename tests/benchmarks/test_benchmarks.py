"""The benchmarks compare like with like: the same weights, the same work, all of it counted."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ctranslate2_model import CTranslate2Model, write_ctranslate2
from rounds import compare, fastest, interleaved, processor
from sentences import Answer, engine_answers, fixed_sentences, search_options
from tests.commands import python
from throughput import Side
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.train.corpus import builtin_pairs
from transferry.export.torch_model import TorchDecoder
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, UsageError

CHECKOUT = Path(__file__).resolve().parents[2]
TEXTS = [pair.source for pair in builtin_pairs(24, seed=3)]


@pytest.fixture(scope="module")
def checkpoint(run_folder: Path) -> Checkpoint:
    return load_checkpoint(run_folder)


def of_shape(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    """A checkpoint of another shape, every tensor random, biases and norms included.

    Layers outweigh the embedding, so that answers depend on every part, and some of them end.
    """
    torch.manual_seed(4)
    model = Transformer(dataclasses.replace(checkpoint.model.config, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            inner = parameter.dim() == 2 and not name.startswith(("embedding", "positions"))
            parameter.add_(torch.randn(parameter.shape) * (0.7 if inner else 0.1))
        model.embedding.weight[checkpoint.tokenizer.special.eos_id] *= 3
    return dataclasses.replace(checkpoint, model=model.eval())


def our_tokens(
    checkpoint: Checkpoint,
    texts: Sequence[str],
    options: GenerationOptions,
) -> list[tuple[int, ...]]:
    tokenizer = checkpoint.tokenizer
    sources = [tokenizer.special.wrap(tokenizer.encode(text)) for text in texts]
    decoder = TorchDecoder(checkpoint.model)
    found = search(decoder, sources, options, tokenizer.special)
    return [hypotheses[0].tokens for hypotheses in found]


def tokens_of(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def ctranslate2_model(
    checkpoint: Checkpoint,
    run_folder: Path,
    folder: Path,
    precision: str = "float32",
) -> CTranslate2Model:
    write_ctranslate2(checkpoint, folder, precision)
    return CTranslate2Model(folder, run_folder, precision, 1, 1)


SHAPES: dict[str, dict[str, Any]] = {
    "as trained": {},
    "pre-norm": dict(norm_order="pre", encoder_layers=2),
    "untied, gelu, learned positions": dict(
        tied=False, activation="gelu", positions="learned", output_bias=True
    ),
    "no bias, normalised embedding": dict(
        bias=False, embedding_norm=True, scale_embedding=False, activation="swish"
    ),
    "gelu-tanh, a wide epsilon": dict(activation="gelu-tanh", norm_epsilon=0.3),
}


@pytest.mark.optional("ctranslate2")
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_the_ctranslate2_model_gives_our_tokens(
    checkpoint: Checkpoint, run_folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = of_shape(checkpoint, **changes)
    theirs = ctranslate2_model(model, run_folder, tmp_path)
    for beam in (1, 4):
        options = search_options(beam, 20)
        expected = our_tokens(model, TEXTS, options)
        assert tokens_of(theirs.answer(TEXTS, options, 8)) == expected
        assert len(set(expected)) > 8, "answers that do not depend on the source show nothing"


@pytest.mark.optional("ctranslate2")
def test_the_ctranslate2_answers_are_texts_in_order(
    checkpoint: Checkpoint, run_folder: Path, tmp_path: Path
) -> None:
    theirs = ctranslate2_model(checkpoint, run_folder, tmp_path)
    answers = theirs.answer(TEXTS, search_options(1, 20), 4)
    assert [one.text for one in answers] == [
        checkpoint.tokenizer.decode(one.tokens) for one in answers
    ]
    assert answers[5:7] == theirs.answer(TEXTS[5:7], search_options(1, 20), 4)


@pytest.mark.optional("ctranslate2")
def test_int8_is_computed_in_int8(checkpoint: Checkpoint, run_folder: Path, tmp_path: Path) -> None:
    whole = ctranslate2_model(checkpoint, run_folder, tmp_path / "whole")
    small = ctranslate2_model(checkpoint, run_folder, tmp_path / "small", "int8")
    assert whole.translator.compute_type == "float32"
    assert small.translator.compute_type == "int8_float32"
    assert (tmp_path / "small/model.bin").stat().st_size < (
        0.5 * (tmp_path / "whole/model.bin").stat().st_size
    )
    options = search_options(1, 20)
    pairs = zip(small.answer(TEXTS, options, 8), whole.answer(TEXTS, options, 8), strict=True)
    assert sum(one.tokens == other.tokens for one, other in pairs) > len(TEXTS) / 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (dict(norm="rms"), "norm"),
        (dict(positions="rotary"), "positions"),
        (dict(activation="swiglu"), "activation"),
        (dict(key_value_heads=1), "key_value_heads"),
        (dict(output_transform=True), "output_transform"),
    ],
)
def test_what_ctranslate2_cannot_hold_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(UsageError, match=f"needs {field} "):
        write_ctranslate2(of_shape(checkpoint, **changes), tmp_path, "float32")


def test_sentences_of_one_length_keep_it(checkpoint: Checkpoint) -> None:
    tokenizer = checkpoint.tokenizer
    # Characters of several tokens, within which a cut leaves nothing that can be decoded.
    lines = [f"{pair.source} 日本語のテキスト" for pair in builtin_pairs(100, seed=0)]
    texts = fixed_sentences(lines, tokenizer, 200, 32)
    assert len(set(texts)) == 200
    assert {len(tokenizer.special.wrap(tokenizer.encode(text))) for text in texts} == {32}


def test_a_text_too_short_for_its_sentences_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(InputError, match="for 1 sentences of 32 tokens, found 0"):
        fixed_sentences(["one"], checkpoint.tokenizer, 1, 32)
    with pytest.raises(InputError, match="must be at least 2"):
        fixed_sentences(TEXTS, checkpoint.tokenizer, 1, 1)


@pytest.mark.optional("ctranslate2")
@pytest.mark.parametrize("beam", [1, 4])
def test_both_sides_give_answers_of_exactly_the_length_asked_for(
    checkpoint: Checkpoint, bundle_folder: Path, tmp_path: Path, beam: int
) -> None:
    options = search_options(beam, 32, 32)
    theirs = ctranslate2_model(checkpoint, bundle_folder, tmp_path).answer(TEXTS, options, 8)
    ours = engine_answers(Engine(bundle_folder, replicas=1), TEXTS, options)
    assert {len(tokens) for tokens in tokens_of(ours) + tokens_of(theirs)} == {32}


def test_a_sentence_without_an_answer_stops_the_comparison(bundle_folder: Path) -> None:
    with pytest.raises(InputError, match="sentence 2 has no answer"):
        engine_answers(Engine(bundle_folder), ["one", " "], search_options(1, 5))


def test_rounds_take_turns_in_both_orders() -> None:
    order: list[str] = []

    def work(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    times = interleaved({name: work(name) for name in "ab"}, 3, quiet=True)
    assert "".join(order) == "abbaab"
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}


def test_the_fastest_setting_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def work(seconds: list[float]) -> Callable[[], None]:
        def run() -> None:
            now[0] += seconds.pop(0)

        return run

    # The first run only warms up, and one slow repeat does not count.
    assert fastest({32: work([0.1, 3, 3, 3]), 64: work([9, 9, 2, 9])}) == 64
    close = {16: [1, 2.1], 32: [1, 2.03], 64: [1, 2.0]}
    for slack, chosen in ((0.0, 64), (0.02, 32), (0.1, 16)):
        assert fastest({rows: work([*times]) for rows, times in close.items()}, 1, slack) == chosen


def test_ratios_are_of_medians_and_of_rounds() -> None:
    times = {"ours": [1.0, 2.0, 10.0], "theirs": [2.0, 4.0, 5.0]}
    found = compare(times, {"ours": 100, "theirs": 200}, 10, "theirs")
    # 100 tokens in 2 s against 200 in 4 s.
    assert found["ratio"] == {"ours": 1.0}
    assert found["ratio_range"] == {"ours": [0.25, 1.0]}
    assert found["tokens_per_second"] == {"ours": 50, "theirs": 50}
    assert found["sentences_per_second"] == {"ours": 5.0, "theirs": 2.5}


def printed(script: str, *arguments: Path | str) -> list[str]:
    """Runs a benchmark as a process; returns the lines that it prints, the last of them JSON."""
    return python(CHECKOUT / "benchmarks" / script, *arguments).stdout.splitlines()


@pytest.mark.optional("ctranslate2")
def test_throughput_ends_in_a_line_of_json(
    run_folder: Path, bundle_folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    options = ["--rows", "6", "--quick", "--beams", "1", "--fixed-length", "12", "--batches", "2"]
    lines = printed("throughput.py", run_folder, bundle_folder, text, *options)
    record = json.loads(lines[-1])
    tuned, held = record["cells"]
    for cell in (tuned, held):
        assert cell["same_tokens"] == {"engine portable and ctranslate2 float32": "6/6"}
        assert cell["tokens"] == {"engine": 72, "ctranslate2": 72}
    assert [side["batch_rows"] for side in held["settings"].values()] == [2, 2]
    assert set(record["ratio"]) == {"portable, beam 1", "portable, beam 1, 2 sentences"}
    assert sum(line.endswith(processor()) for line in lines) == 2


@pytest.mark.parametrize("beam", [1, 3])
def test_both_sides_can_be_held_to_the_same_sentences_per_batch(
    monkeypatch: pytest.MonkeyPatch, beam: int
) -> None:
    opened: list[Side] = []
    sizes: list[int] = []

    def open_side(side: Side) -> Any:
        opened.append(side)
        return lambda texts, options, rows: sizes.append(rows)

    monkeypatch.setattr(Side, "open", open_side)
    options = search_options(beam, 5)
    sides = Side("engine", "bundle", "portable"), Side("ctranslate2", "model", "float32")
    for side, rows in zip(sides, (8 * beam, 8), strict=True):
        tuned = side.tune(TEXTS, options, 8, 1)
        assert tuned.batch_rows == rows
        assert set(sizes) == {rows}
        # Each layout once to warm up, once timed.
        assert len(sizes) == 2 * len(opened)
        opened.clear()
        sizes.clear()
