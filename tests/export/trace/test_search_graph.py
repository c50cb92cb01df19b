"""A search as one graph: the answers of the search step by step, from any runtime."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from tests.commands import call
from tests.export.conftest import opened
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.build_model.train.corpus import builtin_pairs
from transferry.export import bundle as bundle_module
from transferry.export.bundle import Contents
from transferry.export.torch_model import TorchDecoder
from transferry.export.trace.beam_graph import BeamGraph
from transferry.export.trace.graph import Graph
from transferry.export.trace.search_graph import GreedyGraph, require_one_graph
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import ONE_GRAPH
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import pad_sources, search
from transferry.runtime.engine.engine import verify
from transferry.runtime.errors import UsageError
from transferry.runtime.ort.openvino_runner import openvino_core
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.one_graph import OneGraph, beams_of
from transferry.runtime.proof.recorded import Reference, check_reference

ENDING: dict[str, Any] = {"forced_end": (2,)}
SEARCHES: tuple[dict[str, Any], ...] = (
    {"beam": 4},
    {"beam": 3, "early_stopping": "never", "length_penalty": 0.6},
    {"beam": 2, "early_stopping": False, "min_length": 3, "suppress": (7,), "suppress_begin": (9,)},
    {"beam": 3, "length_penalty": 0.6, "repetition_penalty": 1.3, "no_repeat_ngram": 2, **ENDING},
    {"repetition_penalty": 0.8, "no_repeat_ngram": 3, "prompt_ngrams": True, **ENDING},
)
LENGTH = 16
GREEDY = GenerationOptions(max_length=20)
Run = Callable[[dict[str, Any]], Any]
Exported = tuple[Checkpoint, Bundle, list[list[int]]]


def in_onnxruntime(path: Path) -> Run:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)


def in_openvino(path: Path) -> Run:
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino_core().compile_model(str(path), "CPU", settings)

    def run(feeds: dict[str, Any]) -> Any:
        found = compiled(feeds)
        return [found[name] for name in ("tokens", "lengths", "log_probabilities")]

    return run


in_each_runtime = pytest.mark.parametrize(
    "runtime", [in_onnxruntime, pytest.param(in_openvino, marks=pytest.mark.optional("openvino"))]
)


def feeds_of(bundle: Bundle, sources: list[list[int]], length: int) -> dict[str, Any]:
    special = bundle.tokenizer.special
    ids, mask = pad_sources(sources, special.pad_id)
    feeds = {"source": ids, "source_mask": mask, "max_length": np.array([length])}
    if "encoder" in bundle.variant().graphs:
        feeds["target"] = np.full((len(sources), 1), special.bos_id)
    return feeds


@pytest.fixture(scope="module", params=["", "writer_"], ids=["both", "writer"])
def exported(request: pytest.FixtureRequest) -> Exported:
    """A checkpoint, its bundle with greedy search as one graph, and sources."""
    run: Path = request.getfixturevalue(f"{request.param}run_folder")
    checkpoint = load_checkpoint(run)
    bundle = Bundle.load(request.getfixturevalue(f"whole_{request.param}bundle_folder"))
    encode, wrap = checkpoint.tokenizer.encode, checkpoint.tokenizer.special.wrap
    sources = [wrap(encode(text)) for text in load_samples(run)]
    if not checkpoint.model.config.encoder_layers:
        sources = [source[: max(1, len(source) // 2)] for source in sources]
    return checkpoint, bundle, sources


@in_each_runtime
def test_greedy_answers_are_those_of_torch(
    exported: Exported, runtime: Callable[[Path], Run]
) -> None:
    """Of the batch, and of each row alone."""
    checkpoint, bundle, sources = exported
    special = bundle.tokenizer.special
    searched = search(TorchDecoder(checkpoint.model), sources, GREEDY, special)
    wanted = [row[0].scored_tokens for row in searched]
    assert len(set(map(len, wanted))) > 1 or not checkpoint.model.config.encoder_layers
    run = runtime(bundle.graph(bundle.variant().graphs[ONE_GRAPH]))
    found = []
    for batch in (sources, *([source] for source in sources)):
        tokens, lengths, _ = run(feeds_of(bundle, batch, 20))
        found += [tuple(row[:end]) for row, end in zip(tokens.tolist(), lengths, strict=True)]
    assert found == wanted * 2


def test_shares_the_weights_of_the_portable_graphs(exported: Exported) -> None:
    _, bundle, _ = exported
    graph = bundle.graph(bundle.variant().graphs[ONE_GRAPH])
    assert graph.stat().st_size < 100_000
    assert [path.name for path in graph.parent.glob("*.bin")] == ["weights.bin"]


@in_each_runtime
@pytest.mark.parametrize("fixture", ["bundle_folder", "writer_bundle_folder"])
def test_hypotheses_are_those_of_the_search(
    fixture: str, runtime: Callable[[Path], Run], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    bundle = Bundle.load(request.getfixturevalue(fixture))
    variant, special = bundle.variant("portable"), bundle.tokenizer.special
    encoded = [bundle.tokenizer.encode(pair.source) for pair in builtin_pairs(10, seed=7)]
    both = "encoder" in variant.graphs
    sources = [special.wrap(ids if both else ids[: 1 + len(ids) // 3]) for ids in encoded]
    feeds = feeds_of(bundle, sources, LENGTH)
    decoder = PortableDecoder(bundle, variant, SessionOptions())
    # More end tokens, which are likely: several hypotheses end at a time, at many steps.
    plain = search(decoder, sources, GenerationOptions(max_length=LENGTH), special)
    often = Counter(token for row in plain for token in row[0].tokens).most_common(5)
    special = replace(special, more_ends=(often[1][0], often[4][0]))
    pairs = Counter(pair for row in plain for pair in pairwise(row[0].tokens)).most_common(2)
    sequences = *(pair for pair, _ in pairs), (often[3][0],)
    ended = set()
    # OpenVINO takes seconds to compile a graph.
    for number, chosen in enumerate(SEARCHES if runtime is in_onnxruntime else SEARCHES[:1]):
        beam = chosen.get("beam", 1)
        if beam < 3:
            chosen = {**chosen, "suppress_sequences": sequences}
        if scored := beam > 1 and "repetition_penalty" in chosen:
            # Beams are ranked without the forced token's own value; the page says how to feed it.
            chosen = {**chosen, **({"forced_begin": often[2][0]} if both else {})}
        # Or the token of a language, without a default.
        spoken = {"de": often[2][0]} if both and "early_stopping" in chosen and beam == 3 else {}
        scored |= bool(spoken)
        begun = [[special.bos_id, often[2][0]]] * len(sources)
        first = {"target": np.array(begun)} if "forced_begin" in chosen or spoken else {}
        graphs = {
            name: Graph(ir.load(bundle.graph(spec)), spec) for name, spec in variant.steps.items()
        }
        positions = int(bundle.manifest.model["max_positions"])
        given = graphs, replace(special, languages=spoken), chosen, positions
        composer = BeamGraph(*given, beam=beam) if beam > 1 else GreedyGraph(*given)
        made = composer.graph()
        path = tmp_path / f"{number}.onnx"
        ir.save(made.model, path, external_data=f"{number}.bin")
        tokens, lengths, totals, *scores = runtime(path)(feeds | first)
        each = () if beam == 1 else (beam,)
        assert (tokens.shape[1:-1], lengths.shape[1:], totals.shape[1:]) == (each, each, each)
        tokens = tokens.reshape(len(sources), beam, -1)
        lengths, totals, *scores = (x.reshape(-1, beam) for x in (lengths, totals, *scores))
        assert bool(scores) == scored
        options = GenerationOptions(max_length=LENGTH, n_best=beam, **chosen)
        options = replace(options, forced_begin=spoken.get("de", options.forced_begin))
        wanted = search(decoder, sources, options, special)
        ended |= {len(one.tokens) for row in wanted for one in row if one.end is not None}
        for row, hypotheses in enumerate(wanted):
            exist = range(int((lengths[row] > 0).sum()))
            found = [tuple(tokens[row, k, : lengths[row, k]].tolist()) for k in exist]
            assert found == [one.scored_tokens for one in hypotheses], chosen
            own = [one.log_probability for one in hypotheses]
            np.testing.assert_allclose(totals[row, exist], own, atol=1e-4)
            for given_scores in scores:
                ranked = [one.score for one in hypotheses]
                np.testing.assert_allclose(given_scores[row, exist], ranked, atol=1e-4)
    assert len(ended) >= 3


@pytest.mark.parametrize(
    ("fixture", "beam"),
    [("whole_bundle_folder", 1), ("whole_writer_bundle_folder", 1), ("beam_bundle_folder", 4)],
)
def test_the_recorded_answers_are_compared_with_it(
    fixture: str, beam: int, request: pytest.FixtureRequest
) -> None:
    bundle = Bundle.load(request.getfixturevalue(fixture))
    assert beams_of(bundle.variant().graphs[ONE_GRAPH]) == beam
    name = f"{'greedy' if beam == 1 else f'beam {beam}'}, in one graph"
    decisions = verify(bundle.folder, variant="portable").decisions
    (found,) = [item for item in decisions if item.search == name]
    assert found.passed
    assert found.identical == found.rows > 0


@pytest.mark.parametrize("shift", [0, 1])
def test_beams_that_are_not_recorded_are_compared_with_the_search(
    beam_bundle_folder: Path, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    bundle = Bundle.load(beam_bundle_folder)
    variant = bundle.variant()
    reference = Reference.of(bundle, variant)
    greedy = replace(reference, cases=(), searches=reference.searches[:1])
    one = OneGraph(bundle, variant, SessionOptions())
    answers = one.answers_all_ways

    def wrong(*arguments: Any) -> Any:
        found = answers(*arguments)
        return found[shift:] + found[:shift]

    monkeypatch.setattr(one, "answers_all_ways", wrong)
    given = greedy, opened(bundle), bundle.tokenizer.special, Tolerance()
    _, decisions = check_reference(*given, one=one)
    *_, found = decisions
    assert found.search == "beam 4, in one graph"
    assert found.passed == (shift == 0)
    assert all("the search step by step chose" in str(item) for item in found.defects)


@pytest.mark.parametrize(
    ("architecture", "generation", "beam", "named"),
    [
        ("encoder-only", {}, 1, "encoder-only"),
        ("encoder-decoder", {"stop": ("a",)}, 1, "stop"),
        ("decoder-only", {"max_total_length": 9}, 1, "max_total_length"),
        ("decoder-only", {"prefix": (3,)}, 1, "prefix"),
        ("encoder-decoder", {"renormalise": True}, 4, "renormalise"),
        ("encoder-decoder", {}, 65, "between 1 and 64, but are 65"),
    ],
)
def test_what_it_cannot_keep_is_refused_by_name(
    architecture: str, generation: dict[str, Any], beam: int, named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        require_one_graph(architecture, generation, beam)


def test_what_it_keeps_is_not_refused() -> None:
    kept = {"beam": 4, "suppress": (3,), "min_length": 2, "forced_begin": 5, **ENDING}
    for generation in (kept, {"renormalise": True}):
        require_one_graph("encoder-decoder", generation, 1)


@pytest.mark.parametrize(
    ("options", "beams"),
    [("", 0), ("--one-graph", 1), ("--one-graph-beam 4", 4), ("--one-graph --one-graph-beam 2", 2)],
)
def test_beams_imply_one_graph(
    options: str, beams: int, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refused(checkpoint: Checkpoint, out: Path, contents: Contents, **_: Any) -> None:
        asked.append(contents.one_graph)
        raise UsageError("enough")

    monkeypatch.setattr(bundle_module, "export_bundle", refused)
    call("export", run_folder, "--out", tmp_path / "bundle", *options.split())
    assert asked == [beams]
