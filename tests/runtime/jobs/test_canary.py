"""A wrong result stops the job, and the rows before it are kept."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.proof.certified import spoil
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.preprocess import LongRows
from transferry.runtime.engine.result import RowError
from transferry.runtime.engine.tasks.generate import Generate
from transferry.runtime.engine.tasks.task import Layout
from transferry.runtime.errors import ParityError
from transferry.runtime.jobs.canary import Canary
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.ort.encoder import EncoderModel


@pytest.fixture
def lines(run_folder: Path, tmp_path: Path) -> Path:
    samples = json.loads((run_folder / "samples.json").read_bytes())
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{text}\n" for text in [*samples[:5], "", *samples[5:]]), "utf-8")
    return path


def job(folder: Path, lines: Path, name: str = "out.jsonl", **changes: Any) -> Job:
    if "task" not in changes:
        changes["generation"] = {"max_length": 12, **changes.get("generation", {})}
    options = JobOptions(**{"canary": "1/3", "chunk_rows": 4, **changes})
    return Job(folder, lines, lines.with_name(name), options)


def canaries(done: Job) -> dict[str, int]:
    done.run()
    assert done.canary is not None
    return done.canary.tally()


@pytest.mark.parametrize(
    "generation",
    [{}, {"scores": False}, {"beam": 4, "n_best": 2}, {"sample": True, "seed": 3}],
    ids=["greedy", "without scores", "beam", "sampling"],
)
def test_a_sound_job_is_not_stopped(
    bundle_folder: Path, lines: Path, generation: dict[str, Any]
) -> None:
    """Nine rows, one of them empty; a sample is drawn again as the row that it was."""
    done = job(bundle_folder, lines, canary="1/1", generation=generation)
    assert canaries(done) == {"canaries": 9, "canaries_identical": 9, "canaries_tied": 0}


def test_one_row_in_so_many_is_computed_again(bundle_folder: Path, lines: Path) -> None:
    assert canaries(job(bundle_folder, lines, canary="1/4"))["canaries"] == 3


def test_a_prompt_is_computed_again(writer_bundle_folder: Path, lines: Path) -> None:
    assert canaries(job(writer_bundle_folder, lines, canary="1/1"))["canaries_identical"] == 9


@pytest.mark.parametrize("task", ["embed", "fill-mask"])
def test_tasks_of_an_encoder(reader_bundle_folder: Path, lines: Path, task: str) -> None:
    if task == "fill-mask":
        text = lines.read_text("utf-8").splitlines()
        lines.write_text("".join(f"{line} [MASK]\n" if line else "\n" for line in text), "utf-8")
    done = job(reader_bundle_folder, lines, task=task, canary="1/1")
    assert canaries(done)["canaries_identical"] == 9


@pytest.mark.parametrize("long_rows", ["truncate", "split", "error"])
@pytest.mark.parametrize("factor", [1.0, -1.0])
def test_long_rows_are_computed_again(
    bundle_folder: Path, monkeypatch: pytest.MonkeyPatch, long_rows: LongRows, factor: float
) -> None:
    spoil(monkeypatch, factor)
    engine = Engine(bundle_folder)
    options = JobOptions(generation={"max_length": 8}, long_rows=long_rows)
    task = Generate(engine, options, Layout("lines.txt", "text", (), has_id=False))
    canary, text = Canary(engine, 1, task), "One two three. Four five six. " * 6
    text = "One two.\n\n three" if long_rows == "error" else text
    (row,) = task.run(engine, iter([text]), 0)
    if factor == 1.0:
        canary.check(0, row, text)
        assert canary.tally()["canaries_identical"] == 1
        return
    where = "" if long_rows == "truncate" else "piece 1: "
    with pytest.raises(ParityError, match=rf"line 1 .*: {where}'.*a defect"):
        canary.check(0, row, text)


def test_an_unreadable_row_is_not_computed_again(bundle_folder: Path, lines: Path) -> None:
    done = job(bundle_folder, lines, canary="1/1")
    assert done.canary is not None
    error = RowError("undecodable", "no UTF-8")
    (row,) = done.engine.generate([error])
    done.canary.check(0, row, error)
    assert done.canary.tally()["canaries_identical"] == 1


@pytest.mark.parametrize(
    ("factor", "what"), [(-1.0, "a defect"), (1.001, "score "), (np.nan, "NaN or infinity")]
)
def test_a_defect_stops_the_job(
    bundle_folder: Path, lines: Path, monkeypatch: pytest.MonkeyPatch, factor: float, what: str
) -> None:
    """Other tokens, a score that is off where the tokens are right, and no answer here only."""
    spoil(monkeypatch, factor)
    with pytest.raises(ParityError, match=f"line 1 is answered differently.*{what}"):
        job(bundle_folder, lines).run()
    assert {path.name for path in lines.parent.iterdir()} == {"lines.txt"}


def test_the_rows_before_are_kept(
    bundle_folder: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = job(bundle_folder, lines, "whole.jsonl")
    whole.run()
    stopped = job(bundle_folder, lines)
    assert stopped.canary is not None
    check = stopped.canary.check

    def wrong_at_six(number: int, row: Any, given: Any, place: int) -> None:
        if number == 6:
            raise ParityError("line 7 is answered differently")
        check(number, row, given, place)

    monkeypatch.setattr(stopped.canary, "check", wrong_at_six)
    with pytest.raises(ParityError, match=r"differently; 4 rows are saved in .*out\.jsonl\.job$"):
        stopped.run()
    assert not lines.with_name("out.jsonl").exists()
    kept = (lines.with_name("out.jsonl.job") / "000000" / "00000000.part").read_bytes().splitlines()
    assert kept == lines.with_name("whole.jsonl").read_bytes().splitlines()[:4]
    assert job(bundle_folder, lines).run().resumed == 1
    assert lines.with_name("out.jsonl").read_bytes() == whole.output.read_bytes()


def test_a_wrong_vector_stops_the_job(
    reader_bundle_folder: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = EncoderModel.encode

    def wrong(self: EncoderModel, *arguments: Any) -> Any:
        found = encode(self, *arguments)
        if self.options.optimisation == "disable":
            return found
        return {name: tensor * np.float32(1.001) for name, tensor in found.items()}

    monkeypatch.setattr(EncoderModel, "encode", wrong)
    with pytest.raises(ParityError, match=r"line 1 .*a vector 1\.0e-03 of its largest entry away"):
        job(reader_bundle_folder, lines, "out.npy", task="embed").run()
    assert {path.name for path in lines.parent.iterdir()} == {"lines.txt"}
