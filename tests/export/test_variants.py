"""The variants: their entries in the manifest, their files, and their precision."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from tests.conftest import make_bundle
from tests.export.conftest import exported, graphs_of, opened, verified, written
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.export import bundle as exporting
from transferry.export.bundle import Contents, check_graphs
from transferry.export.checks.numbers import compare_cases
from transferry.export.oracle import effort
from transferry.export.oracle.cases import random_case
from transferry.export.oracle.oracle import Oracle
from transferry.export.recipes import RECIPES, recipe_of
from transferry.export.trace.store import ALIGNMENT, WEIGHTS
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import CacheSpec
from transferry.runtime.decoding.logits import log_sum_exp
from transferry.runtime.errors import ParityError, UsageError
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.ort.cuda import cuda_obstacle
from transferry.runtime.ort.fused_decoder import FusedDecoder
from transferry.runtime.ort.lm_head import LARGEST_SUM
from transferry.runtime.ort.session import Kernels, SessionOptions, kernels
from transferry.runtime.proof.certificates.standing import fastest
from transferry.runtime.proof.certificates.stored import certify
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.recorded import verify_recorded
from transferry.runtime.tokenizer.byte_pair import SOURCES

FUSED = {"encoder", "decoder", "lm_head", "exp_sums", "select", "gather", "move", "place"}
GRAPHS = {
    "portable": {"encoder", "decoder", "select"},
    "cpu-fp32": FUSED | {"approximate_logits", "segment_maxima"},
    "cpu-int8": FUSED | {"dequantise"},
    "cpu-int4": FUSED,
}


def test_variants_say_what_they_are(all_variants: Bundle) -> None:
    found = all_variants.manifest.variants
    assert {
        variant.name: (variant.precision, variant.providers, variant.opset, variant.cache)
        for variant in found.values()
    } == {
        "portable": ("float32", ("cpu", "cuda"), 20, CacheSpec(False, "float32")),
        "cpu-fp32": ("float32", ("cpu",), 24, CacheSpec(True, "float32")),
        "cpu-int8": ("int8", ("cpu",), 24, CacheSpec(True, "int8")),
        "cpu-int4": ("int4", ("cpu",), 24, CacheSpec(True, "float32")),
    }
    assert next(iter(found)) == "portable"
    assert {name for name, variant in found.items() if variant.exact} == {"portable", "cpu-fp32"}
    assert {name for name, variant in found.items() if variant.screen} == {"cpu-fp32"}
    assert not any(variant.top_k for variant in found.values())
    for name, variant in found.items():
        files = {graph: f"{RECIPES[name].prefix}{graph}.onnx" for graph in GRAPHS[name]}
        assert {graph: spec.file for graph, spec in variant.graphs.items()} == files
        for spec in variant.graphs.values():
            model = ir.load(all_variants.graph(spec))
            assert model.opset_imports[""] == variant.opset
            standard = {node.domain for node in model.graph} <= {""}
            assert standard or name != "portable", "any runtime can run it"


def test_screening_adds_the_lm_head_in_int8(all_variants: Bundle, bundle: Bundle) -> None:
    """vocabulary * d_model bytes, a float32 per token, and padding to whole pages."""
    config = bundle.manifest.model
    vocabulary, d_model = int(config["vocabulary_size"]), int(config["d_model"])
    alone, grown = (
        (each.folder / "portable" / WEIGHTS).stat().st_size for each in (bundle, all_variants)
    )
    pages = -alone % ALIGNMENT + -(vocabulary * d_model) % ALIGNMENT
    assert grown - alone == pages + vocabulary * d_model + 4 * vocabulary


def test_unknown_variants_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for name in ("cpu-fp16", "", "PORTABLE"):
        known = "one of portable, portable-int8, cpu-fp32, cpu-int8, cpu-int8-kernels"
        with pytest.raises(UsageError, match=known):
            recipe_of(name, calibrated=True)
        with pytest.raises(UsageError, match=f"there is no variant {name!r}"):
            exported(checkpoint, tmp_path / "bundle", Contents(variants=["cpu-fp32", name]))
    with pytest.raises(UsageError, match=r"cpu-int8 is calibrated on text .*--calibrate FILE"):
        exported(checkpoint, tmp_path / "bundle", Contents(variants=["cpu-int8"]))
    assert not list(tmp_path.iterdir()), "before any work"


def test_variants_for_a_gpu_are_written_where_there_is_none(
    reader_run_folder: Path, tmp_path: Path
) -> None:
    """They are reported as not verified; onnx checks every graph all the same."""
    checkpoint = load_checkpoint(reader_run_folder)
    types, said = {"cuda-fp16": "float16", "cuda-bf16": "bfloat16"}, list[str]()
    contents = Contents(load_samples(reader_run_folder), list(types))
    bundle = exported(checkpoint, tmp_path / "bundle", contents, say=said.append)
    if (obstacle := cuda_obstacle()) is not None:
        assert [line for line in said if "is not verified" in line] == [
            f"variant {name} is not verified: {obstacle.missing}" for name in types
        ]
    for name, kind in types.items():
        variant = bundle.variant(name)
        assert (variant.precision, variant.providers) == (kind, ("cuda",))
        weights = ir.load(bundle.graph(variant.graphs["encoder"])).graph.initializers
        assert {
            str(value.dtype) for key, value in weights.items() if key.startswith("model.encoder")
        } == {kind.upper()}
    assert checkpoint.model.embedding.weight.dtype == torch.float32, "the model stays as it is"


def test_kernels_are_written_where_their_package_is_missing(
    reader_run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "kernels", lambda: Kernels("is not installed", "Install it"))
    said, texts, name = list[str](), load_samples(reader_run_folder), "cpu-int8-kernels"
    contents = Contents(texts, ["cpu-int8", name], texts)
    checkpoint = load_checkpoint(reader_run_folder)
    bundle = exported(checkpoint, tmp_path / "bundle", contents, say=said.append)
    assert [line for line in said if "is not verified" in line] == [
        f"variant {name} is not verified: transferry-kernels is not installed"
    ]
    assert bundle.variant(name).precision == "int8-kernels"
    assert "transferry-kernels" not in bundle.manifest.versions


@pytest.fixture
def installed(kernels_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of kernels, for one test."""
    monkeypatch.syspath_prepend(kernels_folder)
    sys.modules.pop("transferry_kernels", None)
    kernels.cache_clear()
    yield
    sys.modules.pop("transferry_kernels", None)
    kernels.cache_clear()


@pytest.mark.parametrize("largest_sum", [LARGEST_SUM, 1.0])
def test_kernels_rank_as_all_logits_do(
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: None,
    largest_sum: float,
) -> None:
    """To the bit, also where float32 does not hold the sum of the exponentials."""
    monkeypatch.setattr("transferry.runtime.ort.lm_head.LARGEST_SUM", largest_sum)
    name, rng = "cpu-int8-kernels", np.random.default_rng(3)
    bundle = Bundle.load(make_bundle(run_folder, tmp_path / "bundle", name))
    decoder = FusedDecoder(bundle, bundle.variant(name), SessionOptions())
    source = rng.integers(3, 350, (40, 12))
    state = decoder.start(source, np.ones(source.shape, np.bool_))
    for tokens in rng.integers(3, 350, (5, 40, 1)):
        ranked = decoder.step(tokens, state, top=7, normalise=True)[0].top_k
        plain = decoder.step(tokens, state, normalise=True)[0]
        alone = decoder.step(tokens, state, top=1)[0]
        logits = plain.all_logits[:, 0]
        assert ranked is not None and ranked.logits is not None
        assert plain.log_sum_exp is not None
        order = np.argsort(-logits, axis=1, kind="stable")[:, :7]
        np.testing.assert_array_equal(ranked.tokens, order)
        np.testing.assert_array_equal(ranked.logits, np.take_along_axis(logits, order, axis=1))
        np.testing.assert_array_equal(ranked.log_sum_exp, plain.log_sum_exp)
        np.testing.assert_allclose(plain.log_sum_exp, log_sum_exp(logits), rtol=1e-6)
        np.testing.assert_array_equal(alone.all_logits[:, 0], logits)
        state = decoder.step(tokens, state)[1]


def test_kernels_are_served_until_their_package_is_removed(
    calm: Checkpoint,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: None,
) -> None:
    """Exported with proof, certified, and computed again by canaries."""
    name, options, lines = "cpu-int8-kernels", SessionOptions(), tmp_path / "lines.txt"
    lines.write_text("".join(f"{text}\n" for text in texts[:4]), encoding="utf-8")
    bundle = exported(calm, tmp_path / "bundle", Contents(texts, ["cpu-int8", name], texts))
    assert bundle.manifest.versions["transferry-kernels"] == kernels().version
    assert opened(bundle, name).describe()["transferry-kernels"] == kernels().version
    assert "transferry-kernels" not in opened(bundle, "cpu-int8").describe()

    for each in (name, "cpu-int8"):
        report = verify_recorded(bundle, opened(bundle, each))
        assert certify(bundle, bundle.variant(each), options, report, "2026-11-21", force=True)
    assert fastest(bundle, options).name == name
    job = Job(bundle.folder, lines, tmp_path / "out.jsonl", JobOptions(canary="1/1"))
    assert job.fingerprint["transferry-kernels"] == kernels().version
    job.run()
    assert job.canary is not None
    assert job.canary.tally()["canaries_identical"] == 4

    monkeypatch.setitem(sys.modules, "transferry_kernels", None)
    kernels.cache_clear()
    assert fastest(bundle, options).name == "cpu-int8"


def test_half_precision_answers_nearly_alike(tmp_path: Path) -> None:
    """A decoder-only model, since the CPU has its kernels in float16 too."""
    torch.manual_seed(0)
    shape = dict(vocabulary_size=40, d_model=16, heads=4, d_ff=24, max_positions=24)
    stacks = dict(encoder_layers=0, decoder_layers=1, norm_order="pre")
    config = ModelConfig.from_dict({**shape, **stacks, "architecture": "decoder-only"})
    model = Transformer(config).eval()
    bundle = written(tmp_path, model, "cuda-fp16", graphs_of(model, "cuda-fp16"))
    variant = bundle.variant()
    assert (variant.top_k, variant.cache) == (True, CacheSpec(True, "float16"))
    check_graphs(bundle, variant)
    # The host handles float32 alone; tensors that stay on the device are half as large.
    types = {
        (spec.role, spec.type)
        for graph in variant.graphs.values()
        for spec in (*graph.inputs, *graph.outputs)
        if spec.role in ("bias", "logits", "hidden")
    }
    assert types == {("bias", "float32"), ("logits", "float32"), ("hidden", "float16")}
    served = opened(bundle)
    cases = [random_case(config, *size, seed=0) for size in [(1, 1, 0), (3, 7, 0), (2, 5, 4)]]
    oracle = Oracle.of(model, SOURCES, Tolerance.of("float16"))
    comparisons = compare_cases(oracle, served, cases)
    assert not [item.fault for item in comparisons if item.fault]
    assert np.isfinite([item.error for item in comparisons]).all()
    # The tolerance of float32 is a thousandth of that.
    oracle = Oracle.of(model, SOURCES, replace(oracle.tolerance, factor=Tolerance().factor))
    assert [item.tensor for item in compare_cases(oracle, served, cases) if item.fault]


@pytest.mark.thorough
def test_of_a_large_model_export_tells_a_loss_and_verify_judges(
    checkpoint: Checkpoint, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effort, "RECORDED_LENGTH", 4)
    monkeypatch.setattr(exporting, "PORTABLE", "cpu-int4")  # no other is traced
    # It is the answers to the texts that are judged.
    case = random_case(checkpoint.model.config, 2, 3, 1, seed=0)
    monkeypatch.setattr(effort.Effort, "cases", lambda *_: [case])
    contents = Contents(texts[:4])
    with pytest.raises(ParityError, match="Equivalent choices"):
        exported(checkpoint, tmp_path / "small", contents)
    assert not (tmp_path / "small").exists()
    monkeypatch.setattr(effort, "JUDGED_TOKENS", 1e9)
    lines: list[str] = []
    bundle = exported(checkpoint, tmp_path / "large", contents, say=lines.append)
    told = [line for line in lines if "variant cpu-int4: Equivalent choices" in line]
    assert len(told) == 1
    assert "too few answers" in told[0]
    report = verified(checkpoint, bundle, texts[:16], "cpu-int4")
    assert not report.passed
    assert all("Equivalent choices" in fault or "hoice" in fault for fault in report.faults)
