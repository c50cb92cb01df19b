"""Options of the command line: declared as decorators, then turned into what the runtime takes.

`--help` imports this module, so it imports nothing heavier than click at its top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from transferry.runtime.console.fields import (
    PanelOption,
    Required,
    Switch,
    fields_as_options,
    given,
    together,
)
from transferry.runtime.console.group import CONFIG, FilePath, current_name
from transferry.runtime.engine.tasks.table import TASKS, option_names
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.outputs import STANDARD_STREAM
from transferry.runtime.jobs.job_options import JobOptions, RayOptions
from transferry.runtime.proof.certificates.strength import STRENGTHS
from transferry.runtime.settings import check_value, listed, read_settings, shown

if TYPE_CHECKING:
    from transferry.runtime.decoding.batching import BatchOptions
    from transferry.runtime.engine.engine import Engine
    from transferry.runtime.jobs.job import Job

Command = TypeVar("Command", bound=Callable[..., Any])


FILE, INPUT = FilePath(), FilePath(remote=True)
# The output of a job, with the files beside it; a folder or file by itself.
JOB_OUTPUT = FilePath("", ".summary.json", ".settings.toml", ".job", remote=True)
MERGED, OUTPUT = FilePath("", ".summary.json", remote=True), FilePath("")


def option(
    *names: str, help: str, panel: str = "", **settings: Any
) -> Callable[[Command], Command]:
    """Adds an option whose help ends with its default, to a panel of --help."""
    default = settings.get("default")
    if default is not None and default is not False and default != "":
        shown = ", ".join(default) if isinstance(default, tuple) else default
        shown = "on" if default is True else shown
        help = f"{help} Default: {shown}."
    return click.option(*names, help=help, cls=PanelOption, panel=panel, **settings)


def require_option(
    values: Mapping[str, Any], needed: str, *, for_options: Sequence[str], reason: str
) -> None:
    """Raises UsageError for options that have no effect without another one."""
    for name in for_options:
        if values[name] is not None and values[name] is not False and values[needed] is None:
            raise UsageError(f"--{name.replace('_', '-')} needs --{needed}: {reason}")


def _read_config(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    context.meta[CONFIG] = path
    try:
        read_settings(path)
    except InputError as error:
        raise UsageError(str(error)) from error
    context.default_map = check_settings(context, path, others=False)


def explicit(context: click.Context) -> dict[str, Any]:
    """Returns the options that the command line or a --config file gives."""
    given = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
    return {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) in given
    }


def check_settings(context: click.Context, path: Path, *, others: bool = True) -> dict[str, Any]:
    """Checks a file of settings as strictly as options; click would make 4 of 4.7 and of true.

    Returns the values by parameter; `others` are settings of other commands, which are left out.
    Raises UsageError or click.BadParameter for a value of another type than its option, or outside
    its range.
    """
    # A key may be an option's name or its parameter's: --json is the parameter as_json.
    known = {
        _key(name): option
        for option in context.command.params
        for name in (str(option.name), *option.opts)
    }
    values = read_settings(path)
    unknown = [name for name in values if _key(name) not in known]
    if unknown and not others:
        raise UsageError(
            f"{path} sets {', '.join(unknown)}, which {context.info_name} does not have"
        )
    found = {}
    for key in (name for name in values if name not in unknown):
        name = str((option := known[_key(key)]).name)
        several = option.multiple or option.nargs != 1
        kind = list[_kind(option)] if several else _kind(option)  # type: ignore[misc]
        found[name] = _alone(option, values[key])
        check_value(f"{path}: {name.replace('_', '-')}", found[name], kind)
        option.type_cast_value(context, found[name])
    return found


def _alone(parameter: click.Parameter, value: Any) -> Any:
    """Returns a value of a file of settings; some options took a single one in earlier versions."""
    several = parameter.name in ("column", "trusted_key")
    return [value] if several and isinstance(value, str) else value


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
    help="TOML file of options; the command line takes precedence.",
)

FORCE = option("--force", is_flag=True, help="Replace the output if it exists.")
AS_JSON = option("--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout.")
QUIET = option("--quiet", is_flag=True, help="Print no progress and no summary.")
# Bytes of input that a few replicas answer while other processes would start.
SMALL_INPUT = 1 << 20

# Headings in --help.
INPUT_OUTPUT, ROWS, SEARCH = "Input and output", "Rows", "Search"
MACHINE, JOB, PROOF, RAY = "Machine", "Job", "Proof", "Ray"
JOB_PANELS = {
    INPUT_OUTPUT: (
        *("column", "output_column", "keep", "drop", "format_in", "encoding", "delimiter"),
        *("sheet", "format", "limit", "force"),
    ),
    JOB: ("partition", "partition_by", "chunk_rows", "max_errors"),
    PROOF: ("canary",),
}
machine, proof = (partial(option, panel=panel) for panel in (MACHINE, PROOF))
provider_option = partial(
    option,
    "--provider",
    type=click.Choice(["cpu", "cuda", "tensorrt"]),
    default="cpu",
    help="Execution provider; exit with 5 if it cannot run.",
)
optimisation_option = partial(
    option,
    "--optimisation",
    type=click.Choice(["disable", "basic", "extended", "all"]),
    default="all",
    help="Optimisation level of onnxruntime.",
)
_SESSION = ("runtime", "provider", "threads", "optimisation")
# How a bundle is opened.
session_options = together(
    machine(
        "--runtime",
        type=click.Choice(["onnxruntime", "openvino"]),
        default="onnxruntime",
        help="Runtime of the graphs; openvino runs portable and portable-int8 on the CPU.",
    ),
    provider_option(panel=MACHINE),
    machine(
        "--variant",
        help="Variant of the bundle. Default: the fastest verified, else the fastest float32 one.",
    ),
    machine("--threads", type=click.IntRange(1, 1024), default=1, help="Threads per replica."),
    optimisation_option(panel=MACHINE),
)
# Fields of ModelCard.
card_options = together(
    option("--name", help="Name of the model, for its card. Default: as the folder states it."),
    option(
        *("--licence", "--license", "licence"),
        help="Licence of the model, for its card. Default: as the folder states it.",
    ),
)
TRUSTED_KEYS = together(
    proof(
        "--trusted-key",
        metavar="PUB",
        type=FILE,
        multiple=True,
        help="Public key (PEM) that must have signed the certificate; may be given several times.",
    ),
    proof(
        "--require-signatures",
        type=click.IntRange(1, 64),
        default=1,
        help="Number of the trusted keys that must have signed it.",
    ),
)
# Fields of GenerationOptions that --prefix and --suppress make of text.
TOKENS = ("prefix", "suppress", "suppress_sequences")
BUNDLE_DEFAULTS = dict.fromkeys(("max_length", "sample", "split_lines"), "from the bundle")
# How a job is run, besides the options of its task.
job_options = together(
    configurable,
    click.argument("bundle_folder", metavar="BUNDLE", type=FILE),
    click.argument("text", metavar="INPUT...", nargs=-1, required=True, type=INPUT),
    option(
        "-o",
        "--out",
        panel=INPUT_OUTPUT,
        type=JOB_OUTPUT,
        default=Path("-"),
        help="Output file; - is stdout; a URL, such as s3://corpora/de.jsonl, a folder of parts.",
    ),
    session_options,
    option(
        "--special-tokens",
        panel=ROWS,
        type=click.Choice(["as-text", "as-tokens"]),
        default="as-text",
        help='Meaning of text such as "</s>": text, or as in transformers a special token.',
    ),
    machine("--device", default="0", help="GPUs that share the work, such as 0,1."),
    machine(
        "--replicas",
        type=click.IntRange(1, 1024),
        help="Concurrent batches per device. Default: one per core, or one per GPU.",
    ),
    machine(
        "--processes",
        type=click.IntRange(1, 1024),
        help="Processes that share the replicas of the CPU: faster with many replicas, or few rows "
        "per batch. Each opens the bundle for itself. Default: one for each 4 replicas, where the "
        "input has more than 1 MB.",
    ),
    machine(
        "--batch-rows",
        type=click.IntRange(1, 65_536),
        help="Rows decoded per batch; a beam hypothesis counts as one. Default: by variant.",
    ),
    click.option(
        "--require-certificate",
        cls=PanelOption,
        panel=PROOF,
        type=Required(STRENGTHS[::-1]),
        is_flag=False,
        flag_value="checkpoint",
        help="Exit with 4 unless a certificate covers variant, settings, search and batches, and "
        "is at least that strong. Default strength: checkpoint.",
    ),
    TRUSTED_KEYS,
    fields_as_options(RayOptions, panel=RAY),
    option(
        "--dry-run",
        panel=JOB,
        is_flag=True,
        help="Only estimate rows, tokens, time and memory from a sample.",
    ),
    AS_JSON,
    QUIET,
)


def tasks_by(command: str) -> list[str]:
    """Returns the names of the tasks that a command runs."""
    return [name for name, task in TASKS.items() if task.command == command]


def task_options(command: str) -> Callable[[Command], Command]:
    """Adds the options of every job and of the tasks that a command runs."""
    tasks = [TASKS[name] for name in tasks_by(command)]
    left_out = {"task", "generation", *(option_names(*TASKS.values()) - option_names(*tasks))}
    if not any(task.has_canary for task in tasks):
        left_out.add("canary")
    prefixes = {}
    for name in option_names(*tasks):
        takers = [task.name for task in tasks if name in option_names(task)]
        if len(takers) < len(tasks):
            prefixes[name] = f"For {listed(takers, 'and')}: "
    return fields_as_options(
        JobOptions, leave_out=[*left_out], panel=ROWS, panels=JOB_PANELS, prefixes=prefixes
    )


def require_one_stream(out: Path, *, as_json: bool) -> None:
    """Raises UsageError where the answers and the summary would both go to standard output."""
    if as_json and out == STANDARD_STREAM:
        raise UsageError("--json and the answers cannot both go to standard output; add --out")


def open_job(chosen: JobOptions, options: Mapping[str, Any]) -> Job:
    """Opens the job that `job_options` describe."""
    as_json = options["as_json"] and not options["dry_run"]
    require_one_stream(options["out"], as_json=as_json)
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


def processes_for(inputs: Sequence[Any]) -> int | None:
    """Returns 1 for files that take less time than processes to start, else None for many."""
    files = [path for path in inputs if isinstance(path, Path) and path.is_file()]
    small = sum(path.stat().st_size for path in files) < SMALL_INPUT
    return 1 if small and len(files) == len(inputs) else None


def _engine_loader(options: Mapping[str, Any]) -> Callable[[], Engine]:
    """Returns a function that opens the bundle, here or in a worker of Ray."""
    from transferry.runtime.engine.engine import Engine

    folder, rows = options["bundle_folder"], options["batch_rows"]
    replicas, processes = options["replicas"], options["processes"]
    trusted_key = options["trusted_key"]
    if options["engine"] == "ray":  # a worker has its own working directory, and few cores
        folder, replicas = folder.absolute(), replicas or 1
        trusted_key = [path.absolute() for path in trusted_key]
    try:
        devices = tuple(int(number) for number in str(options["device"]).split(","))
    except ValueError as error:
        raise UsageError(
            f"--device must be numbers of GPUs, such as 0 or 0,1, found {shown(options['device'])}"
        ) from error
    return partial(
        Engine,
        folder,
        **{name: options[name] for name in (*_SESSION, "variant")},
        replicas=replicas,
        processes=processes_for(options["text"]) if processes is None else processes,
        device_ids=devices,
        batches=batch_options(rows),
        require_certificate=options["require_certificate"] or False,
        trusted_key=trusted_key or None,
        require_signatures=options["require_signatures"],
        special_tokens=options["special_tokens"],
    )
