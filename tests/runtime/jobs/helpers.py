"""An engine without a model, and jobs of three rows a chunk that run on it."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.result import Results, RowError
from transferry.runtime.engine.tasks.generate import GenerationResult, TextHypothesis
from transferry.runtime.jobs.distribution import LOST, Call, ChunkRunner, Worker
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.jobs.journal import parts_of
from transferry.runtime.jobs.summary import Summary


class Echo(Engine):
    """Returns a text in capitals, then reversed; an error for an empty one.

    Attributes:
        change: Used instead of capitals.
        computed: File to which the number of each computed row is added.
        seconds: Time per row.
        fail_at: Row at which the engine breaks down.
        score: Score of the best output.
        described: Returned by `describe`.
    """

    def __init__(
        self,
        *,
        change: Callable[[str], str] = str.upper,
        computed: Path | None = None,
        seconds: float = 0.0,
        fail_at: int | None = None,
        score: float = -0.25000004,
    ) -> None:
        self.change, self.computed, self.seconds = change, computed, seconds
        self.fail_at, self.best_score = fail_at, score
        self.described: dict[str, Any] = {"manifest_sha256": "ab12", "onnxruntime": "1.0"}
        tokenizer = SimpleNamespace(
            encode_target=lambda text: list(text.encode()), looks_special=lambda text: "<s>" in text
        )
        manifest = SimpleNamespace(architecture="encoder-decoder", head=None)
        self.bundle: Any = SimpleNamespace(tokenizer=tokenizer, folder="bundle", manifest=manifest)

    def describe(self) -> dict[str, Any]:
        return self.described

    def require_task(self, task: str) -> None:
        """No certificate is required."""

    def require_covered(self, options: GenerationOptions) -> None:
        """No certificate is required."""

    def default_options(self) -> GenerationOptions:
        return GenerationOptions()

    def generate(
        self,
        texts: Iterable[Any],
        options: GenerationOptions | None = None,
        *,
        first_row: int = 0,
        **named: Any,
    ) -> Results[GenerationResult]:
        return Results(self._echo(texts, options, first_row))

    def _echo(
        self, texts: Iterable[Any], options: GenerationOptions | None, first_row: int
    ) -> Iterator[GenerationResult]:
        for number, text in enumerate(texts, start=first_row):
            if self.computed is not None:
                with self.computed.open("a") as file:
                    file.write(f"{number}\n")
            if self.seconds:
                time.sleep(self.seconds)
            if number == self.fail_at:
                raise RuntimeError("the device is gone")
            if isinstance(text, RowError):
                yield GenerationResult("", 0, error=text)
                continue
            length = len(text.split()) + 1
            if not text:
                error = RowError("empty", "there is no text to work on")
                yield GenerationResult(text, length, error=error)
                continue
            best = TextHypothesis((7,) * length, -1.5, self.best_score, "end", self.change(text))
            second = TextHypothesis((8, 9), -1.0, -0.5, "length", text[::-1])
            found = (best, second)[: options.n_best if options else 1]
            yield GenerationResult(text, length, found)


class Deadly(Echo):
    """Kills its own process at the row "deadly", as a machine that goes away would.

    Attributes:
        spared: File that marks a first time, after which it stops.
    """

    def __init__(self, spared: Path | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.spared = spared

    def generate(
        self, texts: Iterable[Any], *arguments: Any, **named: Any
    ) -> Results[GenerationResult]:
        def watched() -> Iterator[str | RowError]:
            for text in texts:
                if text == "deadly" and not (self.spared and self.spared.exists()):
                    if self.spared:
                        self.spared.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield text

        return super().generate(watched(), *arguments, **named)


def computed_rows(computed: Path) -> list[int]:
    """Rows that were computed, in order of time; empties the file."""
    if not computed.exists():
        return []
    numbers = [int(line) for line in computed.read_text().split()]
    os.truncate(computed, 0)
    return numbers


def make_job(
    source: Path, output: Path | str = "out.jsonl", engine: Engine | None = None, **options: Any
) -> Job:
    """A job; an output without a folder lies beside the input."""
    chosen = JobOptions(**{"chunk_rows": 3, **options})
    return Job(engine or Echo(), source, source.parent / output, chosen)


def run(source: Path, output: Path | str = "out.jsonl", **options: Any) -> bytes:
    """Runs a job; returns the bytes of its output."""
    job = make_job(source, output, **options)
    job.run()
    return job.output.read_bytes()


def write_rows(path: Path, rows: int = 11, empty: int | None = 4) -> Path:
    """Writes "row 0", "row 1" and so on, with one empty line."""
    lines = [f"row {number}" if number != empty else "" for number in range(rows)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    """Bytes of every file at any depth of a folder, by path."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class LocalCrew:
    """Workers in this process, one after the other; some calls lose their worker."""

    def __init__(self, make: Callable[[], Any], workers: int, deaths: Iterable[bool] = ()) -> None:
        self._make, self._workers = make, [make() for _ in range(workers)]
        self._calls, self._deaths = list[Call](), iter(deaths)

    def __len__(self) -> int:
        return len(self._workers)

    def call(self, worker: int, method: str, *arguments: Any) -> None:
        self._calls.append(Call(worker, method, *arguments))

    def resources(self) -> str:
        return "nothing is free"

    def returned(self, seconds: float) -> Iterator[Call]:
        calls, self._calls = self._calls, []
        for call in calls:
            if dies := call.method == "compute" and next(self._deaths, False):
                self._workers[call.worker] = self._make()
            told = {"keep": (call.first, call.places), "compute": (call.first,)}
            method = getattr(self._workers[call.worker], call.method)
            call.result = LOST if dies else method(*told.get(call.method, ()))
            yield call


class LocalRunner(ChunkRunner):
    """Computes chunks as Ray does, in this process."""

    def __init__(self, deaths: Iterable[bool] = (), **engine: Any) -> None:
        super().__init__(lambda: Echo(**engine), 3)
        self._deaths, self.opened = deaths, 0

    @contextmanager
    def crew(self, job: Job, session: int) -> Iterator[LocalCrew]:
        def made() -> Worker:
            self.opened += 1
            return Worker(*self.told(job, session))

        yield LocalCrew(made, self.workers, self._deaths)


def by_workers(
    source: Any, output: Path, runner: LocalRunner | None = None, **options: Any
) -> Summary:
    """Runs a job whose output is a folder of chunks."""
    runner = runner or LocalRunner()
    return Job(runner.load(), source, output, JobOptions(chunk_rows=3, **options), runner).run()


def joined(folder: Path) -> bytes:
    """Bytes of the files of a folder, in order."""
    return b"".join(path.read_bytes() for path in parts_of(folder))
