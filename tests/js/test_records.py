"""Tasks in js/: the records of `run`."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.build_model.importing.huggingface.heads import Theirs
from tests.conftest import make_bundle
from tests.end_to_end import test_chats
from tests.end_to_end.chat_templates import TEMPLATES
from tests.js.cases import answers_of, npm_test, seal, write_cases
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.runtime.errors import UsageError
from transferry.runtime.tokenizer.chat import ChatError

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


TEXTS = ["anna", "a cat and a dog", "", "b" * 2000, "one two three", " x ", "\u3000"]
# No ids of the bundles, and no ids.
ODD: list[Any] = [[], [5, 10**6], [-1], [3, 4], 5, 1.5]
MODES: tuple[Literal["as-text", "as-tokens"], ...] = ("as-text", "as-tokens")
LINES = ["\na cat\r\n \n\r a dog\n", "x\n", "\n", "a\n" + "b" * 2000, "a\u2028b\x0bc\nd"]


@pytest.mark.optional("node")
def test_the_units_of_the_package() -> None:
    assert "# fail 0" in npm_test()


def compared(tmp_path: Path, answers: list[dict[str, Any]]) -> set[str]:
    """Compares the records of both; returns the kinds of errors among them."""
    printed = npm_test(write_cases(tmp_path / "cases.json", answers, []))
    assert "ok 1 - onnxruntime-node gives the records of Python" in printed
    return {
        record["error"]["kind"]
        for each in answers
        for record in each["records"]
        if "error" in record
    }


@pytest.mark.optional("node", "onnxruntime-node", "sentencex-wasm")
def test_generated_records(
    tmp_path: Path, bundle_folder: Path, writer_bundle_folder: Path, weight_only_bundle_folder: Path
) -> None:
    answers = [
        answers_of(folder, "generate", {"max_length": 8, **options}, [*TEXTS, *LINES, *ODD])
        for folder, options in product((bundle_folder, writer_bundle_folder), SEARCHES)
    ]
    long = ["One. Two three! " * 9, "a" * 150, " " * 700 + "x", "Dr. A. B? " * 12]
    long += [
        f" x {'b. ' * 40}\n\n{'c ' * 50}",
        "\u3000".join(["e", "\x1c f ", "g" * 70]),
        "a. \udead " * 30,
    ]
    pairs = [("anna", "a cat"), ("a dog", "b" * 2000), ("", "x"), ("x", " "), ("a", "b")]
    answers += [
        answers_of(bundle_folder, "generate", {"max_length": 8, "split_lines": False}, LINES),
        *(
            answers_of(
                bundle_folder, "generate", {"long_rows": "split", **options}, [*long, *TEXTS]
            )
            for options in ({"max_length": 8}, {"max_length": 5, "sample": True, "stop": ["e"]})
        ),
        answers_of(bundle_folder, "score", {}, pairs),
        answers_of(bundle_folder, "score", {"long_rows": "truncate"}, pairs),
        answers_of(writer_bundle_folder, "score", {}, [*TEXTS, "e"]),
        *(
            answers_of(weight_only_bundle_folder, "generate", options, TEXTS, "portable-int8")
            for options in ({"max_length": 8}, {"max_length": 8, "beam": 4})
        ),
    ]
    assert compared(tmp_path, answers) == {
        *("empty", "lines", "no-text", "prompt", "too-long", "too-short")
    }


@pytest.mark.optional("node", "onnxruntime-node")
def test_records_of_an_encoder(tmp_path: Path, reader_bundle_folder: Path) -> None:
    masked = ["a [MASK] b", "[MASK]", "none", "a [MASK] [MASK].", ""]
    answers = [
        answers_of(reader_bundle_folder, "fill-mask", {"top": 3}, masked),
        answers_of(reader_bundle_folder, "fill-mask", {"mask": "<m>"}, ["a <m>", masked[0]]),
        answers_of(reader_bundle_folder, "embed", {}, TEXTS),
        answers_of(
            reader_bundle_folder, "embed", {"pooling": "first", "normalise": True}, TEXTS[:2]
        ),
    ]
    assert compared(tmp_path, answers) == {"empty", "too-long", "no-mask"}


@pytest.mark.optional("node", "onnxruntime-node")
def test_records_of_heads(
    tmp_path: Path, ranker_bundle_folder: Path, tagger_bundle_folder: Path
) -> None:
    pairs: list[Any] = [("anna", "a cat"), ("one two three " * 9, "a dog"), ("", "x"), ("a", 5)]
    pairs.append(("a " * 9, "b " * 30))
    tagged = ["anna and the cat 's", "Häuser, Straße!", "", "日本語 😀 x", "the " * 500, "don't"]
    kinds = ("none", "simple", "first", "average", "max")
    answers = [
        answers_of(ranker_bundle_folder, "classify", {}, TEXTS),
        answers_of(ranker_bundle_folder, "classify", {"long_rows": "error"}, TEXTS),
        answers_of(ranker_bundle_folder, "classify", {}, [5, ("a", None), ("", 5), ("a", 5)]),
        answers_of(ranker_bundle_folder, "rank", {}, pairs),
        answers_of(ranker_bundle_folder, "rank", {"long_rows": "error"}, pairs),
        answers_of(ranker_bundle_folder, "embed", {}, TEXTS),
        *(answers_of(tagger_bundle_folder, "tag", {"aggregation": k}, tagged) for k in kinds),
        answers_of(tagger_bundle_folder, "tag", {"long_rows": "truncate"}, tagged),
    ]
    with pytest.raises(UsageError, match="aggregation must be one of none, simple"):
        answers_of(tagger_bundle_folder, "tag", {"aggregation": "last"}, tagged)
    assert compared(tmp_path, answers) == {"empty", "no-text", "too-long"}
    tags = [tag for each in answers for record in each["records"] for tag in record.get("tags", ())]
    assert {"PER", "B-PER", "O"} <= {tag["label"] for tag in tags}


@pytest.mark.optional("node", "onnxruntime-node", "@huggingface/jinja")
def test_records_of_chats(tmp_path: Path, chat_bundle_folder: Path) -> None:
    parts: list[Any] = ["a", {"type": "text", "text": "dog"}]
    told: list[Any] = ["a cat", "", "😀 \u2028", parts, [], "b" * 2000]
    rows: list[Any] = [[{"role": "user", "content": content}] for content in told]
    rows += [
        [{"role": "system", "content": "x"}, {"role": "user", "content": "a"}],
        *([], "a plain text", [3, 4], [{"role": "user", "content": "a", "k": {"n": [1, None]}}]),
    ]
    answers = [
        answers_of(chat_bundle_folder, "generate", {"max_length": 6, **options}, rows)
        for options in (
            {},
            {"chat_template_kwargs": {"tone": "soft "}, "sample": True, "first_row": 4},
            {"chat_template_kwargs": {"eos_token": "."}, "beam": 2, "long_rows": "truncate"},
        )
    ]
    assert compared(tmp_path, answers) == {"prompt", "too-long"}
    taken: dict[str, Any] = {"chat_template_kwargs": {"tools": []}}
    with pytest.raises(UsageError, match="cannot set tools, which the chat decides"):
        answers_of(chat_bundle_folder, "generate", taken, rows)
    refused = answers_of(chat_bundle_folder, "generate", taken, rows, refused="cannot set tools")
    assert "# fail 0" in npm_test(write_cases(tmp_path / "cases.json", [refused], []))


def _asked(content: Any) -> list[dict[str, Any]]:
    return [test_chats.SYSTEM, {"role": "user", "content": content}]


# Lists of texts, and of others; then variables of templates.
IN_PARTS: list[Any] = [
    *(test_chats.PARTS, ["a text ", test_chats.PARTS[1], ""], [], [{"type": "image"}]),
    *([*test_chats.PARTS, {"type": "text", "text": 5}], [None], [["a"]]),
]
VARIABLES: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"enable_thinking": True, "x": [1, None]},
    {"date_string": "1 Jan 2026"},
    {"bos_token": "?"},
]


@pytest.mark.optional("node", "@huggingface/jinja")
def test_chats_have_the_ids_of_python(tmp_path: Path) -> None:
    """Messages that hold or complete a token of the template are refused."""
    cases = []
    for name in sorted({*TEMPLATES} - {"careless"}):
        tokenizer = test_chats.ours(name)
        folder = tmp_path / name
        folder.mkdir()
        tokenizer.save(folder)
        seal(folder, tokenizer.vocabulary_size)
        given: list[Any] = [(messages, {}) for messages in test_chats.CHATS]
        given += [(_asked(content), {}) for content in IN_PARTS]
        given += [([test_chats.USER], variables) for variables in VARIABLES]
        chats: list[Any] = []
        for messages, variables in given:
            try:
                ids = tokenizer.encode_chat(messages, variables)
            except ChatError:
                ids = None
            # DeepSeek's template writes an object as Python does, and Gemma's goes through an
            # undefined content, or trims a number, which the other engine refuses.
            lacks = "5}" in str(messages) or any("content" not in each for each in messages)
            differs = {"deepseek": "tool_calls" in str(messages), "gemma 3": lacks}
            if not differs.get(name):
                chats.append((messages, ids, variables))
        token = TEMPLATES[name][1][0]
        chats += [(_asked(f"a {token} b"), None, {}), ([test_chats.USER], None, {"x": [token]})]
        if name == "phi 4 mini":
            chats.append(([{"role": "end", "content": "x"}], None, {}))
        cases.append({"bundle": str(folder), "chats": [*chats, ([], None, {})]})
    assert sum(ids is not None for case in cases for _, ids, _ in case["chats"]) > 80
    assert "# fail 0" in npm_test(write_cases(tmp_path / "cases.json", [], [], chats=cases))


@pytest.mark.optional("node", "onnxruntime-node")
@pytest.mark.parametrize(("kind", "token"), [("bert", "</s>"), ("mistral", "<pad>")])
def test_a_separator_within_a_text(kind: str, token: str, tmp_path: Path, traces: None) -> None:
    """The graph would begin the second segment there, or read padding."""
    Theirs(kind, 0, tmp_path / "theirs", "ForSequenceClassification")
    import_pretrained(tmp_path / "theirs", tmp_path / "run")
    bundle = make_bundle(tmp_path / "run", tmp_path / "bundle")
    rows = [f"the {token} cat", ("the cat", f"sat {token}"), "the cat", ("the cat", "sat")]
    given = [answers_of(bundle, "classify", {}, rows, special=mode) for mode in MODES]
    assert compared(tmp_path, given) == {"tokenizer"}
