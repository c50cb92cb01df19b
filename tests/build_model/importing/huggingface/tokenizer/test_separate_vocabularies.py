"""MarianMT with a vocabulary of its own for each side: ids, texts and answers of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build_model.importing.huggingface.drawn import exact, randomise, transformers
from tests.build_model.importing.huggingface.small_models import (
    marian_model,
    marian_vocabulary,
    spm,
)
from tests.commands import FEW, done
from tests.traced import unverified
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.export.bundle import Contents
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.byte_pair import load_tokenizer

TEXTS = ["the cat sat", "Straße über Häuser", "日本 x", "</s> <pad> >>fra<< <unk>", ">>fra<< a"]


def write(folder: Path, *, larger: str) -> tuple[Any, int]:
    """Writes the tokenizer; returns transformers' and the size of its target's vocabulary."""
    marian_vocabulary(folder)
    tables = []
    for side in ("source", "target"):
        model = spm.SentencePieceProcessor(model_proto=(folder / f"{side}.spm").read_bytes())
        found = [model.id_to_piece(number) for number in range(3, model.get_piece_size())]
        # transformers has one id of each special token, whatever the other table says.
        pieces = dict.fromkeys(["</s>", "<unk>", "<pad>", *found])
        more = [f"<{number}>" for number in range(9)] if side == larger else []
        tables.append({piece: number for number, piece in enumerate([*pieces, *more])})
    names = ("vocab.json", "target_vocab.json")
    for name, table in zip(names, tables, strict=True):
        (folder / name).write_text(json.dumps(table))
    files = {"source_spm": "source.spm", "target_spm": "target.spm", "vocab": names[0]}
    files |= {"target_vocab_file": names[1]}
    paths = {key: str(folder / name) for key, name in files.items()}
    transformers.MarianTokenizer(**paths, separate_vocabs=True).save_pretrained(folder)
    target = tables[1]
    model = marian_model(
        len(tables[0]),
        depth=1,
        decoder_vocab_size=len(target),
        share_encoder_decoder_embeddings=False,
        **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), target["<pad>"]),
        eos_token_id=target["</s>"],
    ).eval()
    torch.manual_seed(0)
    randomise(model)
    model.save_pretrained(folder)
    return model.double(), len(target)


@pytest.mark.parametrize("larger", ["source", "target"])
def test_each_side_has_its_ids(larger: str, tmp_path: Path) -> None:
    folder, run = tmp_path / "theirs", tmp_path / "run"
    folder.mkdir()
    _, size = write(folder, larger=larger)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    import_pretrained(folder, run)
    ours = load_tokenizer(run)
    assert ours.vocabulary_size == size
    for text in TEXTS[:3]:
        assert ours.special.wrap(ours.encode(text)) == theirs(text).input_ids
        target = theirs(text_target=text).input_ids
        assert [*ours.encode_target(text), ours.special.eos_id] == target
        assert ours.decode(target) == theirs.decode(target, skip_special_tokens=True)
    assert 0 not in ours.encode(TEXTS[3])
    assert 0 not in ours.encode_target(TEXTS[3])


@torch.inference_mode()
def test_answers_and_scores_are_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transferry.export.oracle.effort.RECORDED_LENGTH", 4)
    folder, run, bundle = tmp_path / "theirs", tmp_path / "run", tmp_path / "bundle"
    folder.mkdir()
    model, _ = write(folder, larger="source")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    import_pretrained(folder, run)
    ours = load_tokenizer(run)
    texts, variants = TEXTS[:3], ["cpu-fp32"]
    unverified(load_checkpoint(run), bundle, Contents(texts=texts, variants=variants))
    wanted = []
    for text in TEXTS[:3]:
        with exact():
            read = theirs(text, return_tensors="pt")
            answer = model.generate(**read, num_beams=3, max_new_tokens=10)[0]
        wanted.append(theirs.decode(answer, skip_special_tokens=True))
    lines, scores = tmp_path / "lines.txt", tmp_path / "scores.jsonl"
    lines.write_text("".join(f"{text}\n" for text in TEXTS[:3]))
    for variant in ("portable", "cpu-fp32"):
        engine = Engine(bundle, variant=variant)
        found = [row.text for row in engine.generate(TEXTS[:3], beam=3, max_length=10)]
        assert found == wanted
    done("score", bundle, lines, "--target", lines, "-o", scores)
    for text, line in zip(TEXTS, scores.read_text().splitlines(), strict=False):
        labels = theirs(text_target=text).input_ids
        row = json.loads(line)
        assert row["tokens"] == labels
        read = theirs(text, return_tensors="pt")
        given = torch.tensor([[ours.special.bos_id, *labels[:-1]]])
        logits = model(**read, decoder_input_ids=given).logits[0].log_softmax(-1)
        assert abs(row["total"] - logits[range(len(labels)), labels].sum()) < 1e-3
    done("verify", bundle, *FEW, "--checkpoint", run, "--text", lines)
    # Ids as sources are ids of the source's table.
    (row,) = Engine(bundle).generate([[len(theirs.encoder)]])
    assert row.error is not None
    assert f"expected token ids from 0 to {len(theirs.encoder) - 1}" in row.error.message


def test_a_table_that_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    write(folder, larger="source")
    path = folder / "vocab.json"
    table = json.loads(path.read_text())
    for changed, message in (
        ({**table, "x y": len(table)}, rf"vocab.json: expected ids below {len(table)}, .*found"),
        ({"<unk>": 0}, r"vocab.json: expected an id of eos_token </s>, found none"),
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(InputError, match=message):
            import_pretrained(folder, tmp_path / "run")
    path.write_text(json.dumps(table))
    (folder / "target_vocab.json").unlink()
    with pytest.raises(InputError, match=r"target_vocab\.json"):
        import_pretrained(folder, tmp_path / "run")
