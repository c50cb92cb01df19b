"""Requests of the OpenAI API as they are parsed; tests/end_to_end/test_openai.py answers them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.commands import call, done
from transferry.runtime.engine.result import RowError
from transferry.runtime.jobs.formats.openai_batch import SETTINGS, Request, parse_request

CHAT, TEXT, VECTOR = (f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings"))


def request(number: int, prompt: Any, url: str = TEXT, **settings: Any) -> dict[str, Any]:
    key = {CHAT: "messages", TEXT: "prompt", VECTOR: "input"}[url]
    body = {"model": "ours", key: prompt, **settings}
    return {"custom_id": f"row-{number}", "method": "POST", "url": url, "body": body}


def written(path: Path, *requests: Any) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in requests))
    return path


def test_other_formats_hold_the_answers_too(writer_bundle_folder: Path, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", request(0, "the cat", max_tokens=3))
    lines = done("run", writer_bundle_folder, source, "--format-in", "openai", "-o", "-").stdout
    assert lines.strip("\n").count("\n") == 0
    refused = call(
        *("run", str(writer_bundle_folder), str(source), "--format", "openai", "--column", "url"),
        *("-o", str(tmp_path / "out.jsonl")),
    )
    assert refused.exit_code == 2
    assert "add --format-in openai" in refused.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**request(0, "a"), "custom_id": 7}, "expected custom_id, a text, found 7"),
        ({**request(0, "a"), "url": "/v1/audio"}, "expected url to be one of /v1/chat"),
        ({**request(0, "a"), "body": []}, "expected body, an object"),
        (request(0, ["a", 7]), "expected prompt to be a text, token ids, or a list of these"),
        (request(0, []), "expected prompt to be a text, token ids, or a list of these"),
        (request(0, "a", VECTOR, dimensions=0), "expected dimensions to be at least 1, found 0"),
        (request(0, "a", VECTOR, encoding_format="x"), "expected encoding_format to be float or"),
        (request(0, "a", logprobs=0), "logprobs = 0 has no counterpart here"),
        (request(0, "a", CHAT), "expected messages to be a list of messages"),
        (request(0, "a", logit_bias={"5": -100}), "logit_bias = .* has no counterpart here"),
        (request(0, "a", n="many"), 'n cannot be "many"'),
        (request(0, "a", n=True), "n cannot be true"),
        (request(0, [{"content": [{"type": "image_url"}]}], CHAT), "a message of texts"),
    ],
)
def test_what_cannot_be_answered_is_told(line: dict[str, Any], message: str) -> None:
    found = parse_request(line)
    error = found.error if isinstance(found, Request) else found
    assert error is not None
    assert re.search(message, error.message), error.message


def test_settings_get_our_names() -> None:
    everything: dict[str, Any] = {
        **dict(max_completion_tokens=9, temperature=0.5, top_p=0.9, seed=3, n=2, stop="\n"),
        **dict(top_k=-1, min_p=0.1, repetition_penalty=1.2, user="me", stream=False, logprobs=None),
    }
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = parse_request(request(0, [{"content": content}], CHAT, **everything))
    assert isinstance(found, Request)
    assert json.loads(str(found.text)) == [{"content": content}]
    assert found.settings == {
        **dict(max_length=9, temperature=0.5, top_p=0.9, seed=3, n_best=2, stop=("\n",), top_k=0),
        **dict(min_p=0.1, repetition_penalty=1.2, sample=True),
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(["custom_id", "url", "body", "method"])
BODIES = st.dictionaries(st.sampled_from([*SETTINGS, "messages", "prompt", "input", "x"]), JSON)


@settings(max_examples=40)
@given(line=st.dictionaries(NAMES, JSON | BODIES | st.sampled_from([CHAT, TEXT, VECTOR, None])))
def test_any_line_is_a_request_or_an_error(line: dict[str, Any]) -> None:
    found = parse_request({"custom_id": "a", "url": TEXT, **line})
    assert isinstance(found, Request | RowError)
