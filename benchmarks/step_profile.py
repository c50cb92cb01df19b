"""Where does the time of decoding go?

    python benchmarks/step_profile.py BUNDLE TEXT [--variant portable] [--beam 1] [--rows 256]

One replica with one thread on the CPU, for an encoder-decoder. Two measurements: time by stage,
with a clock around each; and time by operator, from onnxruntime's trace of a separate, slower run.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from sentences import read_sentences, search_options
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding import search as search_module
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.generate import GenerationResult
from transferry.runtime.errors import TransferryError, UsageError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.tables import table

METHODS = ("start", "step", "select")
IN_ONNXRUNTIME = "in onnxruntime"
BETWEEN = "between operators"


class Clock:
    """Seconds by stage; time in a nested stage counts for the inner one only."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._stage, self._inner = "", 0.0

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function in a clock; time in onnxruntime is kept per calling stage."""

        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            outer, outer_inner = self._stage, self._inner
            self._stage = f"{outer}, {stage}" if stage == IN_ONNXRUNTIME else stage
            self._inner, started = 0.0, time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                took = time.perf_counter() - started
                self.seconds[self._stage] += took - self._inner
                self._stage, self._inner = outer, outer_inner + took

        return run


@contextmanager
def clocked(engine: Engine, clock: Clock) -> Iterator[None]:
    """Wraps the engine's stages in the clock."""
    import onnxruntime  # after transferry, which turns its telemetry off

    session, tokenizer = onnxruntime.InferenceSession, engine.bundle.tokenizer
    places = [
        *((engine.model, name, name) for name in METHODS),
        *((tokenizer, name, "tokenizer") for name in ("encode_batch", "decode")),
        *((session, name, IN_ONNXRUNTIME) for name in ("run", "run_with_iobinding")),
        (search_module._Batch, "step", "picking"),
        (search_module._Batch, "drop_ended", "dropping ended rows"),
    ]
    with ExitStack() as stack:
        for place, name, stage in places:
            timed = clock.timed(stage, getattr(place, name))
            stack.enter_context(mock.patch.object(place, name, timed))
        yield


def open_engine(bundle: Bundle, variant: Variant, options: SessionOptions, rows: int) -> Engine:
    """Opens an engine with one replica."""
    model = open_model(bundle, variant, options)
    batches = BatchOptions(rows=rows, tokens=rows << 7, window=10**6)
    return Engine(bundle, model, replicas=1, batches=batches)


def by_stage(
    engine: Engine, texts: Sequence[str], options: GenerationOptions, rounds: int
) -> tuple[dict[str, float], list[GenerationResult]]:
    """Answers the texts; returns seconds by stage of the fastest round, and the results."""

    def answer() -> list[GenerationResult]:
        return list(engine.generate(texts, options))

    results = answer()  # also warms up
    found = []
    for _ in range(rounds):
        clock = Clock()
        with clocked(engine, clock):
            clock.timed("batches and threads", answer)()
        found.append(clock.seconds)
    return longest_first(min(found, key=lambda seconds: sum(seconds.values()))), results


def longest_first(seconds: Mapping[str, float]) -> dict[str, float]:
    """Sorts by time."""
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def by_operator(
    bundle: Bundle, variant: Variant, rows: int, texts: Sequence[str], options: GenerationOptions
) -> dict[str, dict[str, dict[str, float]]]:
    """Answers the texts with tracing; returns seconds and calls by graph and operator."""
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(bundle, variant, SessionOptions(profile=Path(folder)), rows)
        for _ in engine.generate(texts, options):
            pass
        # A session writes its trace when it is deleted.
        del engine
        gc.collect()
        events: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for path in sorted(Path(folder).glob("*.json")):
            # onnxruntime appends a time stamp to the graph's name.
            graph = re.sub(r"_\d{4}-\d\d-\d\d_.*", "", path.stem)
            events[graph] += json.loads(path.read_text(encoding="utf-8"))
    return {graph: read_trace(graph, found) for graph, found in events.items()}


def read_trace(graph: str, events: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Sums up a trace: seconds and calls by operator, longest first, and the time between them.

    Raises:
        UsageError: The trace is truncated; onnxruntime keeps a million events.
    """
    if len(events) >= 1_000_000:
        raise UsageError(f"the trace of {graph} is full; profile fewer rows")
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    whole = 0.0
    for event in events:
        if event["name"] == "model_run":
            whole += event["dur"] / 1e6
        elif (
            event["cat"] == "Node"
            and event["name"].endswith("_kernel_time")
            and event["args"]["op_name"] != "If"  # its branches are in the trace
        ):
            seconds[event["args"]["op_name"]] += event["dur"] / 1e6
            calls[event["args"]["op_name"]] += 1
    seconds[BETWEEN] = whole - sum(seconds.values())
    return {
        name: {"seconds": round(value, 5), "calls": calls[name]}
        for name, value in longest_first(seconds).items()
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--variant", help="of the bundle; the first by default")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="of the clock; the fastest counts")
    parser.add_argument("--batch-rows", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=100)
    arguments = parser.parse_args()
    try:
        record = profile(arguments)
    except TransferryError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    for title, times in (
        ("stage", record["stages"]),
        *(
            (f"{graph}: operator", {name: one["seconds"] for name, one in operators.items()})
            for graph, operators in record["operators"].items()
        ),
    ):
        whole = sum(times.values())
        rows = [
            (name, f"{seconds:.4f}", f"{seconds / whole:.1%}")
            for name, seconds in times.items()
            if seconds > whole / 200
        ]
        print(table((title, "seconds", "share"), [*rows, ("all", f"{whole:.4f}", "")]) + "\n")
    print(json.dumps(record))


def profile(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs both measurements."""
    bundle = Bundle.load(arguments.bundle)
    if bundle.manifest.architecture != "encoder-decoder":
        raise UsageError(
            f"expected an encoder-decoder, found {bundle.manifest.architecture}; profile another"
        )
    variant = bundle.variant(arguments.variant)
    config = ModelConfig.from_dict(dict(bundle.manifest.model))
    texts = read_sentences(arguments.text, arguments.rows)
    options = search_options(arguments.beam, min(arguments.max_length, config.max_positions))
    engine = open_engine(bundle, variant, SessionOptions(), arguments.batch_rows)
    stages, _ = by_stage(engine, texts, options, arguments.rounds)
    return {
        "seconds": round(sum(stages.values()), 4),
        "stages": {name: round(value, 5) for name, value in stages.items()},
        "operators": by_operator(bundle, variant, arguments.batch_rows, texts, options),
        "rows": len(texts),
        "beam": arguments.beam,
        "batch_rows": arguments.batch_rows,
        **engine.model.describe(),
    }


if __name__ == "__main__":
    main()
