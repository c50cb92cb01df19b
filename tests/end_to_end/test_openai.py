"""Requests of the OpenAI Batch API: responses that the openai package reads, answer by answer."""

import base64
import csv
import json
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import call, done, fails
from transferry import Engine
from transferry.runtime.jobs.formats.openai_batch import (
    NEUTRAL,
    SETTINGS,
    WITHOUT_EFFECT,
    Request,
    parse_request,
)

CHAT, TEXT, VECTOR = (f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings"))
KEYS = {CHAT: "messages", TEXT: "prompt", VECTOR: "input"}
# Of openai.types: responses, and parameters of requests.
MODELS = {CHAT: "chat.ChatCompletion", TEXT: "Completion", VECTOR: "CreateEmbeddingResponse"}
BASE = "completion_create_params.CompletionCreateParamsBase"
TABLE = {CHAT: f"chat.{BASE}", TEXT: BASE, VECTOR: "EmbeddingCreateParams"}
Body = dict[str, Any]


def lines(url: str, *bodies: Body) -> list[Body]:
    return [{"custom_id": f"{n}", "url": url, "body": body} for n, body in enumerate(bodies)]


def asked(value: Any, url: str = TEXT, **settings: Any) -> Body:
    return {"model": "ours", KEYS[url]: value, **settings}


def of_openai(name: str) -> Any:
    """A type of the openai package, which takes a second to import: not while collecting."""
    return attrgetter(name)(pytest.importorskip("openai.types"))


def answered(folder: Path, bundle: Path, rows: list[Body], *options: str, code: int = 0) -> Any:
    """Runs requests; returns the responses, after the openai package has read those of answers."""
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run: list[str | Path] = [
        *("run", bundle, source, "--format-in", "openai", "-o", out, "--force"),
        *options,
    ]
    assert call(*run).exit_code == code
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["custom_id"] for line in found] == [row.get("custom_id") for row in rows]
    for row, line in zip(rows, found, strict=True):
        assert (line["response"] is None) != (line["error"] is None)
        if line["error"] is None and line["response"]["status_code"] == 200:
            validate(of_openai(MODELS[row["url"]]), line["response"]["body"])
    return found


def validate(model: Any, body: Body) -> None:
    """Reads a body as openai's client does, which unpacks base64 itself."""
    data = [
        {**each, "embedding": unpacked(each["embedding"]).tolist()} for each in body.get("data", ())
    ]
    read = model.model_validate({**body, **({"data": data} if data else {})}, strict=True)
    assert read.model_extra == {}, "openai knows every key"


def unpacked(value: Any) -> Any:
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value), "<f4")
    return np.array(value, np.float32)


def bodies(found: list[Body]) -> list[Body]:
    return [line["response"]["body"] for line in found]


def test_repeated_ids_are_counted(writer_bundle_folder: Path, tmp_path: Path) -> None:
    rows = lines(TEXT, *[asked("x", max_tokens=2)] * 5)
    for place, name in ((2, "1"), (3, "0"), (4, "1")):
        rows[place]["custom_id"] = name
    answered(tmp_path, writer_bundle_folder, rows)
    summary = json.loads((tmp_path / "out.jsonl.summary.json").read_text())
    assert (summary["repeated_ids"], summary["first_repeated_id"]) == (3, "1")
    run = "run", writer_bundle_folder, tmp_path / "in.jsonl", "--format-in", "openai"
    told = "3 rows with the custom_id of an earlier row, first '1'"
    # Requests are answered by responses where no ending names another format.
    for out in ("-", tmp_path / "other"):
        made = call(*run, "-o", out)
        assert told in made.stderr
        found = made.stdout if out == "-" else (tmp_path / "other").read_text()
        assert found == (tmp_path / "out.jsonl").read_text()


@pytest.fixture(scope="module")
def writer(writer_bundle_folder: Path) -> Engine:
    return Engine(writer_bundle_folder)


@pytest.fixture(scope="module")
def reader(reader_bundle_folder: Path) -> Engine:
    return Engine(reader_bundle_folder)


def test_every_row_has_its_own_settings(writer: Engine, tmp_path: Path) -> None:
    """Of each row the answer that the engine gives to that row alone."""
    drawn = {"temperature": 0.8, "max_tokens": 6}
    settings: list[tuple[Body, Body]] = [
        ({"max_tokens": 3}, {"max_length": 3}),
        ({"max_tokens": 7, "stop": "e"}, {"max_length": 7, "stop": ("e",)}),
        ({"max_tokens": 7, "stop": []}, {"max_length": 7}),
        ({**drawn, "seed": 3}, {"temperature": 0.8, "sample": True, "seed": 3, "max_length": 6}),
        ({**drawn, "seed": 9, "n": 3}, {"n_best": 3, "seed": 9, "temperature": 0.8}),
        ({**drawn, "top_p": 0.5}, {"temperature": 0.8, "top_p": 0.5}),
        ({"max_tokens": 5.0, "min_tokens": 5}, {"max_length": 5, "min_length": 5}),
        ({"max_tokens": 4, "temperature": 0, "top_p": 0.1, "seed": 1}, {"max_length": 4}),
    ]
    for options in (one for _, one in settings if "temperature" in one):
        options |= {"sample": True, "max_length": 6}
    rows = [asked("the cat", **body) for body, _ in settings for _ in range(2)]
    wanted = [options for _, options in settings for _ in range(2)]
    found = bodies(answered(tmp_path, writer.bundle.folder, lines(TEXT, *rows), "--canary", "1/1"))
    for number, (body, options) in enumerate(zip(found, wanted, strict=True)):
        (alone,) = writer.generate(["the cat"], first_row=number, **options)
        texts = [choice["text"] for choice in body["choices"]]
        assert texts == [one.text for one in alone.hypotheses], options
        assert (body["object"], body["model"], body["created"]) == ("text_completion", "ours", 0)
        for choice, one in zip(body["choices"], alone.hypotheses, strict=True):
            stopped = "length" if one.finish_reason == "length" else "stop"
            assert choice["finish_reason"] == stopped
        read, written = alone.source_tokens, sum(len(one.tokens) for one in alone.hypotheses)
        assert body["usage"] == {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }
    summary = json.loads((tmp_path / "out.jsonl.summary.json").read_text())
    assert summary["repeated"] == 5, "rows that do not sample, each a second time"


NEUTRAL_BODY: Body = {
    "n": 1,
    "stop": [],
    "best_of": 1,
    "length_penalty": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "response_format": {"type": "text"},
    "parallel_tool_calls": True,
    "seed": 7,
    "min_p": 0,
    "frequency_penalty": 0,
    "logprobs": False,
    "stream": False,
    "min_tokens": 0,
    "echo": False,
    "tools": [],
    "tool_choice": "auto",
    "user": "me",
    "logit_bias": {},
    "suffix": None,
}


def test_settings_that_ask_for_nothing_are_no_settings(writer: Engine, tmp_path: Path) -> None:
    rows = [asked("the cat", max_tokens=5)]
    rows += [{**rows[0], name: value} for name, value in NEUTRAL_BODY.items()]
    rows.append(rows[0] | NEUTRAL_BODY)
    found = answered(tmp_path, writer.bundle.folder, lines(TEXT, *rows))
    answers = [body["choices"] for body in bodies(found)]
    assert answers == [answers[0]] * len(rows)
    summary = json.loads((tmp_path / "out.jsonl.summary.json").read_text())
    assert summary["repeated"] == len(rows) - 1


def test_lists_of_prompts(writer: Engine, tmp_path: Path) -> None:
    texts, ids = ["the cat", "two men", "the cat"], [[5, 6, 7], [8]]
    drawn: Body = {"n": 2, "temperature": 1.0, "seed": 5}
    rows = [
        asked(texts, max_tokens=5),
        asked(texts[:2], max_tokens=5, **drawn),
        *(asked(ids, max_tokens=5), asked(ids[0], max_tokens=5), asked(["x", ""], max_tokens=5)),
        asked(ids[0], max_tokens=1_000_000),
    ]
    found = answered(tmp_path, writer.bundle.folder, lines(TEXT, *rows), code=6)
    choices = [each["choices"] for each in bodies(found)[:4]]
    for each in choices:
        assert [choice["index"] for choice in each] == list(range(len(each)))
    greedy = list(writer.generate(texts, max_length=5))
    assert [choice["text"] for choice in choices[0]] == [each.text for each in greedy]
    assert bodies(found)[0]["usage"]["prompt_tokens"] == sum(one.source_tokens for one in greedy)
    named: dict[str, Any] = {"sample": True, "n_best": 2, "seed": 5, "max_length": 5}
    first = next(writer.generate([texts[0]], first_row=1, **named))
    assert [choice["text"] for choice in choices[1][:2]] == [one.text for one in first.hypotheses]
    assert [one["text"] for one in choices[2]] == [
        each.text for each in writer.generate(ids, max_length=5)
    ]
    assert choices[3][0] == choices[2][0]
    error = bodies(found)[4]["error"]
    assert (error["code"], error["message"][:8]) == ("empty", "input 1:")
    assert found[5]["response"]["status_code"] == 200
    table = tmp_path / "out.csv"
    run = "run", writer.bundle.folder, tmp_path / "in.jsonl", "--format-in", "openai", "-o", table
    assert "csv output has one answer a request" in call(*run).stderr


def test_embeddings(reader: Engine, tmp_path: Path) -> None:
    texts = ["a cat", "b", "a cat"]
    ids = [[5, 6, 7], [8]]
    rows = [
        *(asked(value, VECTOR) for value in (texts[0], texts, ids, ids[0])),
        *(asked(texts, VECTOR, encoding_format=form) for form in ("float", "base64")),
        *(asked(texts, VECTOR, dimensions=size) for size in (3, 10_000)),
        *(asked("", VECTOR), asked([[10**6]], VECTOR)),
    ]
    task = "--task", "embed", "--canary", "1/1"
    found = answered(tmp_path, reader.bundle.folder, lines(VECTOR, *rows), *task, code=6)
    vectors = np.stack([each.vector for each in reader.embed(texts)])
    read = [
        np.stack([unpacked(each["embedding"]) for each in body["data"]])
        for body in bodies(found)[:7]
    ]
    assert np.array_equal(read[0], vectors[:1])
    for each in (read[1], read[4], read[5]):
        assert np.array_equal(each, vectors)
    assert np.array_equal(read[6], vectors[:, :3]), "as truncate_dim of sentence-transformers"
    tokens = reader.bundle.tokenizer.special.wrap(reader.bundle.tokenizer.encode("a cat"))
    # The requests tell the task.
    (same,) = bodies(answered(tmp_path, reader.bundle.folder, lines(VECTOR, asked(tokens, VECTOR))))
    run: list[Any] = ["run", reader.bundle.folder, tmp_path / "in.jsonl", "--format-in", "openai"]
    fails(2, "asks for task embed, not fill-mask; add --task embed", *run, "--task", "fill-mask")
    assert np.array_equal(unpacked(same["data"][0]["embedding"]), vectors[0])
    assert same["usage"] == {"prompt_tokens": len(tokens), "total_tokens": len(tokens)}
    assert np.array_equal(read[2][0], read[3][0])
    codes = [body["error"]["code"] for body in bodies(found)[7:]]
    assert codes == ["settings", "empty", "prompt"]
    texts_of = [each["embedding"] for each in bodies(found)[1]["data"]]
    for vector, row in zip(texts_of, vectors, strict=True):
        assert [repr(number) for number in vector] == [str(number) for number in row]


def test_jobs_are_resumed_and_parted(writer: Engine, tmp_path: Path) -> None:
    settings: list[Body] = [{"seed": 2, "temperature": 1.0}, {}, {"n": 2, "temperature": 0.7}]
    rows = lines(
        TEXT, *[asked(["the cat", "x"], max_tokens=3, **settings[n % 3]) for n in range(8)]
    )
    rows[5]["body"]["prompt"] = ""
    bundle, out = writer.bundle.folder, tmp_path / "resumed.jsonl"
    whole = answered(tmp_path, bundle, rows, code=6)
    run: list[str | Path] = ["run", bundle, tmp_path / "in.jsonl", "--format-in", "openai"]
    run += ["--chunk-rows", "2"]
    stopped = call(*run, "-o", out, "--max-errors", "0")
    assert "4 rows are saved" in stopped.stderr
    assert call(*run, "-o", out).exit_code == 6
    assert out.read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    parts = [tmp_path / f"{n}.jsonl" for n in (1, 2)]
    for n, part in enumerate(parts, start=1):
        call(*run, "-o", part, "--partition", f"{n}/2")
    call("merge", *parts, "-o", tmp_path / "merged.jsonl")
    assert (tmp_path / "merged.jsonl").read_bytes() == out.read_bytes()
    table = tmp_path / "single.csv"
    rows = lines(TEXT, *[asked("the cat", max_tokens=3, **each) for each in settings])
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done(*run, "-o", table)
    with table.open(newline="") as file:
        listed = [row["n_best"] and len(json.loads(row["n_best"])) for row in csv.DictReader(file)]
    assert listed == ["", "", 2]
    assert len(whole) == 8


def test_error_and_response_exclude_each_other(writer: Engine, tmp_path: Path) -> None:
    rows: list[Any] = [
        *lines(TEXT, asked("the cat", max_tokens=3), asked("", max_tokens=3)),
        {"custom_id": "b", "url": TEXT, "body": asked("x", logit_bias={"5": 1})},
        {"custom_id": "c", "url": VECTOR, "body": asked("x", VECTOR)},
        {"custom_id": "d", "url": "/v1/audio", "body": {}},
        {"custom_id": "e", "url": TEXT, "body": asked("x", n=3)},
        {"url": TEXT, "body": asked("x")},
    ]
    found = answered(tmp_path, writer.bundle.folder, rows, code=6)
    codes = [line["response"] and line["response"]["status_code"] for line in found]
    assert codes == [200, 400, 400, 400, None, 400, None]
    errors = [body["error"] for body in bodies([found[place] for place in (1, 2, 3, 5)])]
    assert [each["code"] for each in errors] == ["empty", "malformed", "settings", "settings"]
    assert {tuple(each) for each in errors} == {("message", "type", "param", "code")}
    assert errors[-1]["message"].startswith("n = 3 needs a temperature above 0")
    assert [found[place]["error"]["code"] for place in (4, 6)] == ["malformed"] * 2


def test_chats(chat_bundle_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    user = {"role": "user", "content": "the cat"}
    rows = [asked([user], CHAT, max_completion_tokens=4)]
    rows.append(
        asked([{**user, **parts("the ", "cat")}], CHAT, max_tokens=6, temperature=1, n=2, seed=3)
    )
    rows.append(asked([user], CHAT, max_tokens=4, tools=[{"type": "function"}]))
    found = bodies(answered(tmp_path, chat_bundle_folder, lines(CHAT, *rows), code=6))
    with Engine(chat_bundle_folder) as engine:
        (greedy,) = engine.generate([[user]], max_length=4)
        named: dict[str, Any] = {"sample": True, "n_best": 2, "seed": 3, "max_length": 6}
        (drawn,) = engine.generate([[{**user, "content": "the \ncat"}]], first_row=1, **named)
    for body, wanted in zip(found, (greedy, drawn), strict=False):
        texts = [choice["message"]["content"] for choice in body["choices"]]
        assert texts == [one.text for one in wanted.hypotheses]
    assert found[2]["error"]["message"].startswith("tools = ")


def calls(arguments: Any) -> Body:
    return {"tool_calls": [{"id": "x", "function": {"name": "f", "arguments": arguments}}]}


def parts(*texts: str) -> Body:
    return {"content": [{"type": "text", "text": text} for text in texts]}


def requested(message: Body) -> Request:
    (line,) = lines(CHAT, asked([{"role": "assistant", **message}], CHAT))
    found = parse_request(line)
    assert isinstance(found, Request)
    return found


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": ["a", {"type": "input_text", "text": "b"}]}, parts("a", "b")),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, parts("no")),
        ({"content": None, "tool_calls": []}, {"content": ""}),
        (calls('{"city": "K\u00f6ln"}'), {"content": "", **calls({"city": "K\u00f6ln"})}),
        (calls(" "), {"content": "", **calls({})}),
        ({"role": "tool", **parts("a", "b")}, {"role": "tool", "content": "a\nb"}),
    ],
)
def test_messages_reach_a_template_as_in_vllm(message: Body, expected: Body) -> None:
    """As its `parse_chat_messages` (vllm/entrypoints/chat_utils.py) makes them."""
    assert json.loads(requested(message).inputs[0]) == [{"role": "assistant", **expected}]


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}}, {"type": "text"}, 1])
def test_no_part_of_a_message_is_lost(part: Any) -> None:
    for message in ({"content": [part]}, calls("{")):
        error = requested(message).error
        assert error is not None
        assert error.kind == "malformed"


KNOWN = {*SETTINGS, *WITHOUT_EFFECT, *NEUTRAL, *KEYS.values()}


def test_every_key_of_the_api_stands_in_the_table() -> None:
    for url, name in TABLE.items():
        own = {"encoding_format", "dimensions"} if url == VECTOR else set()
        assert set(of_openai(name).__annotations__) - KNOWN - own == set()


VALUES = st.sampled_from([True, 2, 0.5, "x", ["x"], {"a": 1}, [{"type": "function"}]])


@given(name=st.sampled_from(sorted(NEUTRAL)), value=VALUES, url=st.sampled_from([CHAT, TEXT]))
def test_a_key_without_counterpart_is_refused_unless_it_asks_for_nothing(
    name: str, value: Any, url: str
) -> None:
    prompt: Any = [{"role": "user", "content": "x"}] if url == CHAT else "x"
    for neutral in (None, *NEUTRAL[name]):
        found = parse(url, prompt, {name: neutral})
        assert found.error is None
        assert found == parse(url, prompt, {})
    served = (name, url) == ("chat_template_kwargs", CHAT) and isinstance(value, dict)
    if value not in NEUTRAL[name] and not served:
        error = parse(url, prompt, {name: value}).error
        assert error is not None
        assert error.message.startswith(f"{name} = ")


@given(name=st.sampled_from(sorted(WITHOUT_EFFECT)), value=VALUES)
def test_a_key_without_effect_changes_nothing(name: str, value: Any) -> None:
    found = parse(TEXT, "x", {name: value})
    assert (found.error, found.settings) == (None, {})


def parse(url: str, prompt: Any, settings: Mapping[str, Any]) -> Request:
    (line,) = lines(url, {KEYS[url]: prompt, **settings})
    found = parse_request(line)
    assert isinstance(found, Request)
    return found
