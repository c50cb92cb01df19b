"""Signing for a bundle on the command line: certificates, the files of a report, canaries."""

import json
import shutil
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.commands import call
from transferry.runtime.decoding.decoder import StepOutput
from transferry.runtime.ort.portable_decoder import PortableDecoder

DATE = "2026-11-21"


@pytest.fixture
def bundle(bundle_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle_folder, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def lines(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lines") / "lines.txt"
    samples = json.loads((run_folder / "samples.json").read_bytes())
    path.write_text("".join(f"{text}\n" for text in samples[:4]), encoding="utf-8")
    return path


def spoil(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Multiplies the logits of a bundle that is opened as it is served."""
    step = PortableDecoder.step

    def wrong(self: PortableDecoder, tokens: Any, state: Any, **wanted: Any) -> Any:
        output, later = step(self, tokens, state)
        spoiled = 1.0 if self.options.optimisation == "disable" else factor
        return StepOutput(output.all_logits * spoiled), later

    monkeypatch.setattr(PortableDecoder, "step", wrong)


def test_from_a_proof_to_a_result_that_cites_it(
    bundle: Path, run_folder: Path, lines: Path, tmp_path: Path
) -> None:
    refused = call("run", bundle, lines, "-o", tmp_path / "out", "--require-certificate")
    assert refused.exit_code == 4
    assert "no certificate that holds here" in refused.stderr
    assert not (tmp_path / "out").exists()

    options: list[str | Path] = ["--checkpoint", run_folder, "--text", lines, "--target", lines]
    verified = call("verify", bundle, *options, "--certify", DATE)
    assert verified.exit_code == 0
    assert "Token agreement 100 % (no limit)" in verified.stdout
    assert f"certificate of {DATE} for variant portable, provider cpu" in verified.stderr
    assert "the run" in call("inspect", bundle).stdout
    (shown,) = json.loads(call("inspect", bundle, "--json").stdout)["certificates"]
    assert (shown["date"], shown["rows"], shown["worth"]) == (DATE, "4", "holds")

    done = call("run", bundle, lines, "-o", tmp_path / "out", "--require-certificate")
    assert done.exit_code == 0
    assert f"certificate of {DATE} against the run" in done.stderr
    made = tomllib.loads((tmp_path / "out.settings.toml").read_text(encoding="utf-8"))["made"]
    assert made["certificate"].startswith(f"of {DATE} against the run, variant portable")
    other = ["--require-certificate", "--optimisation", "basic", "--force"]
    assert call("run", bundle, lines, "-o", tmp_path / "out", *other).exit_code == 4


def test_a_certificate_covers_what_was_verified(
    bundle: Path, run_folder: Path, lines: Path, tmp_path: Path
) -> None:
    """Searches, batch sizes, and what the bundle was compared with."""
    assert call("verify", bundle, "--certify", DATE).exit_code == 0
    run: list[str | Path] = ["run", bundle, lines, "-o", tmp_path / "out"]
    refused = call(*run, "--require-certificate")
    assert refused.exit_code == 4
    assert "against the recorded answers alone" in refused.stderr
    assert call(*run, "--require-certificate=recorded").exit_code == 0

    verify: list[str | Path] = ["verify", bundle, "--checkpoint", run_folder, "--text", lines]
    assert call(*verify, "--certify", DATE).exit_code == 0
    weaker = call("verify", bundle, "--certify", DATE)
    assert weaker.exit_code == 2
    assert "give --checkpoint, or --force" in weaker.stderr
    run += ["--force", "--require-certificate"]
    search = ["--beam", "3", "--no-repeat-ngram", "2"]
    refused = call(*run, *search)
    assert refused.exit_code == 4
    assert "covers no search with beam 3, no_repeat_ngram 2" in refused.stderr
    assert not (tmp_path / "out.job").exists()
    assert call(*run, "--batch-rows", "65").exit_code == 4

    verified = call(*verify, *search, "--batch-rows", "65", "--certify", DATE, "--json")
    assert verified.exit_code == 0
    report = json.loads(verified.stdout)
    assert [item["search"] for item in report["decisions"]][-1] == "as given"
    assert report["settings"]["batch_rows"] == 65
    assert call(*run, *search).exit_code == 0
    assert call(*run, "--batch-rows", "65").exit_code == 0
    conflict = call(*verify, "--beam", "3", "--sample")
    assert conflict.exit_code == 2
    assert "sample and beam=3 exclude each other" in conflict.stderr
    alone = call("verify", bundle, *search)
    assert alone.exit_code == 2
    assert "--beam needs --checkpoint" in alone.stderr


def test_a_result_without_a_proof_says_so(bundle: Path, lines: Path, tmp_path: Path) -> None:
    assert call("run", bundle, lines, "-o", tmp_path / "out").exit_code == 0
    made = tomllib.loads((tmp_path / "out.settings.toml").read_text(encoding="utf-8"))["made"]
    assert made["certificate"].startswith("none: nothing was verified for variant portable")


def test_the_report_as_files(bundle: Path, run_folder: Path, lines: Path, tmp_path: Path) -> None:
    page, junit = tmp_path / "report.html", tmp_path / "report.xml"
    result = call(
        *("verify", bundle, "--checkpoint", run_folder, "--text", lines, "--self-test"),
        *("--certify", DATE, "--report", page, "--junit", junit, "--json"),
    )
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert record["schema"] == 3
    assert all(item["passed"] for item in record["self_test"])
    assert sum(item["changes_answer"] for item in record["self_test"]) >= 14
    text = page.read_text(encoding="utf-8")
    assert "PASSED" in text
    assert DATE in text
    assert "Certificate" in text
    cases = list(ET.parse(junit).iter("testcase"))
    assert len(cases) > len(record["self_test"])
    assert not list(ET.parse(junit).iter("failure"))


@pytest.mark.parametrize("wrong", [False, True])
def test_a_failure_has_its_report_too(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    """And takes the certificate back that an earlier success gave."""
    assert call("verify", bundle, "--certify", DATE).exit_code == 0
    if wrong:
        spoil(monkeypatch, 1.01)
    page, junit = tmp_path / "report.html", tmp_path / "report.xml"
    options: list[str | Path] = ["--report", page, "--junit", junit, "--certify", DATE]
    result = call("verify", bundle, *options, "--json")
    assert result.exit_code == (4 if wrong else 0)
    assert json.loads(result.stdout)["passed"] is not wrong
    assert ("FAILED" in page.read_text(encoding="utf-8")) is wrong
    assert bool(list(ET.parse(junit).iter("failure"))) is wrong
    assert len(list((bundle / "certificates").iterdir())) == (0 if wrong else 1)


def test_a_fault_is_traced_to_its_module_and_shown_again(
    bundle: Path, run_folder: Path, tmp_path: Path
) -> None:
    """The run is changed instead of the bundle: one weight by a hundredth."""
    from transferry.build_model.checkpoint import WEIGHTS, load_tensors, save_tensors

    other = tmp_path / "run"
    shutil.copytree(run_folder, other)
    weights, _ = load_tensors(other / WEIGHTS)
    weight = weights["decoder.1.feed_forward.inner.weight"]
    weight.view(-1)[weight.abs().argmax()] *= 1.01
    save_tensors(other / WEIGHTS, weights)
    result = call("verify", bundle, "--checkpoint", other, "--report", tmp_path / "report.html")
    assert result.exit_code == 4
    assert "does not answer as torch does" in result.stderr
    assert "exceeds the budget" in result.stderr
    assert result.stdout.startswith("FAILED: ")
    place = "the fault begins in decoder.1.feed_forward.inner (build_model/layers.py:"
    assert place in result.stdout
    fault = tmp_path / "bundle.fault.npz"
    assert f"transferry replay {fault}" in result.stdout
    assert "decoder.1.feed_forward.inner" in (tmp_path / "report.html").read_text("utf-8")
    again = call("replay", fault)
    assert again.exit_code == 4
    assert "still shows the fault" in again.stderr
    assert "as served" in again.stdout
    assert call("replay", tmp_path / "report.html").exit_code == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "x"], "--text needs --checkpoint"),
        (["--self-test"], "--self-test needs --checkpoint"),
        (["--cross-check"], "--cross-check needs --checkpoint"),
        (["--opinions"], "--cross-check needs --checkpoint"),
        (["--replay", "x.npz"], "--replay needs --checkpoint"),
        (["--certify", "tomorrow"], "expected a date as YYYY-MM-DD, found 'tomorrow'"),
        (["--checkpoint", "run", "--target", "x"], "--target needs --text"),
    ],
)
def test_options_that_need_another(bundle: Path, options: list[str], message: str) -> None:
    result = call("verify", bundle, *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_canaries(bundle: Path, lines: Path, tmp_path: Path) -> None:
    result = call("run", bundle, lines, "-o", tmp_path / "out", "--canary", "1/2")
    assert result.exit_code == 0
    assert "canaries 2, canaries_identical 2, canaries_tied 0" in result.stderr
    made = tomllib.loads((tmp_path / "out.settings.toml").read_text(encoding="utf-8"))["made"]
    assert (made["canaries"], made["canaries_identical"]) == (2, 2)


def test_a_canary_stops_the_job(
    bundle: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, -1.0)
    result = call("run", bundle, lines, "-o", tmp_path / "out", "--canary", "1/2")
    assert result.exit_code == 4
    assert "line 1 is answered differently" in result.stderr
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.job").exists(), "nothing was finished before"


def test_a_canary_is_one_in_so_many(bundle: Path, lines: Path, tmp_path: Path) -> None:
    result = call("run", bundle, lines, "-o", tmp_path / "out", "--canary", "0.1")
    assert result.exit_code == 2
    assert "canary must be 1/N, such as 1/1000, found '0.1'" in result.stderr
