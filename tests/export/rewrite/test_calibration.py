"""Ranges of activations: computed by hand, by hooks, and for every linear layer of a model."""

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.export.rewrite.calibration import (
    BINS,
    Activation,
    Calibration,
    Histogram,
    calibrate,
)
from transferry.export.torch_model import TorchDecoder
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import pad_sources, search
from transferry.runtime.errors import InputError

LENGTH = 12
# Linear layers that read the same input.
SIBLINGS = (
    ("self_attention.query", "self_attention.key"),
    ("self_attention.query", "self_attention.value"),
    ("cross_attention.key", "cross_attention.value"),
    ("feed_forward.inner", "feed_forward.gate"),
)


@functools.cache
def calibrated(folder: Path) -> tuple[Checkpoint, list[list[int]], Calibration]:
    """A run, sentences of unequal length as its model reads them, and their calibration."""
    checkpoint = load_checkpoint(folder)
    tokenizer = checkpoint.tokenizer
    sources = [tokenizer.special.wrap(tokenizer.encode(text)) for text in load_samples(folder)]
    assert len({len(source) for source in sources}) > 2
    found = calibrate(checkpoint.model, checkpoint.tokenizer.special, sources, LENGTH)
    return checkpoint, sources, found


def test_values_on_the_steps_keep_the_whole_range() -> None:
    histogram = Histogram()
    histogram.add(np.arange(0, 64, 0.25, dtype=np.float32))
    assert histogram.activation() == Activation(0.25, 0, 63.75, 256)
    histogram = Histogram()
    histogram.add(np.arange(-127, 128, dtype=np.float32) * 2)
    assert histogram.activation() == Activation(2.0, 128, 254.0, 255)


def test_a_rare_large_value_is_clipped_as_far_as_it_pays() -> None:
    # (10 - c)^2 + 10^6 (c / 255)^2 / 12 is least at c = 4.38, of hundredths of 10 at 4.4.
    histogram = Histogram()
    histogram.add(np.linspace(0, 1, 1_000_000, dtype=np.float32))
    histogram.add(np.array([10], np.float32))
    activation = histogram.activation()
    assert activation.scale == pytest.approx(4.4 / 255, rel=0.03)


def test_counts_do_not_depend_on_the_order() -> None:
    generator = np.random.default_rng(0)
    parts = [generator.standard_normal(500).astype(np.float32) * 4.0**n for n in range(-9, 9)]
    parts += [np.zeros(3, np.float32), np.array([1.0, 2.0**-60], np.float32)]
    forward, backward, at_once = Histogram(), Histogram(), Histogram()
    for part in parts:
        forward.add(part)
    for part in parts[::-1]:
        backward.add(part)
    at_once.add(np.concatenate(parts))
    assert forward.counts.sum() == 18 * 500 + 5
    assert forward.counts.tolist() == backward.counts.tolist() == at_once.counts.tolist()
    assert forward.activation() == backward.activation() == at_once.activation()
    assert np.flatnonzero(at_once.counts).max() >= BINS / 2


def test_zeros_alone_have_scale_1() -> None:
    histogram = Histogram()
    histogram.add(np.zeros(7, np.float32))
    assert histogram.activation() == Activation(1.0, 0, 0.0, 7)


@pytest.mark.parametrize("run", ["run_folder", "writer_run_folder", "reader_run_folder"])
def test_every_linear_layer_is_calibrated(run: str, request: pytest.FixtureRequest) -> None:
    checkpoint, _, found = calibrated(request.getfixturevalue(run))
    model = checkpoint.model
    expected = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    if model.output is None:
        expected.add("embedding.weight")
    assert set(found.activations) == expected
    for activation in found.activations.values():
        levels = 127 if activation.zero_point else 255
        assert 0 < activation.scale * levels <= activation.largest * 1.000001
    compared = 0
    for first, other in SIBLINGS:
        for name in expected:
            sibling = name.replace(first, other)
            if first in name and sibling in expected:
                assert found.activations[sibling] == found.activations[name], "one input, one scale"
                compared += 1
    assert compared >= 4


def test_only_inputs_after_relu_have_zero_point_0(run_folder: Path) -> None:
    checkpoint, _, found = calibrated(run_folder)
    assert checkpoint.model.config.activation == "relu"
    for name, activation in found.activations.items():
        assert activation.zero_point == (0 if name.endswith("feed_forward.outer.weight") else 128)


def test_padding_does_not_count(run_folder: Path) -> None:
    checkpoint, sources, found = calibrated(run_folder)
    model = copy.deepcopy(checkpoint.model)
    special = checkpoint.tokenizer.special
    answers = search(TorchDecoder(model), sources, GenerationOptions(max_length=LENGTH), special)
    targets = [[special.bos_id, *answer[0].tokens[: LENGTH - 1]] for answer in answers]
    (source, source_mask), (target, target_mask) = (
        pad_sources(rows, special.pad_id) for rows in (sources, targets)
    )
    assert not source_mask.all()
    assert not target_mask.all()
    seen: dict[str, Histogram] = {}

    def watch(name: str, mask: np.ndarray[Any, Any]) -> None:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.setdefault(name, Histogram()).add(args[0].detach().numpy()[mask])

        model.get_submodule(name).register_forward_pre_hook(hook)

    of_source = [f"encoder.0.{part}" for part in ("self_attention.query", "feed_forward.outer")]
    of_target = [f"decoder.1.{part}" for part in ("self_attention.key", "cross_attention.query")]
    for name in [*of_source, "decoder.1.cross_attention.value"]:
        watch(name, source_mask)
    for name in [*of_target, "decoder.0.feed_forward.outer"]:
        watch(name, target_mask)
    with torch.inference_mode():
        model(*map(torch.from_numpy, (source, source_mask, target)))
    assert len(seen) == 6
    for name, histogram in seen.items():
        batch, alone = histogram.activation(), found.activations[f"{name}.weight"]
        assert alone.values == batch.values
        assert alone.largest == pytest.approx(batch.largest, rel=1e-5)
        assert alone.scale == pytest.approx(batch.scale, rel=0.03)


def test_the_order_of_sentences_does_not_matter(run_folder: Path) -> None:
    checkpoint, sources, found = calibrated(run_folder)
    special = checkpoint.tokenizer.special
    again = calibrate(checkpoint.model, special, sources[::-1], LENGTH)
    assert again.activations == found.activations
    assert again.kv_scales.keys() == found.kv_scales.keys()
    for name, scale in again.kv_scales.items():
        assert torch.equal(scale.keys, found.kv_scales[name].keys)
        assert torch.equal(scale.values, found.kv_scales[name].values)
    fewer = calibrate(checkpoint.model, special, sources[:1], LENGTH)
    assert fewer.activations != found.activations


@pytest.mark.parametrize("run", ["writer_run_folder", "reader_run_folder"])
def test_of_texts_in_batches_every_token_counts_once(
    run: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, texts, found = calibrated(request.getfixturevalue(run))
    width, tokens = checkpoint.model.config.d_model, sum(map(len, texts))
    inputs = [name for name in found.activations if name.endswith("query.weight")]
    assert inputs
    assert {found.activations[name].values for name in inputs} == {tokens * width}
    monkeypatch.setattr("transferry.export.rewrite.calibration.BATCH_TOKENS", 1)
    alone = calibrate(checkpoint.model, checkpoint.tokenizer.special, texts, LENGTH)
    for name, activation in alone.activations.items():
        assert activation.values == found.activations[name].values
        assert activation.largest == pytest.approx(found.activations[name].largest, rel=1e-5)


def test_nothing_to_calibrate_with_is_refused(run_folder: Path) -> None:
    checkpoint = load_checkpoint(run_folder)
    special = checkpoint.tokenizer.special
    with pytest.raises(InputError, match="found 0 sentences"):
        calibrate(checkpoint.model, special, [], LENGTH)
    with pytest.raises(InputError, match="found 2 sentences, 1 of them empty"):
        calibrate(checkpoint.model, special, [[5, 2], []], LENGTH)


def test_activations_that_are_not_finite_are_refused(run_folder: Path) -> None:
    checkpoint = load_checkpoint(run_folder)
    with torch.no_grad():
        checkpoint.model.embedding.weight[7, 3] = torch.nan
    with pytest.raises(InputError, match="does it pass verify"):
        calibrate(checkpoint.model, checkpoint.tokenizer.special, [[7, 2]], LENGTH)
