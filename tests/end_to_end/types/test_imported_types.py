"""Each imported model type from a file of rows to a file of answers, beside transformers' own way.

Texts are cut at their beginning (`truncation_side`), and hold look-alikes of special tokens, which
are read as text and as tokens. FUZZ=long exports and runs every type, in six minutes; otherwise an
encoder and a decoder, and the token ids of all types are compared.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build_model.importing.huggingface.drawn import (
    AFTER_PADDING,
    TYPES,
    Draw,
    byte_level_tokenizer,
    exact,
    randomise,
    transformers,
)
from tests.build_model.importing.huggingface.encoder_types import ENCODERS, WITH_SEGMENTS
from tests.build_model.importing.huggingface.heads import Theirs
from tests.build_model.importing.huggingface.small_models import (
    change,
    float64,
    gpt2_vocabulary,
    llama_vocabulary,
    marian_vocabulary,
)
from tests.build_model.importing.huggingface.tokenizer.test_tokenizer_classes import write_folder
from tests.commands import call, done
from tests.conftest import Once
from tests.end_to_end.files import HARD_TEXTS
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.preprocess import Preprocessor
from transferry.runtime.tokenizer.byte_pair import load_tokenizer

RUN = tuple(TYPES) if os.environ.get("FUZZ") == "long" else ("roberta", "qwen2")
LONGEST, NEW = 20, 6  # tokens of a text, and of an answer
CLASSES = {
    **dict.fromkeys((*WITH_SEGMENTS, "distilbert"), "BERT"),
    **dict.fromkeys(("t5", "mt5", "umt5"), "T5"),
    "mpnet": "MPNet",
    "deberta-v2": "DeBERTa-v2",
    "deberta": "DeBERTa",
    "albert": "ALBERT",
    **dict.fromkeys(("roberta", "data2vec-text", "roberta-prelayernorm"), "RoBERTa"),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl", "gte"), "XLM-R"),
    "camembert": "CamemBERT",
    "bart": "BART",
    "pegasus": "PEGASUS",
    "mbart": "mBART",
    "m2m_100": "NLLB",
}
OWN: dict[str, Callable[[Path], Any]] = {
    **dict.fromkeys(("llama", "mistral", "phi3"), llama_vocabulary),
    "marian": marian_vocabulary,
    **dict.fromkeys(
        ("olmo2", "olmo3", "granite", "stablelm"),
        lambda folder: byte_level_tokenizer(folder, "", ""),
    ),
    **dict.fromkeys(
        ("modernbert", "eurobert", "jina_embeddings_v3"),
        lambda folder: byte_level_tokenizer(folder, "<s>", "</s>"),
    ),
}
MODES = {"as-text": True, "as-tokens": False}  # as split_special_tokens of transformers


def write(kind: str, folder: Path, seed: int = 0, layers: int = 1, **sizes: Any) -> None:
    """Writes the folder of a small random model with a tokenizer of its type."""
    folder.mkdir()
    if kind in CLASSES:
        write_folder(folder, CLASSES[kind])
    else:
        OWN.get(kind, gpt2_vocabulary)(folder)
    settings = folder / "tokenizer_config.json"
    if not settings.exists():
        settings.write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    change(settings, truncation_side="left", model_max_length=LONGEST)
    name, drawn = TYPES[kind]
    own = {"model_type": kind, "pad_token_id": 1, "eos_token_id": 0, "decoder_start_token_id": 1}
    (folder / "config.json").write_text(json.dumps(own))
    made = transformers.AutoTokenizer.from_pretrained(folder)
    made.save_pretrained(folder)  # with every setting that transformers writes
    size = max(*made.get_vocab().values(), 1) + 1
    end = made.sep_token_id if kind in ENCODERS else made.eos_token_id
    pad = 1 if kind in AFTER_PADDING else end if made.pad_token_id is None else made.pad_token_id
    ids = {"pad_token_id": pad, "eos_token_id": end, "bos_token_id": made.bos_token_id}
    ids |= {
        "decoder_start_token_id": pad if kind in ("marian", "t5", "mt5", "umt5", "pegasus") else end
    }
    places = "n_positions" if kind in ("gpt2", "t5", "mt5", "umt5") else "max_position_embeddings"
    chosen = drawn(Draw(f"{kind} {seed}")) | ids | {places: 64, "vocab_size": size} | sizes
    for key, value in chosen.items():
        if key.endswith(("layers", "n_layer")) and type(value) is int:
            chosen[key] = min(value, layers)
        if key in ("layer_types", "no_rope_layers") and value:
            chosen[key] = value[:layers]
    torch.manual_seed(seed + 1)
    model = getattr(transformers, name)(getattr(transformers, name).config_class(**chosen)).eval()
    randomise(model)
    if model.can_generate() and kind not in ENCODERS:
        search = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1, **ids}
        model.generation_config = transformers.GenerationConfig(**search)
    model.save_pretrained(folder)


def rows_of(folder: Path) -> list[str]:
    """Returns hard texts, with each special token of a folder's tokenizer within a text."""
    made = transformers.AutoTokenizer.from_pretrained(folder)
    special = [*made.all_special_tokens][:6]
    alike = [f"the cat {text} sat{text}on {text}" for text in special]
    return [*HARD_TEXTS[: 30 - len(alike)], *alike]


@pytest.fixture(scope="module")
def folders(once: Once) -> Callable[[str], tuple[Path, Path]]:
    """Returns the folder and the checkpoint of a type."""

    def found(kind: str) -> tuple[Path, Path]:
        folder = once(f"type-{kind}", lambda place: write(kind, place))

        def make(place: Path) -> None:
            done("import", folder, "--out", place, "--quiet")

        return folder, once(f"type-{kind}-run", make)

    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", TYPES)
def test_token_ids_are_theirs(
    kind: str, mode: str, folders: Callable[[str], tuple[Path, Path]]
) -> None:
    folder, run = folders(kind)
    ours, theirs = load_tokenizer(run), transformers.AutoTokenizer.from_pretrained(folder)
    if mode == "as-tokens":
        ours.read_special_tokens()
    read = Preprocessor(ours.encode_batch, ours.special, 64, ours.longest_token)
    for text, row in zip(rows_of(folder), read.encode(rows_of(folder), "truncate"), strict=True):
        wanted = theirs(text, split_special_tokens=MODES[mode], truncation=True).input_ids
        assert row.error is not None or list(row.ids) == wanted, text
        assert (row.error is not None) is (not text.strip())


@pytest.mark.parametrize("kind", ENCODERS)
def test_blanks_beside_a_mask_are_theirs(
    kind: str, folders: Callable[[str], tuple[Path, Path]]
) -> None:
    folder, run = folders(kind)
    ours, theirs = load_tokenizer(run), transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["the cat % sat", "a%b", "a  %  b % c", "%", " %\t% x ", "Straße %.", "%%", "日本%"]
    for mode in MODES:
        if mode == "as-tokens":
            ours.read_special_tokens()
        for text in texts:
            wanted = theirs(text.replace("%", theirs.mask_token)).input_ids
            assert ours.special.wrap(ours.encode_masked(text.split("%"))) == wanted, text


@torch.inference_mode()
def hidden(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with exact():
        found = model(torch.tensor([ids]), output_hidden_states=True)
    states: torch.Tensor = found.hidden_states[-1][0]
    return states


@torch.inference_mode()
def generated(model: Any, tokenizer: Any, ids: Sequence[int]) -> str:
    prompt = torch.tensor([ids])
    with exact():
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt))[0].tolist()
    begin = 1 if model.config.is_encoder_decoder else len(ids)
    text: str = tokenizer.decode(found[begin:], skip_special_tokens=True)
    return text


@pytest.mark.parametrize("kind", RUN)
def test_answers_in_a_file_are_theirs(
    kind: str, folders: Callable[[str], tuple[Path, Path]], traces: None, tmp_path: Path
) -> None:
    folder, run = folders(kind)
    bundle, rows, texts = tmp_path / "bundle", tmp_path / "rows.jsonl", rows_of(folder)
    done("export", run, "--out", bundle, "--variant", "portable", "--quiet")
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = float64(getattr(transformers, TYPES[kind][0]), folder)
    task = ["--task", "embed"] if kind in ENCODERS else ["--no-split-lines"]
    for mode, split in MODES.items():
        out = tmp_path / f"{mode}.jsonl"
        given = ["--long-rows", "truncate", "--quiet", "--special-tokens", mode]
        found = call("run", bundle, rows, "-o", out, *task, *given)
        assert found.exit_code == 6, found.stderr  # empty rows are errors
        records = [json.loads(line) for line in out.read_text().split("\n")[:-1]]
        assert len(records) == len(texts)
        for text, record in zip(texts, records, strict=True):
            if not text.strip():
                assert record["error"]["kind"] == "empty"
                continue
            ids = tokenizer(text, split_special_tokens=split, truncation=True).input_ids
            if kind in ENCODERS:
                wanted = hidden(model, ids).mean(dim=0)
                vector = torch.tensor(record["vector"], dtype=torch.float64)
                assert (vector - wanted).abs().max() <= 1e-4 * wanted.abs().max(), text
            else:
                assert record["text"] == generated(model, tokenizer, ids), text
        other = [*given[:-1], *(each for each in MODES if each != mode)]
        again = call("run", bundle, rows, "-o", out, *task, *other)
        assert (again.exit_code, "exists already" in again.stderr) == (2, True)
        summary = json.loads((tmp_path / f"{mode}.jsonl.summary.json").read_text())
        assert summary["special_texts"] >= 1
        assert (summary.get("special_tokens") == "as-tokens") is (mode == "as-tokens")


def test_tags_stand_where_a_text_cut_at_its_beginning_has_them(
    traces: None, tmp_path: Path
) -> None:
    folder, rows, out = tmp_path / "theirs", tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    theirs = Theirs("roberta", 0, folder, "ForTokenClassification", num_labels=3)
    change(folder / "tokenizer_config.json", truncation_side="left", model_max_length=LONGEST)
    theirs.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    done("import", folder, "--out", tmp_path / "run", "--quiet")
    given = ["--out", str(tmp_path / "bundle"), "--variant", "portable", "--quiet"]
    done("export", tmp_path / "run", *given)
    text = "the cat sat on the mat, Straße über " * 3
    rows.write_text(json.dumps({"text": text}))
    done("run", tmp_path / "bundle", rows, "-o", out, "--task", "tag", "--long-rows", "truncate")
    (record,) = map(json.loads, out.read_text().split("\n")[:-1])
    read = theirs.tokenizer(text, truncation=True, return_offsets_mapping=True)
    scores = theirs(text, truncation=True).logits[0, 1:-1].softmax(dim=-1)
    best = zip(read.offset_mapping[1:-1], scores.max(dim=-1).values.tolist(), strict=True)
    for tag, ((start, end), score) in zip(record["tags"], best, strict=True):
        assert (tag["start"], tag["end"]) == (start, end)
        assert abs(tag["score"] - score) < 1e-5
    assert record["tags"][-1]["end"] >= len(text.rstrip())


@pytest.mark.parametrize(
    ("kind", "suffix", "token"),
    [
        ("bert", "ForSequenceClassification", "</s>"),
        ("bert", "ForQuestionAnswering", "</s>"),
        ("mbart", "ForSequenceClassification", "<pad>"),
        ("mistral", "ForSequenceClassification", "<pad>"),
    ],
)
def test_a_separator_within_a_text_is_refused(
    kind: str, suffix: str, token: str, traces: None, tmp_path: Path
) -> None:
    """transformers counts it to the text's segment, the graph to the second; or reads up to it."""
    Theirs(kind, 0, tmp_path / "theirs", suffix)
    done("import", tmp_path / "theirs", "--out", tmp_path / "run", "--quiet")
    given = ["--out", str(tmp_path / "bundle"), "--variant", "portable", "--quiet"]
    done("export", tmp_path / "run", *given)
    pairs = [(f"the {token} cat", "sat"), ("the cat", f"sat {token}"), ("the <mask>", "sat")]
    refused = [
        None if kind == "mistral" else "tokenizer",
        "tokenizer",
        None,
    ]  # there the last token
    for mode in ("as-text", "as-tokens"):
        with Engine(tmp_path / "bundle", special_tokens=mode) as engine:
            found = list(engine.classify(pairs) if "Seq" in suffix else engine.answer(pairs))
        kinds = [each.error and each.error.kind for each in found]
        assert kinds == (refused if mode == "as-tokens" else [None] * 3)
