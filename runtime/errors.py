"""Exceptions of transferry and their exit codes.

A message says what was expected, what was found and what to do; `cli.main` prints it without a
traceback and exits with `exit_code`.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

# Notes of functions that a program calls; a command prints them on stderr instead.
LOG = logging.getLogger("transferry")
_ROOT = Path(__file__).parent.parent
DOWNLOAD = "Download a model of Hugging Face first: hf download MODEL --local-dir FOLDER."


class Option(str):
    """Name of a setting in a message, such as chunk_rows; the command line shows its option."""

    __slots__ = ()


class TransferryError(Exception):
    """Base of every error that a user can cause or fix.

    Attributes:
        parts: The message in parts; an `Option` is replaced by its name.
    """

    exit_code = 3

    def __init__(self, *parts: str) -> None:
        super().__init__("".join(parts))
        self.parts = parts

    def worded(self, options: Mapping[str, str]) -> str:
        """Returns the message with the options of the command line in place of settings.

        Args:
            options: Option of each setting, such as --chunk-rows of chunk_rows.
        """
        shown = (options.get(part, part) if type(part) is Option else part for part in self.parts)
        return "".join(shown)


class UsageError(TransferryError):
    """A value outside its range, or options that exclude each other."""

    exit_code = 2


class InputError(TransferryError):
    """Text, checkpoint or bundle that cannot be used."""


class AllocationError(InputError, MemoryError):
    """onnxruntime is out of memory; catch MemoryError to include numpy."""


class ParityError(TransferryError):
    """ONNX Runtime and the reference give different answers."""

    exit_code = 4


class ProviderError(TransferryError):
    """The requested execution provider cannot run here."""

    exit_code = 5


class BadRowsError(TransferryError):
    """A job finished, but some of its rows hold an error instead of an answer."""

    exit_code = 6


def joined_options(names: Iterable[str]) -> list[str]:
    """Returns the parts of a message that lists settings, with "and" between."""
    return [part for name in names for part in (" and ", Option(name))][1:]


def require(holds: bool, name: str, expected: str, found: object) -> None:
    """Raises UsageError unless `holds`: option `name` must be `expected`, a range in words."""
    if not holds:
        raise UsageError(Option(name), f" must be {expected}, found {found}")


@contextmanager
def from_extra(extra: str, *needs: str | Option, instead: str = "") -> Iterator[None]:
    """Raises UsageError for a missing or old package, and says how to install the extra.

    `needs` say who needs which package, its name last; `instead` are words on another way.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        told = f", which is not installed; {install_command(extra)}{instead}"
        raise UsageError(*needs, told) from error
    if found := _outdated(needs[-1].split()[-1]):
        told = f" {found[1]} or later, found {found[0]}; {install_command(extra)}{instead}"
        raise UsageError(*needs, told)


@cache
def _outdated(package: str) -> tuple[str, str] | None:
    """Returns the version of a package and the least that is declared, if the first is older."""
    import re
    from importlib.metadata import PackageNotFoundError, requires, version

    try:
        declared, installed = requires("transferry") or [], version(package)
    except PackageNotFoundError:
        return None
    bounds = (re.match(rf"{package}\b[^;]*>=([\d.]+)", each, re.I) for each in declared)
    least = next((bound[1] for bound in bounds if bound), "0")
    found, wanted = ([*map(int, re.findall(r"\d+", each))] for each in (installed, least))
    return (installed, least) if found < wanted else None


def install_command(extra: str, *options: str) -> str:
    """Shell command that installs an extra, such as "export", from this installation's source.

    The source is a checkout, or the wheel file that pip records in direct_url.json (PEP 610); only
    an installation from an index can name `transferry` itself. `options` go to `pip install`.
    """
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    source = "transferry"
    if (_ROOT / "pyproject.toml").is_file():
        source, options = str(_ROOT.resolve()), (*options, "--editable")
    else:
        try:
            record = json.loads(distribution("transferry").read_text("direct_url.json") or "{}")
            url = urlsplit(record.get("url", ""))
        except (PackageNotFoundError, ValueError):
            url = urlsplit("")
        if url.scheme == "file":
            source = url2pathname(url.path)
    return " ".join(["pip install", *options, f'"{source}[{extra}]"'])
