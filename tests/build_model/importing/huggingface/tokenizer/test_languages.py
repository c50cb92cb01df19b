"""Languages of a source and of its answer, by name: ids and tokens are those of transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.build_model.importing.huggingface.drawn import Drawn, exact, transformers
from tests.build_model.importing.huggingface.small_models import sentencepiece_model, spm
from tests.build_model.importing.huggingface.tokenizer.test_tokenizers import pieces
from tests.commands import call, done
from tests.traced import unverified
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.preprocess import InLanguages, Preprocessor
from transferry.runtime.engine.tasks.score import score
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.tokenizer.byte_pair import load_tokenizer

TEXTS = ["the cat sat", "Straße über", "日本 x", "eng_Latn __de__ </s> en_XX"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def nllb(folder: Path, **settings: Any) -> None:
    vocabulary, merges = pieces()
    ids = {text: number for number, text in enumerate(dict.fromkeys([*SPECIAL, *vocabulary]))}
    codes = ["eng_Latn", "deu_Latn", "zho_Hans"]
    made = transformers.NllbTokenizer(
        vocab=ids, merges=merges, extra_special_tokens=codes, **settings
    )
    made.save_pretrained(folder)


def mbart(folder: Path, name: str = "MBartTokenizer", **settings: Any) -> None:
    tokens = dict.fromkeys([*SPECIAL, *pieces()[0]])
    scores = [(text, -float(number)) for number, text in enumerate(tokens)]
    module = getattr(transformers, name).__module__
    codes = __import__(module, fromlist=[""]).FAIRSEQ_LANGUAGE_CODES
    scores += [(text, 0.0) for text in [*codes, "<mask>"]]
    getattr(transformers, name)(vocab=scores, **settings).save_pretrained(folder)


def m2m(folder: Path, **settings: Any) -> None:
    content = sentencepiece_model(vocab_size=110, model_type="bpe")
    (folder / "sentencepiece.bpe.model").write_bytes(content)
    model = spm.SentencePieceProcessor(model_proto=content)
    found = [model.id_to_piece(number) for number in range(3, model.get_piece_size())]
    ids = {text: number for number, text in enumerate([*SPECIAL, *found])}
    (folder / "vocab.json").write_text(json.dumps(ids))
    files = folder / "vocab.json", folder / "sentencepiece.bpe.model"
    transformers.M2M100Tokenizer(*map(str, files), **settings).save_pretrained(folder)


def mbart50_of_config(folder: Path) -> None:
    """As in published folders, only config.json names the class."""
    mbart(folder, "MBart50Tokenizer")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["tokenizer_class"]
    path.write_text(json.dumps(settings))


# Writer, model type, and three languages, the first of them the folder's own.
Kind = tuple[Callable[[Path], None], str, list[str]]
NLLB, MBART, M2M = ["eng_Latn", "deu_Latn", "zho_Hans"], ["en_XX", "de_DE", "zh_CN"], ["en", "de"]
KINDS: dict[str, Kind] = {
    "NLLB": (nllb, "m2m_100", NLLB),
    "NLLB, legacy": (lambda folder: nllb(folder, legacy_behaviour=True), "m2m_100", NLLB),
    "NLLB, from German": (lambda folder: nllb(folder, src_lang="deu_Latn"), "m2m_100", NLLB[1:]),
    "mBART": (mbart, "mbart", MBART),
    "mBART-50": (lambda folder: mbart(folder, "MBart50Tokenizer"), "mbart", [*MBART, "hr_HR"]),
    "mBART-50, named elsewhere": (mbart50_of_config, "mbart", MBART),
    "M2M-100": (m2m, "m2m_100", [*M2M, "zu"]),
    "WMT 21": (
        lambda folder: m2m(
            folder, language_codes="wmt21", additional_special_tokens=["__de__", "<new>"]
        ),
        "m2m_100",
        [*M2M, "ha"],
    ),
}


def imported(kind: str, folder: Path) -> tuple[Drawn, Any]:
    """A folder of transformers, imported into `run` beside it."""
    write, model_type, _ = KINDS[kind]
    theirs = folder / "theirs"
    theirs.mkdir()
    write(theirs)
    size = {"M2M-100": 250, "WMT 21": 150}.get(kind, 480)
    said = {"tokenizer_class": "MBart50Tokenizer"} if write is mbart50_of_config else {}
    drawn = Drawn(model_type, 0, theirs, size, depth=1, rewrite=lambda record: record.update(said))
    import_pretrained(theirs, folder / "run")
    return drawn, transformers.AutoTokenizer.from_pretrained(theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_is_marked_as_theirs(kind: str, tmp_path: Path) -> None:
    _, theirs = imported(kind, tmp_path)
    ours, languages = load_tokenizer(tmp_path / "run"), KINDS[kind][2]
    texts = Preprocessor(ours.encode_batch, ours.special, 64)
    for text in TEXTS[:3]:
        assert texts.encode([text])[0].ids == theirs(text).input_ids
        for language in languages:
            theirs.src_lang = language
            (row,) = texts.encode([InLanguages(text, language)])
            assert row.ids == theirs(text).input_ids, (text, language)
            assert row.target is None
            # To M2M100Tokenizer a language is no special token, and stays in the text.
            code = [] if kind in ("M2M-100", "WMT 21") else [ours.special.languages[language]]
            answer = [2, *code, *ours.encode(text), 2]
            assert ours.decode(answer) == theirs.decode(answer, skip_special_tokens=True)
            assert ours.decode([ours.special.languages[language]]) == ""
        theirs.src_lang = languages[0]
    # Names of languages in a text are text, and an unknown name is reported.
    if not kind.startswith("mBART"):
        assert not ours.special.ids() & set(ours.encode(TEXTS[3]))
    (row,) = texts.encode([InLanguages("x", "Klingon")])
    assert row.error is not None
    assert row.error.kind == "language"
    assert "there is no language 'Klingon'; the bundle's tokenizer has " in row.error.message
    ours.read_special_tokens()  # of M2M-100, languages only where the folder lists them
    assert texts.encode(["__de__ x <new>"])[0].ids == theirs("__de__ x <new>").input_ids


def test_a_text_of_another_type_is_marked_as_theirs(tmp_path: Path) -> None:
    nllb(tmp_path, src_lang="deu_Latn")
    Drawn("llama", 0, tmp_path, 480, depth=1)
    import_pretrained(tmp_path, tmp_path / "run")
    ours, theirs = load_tokenizer(tmp_path / "run"), transformers.AutoTokenizer.from_pretrained
    assert ours.special.wrap(ours.encode(TEXTS[0])) == theirs(tmp_path)(TEXTS[0]).input_ids


def test_a_language_that_the_folder_lacks_is_refused(tmp_path: Path) -> None:
    imported("NLLB", tmp_path)
    path = tmp_path / "theirs" / "tokenizer_config.json"
    wrongs: dict[str, Any] = {
        r'src_lang is "tlh_Latn", which cannot be imported; supported: .*eng_Latn': "tlh_Latn",
        "expected a tokenizer that transformers reads": [],
    }
    for message, wrong in wrongs.items():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"src_lang": wrong}))
        with pytest.raises(InputError, match=message):
            import_pretrained(tmp_path / "theirs", tmp_path / "other")
    assert not (tmp_path / "other").exists()


Made = tuple[Drawn, Any, Path, list[str]]


@pytest.fixture(scope="module", params=["NLLB", "mBART"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("languages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transferry.export.oracle.effort.RECORDED_LENGTH", 4)
        drawn, theirs = imported(request.param, folder)
        unverified(load_checkpoint(folder / "run"), folder / "bundle")
    return drawn, theirs, folder / "bundle", KINDS[request.param][2]


@torch.inference_mode()
def answer(made: Made, text: str, source: str, target: str, beam: int) -> list[int]:
    drawn, theirs, _, languages = made
    theirs.src_lang = source
    read = theirs(text, return_tensors="pt")
    token = theirs.convert_tokens_to_ids(target)
    # mBART's answers begin with their language, NLLB's have it as first token.
    key = "decoder_start_token_id" if "en_XX" in languages else "forced_bos_token_id"
    with exact():
        given = {key: token, "num_beams": beam, "max_new_tokens": 10}
        (found,) = drawn.theirs.generate(**read, **given).tolist()
    return [token for token in found[1:] if token != 2]


@pytest.mark.parametrize("beam", [1, 3])
def test_answers_in_named_languages_are_theirs(made: Made, beam: int) -> None:
    engine, languages = Engine(made[2]), made[3]
    pairs = [(one, other) for one in languages for other in languages]
    rows = [InLanguages(text, *pair) for text in TEXTS[:3] for pair in pairs]
    wanted = [answer(made, row.text, str(row.source), str(row.target), beam) for row in rows]
    assert len({tuple(tokens) for tokens in wanted}) > len(TEXTS[:3]) * len(languages)
    options = engine.options(beam=beam, max_length=10)
    found = [list(row.hypotheses[0].tokens) for row in engine.generate(rows, options)]
    assert found == wanted
    named: dict[str, Any] = dict(source_language=languages[1], target_language=languages[2])
    again = engine.generate(TEXTS[:3], options, **named)
    place = pairs.index((languages[1], languages[2]))
    assert [list(row.hypotheses[0].tokens) for row in again] == wanted[place :: len(pairs)]


@torch.inference_mode()
def test_a_target_is_scored_after_its_language(made: Made) -> None:
    drawn, theirs, folder, languages = made
    engine = Engine(folder)
    named: dict[str, Any] = dict(source_language=languages[1], target_language=languages[2])
    for text, target in (("the cat", "Straße"), ("x", "a")):
        (row,) = score(engine, [(text, target)], **named)
        theirs.src_lang = languages[1]
        begin = [theirs.convert_tokens_to_ids(languages[2])]
        if "eng_Latn" in languages:
            begin = [2, *begin]
        wanted = [*engine.bundle.tokenizer.encode_target(target), 2]
        read = theirs(text, return_tensors="pt")
        given = torch.tensor([[*begin, *wanted[:-1]]])
        logits = drawn.theirs(**read, decoder_input_ids=given).logits[0].log_softmax(-1)
        expected = logits[len(begin) - 1 :][range(len(wanted)), wanted]
        assert row.tokens == tuple(wanted)
        assert np.abs(np.array(row.log_probabilities) - expected.numpy()).max() < 1e-4


def test_languages_of_the_command_line(made: Made, tmp_path: Path) -> None:
    _, _, bundle, (_, second, third) = made
    engine = Engine(bundle)
    lines, table, out = (tmp_path / name for name in ("lines.txt", "rows.jsonl", "out.jsonl"))
    lines.write_text("the cat\nStraße\n")
    short = ("--max-length", "8")
    done("run", bundle, lines, "-o", out, "--target-language", second, *short)
    texts = ["the cat", "Straße"]
    found = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    options = engine.options(max_length=8)
    wanted = [row.text for row in engine.generate(texts, options, target_language=second)]
    assert found == wanted
    rows = [
        {"text": "the cat", "from": second, "to": third},
        {"text": "the cat", "from": "", "to": None},
        {"text": "the cat", "to": "Klingon"},
        {"text": "the cat", "to": 3},
    ]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("--source-language-column", "from", "--target-language-column", "to")
    given = ("--target-language", second, *columns, *short, "--canary", "1/1")
    result = call("run", bundle, table, "-o", out, "--force", *given)
    assert result.exit_code == 6, result.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    sources = [InLanguages("the cat", second, third), InLanguages("the cat", None, second)]
    assert [row["text"] for row in records[:2]] == [
        row.text for row in engine.generate(sources, options)
    ]
    assert records[0]["to"] == third
    assert [row["error"]["kind"] for row in records[2:]] == ["language", "language"]
    # Other languages are another job.
    again = call("run", bundle, table, "-o", out, *given[2:])
    assert again.exit_code == 2
    assert f"target-language was {second}, is not set" in again.stderr
    scores = tmp_path / "scores.jsonl"
    done("score", bundle, lines, "--target", lines, "-o", scores, "--target-language", third)
    totals = [json.loads(line)["total"] for line in scores.read_text().splitlines()]
    pairs = list(zip(texts, texts, strict=True))
    scored = score(engine, pairs, target_language=third)
    assert totals == [row.total for row in scored]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target-language", "x"), "there is no language 'x'; the bundle's tokenizer has "),
        (("--target-language-column", "to"), "is read as text, which has no column to"),
        (("--source-language", "en_XX", "--prompt-ids", "x"), "source-language has no effect on"),
        (("--task", "embed", "--source-language", "x"), "source-language has no effect on task e"),
    ],
)
def test_languages_that_cannot_be_are_refused(
    made: Made, arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "lines.txt").write_text("x\n")
    result = call("run", made[2], tmp_path / "lines.txt", "-o", tmp_path / "out", *arguments)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_a_column_that_is_none_is_told(made: Made, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,lang\nx,y\n")
    given = ("--source-language-column", "from")
    result = call("run", made[2], tmp_path / "rows.csv", "-o", tmp_path / "out", *given)
    assert result.exit_code == 3
    assert "there is no column from for languages; it has lang" in result.stderr


def test_a_model_without_languages_says_so(bundle_folder: Path, tmp_path: Path) -> None:
    engine = Engine(bundle_folder)
    with pytest.raises(UsageError, match="has no languages, so language 'de' has no effect"):
        engine.generate(["x"], target_language="de")
    (tmp_path / "rows.csv").write_text("text,lang\nx,y\n")
    given = ("--source-language-column", "lang")
    result = call("run", bundle_folder, tmp_path / "rows.csv", "-o", tmp_path / "out", *given)
    assert result.exit_code == 2
    assert "has no languages, so the column lang has no effect; leave it out" in result.stderr
