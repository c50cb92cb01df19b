"""Chat templates of imported folders give the ids of AutoTokenizer.apply_chat_template."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.build_model.importing.huggingface.drawn import Drawn, exact, tokenizers, transformers
from tests.build_model.importing.huggingface.small_models import require_saved
from tests.commands import call, done
from tests.end_to_end.chat_templates import TEMPLATES as PUBLISHED
from transferry.build_model.importing.huggingface.folder import PretrainedFolder
from transferry.build_model.importing.huggingface.tokenizer.vocabularies import TOKENIZERS
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.byte_pair import Tokenizer
from transferry.runtime.tokenizer.chat import ChatError
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer

# Model type, further added tokens and settings of the special ones, for published templates.
CASES: dict[str, tuple[str, list[str], dict[str, bool]]] = {
    "llama 3": ("llama", [], {}),
    "qwen 3": ("qwen2", [], {}),
    "gemma 3": ("gemma2", ["\n", "  ", "<h1>"], {}),
    "mistral v3": ("mistral", [], {}),
    "zephyr": ("phi3", [], {"rstrip": True}),
    "gpt2": ("gpt2", [], {}),
}
GPT2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}{% if not message.content %}{% continue %}{% endif %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% endfor %}"
)
TEMPLATES = {**PUBLISHED, "gpt2": (GPT2, ["<|endoftext|>", "<|endoftext|>"], [])}
BYTE_LEVEL = ("llama 3", "qwen 3", "gpt2")
CORPUS = ["Straße über Häuser", "hello world, this is a test", "user model assistant system"] * 9
USER = {"role": "user", "content": "  Hello  wörld,\n this is <h1> a test "}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Yes 😀\n", "name": None}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, {"role": "user", "content": "日本語 \u000f0000 ?"}],
    [USER, {**ASSISTANT, "reasoning_content": "hm"}, USER],
    [{"role": "user", "content": ""}],
]


def write(folder: Path, name: str, how: str = "jinja") -> int:
    """Writes a folder with a tokenizer.json and the chat template; returns the number of ids."""
    (template, special, others), (kind, more, flags) = TEMPLATES[name], CASES[name]
    others, bytewise = [*others, *more], name in BYTE_LEVEL
    if name == "gemma 3":
        special = [*special, "<unk>", "<pad>"]
    model = tokenizers.models.BPE(
        **({} if bytewise else {"byte_fallback": True, "unk_token": "<unk>"})
    )
    made = tokenizers.Tokenizer(model)
    steps, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
    if bytewise:
        made.pre_tokenizer = steps.ByteLevel(add_prefix_space=False)
        if name == "llama 3":  # as no tiktoken ranks can be
            made.normalizer = tokenizers.normalizers.NFC()
        made.decoder = decoders.ByteLevel()
        first = steps.ByteLevel.alphabet()
    else:
        made.pre_tokenizer = steps.Metaspace("▁", prepend_scheme="first", split=True)
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
        first = []
    bytes_ = [] if bytewise else ["<unk>", *(f"<0x{value:02X}>" for value in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=first, show_progress=False, special_tokens=bytes_
    )
    made.train_from_iterator(CORPUS, trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = []
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    token = tokenizers.AddedToken
    made.add_tokens([token(text, special=True, normalized=False, **flags) for text in special])
    made.add_tokens([token(text, special=False, normalized=False) for text in others])
    made.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": special[0], "eos_token": special[1]}
    if how == "jinja":
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    elif how == "text":
        config["chat_template"] = template
    else:
        named = {"default": template, "rag": "{{ 'rag' }}"}
        config["chat_template"] = [{"name": key, "template": named[key]} for key in named]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ids = {"model_type": kind, "eos_token_id": made.token_to_id(special[1])}
    (folder / "config.json").write_text(json.dumps(ids))
    return int(made.get_vocab_size())


def imported(folder: Path, size: int) -> tuple[AnyTokenizer, list[str]]:
    checkpoint = PretrainedFolder(folder)
    kind = str(checkpoint.config.get("model_type"))
    shape = ModelConfig(size, 8, 2, 0, 1, 8, architecture="decoder-only")
    return require_saved(TOKENIZERS[kind](checkpoint, shape), folder), checkpoint.notes


def outcome(compute: Any) -> Any:
    try:
        return compute()
    except Exception as error:  # noqa: BLE001 - of theirs any
        return type(error) is not TypeError and "raised"


@pytest.mark.parametrize("how", ["jinja", "text", "list"])
@pytest.mark.parametrize("name", CASES)
def test_messages_become_their_ids(name: str, how: str, tmp_path: Path) -> None:
    ours, notes = imported(tmp_path, write(tmp_path, name, how))
    assert isinstance(ours, Tokenizer) is (name == "gpt2")
    assert "chat template kept for --chat and --messages" in notes
    assert any("left out, not being the default: rag" in note for note in notes) is (how == "list")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    if name == "llama 3":  # the day on which the test runs, which ours does not know
        source = TEMPLATES[name][0]
        options["chat_template"] = source.replace("strftime_now is defined", "false")
    refused = 0
    for chat in CHATS:
        wanted = outcome(lambda chat=chat: theirs.apply_chat_template(chat, **options))
        refused += wanted == "raised"
        found = outcome(lambda chat=chat: ours.encode_chat(chat))
        assert found == wanted, chat
    assert refused == (name == "gpt2")


@pytest.mark.parametrize("name", CASES)
def test_special_tokens_in_a_message_stay_text(name: str, tmp_path: Path) -> None:
    ours, _ = imported(tmp_path, write(tmp_path, name))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.chat is not None
    control = set(ours.chat.control.values())
    assert set(TEMPLATES[name][1]) <= ours.chat.control.keys()
    assert {"\n", "  ", "<h1>"}.isdisjoint(ours.chat.control)
    for text in ours.chat.control:
        for content in (text, f"a{text}b", f"x {text}\n y", f"{text}{text}", f"{text[0]}{text}"):
            chat = [{"role": "user", "content": content}]
            found = ours.encode_chat(chat)
            plain = ours.encode_chat([{"role": "user", "content": "plain"}])
            assert [token for token in found if token in control] == [
                token for token in plain if token in control
            ], content
            # transformers makes tokens of them, unless an option forbids it.
            taken = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            assert sum(token in control for token in taken) > sum(t in control for t in found)
            if content == text:
                kept = theirs.apply_chat_template(
                    chat,
                    add_generation_prompt=True,
                    return_dict=False,
                    sanitize_control_tokens=True,
                )
                assert theirs.decode(kept) == theirs.decode(found)


def test_a_template_that_is_none_is_refused(tmp_path: Path) -> None:
    size = write(tmp_path, "qwen 3")
    (tmp_path / "chat_template.jinja").write_text("{% for x in %}")
    with pytest.raises(InputError, match=r"template\.jinja: expected a chat template .*correct"):
        imported(tmp_path, size)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(InputError, match=r"chat_template is 3, which cannot be imported"):
        imported(tmp_path, size)


def test_a_folder_of_templates_without_a_default_has_no_chat(tmp_path: Path) -> None:
    size = write(tmp_path, "qwen 3")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (tmp_path / "chat_template.jinja").rename(folder / "tool_use.jinja")
    ours, notes = imported(tmp_path, size)
    assert ours.chat is None
    assert "chat templates left out, not being the default: tool_use" in notes


def test_the_clock_is_refused(tmp_path: Path) -> None:
    size = write(tmp_path, "qwen 3")
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
    ours, _ = imported(tmp_path, size)
    with pytest.raises(ChatError, match="'strftime_now' is undefined"):
        ours.encode_chat(CHATS[0])


def test_a_folder_is_imported_exported_and_answers_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferry.export.oracle.effort.RECORDED_LENGTH", 6)
    theirs, run, bundle = tmp_path / "theirs", tmp_path / "run", tmp_path / "bundle"
    theirs.mkdir()
    size = write(theirs, "qwen 3") + 5
    end = json.loads((theirs / "config.json").read_text())["eos_token_id"]
    ids = {"eos_token_id": end, "bos_token_id": end, "max_position_embeddings": 256}
    model = Drawn("qwen2", 3, theirs, size, 1, **ids).theirs
    said = done("import", theirs, "--out", run).stderr
    assert "tokenizer: chat template kept for --chat and --messages" in said
    assert "config.json, without effect on answers: " in said
    done("export", run, "--out", bundle)
    assert (bundle / "chat_template.jinja").read_text(encoding="utf-8") == TEMPLATES["qwen 3"][0]
    lines = tmp_path / "lines.txt"
    lines.write_text("hello world\nStraße <|im_end|>\n", encoding="utf-8")
    command = ("run", bundle, lines, "--chat", "--max-length", "12", "--format", "jsonl")
    found = [json.loads(line) for line in done(*command).stdout.splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    chat = [{"role": "user", "content": "hello world"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False, return_tensors="pt"
    )
    with exact():
        wanted = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=end)
    answer = tokenizer.decode(wanted[0, prompt.shape[1] :], skip_special_tokens=True)
    assert found[0]["text"] == answer
    assert found[0]["source_tokens"] == prompt.shape[1]
    # The second turn's text has no token of the template in it: the answer has its own prompt.
    assert found[1]["source_tokens"] > prompt.shape[1]
    (bundle / "chat_template.jinja").write_text("other")
    assert call(*command).exit_code == 3
