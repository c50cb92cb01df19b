"""js/ beside Python with drawn tokenizers, texts and options; more of them with FUZZ=long."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Once, make_bundle, make_run
from tests.js import drawn
from tests.js.cases import answers_of, ids_case, npm_test, seal, write_cases
from tests.js.conftest import ENCODER
from tests.js.test_tokenizers import bundled
from transferry.build_model import checkpoint
from transferry.build_model.checkpoint import load_checkpoint
from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.tokenizer.special_tokens import PASSAGES, PROMPTS, SOURCES, SpecialTokens

COUNT = 400 if os.environ.get("FUZZ") == "long" else 24
SEED = int(os.environ.get("SEED", "0"))
RANKER: dict[str, Any] = dict(
    head=HeadSettings("classify", ("LABEL_0",), "sigmoid", "sigmoid", longest=12),
    pooling=("mean",),
    head_widths=(1,),
    head_activations=("none",),
    head_biases=(True,),
)
LANGUAGES = {"aaa_Latn": 5, "bbb_Latn": 6}


@pytest.fixture(scope="session")
def speaker_bundle_folder(once: Once, traces: None) -> Path:
    """A bundle with languages around its sources and answers."""
    special = SpecialTokens(before=(5,), languages=LANGUAGES)
    run = once("speaker-run", lambda folder: make_run(folder, special))
    return once("speaker-bundle", lambda folder: make_bundle(run, folder))


@pytest.mark.optional("node")
def test_ids_of_drawn_tokenizers(tmp_path: Path) -> None:
    ids: list[dict[str, Any]] = []
    for seed in range(SEED, SEED + COUNT):
        draw, refused = drawn.Draw(f"texts {seed}"), ""
        try:
            made = bundled(drawn.tokenizer(seed))
            own = [each for each in made.vocabulary() if each]
            texts = [drawn.text(draw, own) for _ in range(40)]
            ids.append(ids_case(tmp_path / str(seed), made, texts, places=True))
        except InputError as error:  # added tokens that are one text; the library panics
            refused = str(error)
        assert not refused or any(each in refused for each in ("one text once", "cannot")), refused
    assert len(ids) > COUNT * 0.6
    printed = npm_test(write_cases(tmp_path / "cases.json", [], ids))
    assert printed.count("- 40 texts") == len(ids)


@pytest.mark.optional("node")
def test_added_tokens_of_one_normalised_text_are_refused(tmp_path: Path) -> None:
    """The library finds either of them, another one each time it opens the file."""
    t = pytest.importorskip("tokenizers", reason="an extra, which is not installed")
    made = t.Tokenizer(t.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    made.add_tokens([t.AddedToken(each, normalized=True) for each in ("Anna", "ANNA")])
    case = ids_case(tmp_path / "apart", bundled(made), ["Anna ANNA anna"])
    record = json.loads(made.to_str()) | {"normalizer": {"type": "Lowercase"}}
    with pytest.raises(InputError, match="'Anna' and 'ANNA', which have one text once normalised"):
        bundled(t.Tokenizer.from_str(json.dumps(record)))
    folder = tmp_path / "same"
    ids_case(folder, bundled(made), [])
    (folder / "huggingface.json").write_text(json.dumps(record))
    (folder / "manifest.json").unlink()
    seal(folder, 3)
    refused = {"bundle": str(folder), "message": '"Anna" and "ANNA" have one text once normalised'}
    assert "# fail 0" in npm_test(write_cases(tmp_path / "cases.json", [], [case], [refused]))


@pytest.mark.optional("node", "onnxruntime-node")
def test_records_of_a_model_that_overflows(tmp_path: Path) -> None:
    """Of some letters; of long texts a truncated part is read."""
    runs: dict[str, tuple[SpecialTokens, dict[str, Any]]] = {
        "generate score": (SOURCES, {}),
        "score generate": (PROMPTS, {"architecture": "decoder-only", "encoder_layers": 0}),
        "classify embed": (SpecialTokens(before=(1,)), {**ENCODER, **RANKER}),
        "embed fill-mask": (PASSAGES, {**ENCODER, "lm_head": True}),
    }
    rows = [
        *("a cat", "Zz", "Z dog " * 40, "a cat " * 40, " \nZ dog\n" * 20, "Z\na [MASK]"),
        "a [MASK] Z",
    ]
    answers = []
    for names, (special, options) in runs.items():
        run, made = tmp_path / names / "run", tmp_path / names / "bundle"
        make_run(run, special, tied=False, **options)
        loaded = load_checkpoint(run)
        with torch.no_grad():
            loaded.model.embedding.weight[loaded.tokenizer.encode("Z")] = 3e38
        checkpoint.save_tensors(run / checkpoint.WEIGHTS, loaded.model.state_dict())
        make_bundle(run, made)
        for task, long_rows in product(names.split(), ("truncate", "error")):
            pairs = task == "score" and special is SOURCES
            given: list[Any] = [(row, "a dog") for row in rows] if pairs else rows
            options = {"max_length": 3} if task == "generate" else {}
            answers.append(answers_of(made, task, {"long_rows": long_rows, **options}, given))
    records = [record for each in answers for record in each["records"]]
    broken_rows = [each for each in records if each.get("error", {}).get("kind") == "not-finite"]
    assert {"truncated" in each for each in broken_rows} == {True, False}
    printed = npm_test(write_cases(tmp_path / "cases.json", answers, []))
    assert "ok 1 - onnxruntime-node gives the records of Python" in printed


def _case(folder: Path, draw: drawn.Draw, task: str) -> dict[str, Any]:
    """Returns drawn rows with drawn options, and their records; null where Python refuses."""
    texts: list[Any] = [drawn.text(draw, ["\n", "</s>", "x" * 300]) for _ in range(4)]
    texts.append(draw.choice(["", " \x1c", "\u3000", "\ufeff"]))
    options: dict[str, Any] = {"long_rows": draw.choice(["error", "truncate"])}
    if task == "generate":
        ids = [draw.randrange(400) for _ in range(draw.choice([1, 3, 64, 65]))]
        texts += [ids, draw.choice([[], 5])]
        options |= {**drawn.options(draw, 400), "first_row": draw.choice([0, 3])}
    elif "speaker" in str(folder):
        texts = [(text, drawn.text(draw)) for text in texts]
    if "speaker" in str(folder):
        names = ("source_language", "target_language")
        options |= {name: draw.choice([*LANGUAGES]) for name in names if draw.random() < 0.5}
    try:
        return answers_of(folder, task, options, texts)
    except UsageError as error:
        return answers_of(folder, task, options, texts, refused=str(error))


@pytest.mark.optional("node", "onnxruntime-node")
def test_records_of_drawn_options(
    tmp_path: Path, speaker_bundle_folder: Path, writer_bundle_folder: Path
) -> None:
    draw = drawn.Draw(SEED)
    answers = [
        _case(folder, draw, draw.choice(["generate"] * 4 + ["score"]))
        for _ in range(COUNT)
        for folder in (speaker_bundle_folder, writer_bundle_folder)
    ]
    assert 0 < sum(each["records"] is None for each in answers) < COUNT
    printed = npm_test(write_cases(tmp_path / "cases.json", answers, []))
    assert "ok 1 - onnxruntime-node gives the records of Python" in printed
