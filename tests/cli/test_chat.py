"""Jobs over chats and token ids."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import call, done, fails
from transferry.runtime.engine.engine import Engine

pytest.importorskip("jinja2", reason="an extra, which is not installed")

USER = {"role": "user", "content": "the cat"}
LENGTH = ("--max-length", "6")


@pytest.fixture(scope="module")
def bundle(chat_bundle_folder: Path) -> Path:
    return chat_bundle_folder


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def texts(output: str) -> list[str]:
    return [json.loads(line)["text"] for line in output.splitlines()]


def test_turns_messages_and_ids_are_one(bundle: Path, tmp_path: Path) -> None:
    system = {"role": "system", "content": "be brief"}
    chats = [[system, USER], [system, {"role": "user", "content": "a <e> day"}]]
    lines = tmp_path / "turns.txt"
    lines.write_text("the cat\na <e> day\n")
    options = ("--format", "jsonl", "--canary", "1/1", *LENGTH)
    turns = done("run", bundle, lines, "--chat", "--system", "be brief", *options).stdout
    assert json.loads(turns.splitlines()[0])["source"] == "the cat"
    rows = [{"chat": chat, "n": number} for number, chat in enumerate(chats)]
    chats_file = jsonl(tmp_path / "chats.jsonl", *rows)
    messages = done("run", bundle, chats_file, "--messages", "chat", *options).stdout
    assert json.loads(messages.splitlines()[1])["n"] == 1
    tokenizer = Engine(bundle).bundle.tokenizer
    ids = [{"ids": tokenizer.encode_chat(chat)} for chat in chats]
    ids_file = jsonl(tmp_path / "ids.jsonl", *ids)
    prompts = done("run", bundle, ids_file, "--prompt-ids", "ids", *options).stdout
    assert texts(turns) == texts(messages) == texts(prompts)
    assert all(texts(turns))
    assert texts(turns) != texts(done("run", bundle, lines, "--chat", *options).stdout)
    assert texts(turns) != texts(done("run", bundle, lines, *options).stdout)


def test_variables_of_a_template(bundle: Path, tmp_path: Path) -> None:
    variables = {"tone": "a kind <e> dog "}
    lines = tmp_path / "turns.txt"
    lines.write_text("the cat\n")
    option = ("--chat-template-kwargs", json.dumps(variables))
    options = ("--format", "jsonl", *LENGTH)
    with Engine(bundle) as engine:
        ids = engine.bundle.tokenizer.encode_chat([USER], variables)
        (wanted,) = engine.generate([ids], max_length=6)
        (found,) = engine.generate([[USER]], max_length=6, chat_template_kwargs=variables)
        (plain,) = engine.generate([[USER]], max_length=6)
    assert found.text == wanted.text != plain.text
    turns = done("run", bundle, lines, "--chat", *option, *options).stdout
    chats = jsonl(tmp_path / "chats.jsonl", {"chat": [USER]})
    messages = done("run", bundle, chats, "--messages", "chat", *option, *options).stdout
    body = {"messages": [USER], "max_tokens": 6}
    line = {"custom_id": "0", "url": "/v1/chat/completions"}
    requests = [
        {**line, "body": {**body, "chat_template_kwargs": variables}},
        {**line, "body": body},
    ]
    asked = jsonl(tmp_path / "requests.jsonl", *requests)
    openai = ("run", bundle, asked, "--format-in", "openai", "--format", "jsonl")
    own, others = texts(done(*openai).stdout), texts(done(*openai, *option).stdout)
    assert texts(turns) == texts(messages) == [wanted.text]
    assert (own, others) == ([wanted.text, plain.text], [wanted.text, wanted.text])
    run = ("run", bundle, lines, "--chat", "--chat-template-kwargs")
    fails(2, "must be a JSON object, such as", *run, "tone=kind")
    fails(2, "cannot set tools, which the chat decides", *run, '{"tools": []}')
    fails(2, "has no effect without chats", "run", bundle, lines, *option)


def test_a_job_is_resumed_with_the_same_options_only(bundle: Path, tmp_path: Path) -> None:
    lines, out = tmp_path / "turns.txt", tmp_path / "out.jsonl"
    lines.write_text("the cat\n\n")
    command = ("run", bundle, lines, "-o", out, *LENGTH)
    stopped = call(*command, "--chat", "--max-errors", "0", "--chunk-rows", "1")
    assert stopped.exit_code == 3
    assert (tmp_path / "out.jsonl.job").exists()
    for other, named in (((), "chat"), (("--chat", "--system", "x"), "system")):
        fails(3, named, *command, *other, "--chunk-rows", "1")
    assert call(*command, "--chat", "--chunk-rows", "1").exit_code == 6
    summary = json.loads((tmp_path / "out.jsonl.summary.json").read_text())
    assert summary["fingerprint"]["chat"] is True
    assert summary["fingerprint"]["system"] is None


def test_bad_rows_are_told(bundle: Path, tmp_path: Path) -> None:
    rows: list[Any] = ["the cat", [], [{"role": "user"}], [USER], None]
    source = jsonl(tmp_path / "chats.jsonl", *({"chat": row} for row in rows), {})
    result = call("run", bundle, source, "--messages", "chat", *LENGTH, "--format", "jsonl")
    assert result.exit_code == 6
    kinds = [json.loads(line).get("error", {}).get("kind") for line in result.stdout.splitlines()]
    assert kinds == ["no-text", "prompt", "prompt", None, "no-text", "no-text"]
