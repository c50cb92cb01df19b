"""A certificate holds for the bytes and the way of computing that were verified, and no other."""

import dataclasses
import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.proof.certified import (
    DATE,
    a_report,
    certified,
    change_byte,
    file_of,
    remake_manifest,
    rewrite,
    spoil,
    verified,
    with_variants,
)
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST, Manifest
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.score import Score, ScoreOptions
from transferry.runtime.engine.tasks.task import Layout
from transferry.runtime.errors import InputError, ParityError, UsageError
from transferry.runtime.io.whole import sha256
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import Provider, SessionOptions
from transferry.runtime.proof.certificates import certificate as certificate_module
from transferry.runtime.proof.certificates.certificate import Cell, Certificate
from transferry.runtime.proof.certificates.envelope import FOLDER
from transferry.runtime.proof.certificates.standing import fastest, require_standing, standing
from transferry.runtime.proof.certificates.stored import certificates, certify, describe
from transferry.runtime.proof.certificates.strength import GRAPHS, STRENGTHS, Strength
from transferry.runtime.proof.recorded import verify_recorded
from transferry.runtime.proof.report import Claim

NO_CERTIFICATE = r"json is not a certificate.*verify the bundle again"


def status(folder: Path, **options: Any) -> tuple[str, str]:
    bundle = Bundle.load(folder)
    found = standing(bundle, bundle.variant(), SessionOptions(**options))
    return found.status, found.reason


def test_what_was_verified_holds_here(folder: Path) -> None:
    assert status(folder) == ("verified", "")
    engine = Engine(folder, require_certificate="recorded")
    assert engine.certificate.startswith(
        f"of {DATE} against the recorded answers (variant portable"
    )
    assert engine.describe()["certificate"] == engine.certificate
    bundle = Bundle.load(folder)
    (found,) = certificates(bundle)
    assert found.manifest == sha256(folder / MANIFEST)
    assert found.files["portable/weights.bin"] == sha256(folder / "portable/weights.bin")
    assert found.graphs["decoder"] == sha256(folder / "portable/decoder.onnx")
    assert found.versions.keys() >= {"transferry", "onnxruntime", "numpy"}
    assert [item["search"] for item in found.result["decisions"]] == ["greedy", "beam 4"]
    assert describe(bundle)[0][-1] == "holds"


def test_the_same_verification_gives_the_same_bytes(folder: Path) -> None:
    before = file_of(folder).read_bytes()
    verified(folder)
    assert file_of(folder).read_bytes() == before


def test_without_a_certificate_nothing_is_served_that_needs_one(bundle_folder: Path) -> None:
    assert Engine(bundle_folder).certificate.startswith("none: nothing was verified for")
    with pytest.raises(ParityError, match=r"no certificate that holds.*verify .* --certify DATE"):
        Engine(bundle_folder, require_certificate=True)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"optimisation": "basic"}, "optimisation basic"), ({"provider_options": {"x": "1"}}, "x 1")],
)
def test_another_way_of_computing_was_not_verified(
    folder: Path, options: dict[str, Any], what: str
) -> None:
    found, reason = status(folder, **options)
    assert (found, what in reason) == ("none", True)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("portable/decoder.onnx", 10),
        ("portable/weights.bin", -1),
        ("ranks.tiktoken", 0),
        ("reference.npz", 40),
    ],
)
def test_a_changed_byte_is_refused(folder: Path, name: str, place: int) -> None:
    """By the manifest; and where that was made anew, by the certificate."""
    change_byte(folder / name, place)
    with pytest.raises(InputError, match=f"{name} has changed"):
        Engine(folder, require_certificate="recorded")
    remake_manifest(folder)
    # Not `Bundle.load`: the changed tokenizer would not open.
    manifest = Manifest.from_json((folder / MANIFEST).read_bytes(), "manifest")
    bundle = Bundle(folder, manifest, None)  # type: ignore[arg-type]
    found = standing(bundle, bundle.variant(), SessionOptions())
    assert found.status == "none"
    assert f"{name} is not the file that was verified" in found.reason
    with pytest.raises(ParityError, match=name):
        require_standing(found, bundle)


def test_a_changed_manifest_is_refused(folder: Path) -> None:
    remake_manifest(folder, generation={"max_length": 7})
    found, reason = status(folder)
    assert found == "none"
    assert "manifest.json is not the one that was verified" in reason


def with_second_variant(folder: Path) -> None:
    """Adds a variant "other" of different graphs, as `export` would."""
    shutil.copytree(folder / "portable", folder / "other")
    change_byte(folder / "other/select.onnx", -1)
    record = json.loads((folder / MANIFEST).read_bytes())
    other = json.loads(json.dumps(record["variants"]["portable"]).replace("portable", "other"))
    record["variants"]["other"] = other
    for name in list(record["files"]):
        if name.startswith("portable/"):
            record["files"][name.replace("portable", "other")] = dict(record["files"][name])
    remake_manifest(folder, **record)


def test_a_certificate_moved_under_another_variant_is_refused(plain: Path) -> None:
    folder = plain
    with_second_variant(folder)
    verified(folder)
    path = file_of(folder)
    bundle = Bundle.load(folder)
    other = bundle.variant("other")
    renamed = path.with_name(path.name.replace("portable", "other"))
    path.rename(renamed)
    assert standing(bundle, other, SessionOptions()).status == "none"
    assert standing(bundle, bundle.variant("portable"), SessionOptions()).status == "verified"
    (certificate,) = certificates(bundle)
    rewrite(renamed, cell={**dataclasses.asdict(certificate.cell), "variant": "other"})
    found = standing(bundle, other, SessionOptions())
    assert found.status == "none"
    assert "its graphs are not those of variant other" in found.reason


def on_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_module, "instruction_sets", lambda: ("avx2",))


def test_on_another_processor_the_recorded_answers_are_computed_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_another_processor(monkeypatch)
    found, reason = status(folder)
    assert found == "elsewhere"
    assert reason.startswith("hardware avx2, not ")
    engine = Engine(folder, require_certificate="recorded")
    assert "hardware avx2" in engine.certificate
    assert engine.certificate.endswith("; the recorded answers came out here too")


def test_another_processor_that_answers_otherwise_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_another_processor(monkeypatch)
    spoil(monkeypatch, 1.001)
    required: tuple[Strength | bool, ...] = ("recorded", False)
    for require in required:
        with pytest.raises(ParityError, match="does not answer as torch does"):
            Engine(folder, require_certificate=require)


def test_other_threads_and_another_onnxruntime_are_named(folder: Path) -> None:
    assert status(folder, threads=2) == ("elsewhere", "threads 2, not 1")
    (certificate,) = certificates(Bundle.load(folder))
    for name in ("onnxruntime", "transferry", "numpy"):
        rewrite(file_of(folder), versions={**certificate.versions, name: "1.0"})
        found, reason = status(folder)
        assert (found, reason[-8:]) == ("elsewhere", " not 1.0")
        assert reason.startswith(name)
    # The record is computed first.
    cited = Engine(folder, require_certificate="recorded").certificate
    assert cited.endswith("; the recorded answers came out here too")


def test_a_failed_report_withdraws_the_certificate(folder: Path) -> None:
    bundle = Bundle.load(folder)
    shutil.copy(file_of(folder), folder / FOLDER / "copy.json")
    assert certify(bundle, bundle.variant(), SessionOptions(), a_report(fault="bad"), DATE) is None
    assert certificates(bundle) == []


def against_the_run(folder: Path, **session: Any) -> Certificate | None:
    """Certifies as a comparison with the run does, of greedy search and beams of 4."""
    bundle, options = Bundle.load(folder), SessionOptions(**session)
    report = verify_recorded(bundle, open_model(bundle, bundle.variant(), options))
    assert [(item.check, item.runs) for item in report.times] == [("recorded answers", 1)]
    settings = {**report.settings, "against": "the run", "batch_rows": 32}
    report = dataclasses.replace(report, settings=settings, claims=[Claim(GRAPHS)])
    return certify(bundle, bundle.variant(), options, report, DATE)


def test_the_recorded_answers_are_weaker_than_the_run(folder: Path) -> None:
    strengths: list[Strength | bool] = ["checkpoint", True]
    for strength in strengths:
        with pytest.raises(ParityError, match=r"against the recorded answers alone.*--checkpoint"):
            Engine(folder, require_certificate=strength)
    against_the_run(folder)
    for strength in (*strengths, *STRENGTHS):
        Engine(folder, require_certificate=strength)
    with pytest.raises(UsageError, match="must be one of recorded, checkpoint without"):
        Engine(folder, require_certificate="any")  # type: ignore[arg-type]


def test_a_weaker_certificate_replaces_no_stronger_one(folder: Path) -> None:
    against_the_run(folder)
    before = file_of(folder).read_bytes()
    with pytest.raises(UsageError, match=r"is weaker \(recorded\): give --checkpoint, or --force"):
        verified(folder)
    assert file_of(folder).read_bytes() == before
    assert verified(folder, threads=2, force=True).strength == "recorded"
    assert file_of(folder).read_bytes() != before


def test_no_larger_batch_than_was_verified_is_computed(folder: Path) -> None:
    against_the_run(folder)
    engine = Engine(folder, require_certificate="checkpoint")
    assert (engine.batches.rows, engine.model.batches.rows) == (32, 64)
    assert Engine(folder).batches.rows == 64
    smaller = BatchOptions(rows=8)
    assert Engine(folder, require_certificate="checkpoint", batches=smaller).batches == smaller
    with pytest.raises(ParityError, match=r"of 33 rows were not verified.*with --batch-rows 33"):
        Engine(folder, require_certificate="checkpoint", batches=BatchOptions(rows=33))


@pytest.mark.parametrize(
    ("options", "covered"),
    [
        ({}, True),
        ({"max_length": 3}, True),
        ({"beam": 4}, True),
        ({"beam": 4, "n_best": 4}, True),
        ({"beam": 3}, False),
        ({"n_best": 2, "sample": True}, False),
        ({"no_repeat_ngram": 3}, False),
        ({"min_length": 1}, False),
        ({"length_penalty": 0.0}, False),
        ({"suppress": (5,)}, False),
        ({"prefix": (5,)}, False),
        ({"beam": 4, "early_stopping": False}, False),
        ({"repetition_penalty": 1.2}, False),
        ({"beam": 4, "renormalise": True}, False),
        ({"suppress_sequences": ((5, 6),)}, False),
        ({"forced_end": (2,)}, False),
        ({"stop": (".",), "max_total_length": 30}, True),
    ],
)
def test_a_search_that_was_not_verified_is_refused(
    folder: Path, options: dict[str, Any], covered: bool
) -> None:
    engine = Engine(folder, require_certificate="recorded")
    search = GenerationOptions(**{"max_length": 8, **options})
    if covered:
        assert list(engine.generate(["one"], search))
        return
    with pytest.raises(ParityError, match=r"covers no search with .*n_best"):
        engine.generate(["one"], search)
    assert list(Engine(folder).generate(["one"], search))


def test_a_task_that_was_not_verified_is_refused(folder: Path, reader_bundle_folder: Path) -> None:
    rewrite(file_of(folder), tasks=["generate"])
    engine = Engine(folder, require_certificate="recorded")
    assert list(engine.generate(["one"], max_length=8))
    with pytest.raises(ParityError, match="covers task generate, not score"):
        engine.score([("one", "two")])
    with pytest.raises(ParityError, match="covers task generate, not score"):
        Score(engine, ScoreOptions(target=Path("t")), Layout("rows", "jsonl", (), has_id=False))
    rewrite(file_of(folder), tasks=[])
    with pytest.raises(ParityError, match="covers task none, not generate"):
        Engine(folder, require_certificate="recorded").generate(["one"])

    reader = Path(shutil.copytree(reader_bundle_folder, folder.parent / "reader"))
    assert verified(reader).tasks == Engine(reader).tasks == ["embed", "fill-mask"]
    rewrite(file_of(reader), tasks=["embed"])
    engine = Engine(reader, require_certificate="recorded")
    assert list(engine.embed(["one"]))
    with pytest.raises(ParityError, match="covers task embed, not fill-mask"):
        engine.fill_mask(["a [MASK]"])


def test_no_more_hypotheses_than_were_verified_are_covered(folder: Path) -> None:
    rewrite(file_of(folder), searches=[{"beam": 4, "n_best": 2}])
    (found,) = certificates(Bundle.load(folder))
    covered = [found.covers(GenerationOptions(beam=4, n_best=count)) for count in (1, 2, 3)]
    assert covered == [True, True, False]


@pytest.mark.parametrize(
    ("date", "message"),
    [
        *((date, r"found .* which is in the future") for date in ("9999-01-01", "2999-12-31")),
        *((date, "expected a date as YYYY-MM-DD") for date in ("yesterday", "2026-13-01", "")),
        ("21.11.2026", "expected a date as YYYY-MM-DD"),
    ],
)
def test_a_date_is_a_date_of_the_past(plain: Path, date: str, message: str) -> None:
    bundle = Bundle.load(plain)
    with pytest.raises(UsageError, match=message):
        certify(bundle, bundle.variant(), SessionOptions(), a_report(), date)


def test_a_clock_in_the_past_is_told_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_module, "EARLIEST", datetime.date.max)
    with pytest.raises(UsageError, match="before any bundle"):
        certificate_module.check_date("today")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("searches", [{"beam": 0}]),
        ("searches", [{"width": 4}]),
        ("searches", [3]),
        ("searches", 3),
        ("batch_rows", 0),
        ("batch_rows", "64"),
        ("format", 4),
        ("date", "9999"),
        ("date", "1970-01-01"),
        ("claims", ["graphs"]),
        ("verdict", "no such field"),
    ],
)
def test_a_certificate_of_no_search_is_named(folder: Path, name: str, value: Any) -> None:
    rewrite(file_of(folder), **{name: value})
    with pytest.raises(InputError, match=NO_CERTIFICATE):
        Engine(folder)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", '{"format": 1}', '{"format": 3, "cell": {}}', "\0\1"),
        '{"dsseEnvelope": {"payloadType": "text/plain", "payload": "", "signatures": []}}',
        '{"dsseEnvelope": {"payloadType": "application/vnd.in-toto+json", "payload": "?"}}',
        '{"dsseEnvelope": {"payloadType": "application/vnd.in-toto+json", "payload": 3}}',
        '{"dsseEnvelope": {"payloadType": "application/vnd.in-toto+json", "payload": "e30=", '
        '"signatures": [{"sig": 1}]}}',
    ],
)
def test_what_is_no_certificate_is_named(plain: Path, text: str) -> None:
    (plain / FOLDER).mkdir()
    name = Cell.of(Bundle.load(plain).variant(), SessionOptions()).file_name
    (plain / FOLDER / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=NO_CERTIFICATE) as found:
        Engine(plain)
    assert ('"format": 3' in text) == ("format 3, expected 5" in str(found.value))


def chosen(bundle: Bundle, provider: Provider = "cpu") -> str:
    return fastest(bundle, SessionOptions(provider)).name


@pytest.mark.parametrize(
    ("names", "verified_ones", "served"),
    [
        ((), (), "portable"),
        # Without certificates the exact one in place.
        (("cpu-int8", "cpu-fp32"), (), "cpu-fp32"),
        (("cpu-int8",), (), "portable"),
        # Reduced precision once it is certified, and certified variants before others.
        (("cpu-fp32", "cpu-int8"), ("cpu-fp32",), "cpu-fp32"),
        (("cpu-fp32", "cpu-int8"), ("cpu-fp32", "cpu-int8"), "cpu-int8"),
        (("cpu-fp32", "cpu-int8"), ("portable",), "portable"),
    ],
)
def test_the_fastest_certified_variant_is_served(
    plain: Path, names: tuple[str, ...], verified_ones: tuple[str, ...], served: str
) -> None:
    bundle = with_variants(plain, *names)
    for name in verified_ones:
        certified(bundle, name)
    assert chosen(bundle) == served


def test_what_was_verified_here_comes_before_what_was_elsewhere(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = with_variants(plain, "cpu-fp32", "cpu-int8")
    with monkeypatch.context() as patch:
        on_another_processor(patch)
        certified(bundle, "cpu-int8")
    assert chosen(bundle) == "cpu-int8"
    certified(bundle, "cpu-fp32")
    assert chosen(bundle) == "cpu-fp32"


def test_a_certificate_of_other_bytes_counts_for_nothing(plain: Path) -> None:
    bundle = with_variants(plain, "cpu-fp32", "cpu-int8")
    certified(bundle, "cpu-int8")
    change_byte(plain / "reference.npz", 40)
    remake_manifest(plain)
    assert chosen(Bundle.load(plain)) == "cpu-fp32"


def test_each_provider_is_served_its_own(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the portable variant where none is meant for it."""
    monkeypatch.setattr(certificate_module, "cuda_compute_capability", lambda device: "9.0")
    bundle = with_variants(plain, "cpu-fp32", "cuda-fp16")
    assert chosen(bundle, "cuda") == "portable"
    # TensorRT takes none that writes its cache in place, and no certificate of CUDA.
    assert chosen(bundle, "tensorrt") == "portable"
    with pytest.raises(UsageError, match="provider tensorrt runs variants of standard operators"):
        open_model(bundle, bundle.variant("cuda-fp16"), SessionOptions("tensorrt"))
    on_cuda, on_tensorrt = (
        Cell.of(bundle.variant(), SessionOptions(each)) for each in ("cuda", "tensorrt")
    )
    assert dataclasses.replace(on_cuda, hardware=on_tensorrt.hardware) != on_tensorrt
    assert on_tensorrt.hardware == f"{on_cuda.hardware}+tensorrt_unknown"
    portable = dataclasses.replace(bundle.variant("portable"), providers=("cpu",))
    variants = {**bundle.manifest.variants, "portable": portable}
    bundle = dataclasses.replace(
        bundle, manifest=dataclasses.replace(bundle.manifest, variants=variants)
    )
    assert chosen(bundle, "cuda") == "portable"
    assert chosen(bundle) == "cpu-fp32"
