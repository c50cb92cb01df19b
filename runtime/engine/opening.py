"""How a bundle is opened: options of its sessions, devices, certificate."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.engine.processes import Parts
from transferry.runtime.errors import InputError, Option, ParityError, UsageError, require
from transferry.runtime.ort.open_model import ServedModel, open_model
from transferry.runtime.ort.session import Few, Provider, SessionOptions
from transferry.runtime.proof.certificates.certificate import Certificate
from transferry.runtime.proof.certificates.signature import Trust
from transferry.runtime.proof.certificates.standing import require_standing, standing
from transferry.runtime.proof.certificates.strength import Strength
from transferry.runtime.proof.report import ParityReport
from transferry.runtime.settings import check_value, field_types, hint

# Of one process, where no number of processes is given (docs/performance.md).
REPLICAS = 4
# Bytes of all copies of the weights, likewise: a large model has long steps, between which there is
# little Python.
COPIES = 1 << 30


def session_options(options: SessionOptions | None, named: dict[str, Any]) -> SessionOptions:
    """Returns options with named fields changed; raises UsageError for an unknown name."""
    known = field_types(SessionOptions).keys()
    if device := str(named.pop("device", "")):
        named["provider"], _, number = device.partition(":")
        known_device = number.isdecimal() or device in get_args(Provider)
        require(known_device, "device", "cpu, cuda or cuda:1", device)
        named |= {"device_id": int(number)} if number else {}
    if unknown := sorted(named.keys() - known):
        synonyms = {"intra_threads": "threads", "inter_threads": "replicas"}
        synonyms |= {"compute_type": "variant", "batch_size": "batches=BatchOptions(rows=...)"}
        further = ("device", "replicas", "processes", "batches", "variant")
        told = hint(unknown, (*known, *further), synonyms)
        raise UsageError(f"Engine has no {', '.join(unknown)}; {told}")
    return replace(options or SessionOptions(), **named)


def devices_of(options: SessionOptions, device_ids: Sequence[int] | None) -> list[SessionOptions]:
    """Returns the options of each device."""
    given = check_value("device_ids", device_ids, tuple[int, ...] | None)
    ids = [options.device_id] if given is None else list(given)
    if len(set(ids)) != len(ids) or not ids:
        raise UsageError(f"expected devices, each of them once, found {ids}")
    if options.provider == "cpu" and ids != [0]:
        raise UsageError(
            f"provider cpu is one device, found {ids}; choose provider cuda, or more replicas"
        )
    return [replace(options, device_id=number) for number in ids]


def check_replicas(replicas: int) -> None:
    """Raises UsageError unless there is a replica."""
    check_value("replicas", replicas, Few)
    require(replicas >= 1, "replicas", "at least 1", replicas)


def weights_of(bundle: Bundle, variant: Variant) -> int:
    """Returns the bytes of the files beside a variant's graphs."""
    folders = {PurePosixPath(graph.file).parent for graph in variant.graphs.values()}
    files = bundle.manifest.files.items()
    return sum(file.size for path, file in files if PurePosixPath(path).parent in folders)


def shares_of(
    replicas: int, processes: int | None, options: SessionOptions, weights: int
) -> list[int]:
    """Returns the number of replicas of each process, the smallest first.

    Args:
        replicas: Of all processes.
        processes: Their number; None takes it from replicas and weights.
        options: More processes than one need provider cpu.
        weights: Bytes that each process holds.

    Raises:
        UsageError: A number is out of range.
    """
    check_replicas(replicas)
    if processes is None:
        most = COPIES // max(weights, 1) if options.provider == "cpu" else 1
        processes = max(1, min(replicas // REPLICAS, most))
    check_value("processes", processes, Few)
    share, more = divmod(replicas, max(processes, 1))
    require(processes >= 1 and share > 0, "processes", f"1 to {replicas}, the replicas", processes)
    if processes > 1 and options.provider != "cpu":
        raise UsageError(
            Option("processes"), f" is for provider cpu, found {options.provider}; leave it out"
        )
    return [share] * (processes - more) + [share + 1] * more


def open_certified(
    bundle: Bundle,
    variant: Variant,
    options: SessionOptions,
    strength: Strength | None,
    trusted: Trust | None,
    prove: Callable[[Bundle, ServedModel], ParityReport],
) -> tuple[ServedModel, str, Certificate | None]:
    """Opens a variant on one device, cites its certificate, and returns one that is required."""
    found = standing(bundle, variant, options, trusted)
    signed = trusted is not None
    required = require_standing(found, bundle, strength, signed=signed) if strength else None
    model = open_model(bundle, variant, options)
    if found.status != "elsewhere":
        return model, found.cite(), required
    prove(bundle, model).require()
    return model, f"{found.cite()}; the recorded answers came out here too", required


def covered(
    batches: BatchOptions | None, default: BatchOptions, required: Sequence[Certificate]
) -> BatchOptions:
    """Returns limits within what certificates cover; raises ParityError for more rows."""
    most = min(certificate.batch_rows for certificate in required)
    if batches is not None and batches.rows > most:
        raise ParityError(
            f"batches of {batches.rows} rows were not verified, of {most} at most: lower ",
            *(Option("batch_rows"), f", or verify with --batch-rows {batches.rows}"),
        )
    batches = batches or default
    return replace(batches, rows=min(batches.rows, most))


def open_again(
    engine: Callable[[Bundle, ServedModel], Any],
    folder: Path,
    sha256: str,
    variant: str,
    options: SessionOptions,
    reads_special: bool,
) -> Parts:
    """Opens a bundle in another process; raises InputError if it is another one by now.

    `engine` combines a bundle with a model, as `OpenBundle.of` does; `sha256` is the manifest's.
    """
    bundle = Bundle.load(folder)
    if bundle.sha256 != sha256:
        raise InputError(
            f"{folder}: another bundle came into this folder while it was opened; open it again"
        )
    if reads_special:
        bundle.tokenizer.read_special_tokens()
    parts: Parts = engine(bundle, open_model(bundle, bundle.variant(variant), options)).parts()
    return parts
