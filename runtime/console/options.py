"""Options of the command line: declared as decorators, then turned into what the runtime takes.

`--help` imports this module, so it imports nothing heavier than click at its top.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from transferry.runtime.errors import InputError, TransferryError, UsageError
from transferry.runtime.jobs.options import JobOptions, RayOptions
from transferry.runtime.settings import field_helps, read_settings

if TYPE_CHECKING:
    from transferry.runtime.decoding.batching import BatchOptions
    from transferry.runtime.engine.engine import Engine
    from transferry.runtime.jobs.job import Job

Command = TypeVar("Command", bound=Callable[..., Any])

FILE = click.Path(path_type=Path)
# Options that were renamed; the former name still works, also in a --config file.
FORMER_NAMES = {"opinions": "cross-check", "shard": "partition", "shard-rows": "chunk-rows"}
COMMAND_LINE = f"{__name__}.command_line"


class Failure(click.ClickException):
    """An error message for stderr, and the exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it for the class


class Commands(click.Group):
    """The one place that turns exceptions into error messages and exit codes."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.context_settings = {"max_content_width": 100, "token_normalize_func": current_name}

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """Keeps the command line for the hint on how to continue an interrupted job."""
        context.meta[COMMAND_LINE] = shlex.join(["transferry", *arguments])
        return super().parse_args(context, arguments)

    def invoke(self, context: click.Context) -> Any:
        """Runs the command."""
        # A scheduler's SIGTERM acts like Ctrl-C: temporary files are removed, the exit code is 130.
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            return super().invoke(context)
        except TransferryError as error:
            raise Failure(str(error), error.exit_code) from error
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] == "transferry":
                raise
            message = f"{context.invoked_subcommand} needs {error.name}, which is not installed"
            remedy = 'pip install "transferry[export]"'
            raise Failure(f"{message}; {remedy}", UsageError.exit_code) from error
        except KeyboardInterrupt as error:
            click.echo(f"interrupted{': ' if error.args else ''}{error}", err=True)
            context.exit(130)


class Required(click.Choice[str]):
    """The strength of a certificate; a settings file may say true and false."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Turns a switch into a strength."""
        if isinstance(value, bool):
            return "run" if value else None
        return super().convert(value, param, ctx)


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


def together(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Combines options into one decorator, in the order of --help."""

    def add(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return add


def fields_as_options(
    config: type[Any],
    *,
    leave_out: Sequence[str] = (),
    defaults: Mapping[str, str] | None = None,
) -> Callable[[Command], Command]:
    """Adds an option for each field of a dataclass, with its help from the docstring.

    An option that is not given is None, so that `given` can tell it from the field's default.

    Args:
        config: The dataclass.
        leave_out: Fields that get no option.
        defaults: What --help says about defaults that are not the field's own. A bool among these
            can be switched on and off.
    """
    hints, helps, defaults = get_type_hints(config), field_helps(config), defaults or {}

    def declared(field: dataclasses.Field[Any]) -> Callable[[Any], Any]:
        hint, text, flag = hints[field.name], helps[field.name], field.name.replace("_", "-")
        if NoneType in get_args(hint):
            (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
        default = None if field.default is dataclasses.MISSING else field.default
        if hint is bool:
            default = "on" if default else None
        if (default := defaults.get(field.name, default)) not in (None, ""):
            text = f"{text} Default: {default}."
        if hint is bool:
            name = f"--{flag}/--no-{flag}" if default else f"--{flag}"
            return click.option(name, is_flag=True, default=None, help=text)
        kind = click.Choice(get_args(hint)) if get_origin(hint) is Literal else hint
        return click.option(f"--{flag}", type=kind, help=text)

    fields = [field for field in dataclasses.fields(config) if field.name not in leave_out]
    return together(*map(declared, fields))


def given(
    values: Mapping[str, Any], config: type[Any], *, leave_out: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the options that were given and are fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(config)} - set(leave_out)
    return {name: value for name, value in values.items() if name in names and value is not None}


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
    return path


def _read_config(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
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
    option("--threads", type=int, default=1, help="Threads per replica."),
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
        type=int,
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
    option("-o", "--out", type=FILE, default=Path("-"), help="Output file; - is stdout."),
    session_options,
    option("--device", default="0", help="GPUs that share the work, such as 0,1."),
    option(
        "--replicas",
        type=int,
        help="Concurrent batches per device. Default: one per core, or one per GPU.",
    ),
    option(
        "--batch-rows",
        type=int,
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


def open_job(chosen: JobOptions, options: Mapping[str, Any]) -> Job:
    """Opens the job that `job_options` describe.

    Raises:
        TransferryError: The bundle, the input or an option cannot be used.
    """
    if options["as_json"] and str(options["out"]) == "-":
        raise UsageError("--json and the answers cannot both go to standard output; add --out")
    fleet = RayOptions(**given(options, RayOptions))
    load = _engine_loader(options)
    if fleet.engine == "ray":
        from transferry.runtime.jobs.ray_job import ray_job

        return ray_job(load, options["text"], options["out"], chosen, fleet)
    from transferry.runtime.jobs.job import Job

    return Job(load(), options["text"], options["out"], chosen)


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
            f"--device must be numbers of GPUs, such as 0 or 0,1, found {options['device']!r}"
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
