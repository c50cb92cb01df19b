"""Renders a chat template in a process of its own, started with this file's path.

A template may come from a stranger, and jinja2's sandbox bounds neither time nor memory. Standard
input and output are lines of JSON: the template and the limits, then one request after another.

The environment equals transformers' (`_cached_compile_jinja_template` in
utils/chat_template_utils.py, 5.23) without `strftime_now`: an answer must not depend on the day.
Templates that test for it fall back to a date of their own.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from typing import Any, NoReturn


def environment() -> Any:
    """Environment in which templates are parsed and rendered."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

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

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals |= {"raise_exception": raise_exception, "dict": Dict(), "namespace": Namespace}
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


def rendered(template: Any, variables: dict[str, Any], most: int) -> str:
    """Renders a template to a text of at most `most` characters."""
    pieces, size = [], 0
    for piece in template.generate(**variables):
        size += len(piece)
        if size > most:
            raise ValueError(f"it writes more than {most} characters")
        pieces.append(piece)
    text = "".join(pieces)
    text.encode()  # half a surrogate pair has no tokens
    return text


def _limit_memory(size: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def main() -> None:
    """Answers requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    limits = json.loads(sys.stdin.readline())
    alarm = getattr(signal, "alarm", lambda seconds: 0)
    template = None
    for line in sys.stdin:
        alarm(limits["seconds"])  # ends this process even if its parent was killed
        try:
            if template is None:
                _limit_memory(limits["memory"])
                template = environment().from_string(limits["template"])
            reply = {"text": rendered(template, json.loads(line), limits["characters"])}
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        alarm(0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
