"""The package in js/ beside the Python runtime: the same ids, the same records."""

import hashlib
import json
import random
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transferry import Engine
from transferry.runtime.tokenizer.byte_pair import SINGLE_BYTES, SOURCES, Tokenizer
from transferry.runtime.tokenizer.patterns import OURS

JS = Path(__file__).resolve().parent.parent / "js"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="there is no node on the PATH")
needs_packages = pytest.mark.skipif(
    not (JS / "node_modules" / "onnxruntime-node").exists(),
    reason="onnxruntime-node is not installed in js/; `make js` installs it",
)

# What tokenizers get wrong: one of each kind, then mixtures of them.
PIECES = (
    *(
        "Straße",
        "Übergrößen",
        "ẞ",
        "İI ıi",
        "ſ's",
        "'S",
        "'LL",
        "'ſ",
        "don't",
        "DON'T",
        "’s",
        "\u212a",
    ),
    *(
        "e\u0301",
        "\u0301",
        "a\u0308\u0323",
        "क्षि",
        "ﬁ",
        "Ǆ",
        "ʰ",
        "ª",
        "Ⅷ",
        "²³",
        "½",
        "٣٤٥",
        "१२३४५",
    ),
    *(
        "日本語",
        "漢字かな交じり文",
        "한국어",
        "\u1112\u1161\u11ab",
        "ไทย",
        "עברית",
        "العربية",
        "𠮷",
        "𝒳",
    ),
    *(
        "😀",
        "👩‍👩‍👧‍👦",
        "🇩🇪",
        "👍🏽",
        "❤️",
        "\u200d",
        "\ufe0f",
        "\u200b",
        "\u2060",
        "\ufeff",
        "\u00ad",
    ),
    *(
        " ",
        "  ",
        "   \n",
        "\t",
        "\r\n",
        "\n\n",
        "\x85",
        "\xa0",
        "\u2028",
        "\u3000",
        "\u180e",
        "\x1c",
    ),
    *(
        "<s>",
        "</s>",
        "<|endoftext|>",
        "[MASK]",
        "<pad>",
        "<unk>",
        ">>fra<<",
        "▁",
        "\x00",
        "\x7f",
        "\\",
    ),
    *(
        "1234567",
        "1,000.5",
        "a1b2",
        "...",
        "?!\n",
        "--",
        "/path/x",
        "$$",
        "_a_",
        "\U0010ffff",
        "\ufffd",
    ),
    *(
        "\ud800",
        "\udc00x",
        "\ud83d\ude00",
        "anna " * 40,
        "a" * 700,
        " " * 700,
        "é" * 300,
        "^" * 600,
    ),
)


def hard_strings(count: int = 1000) -> list[str]:
    rng = random.Random(0)
    mixed = ["".join(rng.choices(PIECES[:-5], k=rng.randint(2, 6))) for _ in range(count)]
    singles = [chr(code) for code in range(0, 0xD800, 613)]
    return [*PIECES, *singles, *mixed][:count]


def npm_test(cases: Path) -> str:
    """Runs the tests of js/ with the cases; returns what they print."""
    assert NODE is not None
    command = [NODE, "--test", "--test-reporter=tap", *map(str, sorted(JS.glob("test/*.test.js")))]
    environment = {"PATH": str(Path(NODE).parent), "TRANSFERRY_CASES": str(cases)}
    made = subprocess.run(
        command, cwd=JS, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert made.returncode == 0, made.stdout[-6000:] + made.stderr[-2000:]
    return made.stdout


def write_cases(path: Path, answers: list[dict[str, Any]], ids: list[dict[str, Any]]) -> Path:
    def plain(value: object) -> object:
        assert isinstance(value, np.ndarray)
        return value.tolist()

    path.write_text(json.dumps({"answers": answers, "ids": ids}, default=plain))
    return path


def answers_of(
    folder: Path, task: str, options: dict[str, Any], texts: list[str]
) -> dict[str, Any]:
    methods = {"generate": "generate", "embed": "embed", "fill-mask": "fill_mask"}
    with Engine.load(folder, variant="portable") as engine:
        found = getattr(engine, methods[task])(texts, **options)
        records = [each.record(options.get("n_best", 1)) for each in found]
    case = {"bundle": str(folder), "task": task, "texts": texts, "records": records}
    return {**case, "options": options}


@needs_node
@pytest.mark.parametrize("pattern", OURS)
def test_hard_strings_have_the_same_ids(tmp_path: Path, pattern: str) -> None:
    made = (
        " 's|er|ie|an|in|nn|ann|anna| a| an|  |\n\n|\xc3\xa9|\xe6\x97\xa5|\xf0\x9f"
        "|12|123|...|aa|aaaa"
    )
    tokens = [*SINGLE_BYTES, *dict.fromkeys(each.encode("latin-1") for each in made.split("|"))]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    kept = [rank for rank in range(len(tokens)) if rank % 7 or rank < 256]
    ids = []
    for name, chosen in (("whole", None), ("cut", kept)):
        tokenizer = Tokenizer("test", pattern, ranks, chosen, SOURCES)
        folder = tmp_path / name
        folder.mkdir()
        tokenizer.save(folder)
        seal(folder, tokenizer.vocabulary_size)
        texts = hard_strings()
        found = tokenizer.encode_batch(texts)
        decoded = [tokenizer.decode(each) for each in found]
        ids.append({"bundle": str(folder), "texts": texts, "ids": found, "decoded": decoded})
    assert "ok 1 - 1000 texts" in npm_test(write_cases(tmp_path / "cases.json", [], ids))


def seal(folder: Path, vocabulary: int) -> None:
    """Writes a manifest that lists the files of a tokenizer."""
    files = {
        path.name: {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "size": path.stat().st_size,
        }
        for path in folder.iterdir()
    }
    manifest = {"format": 8, "model": {"vocabulary_size": vocabulary}, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))


SEARCHES: tuple[dict[str, Any], ...] = (
    {},
    {"beam": 4, "n_best": 3},
    {"beam": 3, "early_stopping": "never", "length_penalty": 0.6, "repetition_penalty": 1.3},
    {
        "beam": 3,
        "early_stopping": False,
        "renormalise": True,
        "no_repeat_ngram": 2,
        "min_length": 2,
    },
    {"beam": 2, "prefix": [5], "forced_begin": 6, "forced_end": [2], "suppress_begin": [7]},
    {"sample": True, "n_best": 3, "seed": 2**53 - 1},
    {"sample": True, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "temperature": 1.5},
    {"repetition_penalty": 1.5, "suppress": ["a", 9], "stop": ["e", "n"], "prompt_ngrams": True},
    {"suppress_sequences": [[5, 6], [8]], "no_repeat_ngram": 1, "scores": False},
)


@needs_node
@needs_packages
def test_the_records_are_those_of_python(
    tmp_path: Path, bundle_folder: Path, writer_bundle_folder: Path, reader_bundle_folder: Path
) -> None:
    texts = ["anna", "a cat and a dog", "", "b" * 2000, "one two three", " x ", "\u3000"]
    answers = [
        answers_of(folder, "generate", {"max_length": 8, **options}, texts)
        for folder, options in product((bundle_folder, writer_bundle_folder), SEARCHES)
    ]
    masked = ["a [MASK] b", "[MASK]", "none", "a [MASK] [MASK].", ""]
    answers += [
        answers_of(reader_bundle_folder, "fill-mask", {"top": 3}, masked),
        answers_of(reader_bundle_folder, "embed", {}, texts),
        answers_of(
            reader_bundle_folder, "embed", {"pooling": "first", "normalise": True}, texts[:2]
        ),
    ]
    kinds = {
        record["error"]["kind"]
        for each in answers
        for record in each["records"]
        if "error" in record
    }
    assert kinds == {"empty", "too-long", "no-mask"}
    printed = npm_test(write_cases(tmp_path / "cases.json", answers, []))
    assert "# skipped 0" in printed or "onnxruntime-web is not installed" in printed
