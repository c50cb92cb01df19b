"""Chat templates: messages to text in which the template's own special tokens are known.

A template is rendered by `chat_worker` in a process of its own, which tells the characters that the
template wrote from those of the messages. Special tokens are found in the template's characters
alone; whatever a message holds is text.
"""

from __future__ import annotations

import contextlib
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

from transferry.runtime.errors import UsageError, install_command
from transferry.runtime.installation import installed_version
from transferry.runtime.settings import shown

TEMPLATE_FILE = "chat_template.jinja"

SECONDS = 10  # of processor time
WALL = 6  # times as long may pass on a busy machine
MOST_CHARACTERS = 1 << 24  # of a template, and of its text
MEMORY = 1 << 30  # bytes of address space
LEAST_JINJA = (3, 1, 6)  # older versions have known ways out of the sandbox
PRIVATE_USE = range(0xF0000, 0xFFFFE)
ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Keys of a message that hold the model's thoughts; transformers fills in the missing keys.
REASONING = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]
_USER = {"role": "user", "content": "Hello,\nworld"}
_ANSWER = {"role": "assistant", "content": "Yes.\n"}
# Chats in which no text looks like a special token.
SAMPLES: Sequence[Sequence[Message]] = (
    [_USER],
    [{"role": "system", "content": "Be brief."}, _USER, _ANSWER, _USER],
    [_USER, _ANSWER, _USER],
)
# Variables that no chat here has.
ABSENT: Mapping[str, None] = {"tools": None, "documents": None}
# Variables that the chat decides.
RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final_message", *ABSENT})
Pieces = list[str | int]  # text, and ids of special tokens


class ChatError(Exception):
    """Messages that a template cannot render."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, in jinja2's language.

    Attributes:
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

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        answer: bool = True,
    ) -> Pieces:
        """Renders messages with role and content, and the beginning of the assistant's answer.

        Args:
            messages: At least one.
            variables: Further variables of the template, such as enable_thinking.
            answer: Whether the answer begins.

        Raises:
            ChatError: A message lacks them, or the template refuses the messages or takes too long.
            UsageError: jinja2 is not installed.
        """
        plain = [_checked(message) for message in messages]
        if not plain:
            raise ChatError("expected at least one message, found none")
        for message in plain:
            if isinstance(parts := message.get("content"), list):
                message["content"] = self._content(parts)
        return self._rendered(plain, variables or {}, answer=answer)

    def _rendered(
        self, messages: Sequence[Message], variables: Mapping[str, Any], *, answer: bool = True
    ) -> Pieces:
        own = {"messages": messages, **ABSENT, "add_generation_prompt": answer}
        return self._pieces(*self._renderer.render({**variables, **own}, self.named))

    def _content(self, parts: Sequence[Any]) -> list[Any] | str:
        """Returns the parts of a message; joined as in vLLM if the template takes only text."""
        found = [
            {"type": "text", "text": part} if isinstance(part, str) else part for part in parts
        ]
        if self._takes_parts:
            return found
        texts = [part["text"] for part in found if _is_text(part)]
        if len(texts) < len(found):
            other = next(part for part in found if not _is_text(part))
            raise ChatError(f"the chat template takes only text, found {shown(other)}")
        return "\n".join(texts)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether a list of one text is rendered as the text; others lose it, or write a dict."""
        part = {"type": "text", "text": _USER["content"]}
        try:
            in_parts = self._rendered([{**_USER, "content": [part]}], {})
            return in_parts == self._rendered([_USER], {})
        except ChatError:
            return False

    def lost_token(self) -> str | None:
        """Returns a token that the template builds from parts which are not all its own texts."""
        for sample in SAMPLES:
            given = json.dumps(sample)
            try:
                texts = [piece for piece in self.render(sample) if isinstance(piece, str)]
            except ChatError:
                continue
            found = (match.group() for text in texts for match in self._control.finditer(text))
            if lost := next((token for token in found if token not in given), None):
                return lost
        return None

    def _pieces(self, text: str, own: Sequence[tuple[int, int]]) -> Pieces:
        """Splits text at the tokens within the spans that the template wrote."""
        pieces: Pieces = []
        place = 0
        for start, end in own:
            for match in self._control.finditer(text, start, end):
                pieces += [text[place : match.start()], self.control[match.group()]]
                place = match.end()
        return [piece for piece in (*pieces, text[place:]) if piece != ""]

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
    version = installed_version("jinja2") or ""
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
    names = message.keys() if isinstance(message, Mapping) else ()
    if "role" not in names or not {"content", "tool_calls"} & {*names}:
        raise ChatError(f"expected messages with role and content, found {shown(message)}")
    role, content = message["role"], message.get("content")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise ChatError(f"expected a role such as user, found {str(role)[:80]!r}")
    if not isinstance(content, str | list | None):
        raise ChatError(f"expected text as the content of a message, found {str(content)[:80]}")
    kept = {name: value for name, value in message.items() if value is not None}
    thought = next((kept[name] for name in REASONING if name in kept), None)
    if thought is not None:
        kept = {"thinking": thought, **kept, "reasoning_content": thought}
    return kept


def _is_text(part: Any) -> bool:
    """Whether a part of a message is a text."""
    known = isinstance(part, Mapping) and part.get("type") == "text"
    return known and isinstance(part.get("text"), str)


class Renderer:
    """A process that renders one template, started on first use."""

    def __init__(self, source: str, seconds: int = SECONDS) -> None:
        self._source, self._seconds = source, seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def render(
        self, variables: Mapping[str, Any], named: Mapping[str, str]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders the template.

        Args:
            variables: Values of the user.
            named: Special tokens that the template may write by name.

        Returns:
            The text, and the spans of characters that the template wrote.

        Raises:
            ChatError: The template raises an error, or takes more time or memory than it may.
            UsageError: jinja2 is not installed.
        """
        try:
            line = json.dumps({"variables": variables, "named": named}).encode() + b"\n"
        except RecursionError as error:
            raise ChatError("the messages are nested too deeply") from error
        with self._lock:
            process = self._process or self._start()
            timer = threading.Timer(self._seconds * WALL, process.kill)
            timer.start()
            reply = b""
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(line)
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
            raise ChatError(
                f"the chat template took more than {self._seconds} seconds or {MEMORY >> 20} MiB"
            )
        answer = json.loads(reply)
        if "error" in answer:
            raise ChatError(f"the chat template raised {answer['error']}")
        return answer["text"], [(start, end) for start, end in answer["own"]]

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
