"""The manifest, patterns and comparisons of docs/portability.md, with onnxruntime alone."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import regex  # type: ignore[import-untyped]

from tests.commands import done
from transferry.runtime.bundle.manifest import Manifest
from transferry.runtime.engine.engine import Engine
from transferry.runtime.tokenizer.byte_pair import OURS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "portability.md"
Tensors = Mapping[str, Any]


class Portable:
    """Variant portable as the page describes it: names of tensors by role, from the manifest."""

    def __init__(self, folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        self.graphs = manifest["variants"]["portable"]["graphs"]
        self.sessions = {
            name: onnxruntime.InferenceSession(folder / graph["file"])
            for name, graph in self.graphs.items()
        }

    def run(self, graph: str, **given: Any) -> dict[str, list[Any]]:
        """Runs a graph; tensors and lists of them by role."""
        spec = self.graphs[graph]
        feeds: dict[str, Any] = {}
        for role, values in given.items():
            names = [each["name"] for each in spec["inputs"] if each["role"] == role]
            values = values if isinstance(values, list) else [values]
            feeds |= zip(names, values, strict=bool(names))
        found: dict[str, list[Any]] = {}
        outputs = self.sessions[graph].run([each["name"] for each in spec["outputs"]], feeds)
        for each, value in zip(spec["outputs"], outputs, strict=True):
            found.setdefault(each["role"], []).append(value)
        return found

    def case(self, source: Any, mask: Any, target: Any, past: int, rows: Any) -> Tensors:
        """The tensors of a case, by the names of reference.npz."""
        if "decoder" not in self.graphs:
            return {
                name: each[0]
                for name, each in self.run("encoder", source=source, source_mask=mask).items()
            }
        cross: list[Any] = []
        shapes = [
            each["shape"] for each in self.graphs["decoder"]["inputs"] if each["role"] == "past"
        ]
        cache = [np.zeros((len(source), heads, 0, width), "f4") for _, heads, _, width in shapes]
        context: dict[str, Any] = {"past_mask": np.ones((len(source), 0), bool)}
        if "encoder" in self.graphs:
            cross = self.run("encoder", source=source, source_mask=mask)["cross"]
            context = {"source_mask": mask, "cross": cross}
        elif source.size:
            cache = self.run("decoder", target=source, past=cache, **context)["present"]
            context = {"past_mask": mask}
        if past:
            cache = self.run("decoder", target=target[:, :past], past=cache, **context)["present"]
            if "past_mask" in context:
                context["past_mask"] = np.pad(mask, ((0, 0), (0, past)), constant_values=True)
        context = {
            name: [each[rows] for each in value] if name == "cross" else value[rows]
            for name, value in context.items()
        }
        cache = [each[rows] for each in cache]
        found = self.run("decoder", target=target[rows, past:], past=cache, **context)
        named = {"logits": found["logits"][0]}
        for kind, tensors in (("cross", cross), ("past", found["present"])):
            for place, tensor in enumerate(tensors):
                named[f"{kind}.{place // 2}.{('keys', 'values')[place % 2]}"] = tensor
        return named


def mistakes(portable: Portable, engine: Engine, vectors: Sequence[Tensors]) -> list[str]:
    """Fields of vectors that differ from onnxruntime alone or from the engine."""
    found = set()
    bos = engine.bundle.tokenizer.special.bos_id
    for vector in vectors:
        source, target = np.array([vector["ids"]]), np.array([[bos]])
        if "answer" in vector:
            (answer,) = engine.generate([vector["text"]], **vector["options"])
            if answer.text != vector["answer"]:
                found.add("answer")
            if [*answer.hypotheses[0].tokens] != vector["answer_ids"]:
                found.add("answer_ids")
            if "encoder" not in portable.graphs:
                source, target = source[:, :-1], source[:, -1:]
        tensors = portable.case(source, np.ones(source.shape, bool), target, 0, [0])
        names = {"logits", "hidden", "head"} & {*tensors}
        assert names and names <= {*vector}
        for name in names:
            wanted = tensors[name].ravel()[:8]
            if np.abs(wanted - vector[name]).max() > 1e-4 * np.abs(tensors[name]).max():
                found.add(name)
    return sorted(found)


@pytest.mark.parametrize("kind", ["bundle", "writer_bundle", "reader_bundle"])
def test_vectors_are_what_others_compute(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(f"{kind}_folder")
    vectors = [
        json.loads(line) for line in done("inspect", folder, "--vectors").stdout.splitlines()
    ]
    assert len(vectors) >= 3
    portable, last = Portable(folder), vectors[-1]
    with Engine(folder) as engine:
        assert mistakes(portable, engine, vectors) == []
        numbers = "hidden" if kind == "reader_bundle" else "logits"
        planted = {numbers: [*last[numbers][:7], last[numbers][7] + 1]}
        if "answer" in last:
            planted |= {"answer": last["answer"] + ".", "answer_ids": [*last["answer_ids"], 5]}
        for name, value in planted.items():
            assert mistakes(portable, engine, [{**last, name: value}]) == [name]
        ids = [*last["ids"][:-2], last["ids"][-2] ^ 1, last["ids"][-1]]
        assert numbers in mistakes(portable, engine, [{**last, "ids": ids}])


def furthest(portable: Portable, file: Tensors, number: int, case: Any, move: int) -> float:
    """Largest difference to the oracle, as a share of a tensor's largest number."""
    source, mask, target = (file[f"{number}/{name}"] for name in ("source", "mask", "target"))
    rows = file.get(f"{number}/rows", np.arange(len(source)))
    found = portable.case(source ^ move, mask, target, case["past"], rows)
    shares = []
    for name in case["tensors"]:
        wanted = file[f"{number}/oracle/{name}"]
        off = np.abs(found[name] - wanted)
        # Without padding: columns of cross, of a prompt in the cache, or of an encoder's output.
        if name.startswith("cross"):
            off = np.swapaxes(off, 1, 2)[mask]
        elif name.startswith("past") and "encoder" not in portable.graphs:
            off = np.swapaxes(off, 1, 2)[:, : mask.shape[1]][mask[rows]]
        elif "decoder" not in portable.graphs and off.shape[:2] == mask.shape:
            off = off[mask]
        shares.append(float(off.max() / np.abs(wanted).max()))
    return max(shares)


@pytest.mark.parametrize("kind", ["bundle", "writer_bundle", "reader_bundle"])
def test_recorded_tensors_are_those_of_onnxruntime_alone(
    kind: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(f"{kind}_folder")
    portable = Portable(folder)
    with np.load(folder / "reference.npz") as file:
        index = json.loads(file["index"].tobytes())
        assert index.keys() == {"cases", "sources", "searches"}
        for number, case in enumerate(index["cases"]):
            assert furthest(portable, file, number, case, 0) < 1e-5
            assert furthest(portable, file, number, case, 1) > 1e-3


def test_the_manifest_shown_is_one(bundle_folder: Path) -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```", PAGE.read_text("utf-8"), re.S | re.M)
    Manifest.from_json(block, "the page")
    shown, real = json.loads(block), json.loads((bundle_folder / "manifest.json").read_bytes())
    assert shown.keys() == real.keys()
    assert shown["model"].keys() < real["model"].keys()
    assert shown["files"].keys() == real["files"].keys()
    (mine,), (theirs,) = shown["variants"].values(), real["variants"].values()
    assert mine.keys() == theirs.keys()
    for name in ("name", "precision", "providers", "opset", "cache", "reference"):
        assert mine[name] == theirs[name]
    assert roles(mine) == roles(theirs)


def roles(variant: Any) -> dict[tuple[str, str], Any]:
    """Roles and types of the tensors of each graph, in order, repeated ones once."""
    return {
        (name, side): [*dict.fromkeys((each["role"], each["type"]) for each in graph[side])]
        for name, graph in variant["graphs"].items()
        for side in ("inputs", "outputs")
    }


def plain(pattern: str, text: str) -> list[str]:
    """Matches of a pattern without lookahead and possessive quantifiers, as the page has it."""
    simple = re.sub(r"([+*?]|\{1,3\})\+", r"\1", pattern).replace(r"\s+(?!\S)", r"(?<blank>\s+)")
    assert not re.search(r"\(\?!|[+*?]\+|3}\+", simple)
    at, found = 0, []
    while match := regex.compile(simple).search(text, at):
        at = match.end()
        if match["blank"] and match.end() - match.start() > 1 and at < len(text):
            at -= 1
        found.append(text[match.start() : at])
    return found


@pytest.mark.parametrize("pattern", OURS, ids=["transferry", "gpt2", "cl100k", "o200k"])
def test_the_patterns_have_plain_equivalents(pattern: str) -> None:
    pattern = pattern.replace("$", r"\Z")  # `regex` lets $ precede a line feed too
    draw = random.Random(5)
    texts = ["".join(draw.choices("aZé7日'!s \t\r\n\u0301/.", k=24)) for _ in range(300)]
    assert all(plain(pattern, text) == regex.findall(pattern, text) for text in texts)
    careless = regex.compile(pattern.replace(r"(?!\S)", ""))
    assert any(careless.findall(text) != regex.findall(pattern, text) for text in texts)
