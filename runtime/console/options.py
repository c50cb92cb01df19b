"""Options of the command line: declared as decorators, then turned into what the runtime takes.

`--help` imports this module, so it imports nothing heavier than click at its top.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from transferry.runtime.console.fields import (
    Required,
    Switch,
    fields_as_options,
    given,
    together,
)
from transferry.runtime.console.memory import out_of_memory, require_memory
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.errors import InputError, TransferryError, UsageError
from transferry.runtime.files import require_writable
from transferry.runtime.jobs.options import JobOptions, RayOptions, token_or_text
from transferry.runtime.outputs import (
    STANDARD_STREAM,
    foreign_junit,
    foreign_page,
    foreign_replay,
    require_apart,
    require_own,
)
from transferry.runtime.settings import (
    check_value,
    foreign_settings,
    read_settings,
    shown,
)
from transferry.runtime.stopping import EXIT_CODE
from transferry.runtime.tables import printable

if TYPE_CHECKING:
    from transferry.runtime.decoding.batching import BatchOptions
    from transferry.runtime.engine.engine import Engine
    from transferry.runtime.jobs.job import Job

Command = TypeVar("Command", bound=Callable[..., Any])

# Options that were renamed; the former name still works, also in a --config file.
FORMER_NAMES = {"opinions": "cross-check", "shard": "partition", "shard-rows": "chunk-rows"}
COMMAND_LINE, CONFIG = f"{__name__}.command_line", f"{__name__}.config"


class FilePath(click.Path):
    """A file or folder that is read, or one that is written.

    Attributes:
        writes: Suffixes of what is written, "" for the path itself; empty for an input.
        foreign: What is wrong with an existing output, see `require_own`; None where that is
            checked later.
    """

    def __init__(self, *writes: str, foreign: Callable[[Path], str] | None = None) -> None:
        super().__init__(path_type=Path)
        self.writes, self.foreign = writes, foreign

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuses what can be no path, before `exists` raises an error of its own."""
        path = Path(value)
        if not str(value):
            self.fail("expected a path, found nothing", param, ctx)
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise InputError(f"{shown(str(path))}: cannot be used: {error.strerror}") from error
        except ValueError:  # a NUL, or a character that no name can have
            self.fail(f"expected a path, found {shown(str(path))}", param, ctx)
        return super().convert(value, param, ctx)


FILE = FilePath()
# The output of a job, with what lies beside it; a folder or file without more.
JOB_OUTPUT = FilePath("", ".summary.json", ".settings.toml", ".job")
MERGED, OUTPUT = FilePath("", ".summary.json"), FilePath("")
PAGE = FilePath("", foreign=foreign_page)
JUNIT = FilePath("", foreign=foreign_junit)
REPLAY = FilePath("", foreign=foreign_replay)


class Failure(click.ClickException):
    """An error message for stderr, and the exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(printable(message))
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it for the class


class CheckedCommand(click.Command):
    """A command whose outputs are apart from its inputs and from each other."""

    def invoke(self, ctx: click.Context) -> Any:
        """Checks the paths, then runs the command."""
        inputs: list[Path] = []
        outputs: list[tuple[Path, FilePath]] = []
        for parameter in self.params:
            kind, value = parameter.type, ctx.params.get(str(parameter.name))
            if isinstance(value, str):
                _require_text(parameter, value)
            if isinstance(kind, FilePath) and value is not None:
                paths = value if isinstance(value, tuple) else (value,)
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
        if not ctx.params.get("resume"):  # a run is continued in its folder, with its files
            require_apart(written, inputs)
        for path, kind in outputs:
            if kind.foreign is not None:
                require_own(path, kind.foreign)
        return super().invoke(ctx)


def _require_text(parameter: click.Parameter, value: str) -> None:
    """Raises UsageError for an argument with bytes that are not UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{parameter.opts[-1]} must be UTF-8, found {shown(value)}") from error


class Commands(click.Group):
    """The one place that turns exceptions into error messages and exit codes."""

    command_class = CheckedCommand

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.context_settings = {"max_content_width": 100, "token_normalize_func": current_name}

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """Keeps the command line for the hint on how to continue an interrupted job."""
        context.meta[COMMAND_LINE] = shlex.join(["transferry", *arguments])
        return super().parse_args(context, arguments)

    def invoke(self, context: click.Context) -> Any:
        """Runs the command."""
        try:
            require_memory(shlex.split(context.meta[COMMAND_LINE])[1:])
            return super().invoke(context)
        except TransferryError as error:
            raise Failure(str(error), error.exit_code) from error
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] == "transferry":
                raise
            message = f"{context.invoked_subcommand} needs {error.name}, which is not installed"
            remedy = 'pip install "transferry[export]"'
            raise Failure(f"{message}; {remedy}", UsageError.exit_code) from error
        except (MemoryError, ImportError, RuntimeError) as error:
            if (told := out_of_memory(error)) is None:
                raise
            raise Failure(str(told), told.exit_code) from error
        except KeyboardInterrupt as error:
            click.echo(f"interrupted{': ' if error.args else ''}{error}", err=True)
            context.exit(EXIT_CODE)


def current_name(name: str) -> str:
    """Returns the current name of an option, given that name or its former one."""
    return FORMER_NAMES.get(name, name)


def option(*names: str, help: str, **settings: Any) -> Callable[[Command], Command]:
    """Adds an option whose help ends with its default."""
    default = settings.get("default")
    if default is not None and default is not False and default != "":
        shown = ", ".join(default) if isinstance(default, tuple) else default
        help = f"{help} Default: {shown}."
    return click.option(*names, help=help, **settings)


def require_option(
    values: Mapping[str, Any], needed: str, *, for_options: Sequence[str], reason: str
) -> None:
    """Refuses options that have no effect without another one.

    Raises:
        UsageError: One of them is given, and the other is not.
    """
    for name in for_options:
        if values[name] is not None and values[name] is not False and values[needed] is None:
            raise UsageError(f"--{name.replace('_', '-')} needs --{needed}: {reason}")


def writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuses an output file in a missing folder before any work is done.

    Raises:
        InputError: The folder does not exist.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise InputError(f"{path}: cannot be written: there is no such folder; name another")
    if path is not None:
        require_writable(path)
    return path


def beside_bundle(
    context: click.Context, parameter: click.Parameter, path: Path | None
) -> Path | None:
    """Returns the default of --replay, which is written where torch is compared with."""
    if path is None and context.params.get("checkpoint") is not None:
        return Path(f"{context.params['bundle_folder'].absolute()}.fault.npz")
    return path


def _read_config(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    context.meta[CONFIG] = path
    try:
        values = read_settings(path)
    except InputError as error:
        raise UsageError(str(error)) from error
    # A key may be an option's name or its parameter's: --json is the parameter as_json.
    known = {
        _key(name): option.name
        for option in context.command.params
        for name in (str(option.name), *option.opts)
    }
    if unknown := [name for name in values if _key(name) not in known]:
        raise UsageError(
            f"{path} sets {', '.join(unknown)}, which {context.info_name} does not have"
        )
    context.default_map = {known[_key(name)]: value for name, value in values.items()}
    check_settings(context, path)


def explicit(context: click.Context) -> dict[str, Any]:
    """Returns the options that the command line or a --config file gives."""
    given = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
    return {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) in given
    }


def check_settings(context: click.Context, path: Path) -> None:
    """Checks a file of settings as strictly as options; click would make 4 of 4.7 and of true.

    Raises:
        InputError: The file cannot be read.
        UsageError: A value has another type than its option.
        click.BadParameter: A value lies outside the range of its option.
    """
    settings = read_settings(path)
    named = {_key(name): value for name, value in settings.items()}
    values = {
        str(parameter.name): named[key]
        for parameter in context.command.params
        for key in dict.fromkeys(map(_key, (str(parameter.name), *parameter.opts)))
        if key in named
    }
    for parameter in context.command.params:
        if (name := str(parameter.name)) in values:
            several = parameter.multiple or parameter.nargs != 1
            kind = list[_kind(parameter)] if several else _kind(parameter)  # type: ignore[misc]
            check_value(f"{path}: {name.replace('_', '-')}", values[name], kind)
            parameter.type_cast_value(context, values[name])


def _kind(parameter: click.Parameter) -> Any:
    if isinstance(parameter.type, Required | Switch):
        return bool | str
    kinds = ((click.types.IntParamType, int), (click.types.FloatParamType, float))
    for type, kind in kinds:
        if isinstance(parameter.type, type):
            return kind
    return bool if getattr(parameter, "is_flag", False) else str


def _key(name: str) -> str:
    return current_name(name.lstrip("-").replace("_", "-"))


configurable = click.option(
    "--config",
    type=FILE,
    callback=_read_config,
    is_eager=True,
    expose_value=False,
    help="TOML file of options, such as max-length = 100; the command line takes precedence.",
)

FORCE = option("--force", is_flag=True, help="Replace the output if it exists.")
AS_JSON = option("--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout.")
QUIET = option("--quiet", is_flag=True, help="Print no progress and no summary.")
# How a bundle is opened.
session_options = together(
    option(
        "--provider",
        type=click.Choice(["cpu", "cuda"]),
        default="cpu",
        help="Execution provider; exit with 5 if it cannot run.",
    ),
    option(
        "--variant",
        help="Variant of the bundle. Default: the fastest verified one, else the fastest in the "
        "model's own precision.",
    ),
    option("--threads", type=click.IntRange(1, 1024), default=1, help="Threads per replica."),
    option(
        "--optimisation",
        type=click.Choice(["disable", "basic", "extended", "all"]),
        default="all",
        help="Graph optimisation level of onnxruntime; a certificate is for one level.",
    ),
)
TRUSTED_KEY = option(
    "--trusted-key",
    metavar="PUB",
    type=FILE,
    help="PEM file of the public key that must have signed the certificate.",
)
# Fields of GenerationOptions that --prefix and --suppress make of text.
TOKENS = ("prefix", "suppress", "suppress_sequences")
BUNDLE_DEFAULTS = {"max_length": "from the bundle", "sample": "off, unless the bundle sets it"}
# A search that is verified; stop strings choose no token.
VERIFIED = (*TOKENS, "stop")
search_options = together(
    option(
        "--suppress",
        multiple=True,
        help="Text that no output of the search holds, as for `run`; a number is a token id.",
    ),
    fields_as_options(GenerationOptions, leave_out=VERIFIED, defaults=BUNDLE_DEFAULTS),
)
# How a verification is certified.
certify_options = together(
    option("--certify", metavar="DATE", help="Write a certificate with this date, YYYY-MM-DD."),
    option(
        "--sign",
        metavar="KEY",
        type=FILE,
        help="Sign the certificate with this ECDSA P-256 private key, a PEM file; its passphrase "
        "is read from TRANSFERRY_KEY_PASSPHRASE.",
    ),
    option(
        "--batch-rows",
        type=click.IntRange(1, 65_536),
        help="Rows computed at once; a certificate covers no larger batch. Default: what the "
        "variant is served with.",
    ),
    option("--force", is_flag=True, help="Replace a stronger certificate; certify few rows."),
)
# How a job is run, besides the options of its task.
job_options = together(
    configurable,
    click.argument("bundle_folder", metavar="BUNDLE", type=FILE),
    click.argument("text", metavar="INPUT", type=FILE),
    option("-o", "--out", type=JOB_OUTPUT, default=Path("-"), help="Output file; - is stdout."),
    session_options,
    option("--device", default="0", help="GPUs that share the work, such as 0,1."),
    option(
        "--replicas",
        type=click.IntRange(1, 1024),
        help="Concurrent batches per device. Default: one per core, or one per GPU.",
    ),
    option(
        "--batch-rows",
        type=click.IntRange(1, 65_536),
        help="Rows decoded per batch; each beam hypothesis counts as one. Default: depends on the "
        "variant.",
    ),
    click.option(
        "--require-certificate",
        type=Required(["run", "recorded"]),
        is_flag=False,
        flag_value="run",
        help="Exit with 4 unless a certificate covers variant, settings, search and batches: "
        "against the run, or with --require-certificate=recorded against the recorded answers "
        "at least.",
    ),
    TRUSTED_KEY,
    fields_as_options(RayOptions),
    AS_JSON,
    QUIET,
)


def require_one_stream(out: Path, *, as_json: bool) -> None:
    """Raises UsageError where the answers and the summary would both go to standard output."""
    if as_json and out == STANDARD_STREAM:
        raise UsageError("--json and the answers cannot both go to standard output; add --out")


def open_job(chosen: JobOptions, options: Mapping[str, Any]) -> Job:
    """Opens the job that `job_options` describe.

    Raises:
        TransferryError: The bundle, the input or an option cannot be used.
    """
    require_one_stream(options["out"], as_json=options["as_json"])
    fleet = RayOptions(**given(options, RayOptions))
    load = _engine_loader(options)
    if fleet.engine == "ray":
        from transferry.runtime.jobs.ray_job import ray_job

        return ray_job(load, options["text"], options["out"], chosen, fleet)
    from transferry.runtime.jobs.job import Job

    return Job(load(), options["text"], options["out"], chosen)


def given_search(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that `search_options` gave, with the text of --suppress.

    Raises:
        UsageError: They conflict.
    """
    search = given(options, GenerationOptions, leave_out=VERIFIED)
    GenerationOptions(**search)
    texts = tuple(map(token_or_text, options["suppress"]))
    return search | ({"suppress": texts} if texts else {})


def batch_options(rows: int | None) -> BatchOptions | None:
    """Returns the limits on a batch of so many rows."""
    from transferry.runtime.decoding.batching import BatchOptions

    return None if rows is None else BatchOptions(rows=rows, tokens=rows << 7)


def _engine_loader(options: Mapping[str, Any]) -> Callable[[], Engine]:
    """Returns what opens the bundle, in this process or in a worker of Ray."""
    from transferry.runtime.engine.engine import Engine

    folder, rows, replicas = (options[name] for name in ("bundle_folder", "batch_rows", "replicas"))
    trusted_key = options["trusted_key"]
    if options["engine"] == "ray":  # a worker has its own working directory, and few cores
        folder, replicas = folder.absolute(), replicas or 1
        trusted_key = trusted_key and trusted_key.absolute()
    try:
        devices = tuple(int(number) for number in str(options["device"]).split(","))
    except ValueError as error:
        raise UsageError(
            f"--device must be numbers of GPUs, such as 0 or 0,1, found {shown(options['device'])}"
        ) from error
    return partial(
        Engine.load,
        folder,
        **{name: options[name] for name in ("provider", "variant", "threads", "optimisation")},
        replicas=replicas,
        device_ids=devices,
        batches=batch_options(rows),
        require_certificate=options["require_certificate"] or False,
        trusted_key=trusted_key,
    )
