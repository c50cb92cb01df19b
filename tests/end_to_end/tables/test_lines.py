"""Texts of several lines: Engine's answer to each line, joined as the text was."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import call, done
from transferry import BatchOptions, Engine, GenerationOptions, InLanguages, UsageError
from transferry.runtime.engine.tasks.generate import GenerationResult

OPTIONS = GenerationOptions(max_length=6, no_repeat_ngram=1)
TEXTS = [
    "a dog\na cat",
    "\n\r\n  \n a dog \r\n\t\r\n\r\nA CAT\rthe men\n",
    "a dog\n",
    "\na dog",
    "a dog",
    "one\x0btwo\x0cthree\u2028four\x85five",
    "a dog\n" * 20 + "a cat",
    "\n \r\n",
    "",
    "a dog\n" + "b " * 2000,
]


@pytest.fixture(scope="module")
def engine(bundle_folder: Path) -> Engine:
    return Engine(bundle_folder, variant="portable", batches=BatchOptions(rows=8, window=5))


def answer(engine: Engine, text: str, **named: Any) -> GenerationResult:
    (found,) = engine.generate([text], OPTIONS, **named | {"split_lines": False})
    return found


def by_hand(engine: Engine, text: str, **named: Any) -> str:
    """The answer of each line that is not blank, in the place of that line."""
    parts = re.split(r"(\r\n|\r|\n)", text)
    return "".join(answer(engine, part, **named).text if part.strip() else part for part in parts)


@pytest.mark.parametrize("options", [OPTIONS, GenerationOptions(max_length=6, beam=3)])
def test_every_line_is_answered(engine: Engine, options: GenerationOptions) -> None:
    for text, found in zip(TEXTS, engine.generate(TEXTS, options), strict=True):
        assert found.source == text
        lines = [line for line in re.split(r"[\r\n]", text) if line.strip()]
        kind = "too-long" if "b b" in text else None if lines else "empty"
        assert (found.error and found.error.kind) == kind
        if kind is None:
            assert by_hand(engine, text, **vars(options)) == found.text
            alone = [answer(engine, line, **vars(options)) for line in lines]
            assert found.source_tokens == sum(each.source_tokens for each in alone)
            assert found.target_tokens == sum(each.target_tokens for each in alone)
            summed = sum(each.hypotheses[0].log_probability for each in alone)
            assert found.hypotheses[0].log_probability == pytest.approx(summed)
            if len(lines) == 1:
                assert found.hypotheses[0].score == alone[0].hypotheses[0].score
        if kind == "too-long":
            assert found.error and found.error.message.startswith("piece 2 of 2: ")
            (cut,) = engine.generate([text], options, long_rows="truncate")
            assert cut.truncated
            assert cut.text.startswith(answer(engine, "a dog", **vars(options)).text + "\n")


def test_lines_of_a_row_are_sampled_each_for_itself(engine: Engine) -> None:
    options = GenerationOptions(max_length=8, sample=True)
    (found,) = engine.generate(["a dog\na dog"], options, first_row=7)
    (first,) = engine.generate(["a dog"], options, first_row=7)
    assert found.text.startswith(f"{first.text}\n")
    assert found.text != f"{first.text}\n{first.text}"


def test_several_answers_are_those_of_one_line(engine: Engine) -> None:
    several, one = engine.generate(["a\nb", " \na dog\r\n"], OPTIONS, beam=3, n_best=3)
    assert several.error is not None
    assert several.error.kind == "lines"
    assert "2 lines has no joined answers for n_best=3" in several.error.message
    assert several.source == "a\nb"
    alone = answer(engine, "a dog", beam=3, n_best=3)
    texts = [f" \n{each.text}\r\n" for each in alone.hypotheses]
    assert [each.text for each in one.hypotheses] == texts
    assert len(set(texts)) > 1


def test_a_text_may_stay_whole(engine: Engine) -> None:
    text = "a dog\na cat"
    special = engine.bundle.tokenizer.special
    read = special.wrap(engine.bundle.tokenizer.encode(text))
    assert answer(engine, text).source_tokens == len(read)
    whole = next(engine.generate([InLanguages(text)], OPTIONS, split_lines=False))
    assert whole.source_tokens == len(read)
    lines = next(engine.generate([InLanguages(text)], OPTIONS))
    assert lines.text == by_hand(engine, text)


def test_a_prompt_is_read_whole(writer_bundle_folder: Path) -> None:
    with Engine(writer_bundle_folder, variant="portable") as engine:
        text = "a dog\n\na cat\n"
        (found,) = engine.generate([text], max_length=4)
        tokenizer = engine.bundle.tokenizer
        assert found.source_tokens == len(tokenizer.special.wrap(tokenizer.encode(text)))
        with pytest.raises(UsageError, match="split_lines needs an encoder-decoder"):
            engine.generate([text], split_lines=True)


def test_from_file_to_file(bundle_folder: Path, tmp_path: Path, engine: Engine) -> None:
    """Cells of a table and fields of JSON, with canaries, repeats, chunks and a sample."""
    texts = [text for text in TEXTS if "b b" not in text for _ in range(2)]
    with (tmp_path / "in.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "words"], *enumerate(texts)])
    lines = (json.dumps({"words": text}) + "\n" for text in texts)
    (tmp_path / "in.jsonl").write_text("".join(lines))
    common = ["--variant", "portable", "--max-length", "6", "--no-repeat-ngram", "1"]
    common += ["--chunk-rows", "4", "--canary", "1/3"]
    for name in ("in.csv", "in.jsonl"):
        given, out = tmp_path / name, tmp_path / f"{name}.out.csv"
        ran = call("run", bundle_folder, given, "-o", out, "--column", "words", *common)
        assert ran.exit_code == 6, ran.stderr  # blank rows are errors of theirs
        with out.open(newline="") as file:
            rows = list(csv.DictReader(io.StringIO(file.read(), newline="")))
        for text, row in zip(texts, rows, strict=True):
            assert row["error_kind"] == ("" if text.strip() else "empty")
            assert row["text"] == (by_hand(engine, text) if text.strip() else "")
        summary = json.loads(Path(f"{out}.summary.json").read_text())
        assert summary["rows"] == len(texts)
        assert summary["repeated"] > 2
        assert summary["canaries"] == summary["canaries_identical"] == -(-len(texts) // 3)
    out = tmp_path / "whole.jsonl"
    done(
        *("run", bundle_folder, tmp_path / "in.csv", "-o", out, "--column", "words"),
        *("--limit", "1", "--no-split-lines", *common[:6]),
    )
    assert json.loads(out.read_text())["text"] == answer(engine, texts[0]).text
