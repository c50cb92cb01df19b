"""What variants there are, what each says of itself, and what they share on disk."""

import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner, Result

from transferry.build_model.checkpoint import WEIGHTS as RUN_WEIGHTS
from transferry.build_model.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_samples,
    load_tensors,
    save_tensors,
)
from transferry.build_model.config import ModelConfig
from transferry.build_model.transformer import Transformer
from transferry.cli import main
from transferry.export import variants
from transferry.export.bundle import export_bundle
from transferry.export.graphs.external_data import ALIGNMENT, WEIGHTS, write_graphs
from transferry.export.graphs.portable import Graph, export_graphs
from transferry.export.parity.cases import random_case
from transferry.export.parity.oracle import Judge
from transferry.export.variants import RECIPES, make_variant, recipe_of
from transferry.runtime.bundle import MANIFEST, Bundle, Manifest
from transferry.runtime.errors import UsageError
from transferry.runtime.ort.cuda import cuda_obstacle
from transferry.runtime.ort.fused_decoder import FusedDecoder
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.parity.compare import Tolerance
from transferry.runtime.tokenizer.byte_pair import SOURCES

Exporter = Callable[[Transformer, str], dict[str, Graph]]


def test_variants_say_what_they_are(all_variants: Bundle) -> None:
    found = {
        variant.name: (variant.precision, variant.providers, variant.opset, variant.in_place)
        for variant in all_variants.manifest.variants.values()
    }
    assert found == {
        "portable": ("float32", ("cpu", "cuda"), 20, False),
        "cpu-fp32": ("float32", ("cpu",), 24, True),
        "cpu-int8": ("int8", ("cpu",), 24, True),
    }
    assert next(iter(found)) == "portable"
    exact = {variant.name for variant in all_variants.manifest.variants.values() if variant.exact}
    assert exact == {"portable", "cpu-fp32"}
    assert {name for name, variant in all_variants.manifest.variants.items() if variant.screen} == {
        "cpu-fp32"
    }
    slots = {"encoder", "decoder", "head", "sums", "select", "gather", "move", "place"}
    more = {"cpu-fp32": {"rough", "peaks"}, "cpu-int8": {"unrounded"}}
    for name, graphs in {name: slots | added for name, added in more.items()}.items():
        specs = all_variants.variant(name).graphs
        assert specs.keys() == graphs
        assert {spec.file for spec in specs.values()} == {
            f"{RECIPES[name].prefix}{graph}.onnx" for graph in graphs
        }


def test_opsets_are_those_of_the_graphs(all_variants: Bundle) -> None:
    for variant in all_variants.manifest.variants.values():
        for spec in variant.graphs.values():
            model = ir.load(all_variants.graph(spec))
            assert model.opset_imports[""] == variant.opset
            domains = {node.domain for node in model.graph}
            if variant.name == "portable":
                assert domains <= {""}, "any runtime can run it"


def test_manifest_survives_reading(all_variants: Bundle) -> None:
    text = (all_variants.folder / MANIFEST).read_bytes()
    manifest = Manifest.from_json(text, MANIFEST)
    assert manifest == all_variants.manifest
    assert manifest.to_json().encode() == text


def external(path: Path) -> dict[str, tuple[int, int]]:
    """Offset and length in the file of weights of each tensor of a graph that lies there."""
    return {
        name: (int(value.const_value.offset or 0), int(value.const_value.length or 0))
        for name, value in ir.load(path).graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }


def test_cpu_fp32_adds_nothing_to_the_weights(
    checkpoint: Checkpoint,
    bundle: Bundle,
    portable_traced: Exporter,
    slots_traced: Exporter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not screened: byte for byte the file that the portable graphs have alone."""
    monkeypatch.setattr(variants, "export_graphs", portable_traced)
    monkeypatch.setattr(variants, "export_slot_graphs", slots_traced)
    made = [make_variant(checkpoint.model, name) for name in ("portable", "cpu-fp32")]
    graphs = [graph for variant in made for graph in variant.graphs.values()]
    write_graphs([(graph.model, tmp_path / graph.spec.file) for graph in graphs])
    alone = bundle.folder / "portable" / WEIGHTS
    assert (tmp_path / "portable" / WEIGHTS).read_bytes() == alone.read_bytes()


def test_screening_adds_the_projection_in_int8(all_variants: Bundle, bundle: Bundle) -> None:
    """vocabulary * d_model bytes and a float32 a token, and nothing else but whole pages."""
    config = bundle.manifest.model
    vocabulary, d_model = int(config["vocabulary_size"]), int(config["d_model"])
    alone, grown = (
        (each.folder / "portable" / WEIGHTS).stat().st_size for each in (bundle, all_variants)
    )
    pages = -alone % ALIGNMENT + -(vocabulary * d_model) % ALIGNMENT
    assert grown - alone == pages + vocabulary * d_model + 4 * vocabulary
    rough = external(all_variants.folder / "portable/fused-rough.onnx")
    assert sorted(length for _, length in rough.values()) == [4 * vocabulary, vocabulary * d_model]


def test_int8_that_was_verified_is_what_runs(
    all_variants: Bundle, calm: Checkpoint, run_folder: Path, texts: list[str], tmp_path: Path
) -> None:
    """From export to a result, on the command line: unverified it would have to be named."""

    def call(*arguments: str | Path) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result

    bundle = Path(shutil.copytree(all_variants.folder, tmp_path / "bundle"))
    run = Path(shutil.copytree(run_folder, tmp_path / "run"))
    weights, _ = load_tensors(run / RUN_WEIGHTS)
    own = calm.model.state_dict()
    save_tensors(run / RUN_WEIGHTS, {name: own[name] for name in weights})
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"{text}\n" for text in texts[:6]), encoding="utf-8")

    def certificate_of_a_run(*options: str) -> str:
        out = tmp_path / "out.txt"
        call("run", bundle, lines, "-o", out, "--force", *options)
        made = tomllib.loads((tmp_path / "out.txt.settings.toml").read_text("utf-8"))["made"]
        return str(made["certificate"])

    assert "for variant cpu-fp32" in certificate_of_a_run()
    proof = ("--checkpoint", run, "--text", lines, "--certify", "2026-11-22")
    call("verify", bundle, "--variant", "cpu-int8", *proof)
    certificate = certificate_of_a_run("--require-certificate")
    assert certificate.startswith("of 2026-11-22 against the run, variant cpu-int8")


def test_unknown_variants_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for name in ("cpu-fp16", "", "PORTABLE"):
        with pytest.raises(UsageError, match=r"expected one of portable, cpu-fp32, cpu-int8, cuda"):
            make_variant(checkpoint.model, name)
        with pytest.raises(UsageError, match=f"there is no variant {name!r}"):
            export_bundle(checkpoint, tmp_path / "bundle", variants=["cpu-fp32", name])
    assert not list(tmp_path.iterdir())
    assert recipe_of("cpu-int8", calibrated=True) is RECIPES["cpu-int8"]


def test_a_variant_named_twice_is_made_once(
    checkpoint: Checkpoint,
    portable_traced: Exporter,
    slots_traced: Exporter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(variants, "export_graphs", portable_traced)
    monkeypatch.setattr(variants, "export_slot_graphs", slots_traced)
    said: list[str] = []
    names = ["portable", "cpu-fp32", "cpu-fp32"]
    export_bundle(checkpoint, tmp_path / "bundle", variants=names, say=said.append)
    assert [line for line in said if line.startswith("exporting")] == [
        "exporting variant portable",
        "exporting variant cpu-fp32",
    ]


def test_variants_for_a_gpu_are_written_where_there_is_none(
    reader_run_folder: Path,
    reader_bundle_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And it is said that they are not verified; `export_bundle` has onnx check every graph."""
    checkpoint = load_checkpoint(reader_run_folder)
    portable = Bundle.load(reader_bundle_folder)
    spec = portable.variant().graphs["encoder"]

    def traced(model: Transformer, prefix: str) -> dict[str, Graph]:
        if prefix == "portable/":
            return {"encoder": Graph(ir.load(portable.graph(spec)), spec)}
        return export_graphs(model, prefix)

    monkeypatch.setattr(variants, "export_graphs", traced)
    said: list[str] = []
    bundle = export_bundle(
        checkpoint,
        tmp_path / "bundle",
        texts=load_samples(reader_run_folder),
        variants=["cuda-fp16", "cuda-bf16"],
        say=said.append,
    )
    unverified = [line for line in said if "is not verified" in line]
    if (obstacle := cuda_obstacle()) is not None:
        assert unverified == [
            f"variant {name} is not verified: {obstacle.missing}"
            for name in ("cuda-fp16", "cuda-bf16")
        ]
    for name, kind in (("cuda-fp16", "float16"), ("cuda-bf16", "bfloat16")):
        variant = bundle.variant(name)
        assert (variant.precision, variant.providers) == (kind, ("cuda",))
        path = bundle.graph(variant.graphs["encoder"])
        onnx.checker.check_model(str(path), full_check=True)
        weights = ir.load(path).graph.initializers
        kinds = {
            str(value.dtype) for key, value in weights.items() if key.startswith("model.encoder")
        }
        assert kinds == {kind.upper()}
    assert checkpoint.model.embedding.weight.dtype == torch.float32, "the model stays as it is"


def test_half_precision_answers_nearly_alike(tmp_path: Path) -> None:
    """Of a decoder, whose kernels the CPU has too, if not fast ones."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocabulary_size=40,
        d_model=16,
        heads=4,
        encoder_layers=0,
        decoder_layers=1,
        d_ff=24,
        max_positions=24,
        architecture="decoder-only",
        norm_order="pre",
    )
    model = Transformer(config).eval()
    made = make_variant(model, "cuda-fp16")
    (tmp_path / "cuda-fp16").mkdir()
    graphs = made.graphs.values()
    write_graphs([(graph.model, tmp_path / graph.spec.file) for graph in graphs])
    for graph in graphs:
        onnx.checker.check_model(str(tmp_path / graph.spec.file), full_check=True)
    # The host knows float32 alone; what stays on the device is half as large.
    types = {
        (spec.role, spec.type)
        for graph in graphs
        for spec in (*graph.spec.inputs, *graph.spec.outputs)
        if spec.role in ("bias", "logits", "past", "hidden")
    }
    assert types == {
        ("bias", "float32"),
        ("logits", "float32"),
        ("past", "float16"),
        ("hidden", "float16"),
    }
    variant = made.described()
    manifest = Manifest(config.architecture, config.to_dict(), {}, {variant.name: variant}, {}, {})
    opened = open_model(Bundle(tmp_path, manifest, None), variant, SessionOptions())  # type: ignore[arg-type]
    assert isinstance(opened, FusedDecoder)
    cases = [random_case(config, *size, seed=0) for size in [(1, 1, 0), (3, 7, 0), (2, 5, 4)]]
    judge = Judge(model, SOURCES, Tolerance.of("float16"))
    comparisons = judge.numbers(opened, cases)
    assert not [item.fault for item in comparisons if item.fault]
    # In float32 it would pass with a thousandth of that.
    strict = replace(judge.tolerance, factor=Tolerance().factor)
    judge = Judge(model, SOURCES, strict)
    assert [item.tensor for item in judge.numbers(opened, cases) if item.fault]
    assert np.isfinite([item.error for item in comparisons]).all()
