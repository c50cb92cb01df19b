"""Renders a chat template in a process of its own, started with this file's path.

A template may come from a stranger, and jinja2's sandbox bounds neither time nor memory. Standard
input and output are lines of JSON: the template and the limits, then one request after another.

The environment equals transformers' (`_cached_compile_jinja_template` in
utils/chat_template_utils.py, 5.23) without the sources of chance: `strftime_now`, `lipsum`, the
filter `random`, and addresses of objects. Templates that test for `strftime_now` fall back to a
date of their own.
"""

# ruff: noqa: D102 - Marked has the methods of str

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

# Roles from which a template may build a token, as in '<|' + message['role'] + '|>'.
ROLES = {
    *("assistant", "context", "developer", "document", "documents", "environment", "function"),
    *("ipython", "model", "observation", "system", "tool", "user"),
}
# Of an object without a text of its own.
ADDRESS = re.compile(r" at (0x[0-9A-Fa-f]+)>")


class Marked(str):
    """A text that knows which of its characters the template wrote.

    The operations below keep this. Any other returns a plain str, which counts as the user's: a
    token that loses its marks becomes text, and no text becomes a token.
    """

    _own: str  # "1" for a character of the template, "0" for any other

    def __new__(cls, text: str, own: str | None = None) -> Marked:
        made = super().__new__(cls, text)
        made._own = "0" * len(text) if own is None else own
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> Marked:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented
        return Marked(str.__add__(self, other), self._own + own_of(other))

    def __radd__(self, other: Any) -> Marked:
        if not isinstance(other, str):
            return NotImplemented
        return Marked(str.__add__(other, self), own_of(other) + self._own)

    def __mul__(self, times: Any) -> Marked:
        return Marked(str.__mul__(self, times), self._own * times)

    __rmul__ = __mul__

    def __getitem__(self, place: Any) -> Marked:
        return Marked(str.__getitem__(self, place), self._own[place])

    def __iter__(self) -> Iterator[str]:
        return (self[place] for place in range(len(self)))

    def lstrip(self, chars: str | None = None) -> Marked:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> Marked:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None) -> Marked:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> Marked:
        return self[len(prefix) if self.startswith(prefix) else 0 :]

    def removesuffix(self, suffix: str) -> Marked:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[Any]:
        return self._cut(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list[Any]:
        return self._cut(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[Any]:
        lines = self._cut(str.splitlines(self, True), "")
        ends = zip(lines, str.splitlines(self, keepends), strict=True)
        return [line[: len(text)] for line, text in ends]

    def partition(self, sep: str) -> Any:
        return tuple(self._cut(str.partition(self, sep), ""))

    def rpartition(self, sep: str) -> Any:
        return tuple(self._cut(str.rpartition(self, sep), ""))

    def _cut(self, parts: Iterable[str], sep: str | None) -> list[Any]:
        """Finds parts in order, with `sep`, or white space for None, between each two."""
        found, place = [], 0
        for part in parts:
            if sep is None:
                place = self.index(part, place)
            found.append(self[place : place + len(part)])
            place += len(part) + len(sep or "")
        return found

    def join(self, parts: Iterable[str]) -> Marked:
        parts = list(parts)
        return Marked(str.join(self, parts), self._own.join(map(own_of, parts)))

    def replace(self, old: str, new: str, count: Any = -1) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return Marked(new, own_of(new)).join(self.split(old, count))

    def upper(self) -> Marked:
        return self._as_long(str.upper(self))

    def lower(self) -> Marked:
        return self._as_long(str.lower(self))

    def title(self) -> Marked:
        return self._as_long(str.title(self))

    def capitalize(self) -> Marked:
        return self._as_long(str.capitalize(self))

    def _as_long(self, changed: str) -> Marked:
        return Marked(changed, self._own if len(changed) == len(self) else None)


def own_of(text: str) -> str:
    """Returns the marks of a text; those of a plain str are 0."""
    return text._own if isinstance(text, Marked) else "0" * len(text)


def own(text: str) -> Marked:
    """Marks a text as the template's."""
    return Marked(text, "1" * len(text))


def joined(pieces: Iterable[Any]) -> Marked:
    """Concatenates values, as jinja2's `~` and its captured output."""
    return Marked("").join(map(str, pieces))


def marked(value: Any) -> Any:
    """Marks all texts of JSON values, keys included, as the user's.

    Half a surrogate pair becomes U+FFFD, as in texts that are no chats.
    """
    if isinstance(value, str):
        return Marked(value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    if isinstance(value, dict):
        return {marked(name): marked(each) for name, each in value.items()}
    return [marked(each) for each in value] if isinstance(value, list) else value


def _marking_environment() -> type[Any]:
    """Returns the class of an environment in which the texts of a template are marked."""
    from jinja2.compiler import CodeGenerator
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Marking(CodeGenerator):
        """Compiles texts of the template to texts that are marked as its own."""

        def visit_Const(self, node: Any, frame: Any) -> None:
            if type(node.value) is str:
                self.write(f"environment.own({node.value!r})")
            else:
                super().visit_Const(node, frame)

        def visit_TemplateData(self, node: Any, frame: Any) -> None:
            self.write(f"environment.own({node.data!r})")

        def visit_Concat(self, node: Any, frame: Any) -> None:
            self.write("environment.concat((")
            for each in node.nodes:
                self.visit(each, frame)
                self.write(", ")
            self.write("))")

        def _output_const_repr(self, group: Iterable[Any]) -> str:
            return f"environment.own({''.join(map(str, group))!r})"

    class Environment(ImmutableSandboxedEnvironment):
        code_generator_class = Marking
        concat = staticmethod(joined)
        own = staticmethod(own)

    return Environment


def _marking_join(plain: Callable[..., Any]) -> Any:
    """Returns the filter `join` for a separator that jinja2 itself made."""
    import jinja2

    @jinja2.pass_eval_context
    def join(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
        return plain(context, value, Marked(d, own_of(d)) if type(d) is str else d, attribute)

    return join


def environment() -> Any:
    """Environment in which templates are parsed and rendered."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes

    class Generation(jinja2.ext.Extension):
        """{% generation %}, which marks an assistant's turn for training: its body."""

        tags = {"generation"}  # noqa: RUF012 - declared by jinja2

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A scope of its own, as in transformers, where the body is a macro.
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> Any:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """A namespace without attributes that begin with an underscore."""

        def __init__(*arguments: Any, **attributes: Any) -> None:
            self, values = arguments[0], dict(*arguments[1:], **attributes)
            for name in values:
                _require_plain(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            _require_plain(name)
            super().__setitem__(name, value)

    class Dict:
        def __call__(self, *arguments: Any, **values: Any) -> dict[Any, Any]:
            return dict(*arguments, **values)

        def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
            return dict.fromkeys(*arguments)

    def _require_plain(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    made = _marking_environment()(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters |= {"tojson": _tojson, "join": _marking_join(made.filters["join"])}
    made.globals |= {"raise_exception": raise_exception, "dict": Dict(), "namespace": Namespace}
    # The same messages give the same prompt.
    del made.filters["random"], made.globals["lipsum"]
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    options: dict[str, Any] = {"indent": indent, "separators": separators}
    return json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys, **options)


def rendered(template: Any, request: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """Renders a template; returns the text, and the spans of characters that the template wrote."""
    variables = marked(request["variables"])
    for message in variables.get("messages", ()):
        if message["role"] in ROLES:
            message["role"] = own(message["role"])
    named = {name: own(text) for name, text in request["named"].items()}
    pieces, size = [], 0
    for piece in template.generate({**named, **variables}):
        size += len(piece)
        if size > limits["characters"]:
            raise ValueError(f"it writes more than {limits['characters']} characters")
        pieces.append(piece)
    text = "".join(pieces)
    text.encode()  # half a surrogate pair has no tokens
    given = json.dumps(request) + limits["template"]
    if any(address not in given for address in ADDRESS.findall(text)):
        raise ValueError("it writes the address of an object, which no two runs have in common")
    marks = "".join(map(own_of, pieces))
    return {"text": text, "own": [match.span() for match in re.finditer("1+", marks)]}


def _limit_memory(size: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def main() -> None:
    """Answers requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    limits = json.loads(sys.stdin.readline())
    # Of processor time: a busy machine refuses no row. It ends this process.
    timer = getattr(signal, "setitimer", lambda *_: None)
    template = None
    for line in sys.stdin:
        timer(getattr(signal, "ITIMER_PROF", 0), limits["seconds"])
        try:
            if template is None:
                _limit_memory(limits["memory"])
                template = environment().from_string(limits["template"])
            reply = rendered(template, json.loads(line), limits)
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        timer(getattr(signal, "ITIMER_PROF", 0), 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
