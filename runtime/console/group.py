"""The command group: help by concern, paths that are apart, exceptions as messages and exit codes.

`--help` imports this module, so it imports nothing heavier than click at its top.
"""

import contextlib
import errno
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import click

from transferry.runtime.console.progress import COMMAND_LINE, as_logged, logs_json
from transferry.runtime.errors import (
    DOWNLOAD,
    InputError,
    TransferryError,
    UsageError,
    install_command,
)
from transferry.runtime.installation import installed_version
from transferry.runtime.io.folders import names_function
from transferry.runtime.io.outputs import STANDARD_STREAM, require_apart, require_own
from transferry.runtime.jobs.formats.remote_file import (
    HIDDEN,
    RemoteFile,
    is_url,
    shown_url,
    without_secrets,
)
from transferry.runtime.settings import foreign_settings, shown
from transferry.runtime.stopping import EXIT_CODE, format_with
from transferry.runtime.tables import printable

# Renamed options; the old name still works, also in a --config file.
FORMER_NAMES = {"opinions": "cross-check", "shard": "partition", "shard-rows": "chunk-rows"}
FORMER_NAMES |= {"device-id": "device"}
# Commands by purpose, in the order in which a model meets them.
COMMANDS = {
    "Make a bundle": ("train", "distil", "import", "export"),
    "Prove it": ("verify", "sign", "report", "audit"),
    "Use it": ("run", "score", "merge", "inspect", "page"),
    "Machine": ("doctor", "completion"),
}
# Options that --help lists, in this order, of a command with many; --help-all lists the rest.
COMMON = {
    "train": "source target valid-source valid-target text preset max-steps max-minutes seed",
    "run": "out column format task target-language chat long-rows beam max-length sample variant "
    "provider require-certificate engine",
    "score": "out column target format long-rows variant provider require-certificate engine",
    "verify": "checkpoint text target self-test variant provider beam certify sign report",
}
# Headings: of the common options, and of those that few people need, listed last.
FIRST, LAST = "Common options", ("Machine", "Proof", "Ray")
# OpenBLAS exits with 1, and torch aborts, where a limit on the address space leaves no room.
_MORE = "raise the limit (ulimit -v), or end other programs"
# MiB of address space without which libraries cannot even be loaded: at least, and for each core,
# whose threads reserve a stack and an arena. Measured with a tiny model on two cores, rounded up.
_RUNTIME, _WITH_TORCH = (200, 40), (1200, 140)
TORCH_COMMANDS = {"train", "distil", "import", "export", "audit"}
# How to get the argument of a command, where there is no such path.
REMEDIES = {"import": f" {DOWNLOAD}"}
# Messages of the dynamic loader.
_NO_ROOM = ("failed to map segment", "annot allocate memory", "can't start new thread")
CONFIG, HELP_ALL = f"{__name__}.config", f"{__name__}.help_all"


class FilePath(click.Path):
    """A file or folder that is read, or one that is written.

    Attributes:
        writes: Suffixes of the written files, "" for the path itself; empty for an input.
        foreign: Fault of an existing output, see `require_own`; None where the command itself
            checks it.
        remote: Whether a URL may stand there.
    """

    def __init__(
        self, *writes: str, foreign: Callable[[Path], str] | None = None, remote: bool = False
    ) -> None:
        super().__init__(path_type=Path)
        self.writes, self.foreign, self.remote = writes, foreign, remote

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuses an impossible path, before `exists` raises an error of its own."""
        if is_url(str(value)):
            if not self.remote:
                told = f"expected a path, found {shown_url(str(value))}"
                self.fail(f"{told}; only INPUT and --out may be URLs", param, ctx)
            if HIDDEN in str(value):
                self.fail(f"{value} has {HIDDEN} in the place of a secret; give the whole address")
            return RemoteFile(str(value))
        path = Path(value)
        if not str(value):
            self.fail("expected a path, found nothing", param, ctx)
        if self.writes and not self.remote and path == STANDARD_STREAM:
            self.fail("expected a path, found -; standard output takes answers alone", param, ctx)
        try:
            path.lstat()
            if path.is_dir() and not os.access(path, os.X_OK):  # no file in it can be opened
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise InputError(f"{shown(str(path))}: cannot be used: {error.strerror}") from error
        except ValueError:  # a NUL, or a character that no name can have
            self.fail(f"expected a path, found {shown(str(path))}", param, ctx)
        return super().convert(value, param, ctx)


class Failure(click.ClickException):
    """An error message for stderr, and the exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(printable(message))
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it for the class

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints the message on stderr."""
        if logs_json():
            click.echo(as_logged(self.message, "error"), err=True)
        else:
            super().show(file)


@contextlib.contextmanager
def _as_failures() -> Iterator[None]:
    """Turns wrong usage that click found into a message of two lines, without the usage."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        hint = f"\nTry '{error.ctx.command_path} --help' for help." if error.ctx else ""
        raise Failure(f"{error.format_message()}{hint}", error.exit_code) from error


def _flag(show: Callable[[click.Context], str]) -> dict[str, Any]:
    """Returns the settings of a flag that prints a text, before anything else, and exits."""

    def callback(ctx: click.Context, parameter: click.Parameter, given: bool) -> None:
        if given and not ctx.resilient_parsing:
            click.echo(show(ctx))
            ctx.exit()

    return {"is_flag": True, "is_eager": True, "expose_value": False, "callback": callback}


def _whole_help(ctx: click.Context) -> str:
    ctx.meta[HELP_ALL] = True
    return ctx.get_help()


_help_all, _same_help = (
    click.Option(["--help-all"], help=text, hidden=not text, **_flag(_whole_help))
    for text in ("Show every option and exit.", "")
)


class CheckedCommand(click.Command):
    """A command whose outputs are apart from its inputs and from each other."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Returns the parameters, with --help-all, listed where --help is short."""
        added = [_help_all if self.name in COMMON else _same_help]
        return super().get_params(ctx) + (added if self.add_help_option else [])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the options by concern: all of them, or the common ones."""
        common = "" if ctx.meta.get(HELP_ALL) else COMMON.get(str(self.name), "")
        places = {f"--{name}": place for place, name in enumerate(common.split())}
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in sorted(
            self.get_params(ctx), key=lambda each: places.get(each.opts[-1], 99)
        ):
            record = parameter.get_help_record(ctx)
            if record is not None and record[1]:  # an argument has no help of its own
                own = getattr(parameter, "panel", "")
                panels.setdefault(FIRST if parameter.opts[-1] in places else own, []).append(record)
        rest = panels.pop("", [])
        order = (
            [FIRST]
            if common
            else sorted(panels, key=lambda each: each in LAST and LAST.index(each) + 1)
        )
        for heading, records in (*((each, panels[each]) for each in order), ("Options", rest)):
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
        if common:
            formatter.write_paragraph()
            formatter.write_text(f"{ctx.command_path} --help-all shows every option.")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuses an option given twice that takes one value: click would drop the first."""
        given = self.make_parser(ctx).parse_args([*args])[2]
        for option in given:
            single = isinstance(option, click.Option) and not (option.multiple or option.count)
            switch = getattr(option, "is_flag", False) and not option.secondary_opts
            if single and not switch and given.count(option) > 1 and not ctx.resilient_parsing:
                raise click.UsageError(f"{option.opts[-1]} is given twice; give it once", ctx)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Checks the paths, then runs the command."""
        inputs: list[Path] = []
        outputs: list[tuple[Path, FilePath]] = []
        for parameter, kind, paths in self._paths(ctx):
            if isinstance(parameter, click.Argument) and ctx.info_name in TORCH_COMMANDS:
                for path in paths:  # before torch is imported
                    if not path.exists() and not names_function(str(path)):
                        remedy = REMEDIES.get(ctx.info_name, "")
                        raise InputError(
                            f"{path}: cannot be read: No such file or directory.{remedy}"
                        )
            inputs += () if kind.writes else paths
            outputs += [(path, kind) for path in paths if kind.writes]
        # Settings that a command wrote are read, and may be written again beside the same output.
        if (config := ctx.meta.get(CONFIG)) is not None and foreign_settings(config):
            inputs.append(config)
        written = [
            path if path == STANDARD_STREAM else Path(f"{path}{suffix}")
            for path, kind in outputs
            for suffix in kind.writes[: 1 if path == STANDARD_STREAM else None]
        ]
        if not ctx.params.get("resume"):  # a training is continued in its folder, with its files
            require_apart(written, inputs)
        for path, kind in outputs:
            if kind.foreign is not None:
                require_own(path, kind.foreign)
        return super().invoke(ctx)

    def _paths(self, ctx: click.Context) -> Iterator[tuple[click.Parameter, FilePath, list[Path]]]:
        """Yields parameters of paths with the local ones; refuses texts that are not UTF-8."""
        for parameter in self.params:
            kind, value = parameter.type, ctx.params.get(str(parameter.name))
            try:
                if isinstance(value, str):
                    value.encode()
            except UnicodeEncodeError as error:
                found = f"{parameter.opts[-1]} must be UTF-8, found {shown(value)}"
                raise UsageError(found) from error
            if isinstance(kind, FilePath) and value is not None:
                paths = value if isinstance(value, tuple) else (value,)
                yield parameter, kind, [path for path in paths if isinstance(path, Path)]


def _require_memory(arguments: Sequence[str]) -> None:
    """Raises InputError for a limit on the address space with which the command cannot begin."""
    try:
        import resource
    except ImportError:  # there is no such limit on Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or "--help" in arguments:
        return
    torch = arguments[0] in TORCH_COMMANDS or any(
        word.startswith("--checkpoint") for word in arguments
    )
    base, each = _WITH_TORCH if torch else _RUNTIME
    least = base + each * (os.cpu_count() or 1)
    if limit < least << 20:
        raise InputError(
            f"expected at least {least} MiB of address space, found a limit of {limit >> 20} MiB; "
            f"{_MORE}"
        )


def _out_of_memory(error: BaseException) -> InputError | None:
    """Returns the error for a user whose memory ran out; None for any other error."""
    if isinstance(error, MemoryError) or any(text in str(error) for text in _NO_ROOM):
        found = str(error).strip().splitlines()
        return InputError(
            f"there is not enough memory ({(found or ['out of memory'])[-1]}); {_MORE}"
        )
    return None


# Makes a command of a function in another package, for `Commands.add_command`.
command = partial(click.command, cls=CheckedCommand)


class Commands(click.Group):
    """The one place that turns exceptions into error messages and exit codes."""

    command_class = CheckedCommand

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        format_with(partial(as_logged, level="error"))
        self.context_settings = {
            "help_option_names": ["-h", "--help"],
            "max_content_width": 100,
            "token_normalize_func": current_name,
        }

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands by purpose, with the whole first line of their help."""
        listed = {name for names in COMMANDS.values() for name in names}
        rest = [name for name in self.list_commands(ctx) if name not in listed]
        for heading, names in (*COMMANDS.items(), ("Other", rest)):
            commands = [(name, self.get_command(ctx, name)) for name in names]
            rows = [(name, found.get_short_help_str(1000)) for name, found in commands if found]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows, col_spacing=4)

    def make_context(self, *arguments: Any, **settings: Any) -> click.Context:
        """Parses the options of the group."""
        with _as_failures():
            return super().make_context(*arguments, **settings)

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """Keeps the command line for the hint on how to continue an interrupted job."""
        told = [without_secrets(argument) for argument in arguments]
        context.meta[COMMAND_LINE] = shlex.join(["transferry", *told])
        return super().parse_args(context, arguments)

    def invoke(self, context: click.Context) -> Any:
        """Runs the command."""
        try:
            _require_memory(shlex.split(context.meta[COMMAND_LINE])[1:])
            with _as_failures():
                return super().invoke(context)
        except TransferryError as error:
            # `merge` tells of options of `run`.
            commands = ("run", str(context.invoked_subcommand))
            known = filter(None, (self.get_command(context, name) for name in commands))
            options = [each for command in known for each in command.params if each.opts]
            names = {str(each.name): each.opts[-1] for each in options}
            message = error.worded({**names, "output": names.get("out", "output")})
            raise Failure(message, error.exit_code) from error
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] == "transferry":
                raise
            needs = str(context.invoked_subcommand)
            # A page needs no torch, so it can be made on a host that serves.
            page = error.name in ("jinja2", "matplotlib")
            if needs == "verify":
                needs = "verify --report" if page else "verify --checkpoint"
            message = f"{needs} needs {error.name}, which is not installed"
            extra = install_command("report" if page else "export")
            raise Failure(f"{message}; {extra}", UsageError.exit_code) from error
        except (MemoryError, ImportError, RuntimeError) as error:
            if (told := _out_of_memory(error)) is None:
                raise
            raise Failure(str(told), told.exit_code) from error
        except FileNotFoundError as error:
            if error.filename is not None:
                raise
            raise Failure("the working folder is gone; change to another", 3) from error  # getcwd
        except KeyboardInterrupt as error:
            said = f"interrupted{': ' if error.args else ''}{error}"
            click.echo(as_logged(said, "error"), err=True)
            context.exit(EXIT_CODE)


def versions() -> Iterator[tuple[str, str]]:
    """Yields packages and their versions, without importing them."""
    # onnxruntime has another distribution on some systems; torch is needed for export alone.
    for names in (["transferry"], ["onnxruntime-gpu", "onnxruntime"], ["torch"]):
        for name in names:
            if version := installed_version(name):
                yield name, version


version_option = click.option(
    "--version",
    help="Show the versions of transferry, onnxruntime and torch, and exit.",
    **_flag(lambda ctx: ", ".join(f"{name} {version}" for name, version in versions())),
)


def current_name(name: str) -> str:
    """Returns the current name of an option, given that name or its former one."""
    return FORMER_NAMES.get(name, name)
