"""Vectors and scores in a file beside SentenceTransformer.encode and CrossEncoder.predict."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.build_model.importing.huggingface.heads import Theirs, write, write_modules
from tests.build_model.importing.huggingface.small_models import change
from tests.build_model.importing.toolkits.test_sentence_transformers import sentence_folder
from tests.commands import call, done
from tests.end_to_end.files import HARD_TEXTS

pytestmark = pytest.mark.optional("sentence_transformers")

PROMPTS = {"prompts": {"query": "THE query: ", "document": ""}, "default_prompt_name": "query"}
SECOND = "the other text, on the mat"


def answers(folder: Path, place: Path, *options: str) -> list[dict[str, Any]]:
    """Imports, exports and runs a folder over hard texts; returns the records."""
    rows, out = place / "rows.jsonl", place / "out.jsonl"
    done("import", folder, "--out", place / "run", "--quiet")
    given = ["--out", str(place / "bundle"), "--variant", "portable", "--quiet"]
    done("export", place / "run", *given)
    records = [{"text": text, "other": SECOND} for text in HARD_TEXTS]
    rows.write_text("".join(json.dumps(each) + "\n" for each in records))
    options = (*options, "--special-tokens", "as-tokens", "--quiet")
    assert call("run", place / "bundle", rows, "-o", out, *options).exit_code == 6
    return [json.loads(line) for line in out.read_text().split("\n")[:-1]]


@pytest.mark.parametrize(
    ("texts", "reading", "tokens"),
    [
        ({"truncate_dim": 5}, {}, {}),
        ({}, {"do_lower_case": True}, {"truncation_side": "left"}),
        (PROMPTS, {"max_seq_length": None}, {"model_max_length": 9}),
    ],
)
def test_vectors_are_those_of_encode(
    texts: dict[str, Any],
    reading: dict[str, Any],
    tokens: dict[str, Any],
    tmp_path: Path,
    traces: None,
) -> None:
    import sentence_transformers

    folder = tmp_path / "theirs"
    Theirs("roberta", 0, folder, "Model")
    sentence_folder(folder, "mean", normalise=True)
    change(folder / "config_sentence_transformers.json", **texts)
    change(folder / "sentence_bert_config.json", **reading)
    change(folder / "tokenizer_config.json", **tokens)
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    wanted = theirs.encode(HARD_TEXTS, batch_size=1)
    for row, vector in zip(answers(folder, tmp_path, "--task", "embed"), wanted, strict=True):
        if "error" in row:
            assert not row["source"].strip()
        else:
            assert len(row["vector"]) == len(vector)
            assert np.abs(np.array(row["vector"]) - vector).max() < 1e-5, row["source"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_are_those_of_predict(side: str, tmp_path: Path, traces: None) -> None:
    import sentence_transformers

    folder = tmp_path / "theirs"
    Theirs("bert", 0, folder, "ForSequenceClassification", num_labels=1)
    write_modules(folder, "sentence_transformers.base.modules.transformer.Transformer")
    record = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    write(folder / "config_sentence_transformers.json", {**record, **PROMPTS})
    reading = {"transformer_task": "sequence-classification", "max_seq_length": 14}
    write(folder / "sentence_bert_config.json", reading)
    change(folder / "tokenizer_config.json", truncation_side=side)
    theirs = sentence_transformers.CrossEncoder(str(folder), device="cpu")
    wanted = theirs.predict([(text, SECOND) for text in HARD_TEXTS], batch_size=1)
    found = answers(folder, tmp_path, "--task", "rank", "--pair", "other")
    for row, score in zip(found, wanted, strict=True):
        if "error" in row:
            assert not row["source"].strip()
        else:
            assert abs(row["score"] - float(score)) < 1e-4, row["source"]
