"""A process whose CUDA driver is the stand-in: opens and runs bundles, prints a record as JSON.

LD_LIBRARY_PATH=STAND_IN python -m tests.runtime.ort.on_stand_in STAND_IN BUNDLE [BUNDLE ...]
"""

import contextlib
import ctypes
import json
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.runtime.ort.simulated_gpu import COUNTS, LIBRARIES, Simulated
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import AllocationError, ProviderError, TransferryError
from transferry.runtime.ort.cuda import CudaStream, StagingBuffer, cuda_obstacle, cuda_stream
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.open_model import ServedDecoder, ServedModel, open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.one_graph import OneGraph
from transferry.runtime.tokenizer.byte_pair import SINGLE_BYTES, Tokenizer

DEVICE = SessionOptions("cuda")
# Threads of onnxruntime that fail at once write their reasons into one buffer (cuda_call.cc), and
# sometimes nothing is left in it.
LOST = "common::Status> = void]. `transferry doctor` tells what works here."
BYTES = Tokenizer("bytes", r"\S+|\s+", {byte: rank for rank, byte in enumerate(SINGLE_BYTES)})
SLOTS = 4
SEARCHES: dict[str, tuple[int, int | None]] = {
    "greedy": (1, 1),
    "beam 4": (4, 8),
    "sampling": (1, None),
}


def in_child(ask: Callable[[], str]) -> str:
    """Answers in a process that has loaded no library yet."""
    read, write = os.pipe()
    if not os.fork():
        try:
            os.write(write, ask().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.wait()
    return text


def obstacle(absent: str = "") -> str:
    with contextlib.suppress(OSError):
        if absent and ctypes.CDLL(absent):
            return "elsewhere"
    found = cuda_obstacle()
    return f"{found.missing}; {found.remedy}" if found else ""


def without_each_library(folder: Path) -> dict[str, str]:
    """The obstacle without each library, by its name."""
    found = {"": in_child(obstacle)}
    for name in LIBRARIES:
        away = folder / f"away-{name}"
        (folder / name).rename(away)
        found[name] = in_child(partial(obstacle, name))
        away.rename(folder / name)
    return found


def without_tensorrt(bundle: Bundle) -> str:
    """How a variant is refused."""
    try:
        open_model(bundle, bundle.variant(), SessionOptions("tensorrt"))
    except ProviderError as error:
        return str(error)
    return "opened"


def obstacle_of(driver: dict[str, int]) -> str:
    Simulated().set(**driver)
    return obstacle()


def runners_of(model: Any) -> dict[str, Any]:
    alone = "one graph" if isinstance(model, OneGraph) else "encoder"
    return dict(model._runners) if hasattr(model, "_runners") else {alone: model._runner}


def nodes_on_cpu(model: Any) -> dict[str, list[str]]:
    """Operators that onnxruntime leaves to the CPU, by graph."""
    return {
        name: sorted(
            node.op_type
            for part in runner.session.get_provider_graph_assignment_info()
            if part.ep_name == "CPUExecutionProvider"
            for node in part.get_nodes()
        )
        for name, runner in runners_of(model).items()
    }


def used(model: ServedModel) -> None:
    """Runs every graph of a variant, with rows that split, change places and leave."""
    sources = np.full((SLOTS, 6), 5)
    mask = np.ones_like(sources, np.bool_)
    if isinstance(model, EncoderModel):
        model.encode(sources, mask)
        return
    state = model.start(sources, mask)
    for rows in ([0, 0, 1, 1, 2, 2, 3, 3], [1, 0, 3, 2, 5, 4, 7, 6], [6, 7, 2, 3], [2]):
        state = model.select(state, np.array(rows))
        for top in (None, 1, 3):
            tokens = np.full((len(rows), 1), 7)
            _, state = model.step(tokens, state, top=top, normalise=top is None)
    model.tensors(state)


def calls_of_a_step(
    device: Simulated, model: ServedDecoder, width: int, top: int | None
) -> dict[str, int]:
    """Calls of the fourth step of a search, which binds and allocates nothing."""
    sources = np.full((SLOTS, 6), 5)
    state = model.start(sources, np.ones_like(sources, np.bool_))
    state = model.select(state, np.arange(SLOTS).repeat(width))
    tokens, before = np.full((SLOTS * width, 1), 7), device.counts()
    for _ in range(4):
        before = device.counts()
        _, state = model.step(tokens, state, top=top)
    after = device.counts()
    return {name: after[name] - before[name] for name in COUNTS}


def hazards(device: Simulated) -> dict[str, list[int]]:
    """Copies torn and work astray, and results that came: without a fault, and with each."""
    stream, other = cuda_stream(0), CudaStream(0)
    found = {}
    for name in ("sound", "changed", "read early", "on another stream"):
        before = device.counts()
        up, down = (StagingBuffer(stream, {"a": np.arange(4)}) for _ in range(2))
        up.upload()
        if name == "changed":
            up.arrays["a"][:] = 0
        if name == "on another stream":
            down.stream = other
        stream.copy(down.addresses["a"], up.addresses["a"], 32, 3)
        down.download()
        if name != "read early":
            down.stream.wait()
        result, after = down.arrays["a"].tolist(), device.counts()
        stream.wait()
        counts = [after[count] - before[count] for count in ("torn", "strays")]
        found[name] = [*counts, result == [0, 1, 2, 3]]
    return found


def run_variant(device: Simulated, bundle: Bundle, variant: Variant) -> dict[str, Any]:
    """Opens and runs a variant: nodes on the CPU, calls of a step, leaked bytes."""
    model = open_model(bundle, variant, DEVICE)
    used(model)
    found: dict[str, Any] = {"on_cpu": nodes_on_cpu(model)}
    if not isinstance(model, EncoderModel):
        found["steps"] = {
            name: calls_of_a_step(device, model, *how) for name, how in SEARCHES.items()
        }
    used(model)  # after the wider steps, which replaced buffers
    before = device.counts()
    for _ in range(20):
        used(model)
    after = device.counts()
    found |= {name: after[name] - before[name] for name in ("held", "pinned", "torn", "strays")}
    if (whole := OneGraph.of(bundle, variant, DEVICE)) is not None:
        # Only opened: shapes in its loop lie on the device, where the stand-in leaves zeros.
        found["on_cpu"] |= nodes_on_cpu(whole)
    return found


def without_memory(bundle: Bundle, variant: Variant, nth: int) -> str:
    """How opening and running a variant ends without memory from the n-th allocation on."""
    device = Simulated()
    device.set(failing=nth)
    try:
        used(open_model(bundle, variant, DEVICE))
    except AllocationError as error:
        return f"AllocationError in {len(str(error).splitlines())} line"
    except TransferryError as error:
        return str(error)
    return "" if device.counts()["mallocs"] < nth else "not noticed"


def ends_without_memory(bundle: Bundle, variant: Variant) -> dict[str, int]:
    """Counts these ends, until there are as many allocations as a run needs."""
    ends: Counter[str] = Counter()
    for nth in range(1, 1000):
        ask = partial(without_memory, bundle, variant, nth)
        for _ in range(20):
            if not (end := in_child(ask)).endswith(LOST):
                break
        if not end:
            break
        ends[end] += 1
    return dict(ends)


def halved(device: Simulated, bundle: Bundle, variant: Variant) -> list[int]:
    """Rows answered, and rows of the batches tried, where memory is short for all at once."""
    model = open_model(bundle, variant, DEVICE)
    tried: list[int] = []

    class Counted(type(model)):  # type: ignore[misc]
        def start(self, source: Any, mask: Any) -> Any:
            tried.append(len(source))
            return super().start(source, mask)

    model.__class__ = Counted
    engine = Engine.of(bundle, model)
    options = GenerationOptions(max_length=12)
    list(engine.generate(["seven"], options))
    device.set(limit=device.counts()["held"] + (2 << 20))
    rows = [f"number {number} and {number + 1}" for number in range(256)]
    answered = len(list(engine.generate(rows, options)))
    device.set()
    return [answered, *tried]


def opened(folder: Path) -> Bundle:
    """A bundle, or graphs of a variant with their manifest alone."""
    alone = folder / "manifest.pickle"
    if alone.exists():
        return Bundle(folder, pickle.loads(alone.read_bytes()), BYTES)
    return Bundle.load(folder)


def variants_for_cuda(bundles: list[Bundle]) -> Iterator[tuple[str, Bundle, Variant]]:
    for bundle in bundles:
        for variant in bundle.manifest.variants.values():
            if "cuda" in variant.providers:
                yield f"{bundle.folder.name} {variant.name}", bundle, variant


def main(folder: Path, folders: list[Path]) -> dict[str, Any]:
    record: dict[str, Any] = {"missing": without_each_library(folder)}
    for name, driver in {"old": {"driver": 12090}, "none": {"devices": 0}}.items():
        record[name] = in_child(partial(obstacle_of, driver))
    cases = list(variants_for_cuda(list(map(opened, folders))))
    record["tensorrt"] = in_child(partial(without_tensorrt, cases[0][1]))
    # Before this process opens a session: its arena would have memory for all that follow.
    ends = {name: ends_without_memory(bundle, variant) for name, bundle, variant in cases}
    device = Simulated()
    for name, bundle, variant in cases:
        record[name] = run_variant(device, bundle, variant) | {"ends": ends[name]}
    record["hazards"] = hazards(device)
    *_, (name, bundle, variant) = (case for case in cases if case[2].cache is not None)
    record["halved"] = halved(device, bundle, variant)
    return record


if __name__ == "__main__":
    stand_in, *bundles = map(Path, sys.argv[1:])
    print(json.dumps(main(stand_in, bundles)))
