"""Greedy search as one graph: torch's answers from any runtime, and its refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.export.torch_model import TorchDecoder
from transferry.export.trace.search_graph import require_one_graph
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import ONE_GRAPH
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import pad_sources, search
from transferry.runtime.engine.open_bundle import verify
from transferry.runtime.errors import UsageError
from transferry.runtime.ort.openvino_runner import openvino_core

OPTIONS = GenerationOptions(max_length=20)


@pytest.fixture(scope="module", params=["", "writer_"], ids=["both", "writer"])
def exported(request: pytest.FixtureRequest) -> tuple[Checkpoint, Bundle, list[list[int]]]:
    run: Path = request.getfixturevalue(f"{request.param}run_folder")
    checkpoint = load_checkpoint(run)
    bundle = Bundle.load(request.getfixturevalue(f"whole_{request.param}bundle_folder"))
    encode, wrap = checkpoint.tokenizer.encode, checkpoint.tokenizer.special.wrap
    sources = [wrap(encode(text)) for text in load_samples(run)]
    if not checkpoint.model.config.encoder_layers:
        sources = [source[: max(1, len(source) // 2)] for source in sources]
    return checkpoint, bundle, sources


def feeds_of(checkpoint: Checkpoint, sources: list[list[int]]) -> dict[str, Any]:
    special = checkpoint.tokenizer.special
    ids, mask = pad_sources(sources, special.pad_id)
    feeds = {"source": ids, "source_mask": mask, "max_length": np.array([OPTIONS.max_length])}
    if checkpoint.model.config.encoder_layers:
        feeds["target"] = np.full((len(sources), 1), special.bos_id)
    return feeds


def answers(outputs: Any) -> list[tuple[int, ...]]:
    tokens, lengths, _ = outputs
    return [
        tuple(row[:count]) for row, count in zip(tokens.tolist(), lengths.tolist(), strict=True)
    ]


def expected(checkpoint: Checkpoint, sources: list[list[int]]) -> list[tuple[int, ...]]:
    special = checkpoint.tokenizer.special
    found = search(TorchDecoder(checkpoint.model), sources, OPTIONS, special)
    return [row[0].scored_tokens for row in found]


def test_onnxruntime_gives_torch_s_answers(
    exported: tuple[Checkpoint, Bundle, list[list[int]]],
) -> None:
    checkpoint, bundle, sources = exported
    path = bundle.graph(bundle.variant().graphs[ONE_GRAPH])
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    wanted = expected(checkpoint, sources)
    assert len(set(map(len, wanted))) > 1 or not checkpoint.model.config.encoder_layers
    assert answers(session.run(None, feeds_of(checkpoint, sources))) == wanted
    for source, one in zip(sources, wanted, strict=True):
        assert answers(session.run(None, feeds_of(checkpoint, [source]))) == [one]


@pytest.mark.optional("openvino")
def test_openvino_gives_torch_s_answers(
    exported: tuple[Checkpoint, Bundle, list[list[int]]],
) -> None:
    checkpoint, bundle, sources = exported
    path = bundle.graph(bundle.variant().graphs[ONE_GRAPH])
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino_core().compile_model(str(path), "CPU", settings)
    found = compiled(feeds_of(checkpoint, sources))
    outputs = [found[name] for name in ("tokens", "lengths", "log_probabilities")]
    assert answers(outputs) == expected(checkpoint, sources)


def test_shares_the_weights_of_the_portable_graphs(
    exported: tuple[Checkpoint, Bundle, list[list[int]]],
) -> None:
    _, bundle, _ = exported
    graph = bundle.graph(bundle.variant().graphs[ONE_GRAPH])
    assert graph.stat().st_size < 100_000
    assert [path.name for path in graph.parent.glob("*.bin")] == ["weights.bin"]


def test_the_recorded_answers_are_compared_with_it(
    exported: tuple[Checkpoint, Bundle, list[list[int]]],
) -> None:
    _, bundle, _ = exported
    (found,) = [
        item
        for item in verify(bundle.folder, variant="portable").decisions
        if item.search == "greedy, in one graph"
    ]
    assert found.passed
    assert found.identical == found.rows > 0


@pytest.mark.parametrize(
    ("architecture", "generation", "named"),
    [
        ("encoder-only", {}, "encoder-only"),
        ("encoder-decoder", {"no_repeat_ngram": 3}, "no_repeat_ngram"),
        ("encoder-decoder", {"repetition_penalty": 1.2}, "repetition_penalty"),
        ("decoder-only", {"prefix": (3,)}, "prefix"),
    ],
)
def test_what_it_cannot_keep_is_refused_by_name(
    architecture: str, generation: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        require_one_graph(architecture, generation)


def test_what_it_keeps_is_not_refused() -> None:
    kept = {"beam": 4, "suppress": (3,), "min_length": 2, "forced_begin": 5}
    require_one_graph("encoder-decoder", kept)
