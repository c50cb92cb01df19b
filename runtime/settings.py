"""Settings: their types and ranges; as TOML, read by `--config`, written beside every result."""

import difflib
import functools
import json
import os
import re
import textwrap
import tomllib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import msgspec

from transferry.runtime.errors import InputError, Option, UsageError
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.io.whole import read_bytes, reason

MADE = "made"
# The largest count that numpy, torch and onnxruntime all support.
MOST = 2**31 - 1
Count = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Whole64 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Probability = Annotated[float, msgspec.Meta(ge=0, lt=1)]
_WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    bool | str: "true, false or text",
    bool | Literal["never"]: "true, false or never",
}


def read_settings(path: Path) -> dict[str, Any]:
    """Reads option names and values of `write_settings`, without [made]; raises as `read_toml`."""
    values = read_toml(path)
    values.pop(MADE, None)
    return {name.replace("-", "_"): value for name, value in values.items()}


def read_made(path: Path) -> dict[str, Any]:
    """Reads the section [made] of `write_settings`; raises as `read_settings`."""
    made = read_toml(path).get(MADE)
    return made if isinstance(made, dict) else {}


def foreign_settings(path: Path) -> str:
    """Defect of a file that `write_settings` should have written; "" without one."""
    try:
        own = path.is_file() and isinstance(read_toml(path).get(MADE), dict)
    except InputError:
        own = False
    return "" if own else "was not written by transferry"


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file; raises InputError if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(read_bytes(path).decode())
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise InputError(f"{path} is not TOML: {reason(error)}") from error


def write_settings(path: Path, settings: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """Writes the result of `to_toml` to a file."""
    with atomic_file(path) as file:
        file.write(to_toml(settings, made).encode())


def to_toml(settings: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    """Returns the settings as TOML that `read_settings` reads; options that are None are left out.

    `made` has versions, hashes and counts, which explain a result but are not options.
    """
    lines = [f"{name} = {_toml(value)}\n" for name, value in settings.items() if value is not None]
    lines += [f"\n[{MADE}]\n", *(f"{name} = {_toml(value)}\n" for name, value in made.items())]
    # TOML cannot express bytes of a file name that are not UTF-8, and "?" would be a pattern.
    return "".join(lines).encode(errors="surrogatepass").decode(errors="replace")


def check_fields(config: Any) -> None:
    """Raises UsageError for a field of a dataclass with a wrong type, or outside its range."""
    for name, kind in field_types(type(config)).items():
        check_value(name, getattr(config, name), kind)


def check_value(name: str, value: object, kind: Any) -> Any:
    """Returns a value as `kind`; raises UsageError for another type, or outside its range."""
    # A numpy float64 is a float, but unknown to msgspec.
    plain = float(value) if isinstance(value, float) else value
    plain = str(value) if isinstance(value, Decimal) else plain  # equal to a float, and unlike one
    if isinstance(value, Path):
        path_of(name, value)
    texts = value if isinstance(value, list | tuple) else (value,)
    for text in (each for each in texts if isinstance(each, str) and not _is_utf8(each)):
        raise UsageError(Option(name), f" must be UTF-8, found {shown(text)}")
    try:
        return msgspec.convert({"value": plain}, _holder(kind)).value
    except (ValueError, AttributeError) as error:  # also of surrogates and of numpy integers
        expected = _expected(plain, kind)
        raise UsageError(Option(name), f" must be {expected}, found {shown(value)}") from error


def path_of(name: str, value: object) -> Path:
    """Returns a path; raises UsageError for another type, an empty text or a NUL."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text or not _is_utf8(text, os.fsencode):
        raise UsageError(Option(name), f" must be a path, found {shown(value)}")
    return Path(text)


def _is_utf8(text: str, encode: Callable[[str], bytes] = str.encode) -> bool:
    try:
        encode(text)
    except UnicodeEncodeError:
        return False
    return True


def require_type(name: str, value: object, kind: Any) -> None:
    """Raises UsageError for a value of another class, or than one of a union, the class first."""
    if not isinstance(value, kind):
        wanted = getattr(kind, "__args__", (kind,))[0].__name__
        raise UsageError(Option(name), f" must be {wanted}, found {shown(value)}")


@functools.cache
def _holder(kind: Any) -> type[Any]:
    """Class with a value of a type: to look a type up, msgspec calls Python and drops a Ctrl-C."""
    return msgspec.defstruct("Holder", [("value", kind)])


def field_types(config: type[Any]) -> dict[str, Any]:
    """Returns the type of each field of a dataclass, with its range."""
    return _field_types(cast(Hashable, config))


@functools.cache
def _field_types(config: Any) -> dict[str, Any]:
    return get_type_hints(config, include_extras=True)


def hint(unknown: Sequence[str], known: Iterable[str], synonyms: Mapping[str, str]) -> str:
    """Returns what to write instead of unknown names, for an error.

    `known` are the names that there are, `synonyms` gives them by the names of other tools.
    """
    known = list(known)
    near = {name: difflib.get_close_matches(name, known, 1) for name in unknown}
    meant = [synonyms.get(name) or next(iter(near[name]), "") for name in unknown]
    return f"write {', '.join(meant)}" if all(meant) else f"it knows {', '.join(known)}"


def _expected(value: object, kind: Any) -> str:
    """Type and missed range of a value, in words that follow "must be"."""
    kinds = [each for each in get_args(kind) if each is not type(None)]
    if len(kinds) == 1 and type(None) in get_args(kind):
        (kind,) = kinds
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if kind in _WORDS:
        return _WORDS[kind]
    base, *limits = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    if get_origin(base) in (tuple, list):
        return "a list"
    word = _WORDS.get(base, "a table")
    if not limits:
        return word
    limit = limits[0]
    if limit.description:
        return str(limit.description)
    if limit.lt is not None:
        return f"at least {limit.ge} and below {limit.lt}"
    least = f"above {limit.gt}" if limit.gt is not None else f"at least {limit.ge}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    above = number and value > (limit.le if limit.le is not None else value)  # type: ignore[operator]
    bound = f"at most {limit.le}" if above or least == "at least None" else least
    if base is int:
        return f"{word} of {bound}"
    return bound if number else f"{word}, {bound}"


def shown(value: object) -> str:
    """Returns a value for a message, however long it is."""
    if isinstance(value, int) and abs(value) >= 10**80:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print the longest
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def listed(names: Sequence[str], last: str) -> str:
    """Returns names for a message, with `last`, such as "or", before the last one."""
    return f" {last} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def field_helps(config: type[Any]) -> dict[str, str]:
    """Returns the descriptions of a dataclass's attributes from docstrings, each as one line."""
    helps: dict[str, str] = {}
    for each in reversed(config.__mro__):
        section = (each.__doc__ or "").partition("Attributes:")[2]
        # Python 3.13 and later strip the indentation of docstrings themselves.
        section = textwrap.dedent(section.strip("\n")) + "\n"
        found = re.findall(r"^(\w+): (.+?)(?=^\w+: |\Z)", section, re.S | re.M)
        helps |= {name: " ".join((text[0].upper() + text[1:]).split()) for name, text in found}
    return helps


def _toml(value: Any) -> str:
    # JSON and TOML agree on strings, numbers, bools and lists, with two exceptions: TOML has no
    # surrogate pairs, so non-ASCII stays unescaped, and it requires DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
