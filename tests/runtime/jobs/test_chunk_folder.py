"""Rows of unfinished chunks are counted, so that the progress of a job on Ray moves."""

import time
from pathlib import Path

import pytest

from transferry.runtime.jobs.chunk_folder import ChunkFolder
from transferry.runtime.jobs.ray_job import watching
from transferry.runtime.jobs.summary import Summary


@pytest.fixture
def folder(tmp_path: Path) -> ChunkFolder:
    folder = ChunkFolder(tmp_path / "out.jsonl.job", look_every=0.0)
    folder.notes.mkdir(parents=True)
    return folder


def test_rows_of_unfinished_chunks_are_counted(folder: ChunkFolder) -> None:
    assert folder.unfinished() == 0
    with folder.counting("0.jsonl") as note, folder.counting("9.jsonl") as other:
        note(Summary(rows=2))
        other(Summary(rows=1, ahead=3))
        assert folder.unfinished() == 6
        other(Summary(rows=3, ahead=1))  # rows that were ahead are written now
        note(Summary(rows=5))
        assert folder.unfinished() == 9
    # They count until the chunk comes back, and from then on as part of it.
    folder.received("0.jsonl")
    assert folder.unfinished() == 4
    folder.received("9.jsonl")
    folder.received("9.jsonl")
    assert folder.unfinished() == 0


def test_a_chunk_that_is_begun_again_counts_once(folder: ChunkFolder) -> None:
    for rows in (7, 2):
        with folder.counting("0.jsonl") as note:
            note(Summary(rows=rows))
    assert folder.unfinished() == 2


def test_counts_of_a_killed_run_are_forgotten(folder: ChunkFolder) -> None:
    with folder.counting("0.jsonl") as note:
        note(Summary(rows=7))
    folder.begin({"job_format": 3}, force=False)
    assert folder.unfinished() == 0


def test_a_job_is_watched_while_no_chunk_comes_back(folder: ChunkFolder) -> None:
    summary, seen = Summary(), list[Summary]()

    def until(ahead: int) -> Summary:
        while not (seen and seen[-1].ahead == ahead):
            time.sleep(0.001)
        return seen[-1]

    with watching(folder, summary, seen.append):
        assert until(0).note == "starting Ray and its workers"
        with folder.counting("0.jsonl") as note:
            note(Summary(rows=4))
        assert (until(4).rows, until(4).note) == (0, "")
        summary.rows += 4
        folder.received("0.jsonl")
        assert until(0).rows == 4
    assert seen[-1] is summary, "shown once more at the end, without what is ahead"
