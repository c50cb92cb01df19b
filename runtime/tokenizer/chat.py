"""Chat templates: messages to text in which the template's own special tokens are known.

A template is rendered by `chat_worker` in a process of its own. Special tokens that it writes
become tokens, special tokens in the messages stay text: each is put between two private-use
characters that occur in no message, and found again in the text. transformers does the same with
`sanitize_control_tokens=True`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from transferry.runtime.errors import InputError, UsageError, install_command

TEMPLATE_FILE = "chat_template.jinja"

SECONDS = 10
MOST_CHARACTERS = 1 << 24  # of a template, and of its text
MEMORY = 1 << 30  # bytes of address space
LEAST_JINJA = (3, 1, 6)  # older versions have known ways out of the sandbox
PRIVATE_USE = range(0xF0000, 0xFFFFE)
ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Keys of a message that hold the model's thoughts; transformers fills in the missing keys.
REASONING = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]
Pieces = list[str | int]  # text, and ids of special tokens


class ChatError(Exception):
    """Messages that a template cannot render."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template.

    Attributes:
        source: The template, in jinja2's language.
        named: Special tokens that it may write by name, such as bos_token.
        control: Ids of the tokens that count as special only where the template writes them.
    """

    source: str
    named: Mapping[str, str]
    control: Mapping[Annotated[str, Meta(min_length=1)], Annotated[int, Meta(ge=0)]]

    def __hash__(self) -> int:
        return hash(self.source)

    def settings(self) -> dict[str, Any]:
        """Returns all but the source, for tokenizer.json."""
        return {name: value for name, value in asdict(self).items() if name != "source"}

    def render(self, messages: Sequence[Message]) -> Pieces:
        """Renders messages with role and content, and the beginning of the assistant's answer.

        Raises:
            ChatError: A message lacks them, or the template refuses the messages.
            InputError: The template takes too long.
            UsageError: jinja2 is not installed.
        """
        plain = [_checked(message) for message in messages]
        if not plain:
            raise ChatError("expected at least one message, found none")
        there = set(json.dumps(plain, ensure_ascii=False)) | set(self.source)
        start, end = [mark for mark in map(chr, PRIVATE_USE) if mark not in there][:2]
        request = {
            **self.named,
            "messages": [_marked(message, self._control, start, end) for message in plain],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        text = self._renderer.render(request)
        return self._pieces(text, start, end)

    def _pieces(self, text: str, start: str, end: str) -> Pieces:
        """Splits text at the tokens that the template wrote itself."""
        control = self._control.pattern
        found = re.compile(f"{start}({control}){end}|[{start}{end}]|({control})")
        pieces: Pieces = []
        before, place = "", 0
        for match in found.finditer(text):
            before += text[place : match.start()]
            place = match.end()
            of_a_message, of_the_template = match.groups()
            before += of_a_message or ""
            if of_the_template:
                pieces += [before, self.control[of_the_template]]
                before = ""
        pieces.append(before + text[place:])
        return [piece for piece in pieces if piece != ""]

    @cached_property
    def _control(self) -> re.Pattern[str]:
        """Matches any of the tokens; of two that begin alike the longer one."""
        longest_first = sorted(self.control, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.source)


def require_jinja() -> None:
    """Raises UsageError if jinja2 is not installed, or too old."""
    try:
        version = importlib.metadata.version("jinja2")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if found < LEAST_JINJA:
        problem = f"is version {version}" if version else "is not installed"
        least = ".".join(map(str, LEAST_JINJA))
        raise UsageError(
            f"chat templates need jinja2 {least} or later, which {problem}; "
            f"{install_command('chat')}"
        )


def _checked(message: Any) -> dict[str, Any]:
    """Returns a message without null values, as transformers does."""
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        found = json.dumps(message, ensure_ascii=False, default=str)[:80]
        raise ChatError(f"expected messages with role and content, found {found}")
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise ChatError(f"expected a role such as user, found {str(role)[:80]!r}")
    if not isinstance(content, str | list | None):
        raise ChatError(f"expected text as the content of a message, found {str(content)[:80]}")
    kept = {name: value for name, value in message.items() if value is not None}
    thought = next((kept[name] for name in REASONING if name in kept), None)
    if thought is not None:
        kept = {"thinking": thought, **kept, "reasoning_content": thought}
    return kept


def _marked(value: Any, control: re.Pattern[str], start: str, end: str) -> Any:
    if isinstance(value, str):
        return control.sub(rf"{start}\g<0>{end}", value)
    if isinstance(value, Mapping):
        return {
            # A role is a plain word, compared with others by templates.
            name: each if name == "role" else _marked(each, control, start, end)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_marked(each, control, start, end) for each in value]
    return value


class Renderer:
    """A process that renders one template, started on first use."""

    def __init__(self, source: str, seconds: int = SECONDS) -> None:
        self._source, self._seconds = source, seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def render(self, variables: Mapping[str, Any]) -> str:
        """Renders the template.

        Raises:
            ChatError: The template raises an error.
            InputError: It takes too long, or more memory than it may.
            UsageError: jinja2 is not installed.
        """
        with self._lock:
            process = self._process or self._start()
            timer = threading.Timer(self._seconds, process.kill)
            timer.start()
            reply = b""
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps(variables).encode() + b"\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except (BrokenPipeError, ConnectionError):
                pass
            finally:
                timer.cancel()
                if not reply.endswith(b"\n"):  # a later request would get the rest
                    self._end()
                    self._process = None
        if not reply.endswith(b"\n"):
            raise InputError(
                f"the chat template took more than {self._seconds} seconds or {MEMORY >> 20} MiB; "
                "use a template that you trust, or run without --chat and --messages"
            )
        answer = json.loads(reply)
        if "error" in answer:
            raise ChatError(f"the chat template raised {answer['error']}")
        text: str = answer["text"]
        return text

    def _start(self) -> subprocess.Popen[bytes]:
        require_jinja()
        worker = Path(__file__).with_name("chat_worker.py")
        process = subprocess.Popen(
            [sys.executable, "-I", str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process, self._end = process, weakref.finalize(self, _ended, process)
        limits = {
            "template": self._source,
            "seconds": self._seconds,
            "memory": MEMORY,
            "characters": MOST_CHARACTERS,
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(limits).encode() + b"\n")
        return process


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError), process:  # closes the pipes and waits
        pass
