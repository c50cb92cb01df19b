"""OpenVINO as a served runtime: onnxruntime's answers, and refusals."""

import sys
from pathlib import Path

import pytest

from transferry.runtime.bundle import Bundle
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import ProviderError, UsageError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.parity.certificate import Cell
from transferry.runtime.parity.recorded import verify

TEXTS = ["a man in a red shirt", "two dogs", "the quick brown fox runs over the field"]
OPENVINO = SessionOptions(runtime="openvino")


@pytest.fixture
def installed() -> None:
    pytest.importorskip("openvino", reason="openvino is not installed")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("fixture", ["bundle_folder", "writer_bundle_folder"])
@pytest.mark.parametrize("beam", [1, 3])
def test_answers_as_onnxruntime_does(
    fixture: str, beam: int, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(fixture)
    both = [
        [
            row.text
            for row in Engine.load(folder, variant="portable", runtime=runtime).generate(
                TEXTS, beam=beam, max_length=12
            )
        ]
        for runtime in ("onnxruntime", "openvino")
    ]
    assert both[0] == both[1]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "fixture", ["bundle_folder", "writer_bundle_folder", "reader_bundle_folder"]
)
def test_gives_the_recorded_answers(fixture: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(fixture)
    report = verify(folder, options=OPENVINO)
    assert report.passed
    assert "openvino" in report.settings


def test_another_variant_is_refused(fast_bundle_folder: Path) -> None:
    bundle = Bundle.load(fast_bundle_folder)
    with pytest.raises(UsageError, match="variant portable alone"):
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
        Engine.load(bundle_folder, runtime="openvino")
