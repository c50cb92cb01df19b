"""Rotary positions of config.json: the rates that its scaling gives."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.model.layers import rotary_rates
from transferry.runtime.errors import InputError
from transferry.runtime.settings import shown

# Kinds of scaling whose rates depend on the length of a text, which a cache of keys cannot follow.
# Up to the first length, the rates are the same for every text.
DYNAMIC, LONGROPE = "dynamic", "longrope"
# Of GTE's own code, which calls it ntk.
FIXED_NTK = "fixed-ntk"
# Layers with a window, and others.
SLIDING, FULL = "sliding_attention", "full_attention"


class Rotary(NamedTuple):
    """Rotary positions.

    Attributes:
        rates: Radians per position of each pair of features that turns.
        scale: Factor of the cosines and sines.
        fields: Fields of ModelConfig.
    """

    rates: tuple[float, ...]
    scale: float
    fields: dict[str, Any]


@dataclass(frozen=True)
class RotaryKeys:
    """Names and defaults of the rotary settings of a model type.

    Attributes:
        base: Base where the file names none.
        base_key: Its name outside of rope_scaling and rope_parameters.
        share: Share of the features that turn, where the file names none.
        share_key: Its name outside; without one, the model type turns all features.
        renamed: Kinds of scaling that mean another kind in this model type.
    """

    base: float = 10000.0
    base_key: str = "rope_theta"
    share: float = 1.0
    share_key: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Context:
    """Quantities on which the kinds of scaling depend."""

    base: float
    width: int
    longest: int
    original: int


def read_rotary(
    config: Settings, d_head: int, longest: int, keys: RotaryKeys | None = None, kind: str = FULL
) -> Rotary:
    """Reads rope_scaling, rope_parameters (since transformers 5) and the settings of older files.

    `longest` is max_position_embeddings, `keys` are Llama's by default, and `kind` names the layers
    where each kind of them has settings of its own.
    """
    # transformers takes it for the rates even where it is not the width of a head.
    config.only("head_dim", d_head)
    keys, found = keys or RotaryKeys(), _section(config, kind)
    try:
        base = found.number("rope_theta", config.number(keys.base_key, keys.base))
        share = keys.share
        if keys.share_key is not None:
            share = found.number("partial_rotary_factor", config.number(keys.share_key, share))
        elif (part := found.number("partial_rotary_factor", share)) != share:
            # transformers turns all features of such a type, but scales rates of a part of them.
            if _kind(found, keys) != "default":
                found.refuse("partial_rotary_factor", part, f"{share:g} for this model_type")
            config.leave("partial_rotary_factor", part)
        scaling, width = _kind(found, keys), int(d_head * share)
        odd = width < d_head and width % 2
        if not 0 < width <= d_head or odd or base <= 1.0:
            supported = "a share of a head with an even number of features, and a base above 1"
            found.refuse("partial_rotary_factor", share, supported)
        return _rotary(config, found, scaling, d_head, _Context(base, width, longest, longest))
    except (ArithmeticError, ValueError) as error:
        raise InputError(
            f"{config.path}: expected settings of rotary positions that can be computed, found "
            f"{shown(found.values)}: {error}; correct them"
        ) from error


def require_plain_scaling(config: Settings) -> None:
    """Refuses a rope_scaling that transformers reads in part, where layers turn differently."""
    found = config.get("rope_scaling")
    if (
        isinstance(found, dict)
        and found
        and ("rope_type" not in found or config.get("rope_parameters"))
    ):
        config.refuse("rope_scaling", found, "an object with rope_type, without rope_parameters")


def _kind(found: Settings, keys: RotaryKeys) -> str:
    """Returns the kind of scaling, under its newer name."""
    kind = found.get("rope_type", found.get("type", "default"))
    if not isinstance(kind, str):
        found.refuse("rope_type", kind, "the name of a kind of scaling")
    return keys.renamed.get(kind, kind)


def _rotary(
    config: Settings, found: Settings, scaling: str, d_head: int, context: _Context
) -> Rotary:
    longest, (rates, scale) = context.longest, (rotary_rates(context.width, context.base), 1.0)
    if scaling not in (*SCALINGS, "default", DYNAMIC):
        found.refuse("rope_type", scaling, f"default, {DYNAMIC}, {', '.join(SCALINGS)}")
    found.get("finetuned")  # of YaRN's own files, and without effect here
    if scaling == DYNAMIC:
        config.leave("rope_scaling.factor", found.get("factor"))
    if scaling not in ("default", DYNAMIC, "linear"):
        name = "original_max_position_embeddings"
        # Phi 3 says it outside, and that counts.
        original = config.whole(name, found.whole(name, longest))
        context = replace(context, original=original)
    if scaling in SCALINGS:
        rates, scale = SCALINGS[scaling](rates, found, context)
    if scaling == LONGROPE and context.original < longest:
        kept = f"{longest:,}, {context.original:,} of them kept"
        config.leave("max_position_embeddings", kept)
        longest = context.original
    for name, value in found.unread().items():
        found.refuse(name, value, f"nothing of that name with {scaling}")
    fields: dict[str, Any] = {"rotary_base": context.base, "max_positions": longest}
    if rates != rotary_rates(d_head, context.base) or scale != 1.0:
        fields |= {"rotary_rates": tuple(rates), "rotary_scale": scale}
    return Rotary(tuple(rates), scale, fields)


def _section(config: Settings, kind: str) -> Settings:
    """Returns the settings of a kind of layer; the older name counts where there are both."""
    found: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        values = config.get(name, {})
        if not isinstance(values, dict):
            config.refuse(name, values, "null or an object")
        found = values or found
    own = found.get(kind, found)
    made = Settings(config.path, own if isinstance(own, dict) else {})
    if kind in found:
        # transformers reads this one beside the kinds of layers.
        read = found.get("truncate", True)
        if (told := made.get("truncate", read)) != read:
            config.leave(f"truncate of {kind}", json.dumps(told))
        made.values["truncate"] = read
    return made


def _linear(rates: list[float], found: Settings, context: _Context) -> tuple[list[float], float]:
    """Positions divided by a factor (Chen et al. 2023)."""
    factor = _factor(found)
    return [rate / factor for rate in rates], 1.0


def _llama3(rates: list[float], found: Settings, context: _Context) -> tuple[list[float], float]:
    """Llama 3.1: long waves slowed down, short ones not, those between in proportion.

    meta-llama/llama-models, models/llama3/model.py, apply_scaling.
    """
    factor = _factor(found)
    low, high = found.number("low_freq_factor", 1.0), found.number("high_freq_factor", 4.0)
    if high <= low:
        found.refuse("high_freq_factor", high, f"more than low_freq_factor, {low}")

    def scaled(rate: float) -> float:
        turns = context.original * rate / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        return (1 - smooth) * rate / factor + smooth * rate

    return [scaled(rate) for rate in rates], 1.0


def _yarn(rates: list[float], found: Settings, context: _Context) -> tuple[list[float], float]:
    """YaRN (Peng et al. 2023), sections 3.2 to 3.4."""
    factor = found.number("factor", context.longest / context.original)
    fast, slow = found.number("beta_fast", 32.0), found.number("beta_slow", 1.0)
    whole = found.flag("truncate", True)

    def pair(turns: float) -> float:
        """The pair of features that turns so often over the original length."""
        length = context.original / (turns * 2 * math.pi)
        return context.width * math.log(length) / (2 * math.log(context.base))

    first, last = pair(fast or 32.0), pair(slow or 1.0)
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, context.width - 1)
    last += 0.001 if first == last else 0
    ramps = [min(1.0, max(0.0, (number - first) / (last - first))) for number in range(len(rates))]
    scaled = [
        rate / factor * ramp + rate * (1 - ramp) for rate, ramp in zip(rates, ramps, strict=True)
    ]
    scale = found.number("attention_factor", 0.0)
    one, other = found.number("mscale", 0.0), found.number("mscale_all_dim", 0.0)
    if not scale and one and other:
        scale = _growth(factor, one) / _growth(factor, other)
    return scaled, scale or _growth(factor)


def _growth(factor: float, share: float = 1.0) -> float:
    """Peng et al. (2023), eq. 22: 1 / sqrt(t) = 0.1 ln(s) + 1."""
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(rates: list[float], found: Settings, context: _Context) -> tuple[list[float], float]:
    """LongRoPE (Ding et al. 2024) within the original length: each rate has a factor of its own."""
    factors = found.get("short_factor")
    found.get("long_factor")
    if (
        not isinstance(factors, list)
        or len(factors) != len(rates)
        or not all(type(each) in (int, float) and each > 0 for each in factors)
    ):
        found.refuse("short_factor", factors, f"{len(rates)} numbers above 0")
    factor = found.number("factor", context.longest / max(1, context.original))
    scale = found.number("attention_factor", 0.0)
    if not scale:
        growth = math.log(factor) / math.log(context.original) if factor > 1 else 0.0
        scale = math.sqrt(1 + growth)
    return [rate / each for rate, each in zip(rates, factors, strict=True)], scale


def _ntk(rates: list[float], found: Settings, context: _Context) -> tuple[list[float], float]:
    """Fixed and mixed NTK scaling (kexue.fm/archives/9706, eq. 6, 10, 12 and 13)."""
    factor, mixed = found.number("factor", 1.0), found.number("mixed_b", 0.0)
    pairs = len(rates)
    if factor <= 1:  # its code scales texts beyond max_position_embeddings / factor
        return rates, 1.0
    if mixed:
        growth = math.log(factor) / pairs**mixed
        return [rate / math.exp(growth * m**mixed) for m, rate in enumerate(rates, 1)], 1.0
    return [rate / factor ** (m / pairs) for m, rate in enumerate(rates, 1)], 1.0


def _factor(found: Settings) -> float:
    factor = found.number("factor", 0.0)
    if factor <= 0:
        found.refuse("factor", factor, "a number above 0")
    return factor


SCALINGS: dict[str, Callable[[list[float], Settings, _Context], tuple[list[float], float]]] = {
    LONGROPE: _longrope,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    FIXED_NTK: _ntk,
}
