"""A shortlist on the command line: export learns it, run is restricted to it, and says so."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from transferry.build_model.corpus import builtin_pairs
from transferry.cli import main
from transferry.runtime.bundle import SHORTLIST, Bundle
from transferry.runtime.errors import UsageError
from transferry.runtime.job_options import JobOptions
from transferry.runtime.jobs import Job
from transferry.runtime.shortlist import Shortlist


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Parallel text, of which a line is empty on one side."""
    folder = tmp_path_factory.mktemp("text")
    pairs = builtin_pairs(60, seed=5)
    sides = ["".join(f"{text}\n" for text in side) for side in zip(*pairs, strict=True)]
    (folder / "en").write_text(f"{sides[0]}nothing\n", encoding="utf-8")
    (folder / "de").write_text(f"{sides[1]}\n", encoding="utf-8")
    return folder / "en", folder / "de"


@pytest.fixture(scope="module")
def listed(
    run_folder: Path, text: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "listed"
    result = call("export", run_folder, "--out", out, "--variant", "portable", "--shortlist", *text)
    assert result.exit_code == 0, result.output
    assert "learning a shortlist from 60 pairs" in result.stderr
    return out


def test_export_learns_it(listed: Path) -> None:
    bundle = Bundle.load(listed)
    assert SHORTLIST in bundle.manifest.files
    assert SHORTLIST in call("inspect", listed).stdout
    assert Shortlist.of(bundle).likeliest.shape[0] == bundle.manifest.model["vocabulary_size"]
    assert call("verify", listed).exit_code == 0


def test_answers_are_restricted_and_say_so(
    listed: Path, text: tuple[Path, Path], tmp_path: Path
) -> None:
    out, free = tmp_path / "out.jsonl", tmp_path / "free.jsonl"
    assert call("run", listed, text[0], "-o", free).exit_code == 0
    result = call("run", listed, text[0], "-o", out, "--shortlist")
    assert result.exit_code == 0
    assert "shortlist True" in result.stderr
    summary = json.loads(out.with_name("out.jsonl.summary.json").read_bytes())
    assert summary["fingerprint"]["shortlist"] is True
    settings = tomllib.loads(out.with_name("out.jsonl.settings.toml").read_text())
    assert settings["shortlist"] is True
    assert out.read_bytes() != free.read_bytes()
    # An unrestricted job is another one.
    again = call("run", listed, text[0], "-o", out)
    assert again.exit_code == 2
    assert "shortlist was true, is false" in again.stderr.lower()


def test_settings_may_want_it_and_the_command_line_not(
    listed: Path, text: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("shortlist = true\n")
    restricted = call("run", listed, text[0], "--shortlist").stdout
    assert call("run", listed, text[0], "--config", settings).stdout == restricted
    free = call("run", listed, text[0], "--config", settings, "--no-shortlist").stdout
    assert free == call("run", listed, text[0]).stdout
    assert free != restricted


@pytest.mark.parametrize(
    ("bundle", "canary", "message"),
    [
        ("bundle_folder", None, "has none; export it again with --shortlist SOURCE TARGET"),
        ("writer_bundle_folder", None, "is decoder-only; leave it out"),
        ("listed", "1/5", "canary and shortlist exclude each other"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    bundle: str,
    canary: str | None,
    message: str,
    text: tuple[Path, Path],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    folder = request.getfixturevalue(bundle)
    options = JobOptions(generation={"shortlist": True}, canary=canary)
    with pytest.raises(UsageError, match=message):
        Job(folder, text[0], tmp_path / "out.txt", options)
    more = ("--canary", canary) if canary else ()
    result = call("run", folder, text[0], "-o", tmp_path / "out.txt", "--shortlist", *more)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_certificate_is_not_for_it(listed: Path, text: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "certified"
    shutil.copytree(listed, folder)
    assert call("verify", folder, "--certify", "2026-11-21").exit_code == 0
    run = ("run", folder, text[0], "--require-certificate")
    assert call(*run).exit_code == 0
    result = call(*run, "--shortlist")
    assert result.exit_code == 2
    assert "shortlist and require-certificate exclude each other" in result.stderr
    assert result.stdout == ""
    cited = []
    for more in ([], ["--shortlist"]):
        out = tmp_path / f"out{len(more)}"
        loose = call("run", folder, text[0], "-o", out, *more)
        assert loose.exit_code == 0
        summary = json.loads(out.with_name(f"{out.name}.summary.json").read_bytes())
        cited.append((summary["certificate"].startswith("none: "), "certificate" in loose.stderr))
    assert cited == [(False, True), (True, False)]


def test_export_refuses_what_it_cannot_learn_from(
    run_folder: Path, writer_run_folder: Path, text: tuple[Path, Path], tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    other.write_text("one\n")
    for run, source, code, message in (
        (writer_run_folder, text[0], 2, "the run is decoder-only; leave --shortlist out"),
        (run_folder, other, 3, "expected as many lines in the source as in the target"),
        (run_folder, tmp_path / "absent", 3, "absent"),
    ):
        result = call("export", run, "--out", out, "--shortlist", source, text[1])
        assert result.exit_code == code, result.output
        assert message in result.stderr
        assert not out.exists()


def test_help_has_both() -> None:
    assert "--shortlist SOURCE TARGET" in call("export", "--help").stdout
    assert "--shortlist / --no-shortlist" in call("run", "--help").stdout
