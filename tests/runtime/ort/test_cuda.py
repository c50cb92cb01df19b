"""Properties that only a GPU shows; each test skips, saying why, where onnxruntime has no CUDA."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.recorded import verify_recorded

pytestmark = pytest.mark.cuda

TEXTS = ["three hundred and forty-two", "Wednesday, 5 March 2031", "seven", "The farmer sold keys."]


@pytest.mark.parametrize("beam", [1, 4])
def test_cuda_gives_the_tokens_of_the_cpu(bundle_folder: Path, beam: int) -> None:
    options = GenerationOptions(beam=beam, n_best=beam, max_length=20)
    cpu, cuda = (
        [
            [output.tokens for output in result.hypotheses]
            for result in Engine(bundle_folder, provider=provider).generate(TEXTS, options)
        ]
        for provider in ("cpu", "cuda")
    )
    assert cuda == cpu


@pytest.mark.parametrize(
    "fixture", ["bundle_folder", "writer_bundle_folder", "reader_bundle_folder"]
)
def test_cuda_passes_the_recorded_reference(fixture: str, request: pytest.FixtureRequest) -> None:
    bundle = Bundle.load(request.getfixturevalue(fixture))
    report = verify_recorded(bundle, open_model(bundle, bundle.variant(), SessionOptions("cuda")))
    assert report.faults == []


def test_the_nodes_run_and_the_cache_stays_on_the_device(bundle_folder: Path) -> None:
    bundle = Bundle.load(bundle_folder)
    decoder = PortableDecoder(bundle, bundle.variant(), SessionOptions("cuda"))
    nodes = dict(entry.rsplit(" ", 1) for entry in decoder.describe()["nodes"])
    # Shapes are computed on the CPU by onnxruntime's choice; the bulk must not be.
    assert int(nodes["CUDAExecutionProvider"]) > int(nodes.get("CPUExecutionProvider", 0))
    state = decoder.start(np.array([[5, 6, 2]]), np.ones((1, 3), np.bool_))
    _, state = decoder.step(np.array([[1]]), state)
    state = decoder.select(state, np.array([0, 0]))
    places = {value.device_name() for value in (*state.cross, *state.past, state.mask)}
    assert places == {"cuda"}


@pytest.mark.parametrize("beam", [1, 4])
def test_the_top_k_of_the_device_changes_no_answer(device_bundle_folder: Path, beam: int) -> None:
    bundle = Bundle.load(device_bundle_folder)
    variant = bundle.variant("cuda-fp16")
    options = GenerationOptions(beam=beam, n_best=beam, max_length=20)
    texts = [pair.source for pair in builtin_pairs(200, seed=5)]
    ranking, plain = (
        Engine.of(bundle, open_model(bundle, replace(variant, top_k=top_k), SessionOptions("cuda")))
        for top_k in (True, False)
    )
    for one, other in zip(
        ranking.generate(texts, options), plain.generate(texts, options), strict=True
    ):
        assert [item.tokens for item in one.hypotheses] == [
            item.tokens for item in other.hypotheses
        ]
        scores = [[item.score for item in result.hypotheses] for result in (one, other)]
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-3, atol=1e-3)
