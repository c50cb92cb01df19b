"""Settings are checked once, when a config is made, and come back from JSON unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest

from transferry.build_model.model.config import ModelConfig
from transferry.build_model.train.presets import PRESETS
from transferry.build_model.train.train_config import TrainConfig
from transferry.runtime.errors import UsageError

STORED = json.loads(Path(__file__).with_name("stored_configs.json").read_text(encoding="utf-8"))
SHAPE: dict[str, Any] = dict(
    vocabulary_size=300, d_model=16, heads=2, encoder_layers=1, decoder_layers=2, d_ff=32
)


def model_config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**SHAPE, **changes})


@pytest.mark.parametrize("name", ["vocabulary_size", "encoder_layers", "max_positions"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "4"])
def test_sizes_are_whole_numbers(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{name} must be .* at least 1, found {value!r}$"):
        model_config(**{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(d_model=16, heads=3), r"d_model must be a multiple of heads \(3\), found 16"),
        (dict(d_model=15, heads=3), "d_model must be even .*, found 15"),
        (dict(dropout=1.0), r"dropout must be at least 0 and below 1, found 1.0"),
        (dict(dropout=-0.1), r"dropout must be at least 0 and below 1, found -0.1"),
        (dict(norm_epsilon=0.0), "norm_epsilon must be above 0, found 0.0"),
        (dict(rotary_base=-1.0), "rotary_base must be above 0, found -1.0"),
        (dict(key_value_heads=-1), "key_value_heads must be .* at least 0, found -1"),
        (dict(heads=4, key_value_heads=3), r"multiple of key_value_heads \(3\), found 4"),
        (dict(key_value_heads=4), r"multiple of key_value_heads \(4\), found 2"),
        (
            dict(d_model=18, heads=6, positions="rotary"),
            "d_model / heads must be even .*, found 3",
        ),
        (dict(architecture="decoder-only"), "encoder_layers must be 0 for .*-only, found 1"),
        (dict(architecture="encoder-only"), "decoder_layers must be 0 for .*-only, found 2"),
        (dict(architecture="gpt"), "architecture must be one of encoder-decoder, .*found 'gpt'"),
        (
            dict(norm_order="mid"),
            "norm_order must be one of post, pre, sandwich, res-post, found 'mid'",
        ),
        (dict(activation="tanh"), "activation must be one of .*, found 'tanh'"),
    ],
)
def test_refused_models(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model_config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(batch_tokens=0), "batch_tokens must be a whole number of at least 1, found 0"),
        (dict(accumulation=1.5), "accumulation must be a whole number of at least 1, found 1.5"),
        (dict(warmup_steps=0), "warmup_steps must be a whole number of at least 1, found 0"),
        (dict(seed=-1), "seed must be a whole number of at least 0, found -1"),
        (dict(seed="7"), "seed must be a whole number of at least 0, found '7'"),
        (dict(max_steps=-1), "max_steps must be a whole number of at least 0, found -1"),
        (dict(max_minutes=-0.5), "max_minutes must be at least 0, found -0.5"),
        (dict(weight_decay=-0.1), "weight_decay must be at least 0, found -0.1"),
        (dict(peak_learning_rate=0.0), "peak_learning_rate must be above 0, found 0.0"),
        (dict(label_smoothing=1.0), r"label_smoothing must be at least 0 and below 1, found 1.0"),
        (dict(schedule="cosine"), "schedule must be one of inverse-sqrt, linear, found 'cosine'"),
        (
            dict(schedule="linear", max_steps=0, max_minutes=1.0),
            "linear ends at max_steps",
        ),
        (dict(max_steps=0), "needs an end: set max_steps, max_minutes or both"),
    ],
)
def test_refused_trainings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(**{"max_steps": 1000, **changes})


@pytest.mark.parametrize(
    "config",
    [
        model_config(dropout=0.25, max_positions=77),
        TrainConfig(max_minutes=1.5, seed=3, schedule="inverse-sqrt", patience=2),
    ],
)
def test_json_round_trip(config: ModelConfig | TrainConfig) -> None:
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_and_missing_fields_are_named() -> None:
    with pytest.raises(UsageError, match=r"ModelConfig has no depth, width; it knows .*d_model"):
        model_config(width=3, depth=4)
    with pytest.raises(UsageError, match=r"TrainConfig has no steps; it knows .*max_steps"):
        TrainConfig.from_dict({"steps": 3})
    with pytest.raises(UsageError, match="ModelConfig needs d_ff, heads, which is not given"):
        ModelConfig.from_dict({k: v for k, v in SHAPE.items() if k not in ("heads", "d_ff")})


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_model_and_a_training(name: str) -> None:
    preset = PRESETS[name]
    model = preset.model_config(preset.vocabulary_size, dropout=0.5)
    assert (model.vocabulary_size, model.dropout) == (preset.vocabulary_size, 0.5)
    assert model.d_ff == preset.model["d_ff"]
    train = preset.train_config(max_steps=10_000, seed=5)
    assert (train.max_steps, train.seed) == (10_000, 5)
    assert train.warmup_steps == preset.train["warmup_steps"]


def test_the_presets_are_those_that_are_documented() -> None:
    shapes = {
        name: (c.d_model, c.heads, c.encoder_layers, c.decoder_layers, c.d_ff)
        for name, c in ((name, preset.model_config(300)) for name, preset in PRESETS.items())
    }
    del shapes["tiny"]
    assert shapes == {
        "mini": (128, 4, 4, 4, 256),
        "small": (256, 4, 3, 3, 1024),
        "fast": (256, 4, 6, 2, 1024),
        "student": (128, 4, 6, 2, 768),
        "textbook": (64, 4, 0, 8, 256),
        "prose": (256, 4, 0, 4, 688),
        "reader": (256, 4, 4, 0, 1024),
        "base": (512, 8, 6, 6, 2048),
        "big": (1024, 16, 6, 6, 4096),
    }


def test_inverse_square_root_is_equation_3() -> None:
    """lrate = d_model^-0.5 min(step^-0.5, step warmup^-1.5), with base's numbers."""
    warmup, d_model = 4000, 512
    peak = (d_model * warmup) ** -0.5
    config = TrainConfig(warmup_steps=warmup, peak_learning_rate=peak, max_steps=1)
    for step in (1, 100, 3999, 4000, 4001, 16_000, 100_000):
        paper = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert config.learning_rate(step) == pytest.approx(paper, rel=1e-12)
    assert config.learning_rate(4000) == peak
    assert config.learning_rate(16_000) == pytest.approx(peak / 2)


def test_linear_rises_to_the_peak_and_falls_to_zero() -> None:
    config = TrainConfig(
        schedule="linear", warmup_steps=10, max_steps=110, peak_learning_rate=0.004
    )
    rates = {step: config.learning_rate(step) for step in (1, 5, 10, 60, 110, 120)}
    assert rates == pytest.approx({1: 0.0004, 5: 0.002, 10: 0.004, 60: 0.002, 110: 0.0, 120: 0.0})
    assert max(range(1, 111), key=config.learning_rate) == 10


def test_linear_falls_to_zero_even_within_the_warm_up() -> None:
    config = TrainConfig(schedule="linear", warmup_steps=10, max_steps=5, peak_learning_rate=0.1)
    rates = [config.learning_rate(step) for step in range(1, 6)]
    assert rates == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.0])


def test_another_architecture_keeps_the_stacks_that_it_has() -> None:
    model = PRESETS["mini"].model_config(300, architecture="decoder-only")
    assert (model.encoder_layers, model.decoder_layers) == (0, 4)
    model = PRESETS["mini"].model_config(300, architecture="encoder-only", encoder_layers=2)
    assert (model.encoder_layers, model.decoder_layers) == (2, 0)


def test_heads_of_keys_and_values() -> None:
    assert model_config(heads=4, key_value_heads=1).kv_heads == 1
    assert model_config(d_model=15, heads=3, positions="learned").d_model == 15


@pytest.mark.parametrize("kind", STORED)
def test_configs_of_earlier_checkpoints_are_read_and_written_alike(kind: str) -> None:
    stored = STORED["tiny"] | STORED[kind]
    config = ModelConfig.from_dict(stored)
    assert list(config.to_dict().items()) == list(stored.items())
    assert {name: getattr(config, name) for name in stored} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
    }
