"""Documents of a bundle in js/: refused where Python refuses them, manifests for its reason."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.js.cases import npm_test, write_cases
from transferry import Engine
from transferry.runtime.bundle.bundle import read_manifest
from transferry.runtime.bundle.manifest import Manifest
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.byte_pair import load_tokenizer

COUNT = 20_000 if os.environ.get("FUZZ") == "long" else 1500
# Reasons other than a field of another type, whose names differ.
REASON = re.compile(r"manifest.json: (variant '|'|weight '|two of|generation: max_length is)")
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**53 - 1, 0.5, 1e300, "", "x", "a/b", [], {}, ["x"], [0], [[]]),
    *("batch", "logits", "head", "hidden", "float32", "int8", "columns", "state", "tag", "sparse"),
    *("answer", "encoder-only", "decoder-only", "encoder-decoder", {"in_place": True}),
)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each object or list with each of its keys."""
    names = value if isinstance(value, dict) else range(len(value))
    for name in names:
        yield value, name
        if isinstance(value[name], dict | list):
            yield from _places(value[name])


def _changed(draw: random.Random, manifest: dict[str, Any]) -> None:
    """Removes a value, renames it, or puts an odd value or a copy of another into its place."""
    places = [*_places(manifest)]
    owner, name = draw.choice(places)
    other, key = draw.choice(places)
    way = draw.choice(["remove", "odd", "odd", "copy", "copy", "rename", "swap"])
    if way == "remove":
        del owner[name]
    elif way == "odd":
        owner[name] = copy.deepcopy(draw.choice(ODD))
    elif way == "copy":
        owner[name] = copy.deepcopy(other[key])
    elif way == "rename" and isinstance(owner, dict):
        owner[draw.choice(["x", "generate", "__proto__", "a b", str(name).upper()])] = owner[name]
    elif way == "swap" and isinstance(owner, dict) and isinstance(key, str):
        owner[key] = owner.pop(name)


def _text(document: dict[str, Any]) -> str:
    """Returns JSON in which 1.0 is 1, as JavaScript reads it."""
    return re.sub(r"(\d)\.0\b", r"\1", json.dumps(document))


def _verdict(text: str) -> str | None:
    """Returns why Python refuses a manifest: of another type, only that it does; None if not."""
    try:
        Manifest.from_json(text, "manifest.json")
    except InputError as error:
        return str(error) if REASON.match(str(error)) else ""
    return None


@pytest.mark.optional("node")
def test_manifests_are_refused_as_in_python(
    tmp_path: Path,
    bundle_folder: Path,
    writer_bundle_folder: Path,
    reader_bundle_folder: Path,
    ranker_bundle_folder: Path,
    tagger_bundle_folder: Path,
) -> None:
    folders = [bundle_folder, writer_bundle_folder, reader_bundle_folder]
    folders += [ranker_bundle_folder, tagger_bundle_folder]
    sound = [read_manifest(folder).decode() for folder in folders]
    draw = random.Random(int(os.environ.get("SEED", "0")))
    texts = [*sound, "\ufeff" + sound[0], '{"format": 9, "x": "\\ud800"}', '{"format": 9e999}']
    while len(texts) < COUNT:
        manifest = json.loads(draw.choice(sound))
        for _ in range(draw.choice([1, 1, 2])):
            _changed(draw, manifest)
        texts.append(_text(manifest))
    cases = [(text, _verdict(text)) for text in texts]
    reasons = [reason for _, reason in cases if reason]
    assert len({re.sub("'.*?'", "", reason) for reason in reasons}) > 10
    path = write_cases(tmp_path / "cases.json", [], [], manifests=cases)
    assert "# fail 0" in npm_test(path)


@pytest.mark.optional("node", "onnxruntime-node")
def test_a_graph_has_the_tensors_of_the_manifest(
    tmp_path: Path, ranker_bundle_folder: Path
) -> None:
    changes: list[dict[str, Any]] = [
        {"name": "other"},
        {"shape": ["batch", 2, 3]},
        {"shape": ["batch", 2]},
        {"type": "int64"},
    ]
    for place, change in enumerate(changes):
        folder = tmp_path / str(place)
        shutil.copytree(ranker_bundle_folder, folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        outputs = manifest["variants"]["portable"]["graphs"]["encoder"]["outputs"]
        next(each for each in outputs if each["role"] == "hidden").update(change)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(InputError, match="the manifest describes other outputs"):
            Engine(folder, variant="portable")
    message = "portable/encoder.onnx: the manifest describes other tensors than the graph has"
    refused = [
        {"bundle": str(tmp_path / str(place)), "message": message} for place in range(len(changes))
    ]
    assert "# fail 0" in npm_test(write_cases(tmp_path / "cases.json", [], [], refused))


@pytest.mark.optional("node")
def test_settings_of_a_tokenizer_are_refused_as_in_python(
    tmp_path: Path, bundle_folder: Path, tagger_bundle_folder: Path
) -> None:
    """Special ids that the vocabulary lacks or ordinary tokens have, and missing fields."""
    draw, sample = random.Random(int(os.environ.get("SEED", "0"))), "the cat 's"
    cases: list[dict[str, Any]] = []
    for number in range(COUNT // 5):
        folder = (bundle_folder, tagger_bundle_folder)[number % 2]
        settings = json.loads((folder / "tokenizer.json").read_text())
        _changed(draw, settings)
        text = _text(settings)

        def read(name: str, folder: Path = folder, text: str = text) -> bytes:
            return text.encode() if name == "tokenizer.json" else (folder / name).read_bytes()

        ids, refused = None, ""
        # JavaScript has limits of its own.
        if re.search(r"2147483648|9007199254740991", text):
            continue
        try:
            tokenizer = load_tokenizer(folder, read)
            ids = tokenizer.special.wrap(tokenizer.encode(sample))
        except FileNotFoundError:
            continue  # of another kind
        except InputError as error:
            refused = str(error)
        case = {"bundle": str(folder), "text": text, "sample": sample}
        cases.append({**case, "ids": ids, "refused": refused})
    reasons = {re.sub(r"\d+", "", each["refused"].partition(": ")[2]) for each in cases}
    assert len(reasons) > 8
    assert "# fail 0" in npm_test(write_cases(tmp_path / "cases.json", [], [], settings=cases))
