"""Faults of weights, tables of positions, the tokenizer and whole files."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from transferry.build_model.model.transformer import Transformer
from transferry.export.faults.gate import Faults, first, given, last, rare_tokens, stack, tables
from transferry.export.subject.bundle_copy import BundleCopy, Change
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.proof.compare import Truth
from transferry.runtime.proof.recorded import Reference
from transferry.runtime.tokenizer.special_tokens import SETTINGS_FILE, read_settings

RANKS_FILE = "ranks.tiktoken"
FAULTS = Faults()


# Weights.


def _one_entry(copy: BundleCopy, name: str, change: Callable[[Any], Any], row: int = -1) -> str:
    """Changes the entry of median size of a weight, or of one of its rows."""
    array = copy.array(name)
    chosen = array if row < 0 else array[row]
    sizes = np.abs(chosen.astype(np.float64)).ravel()
    place = int(np.argsort(sizes)[len(sizes) // 2]) + max(0, row) * chosen.size
    before = array.ravel()[place]
    after = array.ravel()[place] = array.dtype.type(change(before))
    copy.edit(name, given(array))
    where = [int(index) for index in np.unravel_index(place, array.shape)]
    return f"{name}{where}: {float(before):.9g} became {float(after):.9g}"


def _one_percent(weight: Any) -> Any:
    return weight * weight.dtype.type(1.01)


@FAULTS.kind("one weight off by 1 %")
def _one_off(copy: BundleCopy) -> str:
    return _one_entry(copy, f"{last(copy.config)}.feed_forward.outer.weight", _one_percent)


@FAULTS.kind("one weight off by one ULP")
def _one_ulp(copy: BundleCopy) -> str:
    name = f"{last(copy.config)}.feed_forward.outer.weight"
    return _one_entry(copy, name, lambda weight: np.nextafter(weight, weight.dtype.type(9)))


@FAULTS.kind("a rare token's embedding off by 1 %")
def _rare_embedding(copy: BundleCopy) -> str:
    return _one_entry(copy, "embedding.weight", _one_percent, rare_tokens(copy.config)[0])


@FAULTS.kind("NaN in a weight")
def _not_a_number(copy: BundleCopy) -> str:
    name = f"{first(copy.config)}.self_attention.value.weight"
    return _one_entry(copy, name, lambda weight: np.nan)


@FAULTS.kind("two rows of the vocabulary swapped")
def _vocabulary_rows(copy: BundleCopy) -> str:
    one, other = rare_tokens(copy.config)
    array = copy.array("embedding.weight")
    array[[one, other]] = array[[other, one]]
    copy.edit("embedding.weight", given(array))
    return f"embedding.weight, rows {one} and {other}"


def _swap(copy: BundleCopy, one: str, other: str) -> None:
    """Swaps two weights unless they are equal."""
    left, right = copy.array(one), copy.array(other)
    if left.tobytes() != right.tobytes():
        copy.edit(one, given(right))
        copy.edit(other, given(left))


@FAULTS.kind("two layers swapped", lambda config: stack(config)[1] > 1)
def _layers_swapped(copy: BundleCopy) -> str:
    side, layers = stack(copy.config)
    one, other = f"{side}.0.", f"{side}.{layers - 1}."
    for name in [name for name in copy.names() if name.startswith(one)]:
        _swap(copy, name, other + name.removeprefix(one))
    return f"{side}, layers 0 and {layers - 1}"


def _drop(copy: BundleCopy, suffix: str) -> str | None:
    """Zeroes the first bias of this name that is not zero already; BART's of the output may be."""
    found = [name for name in copy.names() if name.endswith(suffix)]
    if not found:
        raise copy.absent(f"biases named {suffix}")
    name = next((name for name in found if copy.array(name).any()), None)
    if name is None:
        return None
    copy.edit(name, np.zeros_like)
    return f"{name} is zero"


for _bias, _name, _field in (
    ("a bias", "feed_forward.inner.bias", "bias"),
    # softmax(q (k + b)) = softmax(q k + q b) adds the same to every score: without rotation an
    # answer does not depend on this bias, but a decoder's cache holds it.
    ("the bias of the keys", "self_attention.key.bias", "bias"),
    ("the bias of the output", "output_bias", "output_bias"),
):
    FAULTS.kind(f"{_bias} dropped", attrgetter(_field))(partial(_drop, suffix=_name))


@FAULTS.kind("a square weight transposed", lambda config: config.d_model > 1)
def _transposed(copy: BundleCopy) -> str:
    name = f"{last(copy.config)}.self_attention.output.weight"
    copy.edit(name, np.transpose)
    return name


@FAULTS.kind("the heads of the query permuted", lambda config: config.heads > 1)
def _heads_permuted(copy: BundleCopy) -> str:
    name = f"{last(copy.config)}.self_attention.query.weight"
    copy.edit(name, lambda array: np.roll(array, copy.config.d_head, axis=0))
    return f"{name}, by one head"


@FAULTS.kind("all weights rounded")
def _rounded(copy: BundleCopy) -> str:
    arrays = {name: copy.array(name) for name in copy.names()}
    # Floating-point numbers; onnx_ir gives bfloat16 as kind V.
    weights = {name: a for name, a in arrays.items() if a.ndim and a.dtype.kind in "fV"}
    # float16's bits of mantissa; fewer for a model that was published in half precision.
    for bits in (10, 7, 4):
        rounded = {name: _to_bits(array, bits) for name, array in weights.items()}
        changed = [name for name in weights if (rounded[name] != weights[name]).any()]
        for name in changed:
            copy.edit(name, given(rounded[name]))
        if changed:
            return f"{len(changed)} tensors, to {bits} bits of mantissa"
    raise copy.absent("weights of more than 4 bits of mantissa")


def _to_bits(array: NDArray[Any], bits: int) -> NDArray[Any]:
    mantissa, exponent = np.frexp(array)
    rounded: NDArray[Any] = np.ldexp(np.round(np.ldexp(mantissa, bits + 1)), exponent - bits - 1)
    return rounded.astype(array.dtype)


@FAULTS.kind("weights of an untrained model")
def _untrained(copy: BundleCopy) -> str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        fresh = Transformer(copy.config).state_dict()
    for name in copy.names():
        if name.endswith(".weight") and name in fresh and fresh[name].ndim == 2:
            copy.edit(name, given(fresh[name].float().numpy()))
    return "all matrices"


@FAULTS.kind("the output projection taken for the embedding", lambda config: not config.tied)
def _tied(copy: BundleCopy) -> str:
    copy.edit("output.weight", given(copy.array("embedding.weight")))
    return "output.weight"


@FAULTS.kind(
    "cross keys and values swapped",
    lambda config: bool(config.encoder_layers and config.decoder_layers),
)
def _cross_swapped(copy: BundleCopy) -> str:
    module = f"decoder.{copy.config.decoder_layers - 1}.cross_attention"
    for part in ["weight", "bias"] if copy.config.bias else ["weight"]:
        _swap(copy, f"{module}.key.{part}", f"{module}.value.{part}")
    return module


# Positions.


def _edit_tables(copy: BundleCopy, change: Change, told: str) -> str:
    names = tables(copy.config)
    for name in names:
        copy.edit(name, change)
    return f"{', '.join(names)}: {told}"


@FAULTS.kind("positions shifted by one", lambda config: config.max_positions > 1)
def _shifted(copy: BundleCopy) -> str:
    told = "each position has the next one's row"
    return _edit_tables(copy, lambda table: np.concatenate([table[1:], table[-1:]]), told)


@FAULTS.kind("the last position wrong", lambda config: config.max_positions > 1)
def _last_position(copy: BundleCopy) -> str:
    told = "the last row is the one before it"
    return _edit_tables(copy, lambda table: np.concatenate([table[:-1], table[-2:-1]]), told)


@FAULTS.kind("positions turned the wrong way", lambda config: config.positions == "rotary")
def _reversed(copy: BundleCopy) -> str:
    copy.edit("sines", np.negative)
    return "sines are negative"


# Faults in the bundle's claims.


@FAULTS.kind("another default of generation", everywhere=True)
def _generation(copy: BundleCopy) -> str:
    shorter = {**copy.manifest.generation, "max_length": 1}
    copy.manifest = dataclasses.replace(copy.manifest, generation=shorter)
    return f"{MANIFEST}: max_length 1"


@FAULTS.kind("a precision that allows larger errors", everywhere=True)
def _precision(copy: BundleCopy) -> str:
    name = copy.variant.name
    wider = dataclasses.replace(copy.manifest.variants[name], precision="bfloat16")
    variants = {**copy.manifest.variants, name: wider}
    copy.manifest = dataclasses.replace(copy.manifest, variants=variants)
    return f"{MANIFEST}: variant {name} in bfloat16"


def _rerecord(copy: BundleCopy, change: Callable[[Truth], Truth], told: str) -> str:
    path = copy.folder / copy.variant.reference
    reference = Reference.load(path)
    cases = [(case, change(truth)) for case, truth in reference.cases]
    dataclasses.replace(reference, cases=cases).save(path)
    copy.write(copy.variant.reference, path.read_bytes())
    return f"{copy.variant.reference}: {told}"


@FAULTS.kind("other recorded answers", everywhere=True)
def _recorded_answers(copy: BundleCopy) -> str:
    def doubled(truth: Truth) -> Truth:
        oracle = {name: 2 * tensor for name, tensor in truth.oracle.items()}
        return dataclasses.replace(truth, oracle=oracle)

    return _rerecord(copy, doubled, "every tensor twice as large")


@FAULTS.kind("recorded errors that allow larger ones", everywhere=True)
def _recorded_errors(copy: BundleCopy) -> str:
    def wider(truth: Truth) -> Truth:
        errors = {name: 1e4 * np.maximum(each, 2.0**-23) for name, each in truth.errors.items()}
        return dataclasses.replace(truth, errors=errors)

    return _rerecord(copy, wider, "torch's own errors times 10,000")


# Files.


@FAULTS.kind("truncated external data", everywhere=True)
def _truncated(copy: BundleCopy) -> str:
    name = copy.weights_file()
    copy.truncate(name, vouched=False)
    return f"{name} ends in the middle; the manifest is as it was"


@FAULTS.kind("truncated external data, hashes agreeing", everywhere=True)
def _truncated_before_hashing(copy: BundleCopy) -> str:
    name = copy.weights_file()
    copy.truncate(name, vouched=True)
    return f"{name} ends in the middle, as in the manifest"


@FAULTS.kind("another tokenizer", everywhere=True)
def _tokenizer(copy: BundleCopy) -> str:
    if (copy.folder / RANKS_FILE).is_file():
        lines = (copy.folder / RANKS_FILE).read_bytes().splitlines(keepends=True)
        one, other = (line.split() for line in lines[-2:])
        lines[-2:] = [other[0] + b" %s\n" % one[1], one[0] + b" %s\n" % other[1]]
        copy.write(RANKS_FILE, b"".join(lines))
        return f"{RANKS_FILE}: ranks {int(one[1])} and {int(other[1])} changed places"
    # Other kinds of tokenizer have their libraries' files; all name the end token alike.
    settings = read_settings(copy.folder)
    settings["special"]["eos_id"] += 1
    copy.write(SETTINGS_FILE, json.dumps(settings).encode())
    return f"{SETTINGS_FILE}: another end token"
