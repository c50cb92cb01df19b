"""Proofs on the command line: certificates, signatures, the files of a report, canaries."""

import html
import json
import re
import shutil
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.commands import FEW, call, done, fails
from tests.runtime.proof.certified import DATE, spoil
from tests.runtime.proof.keys import key_files, model_signing
from transferry.runtime.errors import ParityError
from transferry.runtime.proof.certificates.certificate import LEAST_ROWS
from transferry.runtime.proof.certificates.signature import load_public_key


@pytest.fixture
def bundle(bundle_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle_folder, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def verified(
    bundle_folder: Path, run_folder: Path, lines: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result]:
    """A bundle with a certificate against its checkpoint, and the output of `verify`."""
    bundle = shutil.copytree(bundle_folder, tmp_path_factory.mktemp("verified") / "bundle")
    options: list[str | Path] = ["--checkpoint", run_folder, "--text", lines, "--target", lines]
    return bundle, done("verify", bundle, *options, "--certify", DATE)


@pytest.fixture
def certified(verified: tuple[Path, Result], tmp_path: Path) -> Path:
    """A copy of the bundle of `verified`."""
    return Path(shutil.copytree(verified[0], tmp_path / "certified"))


@pytest.fixture(scope="module")
def lines(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lines") / "lines.txt"
    samples = json.loads((run_folder / "samples.json").read_bytes())
    words = " ".join(samples).split()
    path.write_text(
        "".join(f"{' '.join(words[row : row + 5])}\n" for row in range(LEAST_ROWS)),
        encoding="utf-8",
    )
    return path


def test_from_a_proof_to_a_result_that_cites_it(
    bundle: Path, certified: Path, verified: tuple[Path, Result], lines: Path, tmp_path: Path
) -> None:
    command = "run", bundle, lines, "-o", tmp_path / "out", "--require-certificate"
    fails(4, "no certificate that holds here", *command)
    assert not (tmp_path / "out").exists()

    assert "Token agreement 100 %" in verified[1].stdout
    assert f"certificate of {DATE} for variant portable, unsigned" in verified[1].stderr
    assert "against the checkpoint" in call("inspect", certified).stdout
    (shown,) = json.loads(call("inspect", certified, "--json").stdout)["certificates"]
    assert (shown["date"], shown["rows"], shown["worth"]) == (DATE, "30", "holds")

    cited = done("run", certified, lines, "-o", tmp_path / "out", "--require-certificate")
    assert f"certificate of {DATE} against the checkpoint" in cited.stderr
    made = tomllib.loads((tmp_path / "out.settings.toml").read_text(encoding="utf-8"))["made"]
    assert made["certificate"].startswith(f"of {DATE} against the checkpoint (variant portable")
    other = ["--require-certificate", "--optimisation", "basic", "--force"]
    assert call("run", certified, lines, "-o", tmp_path / "out", *other).exit_code == 4


def test_a_certificate_says_how_strong_it_is(
    bundle: Path, certified: Path, run_folder: Path, lines: Path, tmp_path: Path
) -> None:
    done("verify", bundle, "--certify", DATE)
    run: list[str | Path] = ["run", bundle, lines, "-o", tmp_path / "out"]
    fails(4, "against the recorded answers alone", *run, "--require-certificate")
    done(*run, "--require-certificate=recorded")

    few = tmp_path / "few"
    few.write_bytes(b"".join(lines.read_bytes().splitlines(True)[: LEAST_ROWS - 1]))
    verify: list[str | Path] = ["verify", bundle, "--checkpoint", run_folder, "--text", few]
    little = call(*verify, "--certify", DATE)
    assert little.exit_code == 2
    assert not little.stdout, "refused before the work"
    assert "expected at least 30 rows of text for a certificate, found 29" in little.stderr
    fails(2, "give --checkpoint, or --force", "verify", certified, "--certify", DATE)


def test_a_certificate_covers_what_was_verified(
    certified: Path, run_folder: Path, lines: Path, tmp_path: Path
) -> None:
    """Searches and batch sizes."""
    verify: list[str | Path] = ["verify", certified, "--checkpoint", run_folder, "--text", lines]
    run: list[str | Path] = ["run", certified, lines, "-o", tmp_path / "out", "--force"]
    run.append("--require-certificate")
    search = ["--beam", "3", "--no-repeat-ngram", "2", "--suppress", "the", "--suppress", "7"]
    fails(4, "covers no search with beam 3, no_repeat_ngram 2, suppress", *run, *search)
    assert not (tmp_path / "out.job").exists()
    assert call(*run, "--batch-rows", "65").exit_code == 4

    report = json.loads(
        done(*verify, *search, "--batch-rows", "65", "--certify", DATE, "--json").stdout
    )
    assert "as given" in [item["search"] for item in report["decisions"]]
    assert report["settings"]["batch_rows"] == 65
    done(*run, *search)
    done(*run, "--batch-rows", "65")
    assert "covers no search with suppress" in call(*run, *search[-4:]).stderr
    assert call(*run, *search[:-1], "a").exit_code == 4
    # A stop string ends an answer and chooses no token.
    done(*run, "--stop", "the")


def countersigned(bundle: Path, run: list[str | Path], public: Path, folder: Path) -> None:
    """A second person signs a certificate, and a job demands both signatures."""
    second, second_public = key_files(folder, "second", secret=11)
    key_id = load_public_key(public).key_id
    told = done("sign", bundle, "--key", second, "--trusted-key", public).stderr
    assert told.count("signed by ") == 1
    assert f"{key_id}, {load_public_key(second_public).key_id}, " in told
    both = ("--trusted-key", public, "--trusted-key", second_public)
    done(*run, "--force", *both, "--require-signatures", "2")
    assert call(*run, "--force", *both[:2], "--require-signatures", "2").exit_code == 2
    _, unknown = key_files(folder, "unknown", secret=13)
    fails(3, "no certificate to sign", "sign", bundle, "--key", second, "--trusted-key", unknown)


def test_from_a_signature_to_a_result_that_cites_its_key(
    certified: Path, run_folder: Path, lines: Path, tmp_path: Path
) -> None:
    bundle = certified
    private, public = key_files(tmp_path)
    _, other = key_files(tmp_path, "other", secret=7)
    key_id = load_public_key(public).key_id
    options: list[str | Path] = ["--checkpoint", run_folder, "--text", lines, "--certify", DATE]
    done("sign", bundle, "--key", private)
    (path,) = (bundle / "certificates").iterdir()
    assert model_signing(bundle, path, public) == (0, "Verification succeeded\n")

    def shown(*key: str | Path) -> tuple[str, str]:
        (found,) = json.loads(done("inspect", bundle, "--json", *key).stdout)["certificates"]
        return found["signature"], found["worth"]

    assert shown() == (f"signature of {key_id} not checked", "holds")
    assert shown("--trusted-key", public) == (f"signed by {key_id}", "holds")
    assert shown("--trusted-key", other)[1] == "refused"

    out = tmp_path / "out"
    run: list[str | Path] = ["run", bundle, lines, "-o", out, "--require-certificate"]
    done(*run, "--trusted-key", public)
    settings = tomllib.loads(Path(f"{out}.settings.toml").read_text(encoding="utf-8"))
    assert settings["made"]["certificate"].endswith(f", signed by {key_id}")
    assert settings["trusted_key"] == [str(public)]
    again = tmp_path / "again"
    done("run", bundle, lines, "-o", again, "--config", f"{out}.settings.toml")
    assert again.read_bytes() == out.read_bytes()
    score: list[str | Path] = ["score", bundle, lines, "--target", lines, *run[3:], "--force"]
    done(*score, "--trusted-key", public)
    for command in (score, [*run, "--force"]):
        fails(4, f"is signed by {key_id}, not by the trusted key", *command, "--trusted-key", other)

    countersigned(bundle, run, public, tmp_path)
    fails(2, "is signed, and the new one is not", "verify", bundle, *options)
    done("verify", bundle, *options, "--force")
    done(*run, "--force")
    fails(4, "is unsigned", *run, "--force", "--trusted-key", public)


def test_a_key_is_read_before_the_work_begins(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transferry.runtime.bundle.bundle import Bundle

    def opened(folder: Path) -> None:
        raise AssertionError("opened the bundle before the key")

    monkeypatch.setattr(Bundle, "load", opened)
    command = "verify", bundle, "--certify", DATE, "--sign", tmp_path / "absent.key"
    fails(3, "absent.key: cannot be read: No such file", *command)


def test_the_workers_of_ray_check_the_signature_too(
    bundle: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have another working directory, so the key's path is absolute."""
    from transferry.runtime.jobs import ray_job

    private, public = key_files(tmp_path)
    signed = done("verify", bundle, "--certify", DATE, "--sign", private)
    assert f", signed by {load_public_key(public).key_id}, in {bundle}" in signed.stderr
    loaded = {}

    def of_ray(load: Any, *_: object) -> None:
        loaded.update(load.keywords)
        engine = load()
        assert "signed by sha256:" in engine.certificate
        raise ParityError("far enough")

    monkeypatch.setattr(ray_job, "ray_job", of_ray)
    monkeypatch.chdir(tmp_path)
    options = ["--engine", "ray", "--require-certificate=recorded", "--trusted-key", public.name]
    assert "far enough" in call("run", bundle, lines, "-o", "out", *options).stderr
    assert loaded["trusted_key"] == [public]
    assert loaded["require_certificate"] == "recorded"


def test_the_report_as_files(bundle: Path, run_folder: Path, lines: Path, tmp_path: Path) -> None:
    page, junit = tmp_path / "report.html", tmp_path / "report.xml"
    result = call(
        *("verify", bundle, "--checkpoint", run_folder, "--text", lines, "--self-test"),
        *FEW,
        *("--certify", DATE, "--report", page, "--junit", junit, "--json", "--verbose"),
    )
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert (record["schema"], record["strength"]) == (5, "checkpoint")
    times = {item["check"]: item for item in record["times"]}
    assert times.keys() >= {"weights", "graphs", "greedy", "source and target N", "self-test"}
    assert times["source and target N"]["runs"] > 1
    assert all(item["wall"] > 0 and item["cpu"] >= 0 for item in times.values())
    assert re.search(r"self-test +1 +\d", result.stderr)
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
    done("verify", bundle, "--certify", DATE)
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


def changed_run(run: Path, folder: Path, factor: float, *names: str) -> Path:
    """Copies a run and multiplies the largest entry of some weights, by default of all."""
    from transferry.build_model.checkpoint import WEIGHTS, load_tensors, save_tensors

    shutil.copytree(run, folder)
    weights, _ = load_tensors(folder / WEIGHTS)
    for name in names or weights:
        flat = weights[name].view(-1)
        flat[flat.abs().argmax()] *= factor
        flat[0] += 0 if names else 0.01
    save_tensors(folder / WEIGHTS, weights)
    return folder


def test_a_wrong_weight_is_the_headline(bundle: Path, run_folder: Path, tmp_path: Path) -> None:
    """The checkpoint is changed instead of the bundle: one weight by a hundredth."""
    other = changed_run(run_folder, tmp_path / "run", 1.01, "decoder.1.feed_forward.inner.weight")
    page = tmp_path / "report.html"
    result = call("verify", bundle, *FEW, "--checkpoint", other, "--report", page)
    assert result.exit_code == 4
    headline = (
        "has stored weights unlike the checkpoint's: 1 of 1,536 entries of "
        "decoder.1.feed_forward.inner.weight in graph decoder differ, first ["
    )
    assert headline in result.stderr
    assert headline in result.stdout.splitlines()[0]
    assert "exceeds the budget" in " ".join(result.stdout.split())
    assert result.stdout.startswith("FAILED: ")
    shown = page.read_text("utf-8")
    assert headline in html.unescape(shown)
    # Neither the code nor an operator is blamed.
    assert all("layers.py" not in each for each in (result.stdout, shown))
    assert "Where the fault begins" not in shown


def test_another_checkpoint_is_the_headline(bundle: Path, run_folder: Path, tmp_path: Path) -> None:
    """And no module is blamed; one unit in the last place of one weight is a fault by itself."""
    other = changed_run(run_folder, tmp_path / "run", 1.5)
    page = tmp_path / "report.html"
    few = tmp_path / "few"
    few.write_text("the\n")
    against: list[str | Path] = ["verify", bundle, *FEW, "--text", few, "--json", "--checkpoint"]
    result = call(*against, other, "--report", page)
    assert result.exit_code == 4
    record, text = json.loads(result.stdout), page.read_text("utf-8")
    assert record["origin"] is None
    found = re.match(r"weights: (\d+) of (\d+) stored weights differ; ", record["faults"][0])
    assert found
    assert found[1] == found[2]
    headline = f"was not exported from this checkpoint: {found[1]} of {found[2]} stored weights"
    assert all(headline in each for each in (record["verdict"], result.stderr, text))

    name = "decoder.0.feed_forward.inner.weight"
    close = changed_run(run_folder, tmp_path / "close", 1 + 2**-23, name)
    result = call(*against, close)
    record = json.loads(result.stdout)
    assert record["verdict"].startswith("has stored weights unlike the checkpoint's: ")
    assert record["verdict"].endswith("; all else passed")
    assert len(record["faults"]) == 1


def test_canaries(bundle: Path, lines: Path, tmp_path: Path) -> None:
    result = call("run", bundle, lines, "-o", tmp_path / "out", "--canary", "1/2")
    assert result.exit_code == 0
    assert "canaries 15, canaries identical 15, canaries tied 0" in result.stderr
    made = tomllib.loads((tmp_path / "out.settings.toml").read_text(encoding="utf-8"))["made"]
    assert (made["canaries"], made["canaries_identical"]) == (15, 15)


def test_reports_of_several_variants_make_one_page(bundle: Path, tmp_path: Path) -> None:
    files = []
    for threads in ("1", "2"):
        files.append(tmp_path / f"{threads}.json")
        files[-1].write_text(call("verify", bundle, "--threads", threads, "--json").stdout)
    page = tmp_path / "page.html"
    done("report", *files, "-o", page)
    assert "PASSED: all 2 reports" in page.read_text("utf-8")
    record = json.loads(files[1].read_text())
    files[1].write_text(json.dumps({**record, "passed": False, "faults": ["bad"]}))
    fails(4, f"failed: {files[1]}; {page} says why", "report", *files, "-o", page)


@pytest.mark.parametrize("command", ["verify", "audit"])
def test_what_a_page_needs_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "transferry.export.report.page", raising=False)
    reference = ("--reference", tmp_path) if command == "audit" else ()
    refused = call(command, tmp_path, "--report", tmp_path / "a.html", *reference)
    assert refused.exit_code == 2
    needs = "verify --report" if command == "verify" else command
    assert f"{needs} needs jinja2, which is not installed" in refused.stderr


@pytest.mark.parametrize(
    "command",
    [
        "export {run} --out {out} --text {empty}",
        "export {run} --out {out} --variant cpu-int8 --calibrate {empty}",
        "verify {bundle} --checkpoint {run} --text {empty}",
        "audit {bundle} --reference {run} --text {empty}",
    ],
)
def test_text_without_a_line_proves_nothing(
    run_folder: Path, bundle_folder: Path, tmp_path: Path, command: str
) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    given = {"run": run_folder, "bundle": bundle_folder, "out": tmp_path / "out", "empty": empty}
    fails(3, "expected at least one line, found none", *command.format(**given).split())
