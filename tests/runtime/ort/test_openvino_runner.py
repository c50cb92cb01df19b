"""OpenVINO as a served runtime: onnxruntime's answers, its promises, and refusals."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.commands import python
from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.decoder import StepOutput
from transferry.runtime.engine.engine import Engine, verify
from transferry.runtime.errors import InputError, ParityError, ProviderError, UsageError
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.ort import openvino_runner
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.openvino_runner import compiled_in_float32
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.certificates.certificate import Cell
from transferry.runtime.proof.certificates.standing import fastest, standing
from transferry.runtime.proof.certificates.stored import certify
from transferry.runtime.proof.recorded import verify_recorded

TEXTS = ["a man in a red shirt", "two dogs", "the quick brown fox runs over the field"]
OPENVINO = SessionOptions(runtime="openvino")


@pytest.mark.optional("openvino")
@pytest.mark.parametrize("fixture", ["bundle_folder", "writer_bundle_folder"])
@pytest.mark.parametrize("beam", [1, 3])
def test_answers_as_onnxruntime_does(
    fixture: str, beam: int, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(fixture)
    both = [
        [
            row.text
            for row in Engine(folder, variant="portable", runtime=runtime).generate(
                TEXTS, beam=beam, max_length=12
            )
        ]
        for runtime in ("onnxruntime", "openvino")
    ]
    assert both[0] == both[1]


@pytest.mark.optional("openvino")
@pytest.mark.parametrize(
    ("fixture", "variant"),
    [
        *((f"{name}bundle_folder", "portable") for name in ("", "writer_", "reader_")),
        ("weight_only_bundle_folder", "portable-int8"),
    ],
)
def test_gives_the_recorded_answers(
    fixture: str, variant: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(fixture)
    report = verify(folder, variant=variant, options=OPENVINO)
    assert report.passed
    assert "openvino" in report.settings


# Largest distance of a score between batches, in nats: OpenVINO's sums follow the rows of a batch.
ROUNDING = 1e-5
ROWS = [pair.source for pair in builtin_pairs(20, seed=7)]


@pytest.mark.optional("openvino")
@pytest.mark.parametrize("fixture", ["bundle_folder", "writer_bundle_folder"])
@pytest.mark.parametrize("beam", [1, 4])
def test_no_answer_depends_on_the_batch(
    fixture: str, beam: int, request: pytest.FixtureRequest
) -> None:
    engine = Engine(request.getfixturevalue(fixture), runtime="openvino", replicas=1)
    search: dict[str, Any] = {"beam": beam, "max_length": 10, "no_repeat_ngram": 1}
    alone = [next(engine.generate([text], **search)).hypotheses[0] for text in ROWS]
    assert len({one.tokens for one in alone}) > len(ROWS) / 2
    for rows, replicas in ((7 * beam, 2), (64 * beam, 1)):
        batches = BatchOptions(rows=rows)
        cut = Engine.of(engine.bundle, engine.model, replicas=replicas, batches=batches)
        found = [row.hypotheses[0] for row in cut.generate(ROWS, **search)]
        assert [one.tokens for one in found] == [one.tokens for one in alone]
        for one, other in zip(found, alone, strict=True):
            assert abs(one.score - other.score) < ROUNDING


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{text}\n" for text in [*ROWS[:4], "", *ROWS[4:9]]), "utf-8")
    return path


def job(folder: Path, lines: Path, **options: Any) -> Job:
    opened = Engine(folder, runtime="openvino")
    small = BatchOptions(rows=2, window=3)  # so that chunks end one after another
    engine = Engine.of(opened.bundle, opened.model, replicas=1, batches=small)
    chosen = JobOptions(chunk_rows=3, generation={"max_length": 10}, **options)
    return Job(engine, lines, lines.with_name("out.txt"), chosen)


@pytest.mark.optional("openvino")
def test_a_job_resumes_and_ends_with_the_same_bytes(
    bundle_folder: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = job(bundle_folder, lines)
    whole.run()
    expected = whole.output.read_bytes()
    assert expected.count(b"\n") == 10
    whole.output.unlink()
    (whole.output.parent / "out.txt.summary.json").unlink()
    step, steps = PortableDecoder.step, 0

    def breaks(self: PortableDecoder, *arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 35:
            raise InputError("the device is gone")
        return step(self, *arguments, **named)

    monkeypatch.setattr(PortableDecoder, "step", breaks)
    with pytest.raises(InputError, match="the device is gone"):
        job(bundle_folder, lines).run()
    assert not whole.output.exists()
    monkeypatch.setattr(PortableDecoder, "step", step)
    later = job(bundle_folder, lines)
    assert later.run().resumed == 1
    assert later.output.read_bytes() == expected


@pytest.mark.optional("openvino")
def test_a_canary_computes_in_onnxruntime_and_stops_a_wrong_job(
    bundle_folder: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = job(bundle_folder, lines, canary="1/1")
    sound.run()
    assert sound.canary is not None
    assert sound.canary.tally()["canaries_identical"] == 10
    assert "openvino" in sound.engine.describe()
    assert "openvino" not in sound.canary.reference.describe()
    step = PortableDecoder.step

    def wrong(self: PortableDecoder, tokens: Any, state: Any, **named: Any) -> Any:
        output, later = step(self, tokens, state)
        factor = np.float32(-1.0 if self.options == sound.engine.model.options else 1.0)
        return StepOutput(output.all_logits * factor), later

    monkeypatch.setattr(PortableDecoder, "step", wrong)
    with pytest.raises(ParityError, match="line 1 is answered differently"):
        job(bundle_folder, lines, canary="1/1", force=True).run()


@pytest.mark.optional("openvino")
def test_a_certificate_is_for_one_runtime(fast_bundle_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(fast_bundle_folder, tmp_path / "bundle")
    bundle = Bundle.load(folder)
    portable = bundle.variant("portable")
    assert fastest(bundle, OPENVINO) == portable
    report = verify_recorded(bundle, open_model(bundle, portable, OPENVINO))
    made = certify(bundle, portable, OPENVINO, report, "2026-11-21")
    assert made is not None
    assert made.versions["openvino"] == openvino_runner.openvino_version()
    assert standing(bundle, portable, OPENVINO).status == "verified"
    assert standing(bundle, portable, SessionOptions()).status == "none"
    Engine(folder, runtime="openvino", require_certificate="recorded")
    with pytest.raises(ParityError, match="no certificate that holds"):
        Engine(folder, variant="portable", require_certificate="recorded")


def test_another_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a processor could not be told."""

    bfloat16 = SimpleNamespace(get_type_name=lambda: "bf16")
    compiled = SimpleNamespace(get_property=lambda name: bfloat16)
    given: list[Any] = []

    class Core:
        def compile_model(self, *arguments: Any) -> Any:
            given.extend(arguments)
            return compiled

    module = SimpleNamespace(Type=SimpleNamespace(f32="f32"))
    monkeypatch.setattr(openvino_runner, "openvino_module", lambda: module)
    monkeypatch.setattr(openvino_runner, "openvino_core", Core)
    with pytest.raises(ProviderError, match="told to compute in float32, but computes in bf16"):
        compiled_in_float32(Path("graph.onnx"))
    path, device, settings = given
    assert (path, device) == ("graph.onnx", "CPU")
    assert settings["INFERENCE_PRECISION_HINT"] == "f32"


@pytest.mark.optional("openvino")
def test_a_signal_is_handled_when_engines_are_gone(bundle_folder: Path) -> None:
    """A stack for signals that OpenVINO had freed ended the process with SIGSEGV."""
    script = """
import faulthandler, gc, signal, sys
faulthandler.enable()
from transferry.runtime.engine.engine import Engine
from transferry.runtime.ort.session import SessionOptions

engines = [Engine(sys.argv[1], SessionOptions(runtime="openvino")) for _ in range(2)]
print(sum(len(row.hypotheses) for each in engines for row in each.generate(["a b"])))
while engines:
    del engines[0]
    gc.collect()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    result = python("-c", script, bundle_folder)
    assert result.stdout.split() == ["2", "interrupted"], result.stderr


def test_another_variant_is_refused(fast_bundle_folder: Path) -> None:
    bundle = Bundle.load(fast_bundle_folder)
    with pytest.raises(UsageError, match="choose --variant portable or portable-int8"):
        open_model(bundle, bundle.variant("cpu-fp32"), OPENVINO)


@pytest.mark.parametrize("wrong", [{"provider": "cuda"}, {"optimisation": "basic"}])
def test_options_of_onnxruntime_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="leave it out"):
        SessionOptions(runtime="openvino", **wrong)  # type: ignore[arg-type]


def test_its_cell_is_its_own(bundle_folder: Path) -> None:
    variant = Bundle.load(bundle_folder).variant()
    assert Cell.of(variant, OPENVINO) != Cell.of(variant, SessionOptions())


def test_without_openvino_says_how_to_get_it(
    bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ProviderError, match=r"\[openvino\]"):
        Engine(bundle_folder, runtime="openvino")
