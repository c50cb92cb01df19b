"""Jobs as a person or a scheduler runs them: stopped, resumed, in partitions, merged."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import call, done, fails
from tests.runtime.jobs.helpers import read_records
from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.console.progress import Progress, log_every


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lines") / "lines.txt"
    path.write_text("".join(f"{pair.source}\n" for pair in builtin_pairs(300, seed=7)))
    return path


@pytest.fixture(scope="module")
def many_lines(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many that even a busy machine stops a job before the last one is answered."""
    path = tmp_path_factory.mktemp("many") / "many.txt"
    path.write_text("".join(f"{pair.source}\n" for pair in builtin_pairs(240, seed=7)))
    done("run", bundle_folder, path, "--chunk-rows", "4", "-o", path.with_name("whole.jsonl"))
    return path


def text_of(records: Path, path: Path) -> Path:
    """Writes the answers in JSONL as lines of text."""
    rows = map(json.loads, records.read_text().splitlines())
    path.write_text("".join(f"{row['text']}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("number", "runtime"),
    [
        (signal.SIGINT, "onnxruntime"),
        pytest.param(signal.SIGTERM, "onnxruntime", marks=pytest.mark.thorough),
        (signal.SIGKILL, "onnxruntime"),
        pytest.param(signal.SIGKILL, "openvino", marks=pytest.mark.optional("openvino")),
    ],
)
def test_a_job_that_is_stopped_is_resumed(
    bundle_folder: Path, many_lines: Path, tmp_path: Path, number: signal.Signals, runtime: str
) -> None:
    whole = many_lines.with_name("whole.jsonl")
    out = tmp_path / "out name.jsonl"
    if runtime == "openvino":  # its scores depend on the batch
        whole, out = text_of(whole, tmp_path / "whole.txt"), tmp_path / "out name.txt"
    command: list[str | Path] = ["run", bundle_folder, many_lines, "--chunk-rows", "4", "-o", out]
    command += ["--runtime", runtime]
    # Slow enough to be stopped in the middle.
    slow = [*command, "--batch-rows", "1", "--replicas", "1"]
    arguments = [sys.executable, "-m", "transferry.cli", *map(str, slow)]
    journal = Path(f"{out}.job", "journal.jsonl")
    with subprocess.Popen(
        arguments,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # Two lines: the first may be there before the job knows that it is on the disk.
        while not (journal.exists() and journal.read_bytes().count(b"\n") >= 2):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=600)
    assert not out.exists()
    saved = sum(json.loads(line)["rows"] for line in journal.read_text().splitlines())
    assert 0 < saved < 240
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        said, _, again = stderr.partition("; continue with: ")
        # Likewise a chunk whose line was being synced is saved, but not counted yet.
        counted = [
            f"interrupted: {rows} rows are saved in {out}.job" for rows in (saved, saved - 4)
        ]
        assert said.endswith(tuple(counted))
        assert shlex.split(again) == ["transferry", *map(str, slow)]
    resumed = done(*command)
    rest = f"this run computes the rest, from row {saved + 1} on, with task generate, variant "
    assert f"{saved} rows are saved in {out}.job; {rest}" in resumed.stderr
    assert out.read_bytes() == whole.read_bytes()
    assert json.loads(Path(f"{out}.summary.json").read_bytes())["resumed"] == 1
    assert not journal.parent.exists()


def test_bad_rows_are_told_again_when_nothing_is_left_to_do(
    bundle_folder: Path, tmp_path: Path
) -> None:
    source, out = tmp_path / "source.txt", tmp_path / "out.jsonl"
    source.write_text("seven\n\neight\n")
    command: list[str | Path] = ["run", bundle_folder, source, "-o", out, "--max-errors", "1"]
    assert call(*command).exit_code == 6
    again = call(*command)
    assert (again.exit_code, again.stderr.splitlines()[0].partition(" in ")[0]) == (
        6,
        f"{out} was finished before: 3 rows",
    )
    assert call(*command, "--force", "--quiet").exit_code == 6


def test_the_summary_is_printed_as_json(bundle_folder: Path, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = done("run", bundle_folder, lines, "-o", out, "--json", "--quiet")
    record = json.loads(result.stdout)
    assert record == json.loads((tmp_path / "out.jsonl.summary.json").read_bytes())
    assert record["rows"] == 300
    assert record["certificate"]
    assert record["fingerprint"]["variant"] == "portable"
    assert result.stderr == ""


def test_partitions_are_merged(bundle_folder: Path, lines: Path, tmp_path: Path) -> None:
    options = ["--sample", "--seed", "3"]
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    done("run", bundle_folder, lines, "-o", whole, *options)
    parts = [tmp_path / f"{number}.jsonl" for number in (1, 2, 3)]
    for number, part in enumerate(parts, start=1):
        done("run", bundle_folder, lines, "-o", part, *options, "--partition", f"{number}/3")
    merged = done("merge", *reversed(parts), "-o", out)
    assert merged.stderr.startswith("300 rows in ")
    assert out.read_bytes() == whole.read_bytes()
    fails(3, "its job ran without --partition", "merge", whole, "-o", out)
    fails(2, "name another --out or --format", "run", bundle_folder, lines, "-o", "new.npy")


@pytest.mark.parametrize(
    ("option", "former", "value", "message"),
    [("partition", "shard", "4/3", "must be I/N"), ("chunk-rows", "shard-rows", 0, "at least 1")],
)
def test_former_names_of_options(
    option: str, former: str, value: object, message: str, tmp_path: Path
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(f"{former} = {json.dumps(value)}\n")
    for words in ([f"--{option}={value}"], [f"--{former}={value}"], ["--config", str(settings)]):
        fails(2, message, "run", "bundle", "lines.txt", *words)


def test_a_job_over_standard_input_is_resumed(
    bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same lines have to come again."""
    from transferry.runtime.jobs.plan import Runner

    out, stdin = tmp_path / "out.jsonl", b"one\ntwo\nthree\nfour\nfive\n"
    command: list[str | Path] = ["run", bundle_folder, "-", "-o", out, "--chunk-rows", "2"]

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "publish", stop)
        stopped = call(*command, stdin=stdin)
    assert stopped.exit_code == 130
    assert "interrupted: 5 rows are saved in" in stopped.stderr
    changed = "has changed: rows 1 to 2 are not those that were computed"
    fails(3, changed, *command, stdin=stdin.replace(b"two", b"too"))
    done(*command, stdin=stdin)
    assert [record["source"] for record in read_records(out)][:2] == ["one", "two"]
    assert "was finished before" in done(*command, stdin=stdin).stderr
    fails(2, "has changed since; add --force", *command, stdin=stdin + b"six\n")
    assert "no pipe or stdin" in call(*command, "--partition", "1/2", stdin=stdin).stderr


def test_a_long_job_says_how_far_it_is(
    bundle_folder: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFERRY_LOG_EVERY", "0")
    result = done("run", bundle_folder, lines, "-o", tmp_path / "out.jsonl")
    said = result.stderr.splitlines()
    # Of a text file the rows are estimated, by its bytes.
    rows = [int(found[1]) for found in map(re.compile(r"rows: (\d+) of \d+ ").match, said) if found]
    assert said[0] == "rows: 0"
    assert len(rows) == len(said) - 2
    # Rows that are computed ahead of the one awaited count.
    assert sorted(rows) == rows
    assert said[-2].startswith("rows: 300 of 300 (100 %)")
    assert said[-1].startswith("300 rows in ")
    assert done("run", bundle_folder, lines, "-o", tmp_path / "o.jsonl", "--quiet").stderr == ""


@pytest.mark.parametrize("columns", [30, 80, 120])
def test_a_terminal_has_a_bar_that_fits(
    columns: int, bundle_folder: Path, lines: Path, tmp_path: Path
) -> None:
    import fcntl
    import pty
    import struct
    import termios

    main_end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "transferry.cli", "run", str(bundle_folder), str(lines)]
    with subprocess.Popen([*command, "-o", str(tmp_path / "out.jsonl")], stderr=terminal) as run:
        os.close(terminal)
        shown = b""
        while run.poll() is None or not shown.endswith(b"\n"):
            try:
                shown += os.read(main_end, 1 << 16)
            except OSError:  # the other end is closed
                break
    os.close(main_end)
    assert run.returncode == 0
    bar, _, summary = shown.decode().rstrip().rpartition("\r")
    assert summary.startswith("300 rows in ")
    states = [state for state in re.split(r"[\r\n]+", bar) if state]
    # The last bar gives way to the summary.
    assert states[-2].startswith("rows 100 %")
    assert states.pop().isspace()
    # The terminal shows Ctrl-C as ^C, which fits beside it.
    assert all(len(state) + len("^C") < columns for state in states), states


@pytest.mark.parametrize(("text", "seconds"), [("5", 5.0), ("soon", 30.0)])
def test_the_environment_sets_the_interval_of_progress(
    monkeypatch: pytest.MonkeyPatch, text: str, seconds: float
) -> None:
    monkeypatch.setenv("TRANSFERRY_LOG_EVERY", text)
    assert log_every() == seconds


def test_the_rate_is_of_the_last_half_of_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERRY_LOG_EVERY", "30")
    clock, said = [100.0], list[str]()
    shown = Progress("rows", lambda: clock[0], lambda line, **_: said.append(line))
    done = 0
    for second in range(200):
        clock[0] += 1
        done += 1 if second < 100 else 10
        shown.show("rows", done, 5000, "2 errors")
    assert len(said) == 6
    assert said[0] == "rows: 31 of 5,000 (0 %), 1.0 rows/s, 1:22:49 left, 2 errors"
    assert said[-1].startswith("rows: 910 of 5,000 (18 %), 9.0 rows/s, 07:34 left")
    shown.show("merging", 1)
    clock[0] += 31
    shown.show("merging", 5)
    assert said[-1] == "merging: 5, 0.1 rows/s"


def test_an_estimate_is_steady_where_batches_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERRY_LOG_EVERY", "30")
    clock, said = [100.0], list[str]()
    shown = Progress("", lambda: clock[0], lambda line, **_: said.append(line))
    done = 0
    for minute in range(30):  # long rows and short ones, by turns
        for _ in range(60):
            clock[0] += 1
            done += (2, 20)[minute % 2]
            shown.show("rows", done, 40_000)
    left = [re.search(r"(?:(\d+):)?(\d+):(\d+) left", line) for line in said]
    ends = [
        30 * (place + 1) + 3600 * int(each[1] or 0) + 60 * int(each[2]) + int(each[3])
        for place, each in enumerate(left)
        if each
    ]
    # At 11 rows a second the end is at 3,636 seconds; by half a minute alone at 2,700 to 11,000.
    assert len(ends) > 50
    assert all(3000 < end < 4500 for end in ends[20:]), ends


def test_estimates_are_of_enough_rows_and_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERRY_LOG_EVERY", "0")
    clock, said = [100.0], list[str]()
    shown = Progress("rows", lambda: clock[0], lambda line, **_: said.append(line))
    for rows, seconds_left in ((0, math.inf), (1, math.inf), (256, math.inf), (512, 5.0)):
        shown.show("rows", rows, 3000, "", seconds_left)
        clock[0] += 4
    assert said[1:] == [
        "rows: 1 of 3,000 (0 %), 0.2 rows/s",
        "rows: 256 of 3,000 (8 %), 32 rows/s, 01:26 left",
        "rows: 512 of 3,000 (17 %), 43 rows/s, 00:05 left",
    ]


def test_messages_may_be_lines_of_json(
    bundle_folder: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFERRY_LOG", "json")
    monkeypatch.setenv("TRANSFERRY_LOG_EVERY", "0")
    ended = done("run", bundle_folder, lines, "-o", tmp_path / "out.jsonl")
    records = [json.loads(line) for line in ended.stderr.splitlines()]
    assert {record["level"] for record in records} == {"info"}
    states = [record for record in records if record.get("phase") == "rows"]
    assert (states[-1]["done"], states[-1]["total"]) == (300, 300)
    assert records[-1]["message"].startswith("300 rows in")
    refused = call("run", bundle_folder, tmp_path / "absent.txt", "-o", tmp_path / "a.jsonl")
    *_, error = map(json.loads, refused.stderr.splitlines())
    assert error["level"] == "error"
    assert "absent.txt" in error["message"]
    (error,) = map(json.loads, call("run", "--bean", "4").stderr.splitlines())
    assert error["message"].startswith("No such option '--bean'. Did you mean '--beam'?\nTry")


def test_a_working_folder_that_is_gone_is_told(
    bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    fails(3, "the working folder is gone", "run", bundle_folder, "in.txt", "-o", "out.jsonl")
