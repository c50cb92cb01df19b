"""The runtime of docs/examples, written from docs/portability.md alone: answers as the engine's."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.commands import PATIENCE
from tests.optional import CHECKOUT, PACKAGES, program
from transferry import Engine

RUNTIME = CHECKOUT / "docs" / "examples" / "second-runtime" / "runtime.mjs"
SOURCE = RUNTIME.read_text(encoding="utf-8")
LINES = [
    *("a man in a red shirt", "Two dogs run.", "x", " we're  HERE, don'T ", "o'ſ o'LL", "\x1c"),
    *("1234567 and 1,000.5", "Straße\tÜ", "", "日本語 👍🏽", "a\u2028b\x85", "cat " * 40),
]
SEARCHES: list[dict[str, Any]] = [
    {},
    {"beam": 4, "n_best": 3},
    {"beam": 3, "early_stopping": "never", "length_penalty": 0.6, "repetition_penalty": 1.3},
    {"beam": 3, "early_stopping": False, "renormalise": True, "no_repeat_ngram": 2},
    {"min_length": 7, "suppress_begin": [7], "prefix": [5, 6], "forced_end": [9]},
    {"sample": True, "n_best": 2, "seed": 2**53 - 1},
    {"sample": True, "top_k": 9, "top_p": 0.9, "typical_p": 0.9, "min_p": 0.01, "seed": 3},
    {"repetition_penalty": 1.5, "suppress": [9], "stop": ["e", "n"], "prompt_ngrams": True},
    {"suppress_sequences": [[5, 6], [8]], "no_repeat_ngram": 1, "max_total_length": 30},
]
SEARCHES = [{"max_length": 8, **each} for each in SEARCHES]
# Faults: a line of the runtime and a wrong one.
FAULTS = {
    "merges the last of equals": ("if (rank < best)", "if (rank <= best)"),
    "no mask of the padding": (
        "row.map(() => true), ...pad.map(() => false)",
        "row.map(() => true)",
    ),
    "the higher token of equals": ("b.score - a.score", "a.score - b.score"),
    "score without the end": ("longer.tokens.length ** (", "tokens.length ** ("),
    "an end too early": ("if (tokens.length < Math.max", "if (tokens.length + 1 < Math.max"),
    "other numbers": ("BigInt(drawn / 4 + 1)", "BigInt(drawn / 4)"),
}

pytestmark = pytest.mark.optional("node", "onnxruntime-node")


def printed(folder: Path, bundle: Path, *options: str, source: str = SOURCE) -> str:
    """The output of the runtime in a folder beside the packages."""
    if not (folder / "node_modules").exists():
        (folder / "node_modules").symlink_to(PACKAGES)
    (folder / "runtime.mjs").write_text(source, encoding="utf-8")
    found = subprocess.run(
        [str(program("node")), str(folder / "runtime.mjs"), str(bundle), *options],
        capture_output=True,
        check=False,
        input="\n".join(LINES).encode(),
        timeout=PATIENCE,
    )
    assert found.returncode == 0, found.stderr.decode()
    return found.stdout.decode()


def rounded(answer: dict[str, Any], end: int) -> dict[str, Any]:
    """The parts of an answer in both runtimes."""
    tokens = [*answer["tokens"]]
    if tokens[-1:] == [end]:
        tokens.pop()
    numbers = {name: pytest.approx(answer[name], rel=1e-5) for name in ("log_probability", "score")}
    return {"tokens": tokens, "text": answer["text"], "end": answer["finish_reason"], **numbers}


def answers(folder: Path, bundle: Path, source: str = SOURCE) -> list[list[dict[str, Any]] | None]:
    """The answers to each line by each search; None for an error."""
    found = printed(folder, bundle, json.dumps(SEARCHES), source=source).splitlines()
    return [json.loads(line).get("answers") for line in found]


def expected(bundle: Path) -> list[list[dict[str, Any]] | None]:
    """The answers of the engine."""
    names = ("tokens", "text", "finish_reason", "log_probability", "score")
    with Engine(bundle, variant="portable") as engine:
        columns = [[*engine.generate(LINES, split_lines=False, **each)] for each in SEARCHES]
    return [
        [{name: getattr(answer, name) for name in names} for answer in result.hypotheses] or None
        for row in zip(*columns, strict=True)
        for result in row
    ]


def differences(found: list[Any], wanted: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    """Lines and searches with other answers. The end token is 2 in both bundles."""
    cases = [(line, search) for line in LINES for search in SEARCHES]
    plain = [
        [row and [rounded(answer, 2) for answer in row] for row in rows] for rows in (found, wanted)
    ]
    return [case for case, one, other in zip(cases, *plain, strict=True) if one != other]


@pytest.mark.parametrize("kind", ["bundle_folder", "writer_bundle_folder"])
def test_answers_are_those_of_the_engine(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    bundle: Path = request.getfixturevalue(kind)
    assert "recorded answers equal" in printed(tmp_path, bundle, "--check")
    wanted = expected(bundle)
    assert differences(answers(tmp_path, bundle), wanted) == []
    assert sum(row is None for row in wanted) < len(wanted) / 2
    for name, (line, changed) in FAULTS.items() if kind == "bundle_folder" else ():
        assert line in SOURCE, name
        broken = answers(tmp_path, bundle, SOURCE.replace(line, changed))
        assert differences(broken, wanted), name


def test_it_is_short() -> None:
    assert SOURCE.count("\n") <= 600
