"""Ranges of activations: computed by hand, by hooks, and for every linear layer of a model."""

import copy
import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.export.rewrite.calibration import (
    BINS,
    Activation,
    Calibration,
    Histogram,
    calibrate,
    misfit,
)
from transferry.export.torch_model import TorchDecoder
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import pad_sources, search
from transferry.runtime.errors import InputError

Array = NDArray[Any]
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


def histogram(*parts: Array) -> Histogram:
    found = Histogram()
    for part in parts:
        found.add(part.astype(np.float32))
    return found


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.arange(0, 64, 0.25), Activation(0.25, 0, 63.75, 256)),
        (np.arange(-128, 128) * 2, Activation(2.0, 128, 256.0, 256)),
        (np.arange(-8, 248) * 2, Activation(2.0, 8, 494.0, 256)),
        (np.zeros(7), Activation(1.0, 0, 0.0, 7)),
    ],
    ids=["not negative", "of both signs", "hardly negative", "zeros"],
)
def test_values_on_the_steps_keep_the_whole_range(values: Array, expected: Activation) -> None:
    assert histogram(values).activation() == expected


def test_a_rare_large_value_is_clipped_as_far_as_it_pays() -> None:
    # (10 - c)^2 + 10^6 (c / 255)^2 / 12 is least at c = 4.38, of hundredths of 10 at 4.4.
    activation = histogram(np.linspace(0, 1, 1_000_000), np.array([10])).activation()
    assert activation.scale == pytest.approx(4.4 / 255, rel=0.03)


def test_counts_do_not_depend_on_the_order() -> None:
    generator = np.random.default_rng(0)
    parts = [generator.standard_normal(500).astype(np.float32) * 4.0**n for n in range(-9, 9)]
    parts += [np.zeros(3, np.float32), np.array([1.0, 2.0**-60], np.float32)]
    forward, backward = histogram(*parts), histogram(*parts[::-1])
    at_once = histogram(np.concatenate(parts))
    assert forward.counts.sum() == 18 * 500 + 5
    assert forward.counts.tolist() == backward.counts.tolist() == at_once.counts.tolist()
    assert forward.activation() == backward.activation() == at_once.activation()
    assert np.abs(np.flatnonzero(at_once.counts) - BINS).max() >= BINS / 2


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
        assert 0 < activation.scale * 255 <= 2 * activation.largest * 1.000001
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
        assert (activation.zero_point == 0) == name.endswith("feed_forward.outer.weight")


def test_inputs_far_wider_than_the_others_stay_in_float32(reader_run_folder: Path) -> None:
    """Calibrated without them, each layer has the range of the others; a tied LM head keeps all."""
    checkpoint, sources, found = calibrated(reader_run_folder)
    model, wide = copy.deepcopy(checkpoint.model), {3, 7}
    assert model.output is None
    assert not any(each.wide for each in found.activations.values())
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    with torch.no_grad():
        for norm in norms:
            norm.weight[[*wide]] *= 30
    again = calibrate(model, checkpoint.tokenizer.special, sources, LENGTH).activations
    for name, activation in again.items():
        read = not name.endswith((".output.weight", "outer.weight", "embedding.weight"))
        assert set(activation.wide) == (wide if read else set()), name
        assert not read or activation.largest < 10


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
    for name, each in seen.items():
        batch, alone = each.activation(), found.activations[f"{name}.weight"]
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


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        ([], "found 0 sentences"),
        ([[5, 2], []], "found 2 sentences, 1 of them empty"),
        ([[7, 2]], "does it pass verify"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    sentences: list[list[int]], message: str, run_folder: Path
) -> None:
    """Without sentences, and where activations are not finite."""
    checkpoint = load_checkpoint(run_folder)
    with torch.no_grad():
        checkpoint.model.embedding.weight[7, 3] = torch.nan
    with pytest.raises(InputError, match=message):
        calibrate(checkpoint.model, checkpoint.tokenizer.special, sentences, LENGTH)


@pytest.mark.parametrize("run", ["run_folder", "writer_run_folder", "reader_run_folder"])
def test_ranges_that_do_not_fit_the_text_are_told(run: str, request: pytest.FixtureRequest) -> None:
    """Too wide and too narrow, of any layer and of a single channel, which the message names."""
    checkpoint, sources, found = calibrated(request.getfixturevalue(run))
    model = checkpoint.model
    both = bool(model.encoder and model.decoder)
    texts = [(source if model.encoder else (), source) for source in sources[: 4 if both else 8]]

    def told(name: str, activation: Activation | None = None, **kv: Tensor) -> str:
        activations, scales = dict(found.activations), dict(found.kv_scales)
        if activation is not None:
            activations[name] = activation
        if kv:
            scales[name] = replace(scales[name], **kv)
        return misfit(model, Calibration(activations, scales), texts)

    name = next(iter(found.activations))
    assert told(name) == misfit(model, found, []) == ""
    moved = told(name, replace(found.activations[name], zero_point=0))
    assert re.match(rf"{name}: the range of inputs is 0 to [\d.]+, not -[\d.]+ to ", moved)
    for name in [*found.activations][::7]:
        stored = found.activations[name]
        for factor in (4.0, 0.25):
            problem = told(name, replace(stored, scale=factor * stored.scale))
            assert problem.startswith(f"{name}: the range of inputs is ")
    for name, scales in [*found.kv_scales.items()][:2]:
        wide = scales.keys.clone()
        wide.view(-1)[5] *= 4
        assert "the scale of keys, channel 5, is" in told(name, keys=wide)
        assert f"{name}: the scale of values" in told(name, values=scales.values / 4)
