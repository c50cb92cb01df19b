"""Options by name, suppressed text and stop strings, through an engine and a job."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.commands import done, fails
from transferry.runtime.decoding.generation_options import (
    SYNONYMS,
    GenerationOptions,
    generation_options,
)
from transferry.runtime.decoding.search import search
from transferry.runtime.decoding.stop_strings import StopStrings
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.prompts import Asked
from transferry.runtime.errors import UsageError
from transferry.runtime.settings import field_types

TEXTS = ["a dog runs", "two men", "the cat sat on the mat", "one"]


@pytest.fixture(scope="module")
def engine(bundle_folder: Path) -> Engine:
    return Engine(bundle_folder, replicas=1)


def texts(engine: Engine, **named: Any) -> list[str]:
    return [row.text for row in engine.generate(TEXTS, **named)]


def test_names_change_single_fields_of_the_defaults(engine: Engine) -> None:
    default = engine.default_options()
    assert engine.options(beam=4) == replace(default, beam=4)
    assert engine.options(GenerationOptions(n_best=2, beam=2), max_length=7) == GenerationOptions(
        n_best=2, beam=2, max_length=7
    )
    named = list(engine.generate(TEXTS, beam=2, n_best=2, max_length=8))
    given = list(engine.generate(TEXTS, replace(default, beam=2, n_best=2, max_length=8)))
    assert named == given
    assert len(named[0].hypotheses) == 2
    with pytest.raises(UsageError, match=r"generation has no beams; write beam$"):
        engine.generate(TEXTS, beams=4)
    with pytest.raises(UsageError, match=r"no do_sample, num_beams; write sample, beam$"):
        engine.generate(TEXTS, num_beams=4, do_sample=True)
    with pytest.raises(UsageError, match=r"no progress; write Engine\(..., progress=True\)$"):
        engine.generate(TEXTS, progress=True)
    with pytest.raises(UsageError, match="no beams, xyz; it knows beam, "):
        engine.generate(TEXTS, beams=4, xyz=1)
    with pytest.raises(UsageError, match="beam must be a whole number"):
        engine.generate(TEXTS, beam="4")


def test_the_names_of_other_tools_lead_to_ours() -> None:
    known = field_types(GenerationOptions)
    assert set(SYNONYMS.values()) <= known.keys()
    assert not SYNONYMS.keys() & known.keys()


def test_inputs_with_options_of_their_own_are_answered_as_alone(engine: Engine) -> None:
    drawn = GenerationOptions(max_length=9, sample=True, seed=4)
    options = [
        *(GenerationOptions(max_length=3), GenerationOptions(max_length=8, stop=("e",))),
        *(GenerationOptions(beam=2, n_best=2, max_length=6), replace(drawn, n_best=3)),
        *(drawn, replace(drawn, seed=5), replace(drawn, temperature=2.0)),
    ]
    rows = [Asked(text, one, 7) for one in options for text in TEXTS]
    found = list(engine.generate([*rows, *rows, "one"], max_length=5))
    for row, each in zip([*rows, *rows], found, strict=False):
        assert isinstance(row.source, str)
        (alone,) = engine.generate([row.source], row.options, first_row=7)
        assert each == alone, row
    samples = [each.text for each in found[16:24]]
    assert samples[:4] != samples[4:], "the seeds differ"
    assert found[-1] == next(engine.generate(["one"], max_length=5))
    searched = [each.repeated for each in found[len(rows) :]]
    assert searched == [not row.options.sample for row in rows if row.options] + [False]
    with pytest.raises(UsageError, match="max_length is 2000, but the model has"):
        list(engine.generate([Asked("one", GenerationOptions(max_length=2000))]))


def test_defaults_give_way_to_what_is_named() -> None:
    sampling = GenerationOptions(sample=True, top_k=50, temperature=0.7, n_best=3)
    assert generation_options({"beam": 4}, sampling) == GenerationOptions(beam=4, n_best=3)
    assert generation_options({"sample": False}, sampling) == GenerationOptions()
    assert generation_options({"top_k": 5}, sampling) == replace(sampling, top_k=5)
    beams = GenerationOptions(beam=5, n_best=5, min_length=9)
    assert generation_options({"sample": True}, beams) == replace(beams, beam=1, sample=True)
    assert generation_options({"beam": 2, "max_length": 4}, beams) == replace(
        beams, beam=2, n_best=2, max_length=4, min_length=4
    )
    with pytest.raises(UsageError, match="n_best=4 is more than beam=2"):
        generation_options({"beam": 2, "n_best": 4}, beams)


def test_an_answer_ends_before_the_first_stop_string(engine: Engine) -> None:
    plain = texts(engine, max_length=24)
    whole = max(plain, key=len)
    row = plain.index(whole)
    middle = len(whole) // 2
    # It begins and ends within words, and so within tokens.
    stop = whole[middle : middle + 3]
    searches: list[dict[str, Any]] = [{}, {"beam": 3}, {"sample": True, "top_k": 1}]
    for options in searches:
        (result,) = engine.generate([TEXTS[row]], max_length=24, stop=(stop, "\0"), **options)
        best = result.hypotheses[0]
        assert stop not in result.text
        if options.get("beam") is None:
            assert result.text == whole[: whole.index(stop)]
            assert best.finish_reason == "stop"
            held = engine.bundle.tokenizer.decode(best.tokens)
            assert stop in held
            assert stop not in engine.bundle.tokenizer.decode(best.tokens[:-1])
    together = texts(engine, max_length=24, stop=(stop,))
    alone = [next(engine.generate([text], max_length=24, stop=(stop,))).text for text in TEXTS]
    assert together == alone


def test_stop_strings_need_a_tokenizer(engine: Engine) -> None:
    special = engine.bundle.tokenizer.special
    with pytest.raises(UsageError, match="stop needs the text of tokens"):
        search(engine.decoder, [[5]], GenerationOptions(stop=(".",)), special)
    assert StopStrings(("b", "ab"), lambda ids: "").cut("xxabb") == "xx"
    with pytest.raises(UsageError, match="stop must be entries that are not empty"):
        GenerationOptions(stop=("",))


def test_suppressed_text_adds_to_what_the_bundle_suppresses(engine: Engine) -> None:
    encode = engine.bundle.tokenizer.encode_target
    longer = next(text for text in ("Größenwahn", "xylophone") if len(encode(text)) > 1)
    single = next(text for text in "abcdefgh" if len(encode(text)) == 1)
    base = replace(engine.default_options(), suppress=(9,))
    found = engine.options(base, suppress=(7, single, longer))
    assert set(found.suppress) >= {9, 7, encode(single)[0]}
    assert tuple(encode(longer)) in found.suppress_sequences
    assert tuple(encode(f" {longer}")) in found.suppress_sequences
    with pytest.raises(UsageError, match="suppress holds '', which has no tokens"):
        engine.options(suppress=("",))
    plain = texts(engine, max_length=12)
    word = max(" ".join(plain).split(), key=len)
    without = texts(engine, max_length=12, suppress=(word,))
    assert without != plain


def test_jobs_take_both(bundle_folder: Path, tmp_path: Path, engine: Engine) -> None:
    lines, out = tmp_path / "lines.txt", tmp_path / "answers.jsonl"
    lines.write_text("".join(f"{text}\n" for text in TEXTS))
    word = max(" ".join(texts(engine, max_length=12)).split(), key=len)
    longest = max(texts(engine, max_length=12, suppress=(word, 7)), key=len)
    stop = longest[len(longest) // 2 :][:2]
    options = ["--max-length", "12", "--suppress", word, "--suppress", "7", "--stop", stop]
    done("run", bundle_folder, lines, "-o", out, *options, "--early-stopping", "never")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    named = list(engine.generate(TEXTS, max_length=12, suppress=(word, 7), stop=(stop,)))
    assert [row["text"] for row in found] == [row.text for row in named]
    assert {row["finish_reason"] for row in found} & {"stop"}
    settings = tmp_path / "answers.jsonl.settings.toml"
    done("run", "--config", settings, bundle_folder, lines, "-o", tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == out.read_bytes()
    fails(2, "suppress", "run", bundle_folder, lines, "-o", out, "--force", "--suppress", "9" * 30)
