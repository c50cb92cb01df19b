"""Every weight of every variant is the checkpoint's, bit for bit."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from tests.export.conftest import graphs_of, random_reader, written
from transferry.build_model.checkpoint import Checkpoint
from transferry.export.checks import weights as stored_weights
from transferry.export.checks.weights import CheckpointWeights, weights_claim
from transferry.export.rewrite.calibration import Calibration
from transferry.export.subject.bundle_copy import BundleCopy
from transferry.export.trace.store import SMALLEST
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import StoredTensor
from transferry.runtime.precision import Precision

VARIANTS = ["portable", "cpu-fp32", "cpu-int8", "cpu-int4"]


def problem(checkpoint: Checkpoint, bundle: Bundle, name: str) -> str:
    variant = bundle.variant(name)
    calibration = Calibration.of(bundle, variant) if name == "cpu-int8" else None
    return weights_claim(checkpoint.model, bundle, variant, calibration).problem


@pytest.mark.parametrize("name", VARIANTS)
def test_an_honest_bundle_holds_the_weights_of_its_run(
    calm: Checkpoint, all_variants: Bundle, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constants too that grow with the model: of this one they are too small to be looked at."""
    monkeypatch.setattr(stored_weights, "SMALLEST", 4 * calm.model.config.d_model)
    assert problem(calm, all_variants, name) == ""


@pytest.mark.parametrize("name", VARIANTS)
def test_every_weight_is_looked_at(
    calm: Checkpoint, all_variants: Bundle, tmp_path: Path, name: str
) -> None:
    """One entry of each, by one unit in the last place, a whole number by one."""
    copy = BundleCopy(all_variants, all_variants.variant(name), tmp_path / "copy")
    calibration = Calibration.of(all_variants, copy.variant) if name == "cpu-int8" else None
    weights = CheckpointWeights(calm.model, Precision.of(copy.variant.precision), calibration)
    known = {
        key: value
        for model in copy.graphs.values()
        for key, value in model.graph.initializers.items()
        if weights.find(key) is not None
    }
    assert len(known) > 20
    for key, value in known.items():
        assert value.const_value is not None
        wanted, slack = weights.find(key) or (torch.zeros(0), 0.0)
        array: NDArray[Any] = value.const_value.numpy().copy()
        last = array.reshape(-1)[-1:]
        if array.dtype.kind == "f":
            last[:] = last * (1 + 2 * slack) + 1e-30 if slack else np.nextafter(last, np.inf)
        else:
            last[:] = last - 1
        changed = ir.Tensor(array, name=key).numpy().astype(np.float64)
        wrong = ~(np.abs(changed - wanted.double().numpy()) <= slack * np.abs(wanted.numpy()))
        assert wrong.sum() == 1, key


def test_a_cap_that_divides_the_scales_of_the_lm_head_is_no_fault(tmp_path: Path) -> None:
    """A cap that is a power of two divides the scales instead of the product, as in attention."""
    model = random_reader(output_softcap=4.0)
    bundle = written(tmp_path, model, "cpu-int4", graphs_of(model, "cpu-int4"))
    held = ir.load(bundle.graph(bundle.variant("cpu-int4").graphs["encoder"])).graph.initializers
    assert "embedding.weight.divided_scales" in held
    assert weights_claim(model, bundle, bundle.variant("cpu-int4"), None).problem == ""


def test_a_wrong_weight_is_named(calm: Checkpoint, all_variants: Bundle, tmp_path: Path) -> None:
    copy = BundleCopy(all_variants, all_variants.variant("cpu-fp32"), tmp_path / "copy")

    def change(array: NDArray[Any]) -> NDArray[Any]:
        array[1, 2] = np.nextafter(array[1, 2], np.float32(9))
        return array

    copy.edit("decoder.0.feed_forward.inner.weight", change)
    copy.seal()
    found = problem(calm, Bundle.load(copy.folder), "cpu-fp32")
    assert found.startswith(
        "1 of 1,536 entries of decoder.0.feed_forward.inner.weight in graph decoder differ, "
        "first [1, 2]: "
    )


def test_a_large_constant_that_is_no_weight_is_refused(
    calm: Checkpoint, all_variants: Bundle, tmp_path: Path
) -> None:
    copy = BundleCopy(all_variants, all_variants.variant("portable"), tmp_path / "copy")
    graph = copy.graphs["encoder"].graph
    tensor = ir.Tensor(np.zeros(SMALLEST, np.float32), name="extra")
    graph.register_initializer(ir.Value(name="extra", const_value=tensor))
    copy.seal()
    found = problem(calm, Bundle.load(copy.folder), "portable")
    assert found == "encoder: extra is no weight of the checkpoint"


def test_the_weights_that_screening_reads_are_compared(
    calm: Checkpoint, all_variants: Bundle
) -> None:
    """The manifest says where they lie: elsewhere lies something else."""
    variant = all_variants.variant("cpu-fp32")
    for part, stored in variant.screen.items():
        offset = stored.offset + (64 if stored.offset < 64 else -64)
        elsewhere: StoredTensor = dataclasses.replace(stored, offset=offset)
        screen = {**variant.screen, part: elsewhere}
        variants = {"cpu-fp32": dataclasses.replace(variant, screen=screen)}
        manifest = dataclasses.replace(all_variants.manifest, variants=variants)
        found = problem(calm, dataclasses.replace(all_variants, manifest=manifest), "cpu-fp32")
        assert f" entries of {part} of the screen differ, first [" in found
