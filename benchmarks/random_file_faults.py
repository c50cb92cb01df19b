"""Random faults of weights, claims, records and whole files of a bundle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace as changed
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from planted_values import Plants, Site, described
from transferry.export.faults.weight_faults import RANKS_FILE
from transferry.export.rewrite.calibration import CALIBRATION, Calibration
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.proof.recorded import Reference
from transferry.runtime.tokenizer.special_tokens import SETTINGS_FILE, read_settings

Array: TypeAlias = NDArray[Any]
FILE_PLANTS: Plants = []

# Each field of GenerationOptions that a bundle may have as a default, with another value.
DEFAULTS: Mapping[str, Any] = {
    "max_length": 20,
    "max_total_length": 30,
    "min_length": 12,
    "min_total_length": 14,
    "length_penalty": 0.0,
    "early_stopping": False,
    "beam": 3,
    "sample": True,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.3,
    "typical_p": 0.5,
    "seed": 5,
    "repetition_penalty": 1.3,
    "no_repeat_ngram": 2,
    "prompt_ngrams": True,
    "suppress": [5, 6],
    "suppress_sequences": [[7, 8]],
    "suppress_begin": [9],
    "forced_begin": 10,
    "forced_end": [11],
    "renormalise": True,
    "prefix": [12],
    "stop": ["e"],
    "split_lines": True,
}


def _some_weight(site: Site, *, whole: bool = False) -> str:
    """Returns the name of a weight: floats, or with `whole` integers and their scales."""
    names = site.copy.names()
    if whole:
        ends = ("int8", "scales", "input_scale", "input_zero", "blocks", "block_scales")
        names = [
            key
            for model in site.copy.graphs.values()
            for key in model.graph.initializers
            if key.rpartition(".")[2] in ends or key.startswith("scale.")
        ]
    return site.drawn(names, "weights of integers").removeprefix("model.")


def _off(site: Site, array: Array) -> tuple[Array, int]:
    """Makes one entry 1 % larger, a whole number 1 larger, a truth its opposite."""
    flat = array.reshape(-1)
    place = int(site.generator.integers(len(flat)))
    if array.dtype == np.bool_:
        flat[place] = not flat[place]
    elif array.dtype.kind in "iu":
        flat[place] = flat[place] + 1 if flat[place] < 127 else flat[place] - 1
    else:
        flat[place] = flat[place] * 1.01 if flat[place] else 1e-3
    return flat.reshape(array.shape), place


def _matrix(site: Site) -> str:
    names = [name for name in site.copy.names() if site.copy.array(name).ndim == 2]
    if not names:
        raise site.copy.absent("matrices")
    return str(site.choice(names))


@described(FILE_PLANTS, "a weight off")
def _wrong_weight(site: Site) -> str:
    name = _some_weight(site)
    site.copy.edit(name, lambda array: _off(site, array)[0])
    return f"one entry of {name} off by 1 %"


@described(FILE_PLANTS, "an integer or scale of a weight off")
def _wrong_integer(site: Site) -> str:
    name = _some_weight(site, whole=True)
    site.copy.edit(name, lambda array: _off(site, array)[0])
    return f"one entry of {name} is 1 or 1 % larger"


@described(FILE_PLANTS, "a row of a weight gone")
def _row_gone(site: Site) -> str:
    name = _matrix(site)

    def change(array: Array) -> Array:
        array[site.integer(len(array))] = 0
        return array

    site.copy.edit(name, change)
    return f"a row of {name} is 0"


@described(FILE_PLANTS, "rows of a weight swapped")
def _rows_swapped(site: Site) -> str:
    name = _matrix(site)
    pair = site.generator.choice(len(site.copy.array(name)), 2, replace=False)

    order = np.arange(len(site.copy.array(name)))
    order[pair] = pair[::-1]
    site.copy.edit(name, lambda array: array[order])
    return f"rows {pair[0]} and {pair[1]} of {name} changed places"


@described(FILE_PLANTS, "a weight rounded")
def _rounded_weight(site: Site) -> str:
    name, kinds = _some_weight(site), (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    kind = kinds[site.integer(2)]
    site.copy.edit(name, lambda array: array.astype(kind.numpy()).astype(array.dtype))
    return f"{name} in {kind.name}"


@described(FILE_PLANTS, "a constant off")
def _small_constant(site: Site) -> str:
    """A constant of a few entries in a graph, or in the body of an If or a Loop."""
    found = [
        (value.name, value)
        for model in site.copy.graphs.values()
        for graph in (model.graph, *model.graph.subgraphs())
        for value in graph.initializers.values()
        if value.const_value is not None and value.const_value.nbytes < 1024
    ]
    name, value = site.drawn(found, "small constants")
    assert value.const_value is not None
    array = value.const_value.numpy().copy()
    if not array.size:
        raise site.copy.absent("entries of a constant")
    array, place = _off(site, array)
    value.const_value = ir.Tensor(array, name=name)
    return f"constant {name}, entry {place}, off"


@described(FILE_PLANTS, "a calibration range off")
def _calibration(site: Site) -> str:
    """The range of one layer's input, in the calibration and in the graphs alike."""
    name = PurePosixPath(site.copy.variant.reference).with_name(CALIBRATION).as_posix()
    path = site.copy.folder / name
    if not path.is_file():
        raise site.copy.absent("calibration")
    found, factor = Calibration.load(path), site.choice((0.25, 0.5, 1.5, 4.0))
    base = str(site.generator.choice(sorted(found.activations)))
    activation = found.activations[base]
    scale = float(np.float32(activation.scale * factor))
    activations = {**found.activations, base: changed(activation, scale=scale)}
    changed(found, activations=activations).save(path)
    site.copy.write(name, path.read_bytes())
    for part in ("input_scale", "divided_scale"):
        for model in site.copy.graphs.values():
            if f"{base}.{part}" in model.graph.initializers:
                value = model.graph.initializers[f"{base}.{part}"]
                assert value.const_value is not None
                array = value.const_value.numpy()
                value.const_value = ir.Tensor((array * factor).astype(array.dtype), name=value.name)
    return f"{base}: the range of its input times {factor:g}"


@described(FILE_PLANTS, "a default")
def _default(site: Site) -> str:
    if not site.copy.config.decoder_layers:
        raise site.copy.absent("defaults of generation")
    names = sorted(DEFAULTS)
    name = site.drawn(names)
    chosen = {name: DEFAULTS[name]}
    if name in ("temperature", "top_k", "top_p", "min_p", "typical_p"):
        chosen["sample"] = True
    site.copy.manifest = changed(
        site.copy.manifest, generation={**site.copy.manifest.generation, **chosen}
    )
    return f"defaults of generation: {chosen}"


@described(FILE_PLANTS, "the record")
def _record(site: Site) -> str:
    """The recorded answers hold less, or something else."""
    path = site.copy.folder / site.copy.variant.reference
    found = Reference.load(path)
    kind = site.integer(7)
    if not found.searches:
        kind %= 3
    searches = list(found.searches)
    if kind == 0:
        new, words = changed(found, cases=found.cases[:1]), "one case"
    elif kind == 1:
        new, words = changed(found, cases=found.cases[1:]), "without its first case"
    elif kind == 2:
        case, truth = found.cases[-1]
        errors = {key: 20 * error + 1e-5 for key, error in truth.errors.items()}
        last = case, changed(truth, errors=errors)
        new, words = changed(found, cases=[*found.cases[:-1], last]), "twenty times torch's error"
    elif kind == 3:
        few = [
            changed(
                each,
                answers=each.answers[:1],
                scores=each.scores[:1],
                score_error=[[one.own for one in row] for row in each.exact[:1]],
                ends=each.ends[:1],
            )
            for each in searches
        ]
        new, words = changed(found, sources=found.sources[:1], searches=few), "one source"
    elif kind == 4:
        new, words = changed(found, searches=searches[:1]), "one search"
    elif kind == 5:
        more = [
            changed(each, score_error=[[4 * one.own for one in row] for row in each.exact])
            for each in searches
        ]
        new, words = changed(found, searches=more), "twenty times torch's error of scores"
    else:
        short = [changed(each, options={**each.options, "max_length": 2}) for each in searches]
        cut = [
            changed(
                each,
                answers=[[list(one)[:2] for one in row] for row in each.answers],
                ends=[[None for _ in row] for row in each.answers],
            )
            for each in short
        ]
        new, words = changed(found, searches=cut), "answers of two tokens"
    new.save(path)
    site.copy.write(site.copy.variant.reference, path.read_bytes())
    return f"{site.copy.variant.reference}: {words}"


@described(FILE_PLANTS, "a special token")
def _special(site: Site) -> str:
    """One special id or setting of the tokenizer."""
    settings = read_settings(site.copy.folder)
    special = settings["special"]
    names = sorted(special)
    name = site.drawn(names)
    before = special[name]
    if isinstance(before, bool):
        special[name] = not before
    elif isinstance(before, int):
        special[name] = before + 1
    elif isinstance(before, list):
        special[name] = [*before, 0]
    else:
        special[name] = 0
    site.copy.write(SETTINGS_FILE, json.dumps(settings).encode())
    return f"{SETTINGS_FILE}: {name} {before!r} became {special[name]!r}"


@described(FILE_PLANTS, "ranks of the tokenizer")
def _ranks(site: Site) -> str:
    path = site.copy.folder / RANKS_FILE
    if not path.is_file():
        raise site.copy.absent(RANKS_FILE)
    lines = path.read_bytes().splitlines(keepends=True)
    place = site.integer(256, len(lines) - 1)
    one, other = (line.split() for line in lines[place : place + 2])
    lines[place : place + 2] = [b" ".join((other[0], one[1])), b" ".join((one[0], other[1]))]
    site.copy.write(RANKS_FILE, b"\n".join(line.rstrip(b"\n") for line in lines) + b"\n")
    return f"{RANKS_FILE}: ranks {place} and {place + 1} changed places"


@described(FILE_PLANTS, "a setting of the head")
def _head(site: Site) -> str:
    """One label, prompt or other setting of the head."""
    head = site.copy.manifest.head
    if head is None:
        raise site.copy.absent("settings of a head")
    found: dict[str, Any] = {
        "longest": (head.longest or site.copy.config.max_positions) - 1,
        "probabilities": "sigmoid" if head.probabilities != "sigmoid" else "softmax",
        "rank": "sigmoid" if head.rank != "sigmoid" else "none",
        "width": 3,
    }
    if head.labels:
        found["labels"] = tuple(reversed(head.labels))
    if head.prompts:
        found["prompts"] = {key: f"{text} " for key, text in head.prompts.items()}
    names = sorted(found)
    name = site.drawn(names)
    site.copy.manifest = changed(site.copy.manifest, head=changed(head, **{name: found[name]}))
    return f"{MANIFEST}: {name} of the head is {found[name]!r}"


@described(FILE_PLANTS, "the model's shape")
def _of_model(site: Site) -> str:
    """One number or switch of the model's shape."""
    names = sorted(
        name
        for name, value in site.copy.manifest.model.items()
        if isinstance(value, (int, float, bool))
    )
    name = site.drawn(names)
    before = site.copy.manifest.model[name]
    after = (not before) if isinstance(before, bool) else before + 1
    site.copy.manifest = changed(
        site.copy.manifest, model={**site.copy.manifest.model, name: after}
    )
    return f"{MANIFEST}: {name} of the model {before!r} became {after!r}"


@described(FILE_PLANTS, "a file")
def _file(site: Site) -> str:
    """A file is cut, emptied, missing, or has one byte changed; the manifest may vouch for it."""
    names = sorted({spec.file for spec in site.copy.specs.values()} | {site.copy.variant.reference})
    names += sorted(
        str(each.relative_to(site.copy.folder).as_posix())
        for each in site.copy.folder.rglob("*.bin")
        if each.name != "planted.bin"
    )
    name = site.drawn(names)
    path: Path = site.copy.folder / name
    content = bytearray(path.read_bytes())
    kind = site.integer(3)
    if kind == 0:
        site.copy.truncate(name, vouched=bool(site.integer(2)))
        return f"{name} ends in the middle"
    if kind == 1:
        site.copy.truncate(name, vouched=False)
        path.write_bytes(b"")
        return f"{name} is empty"
    place = site.integer(len(content))
    content[place] ^= 1 << site.integer(8)
    vouched = bool(site.integer(2))
    site.copy.truncate(name, vouched=vouched)  # the graphs are not written again
    path.write_bytes(bytes(content))
    return f"{name}, one bit of byte {place}, {'as' if vouched else 'not as'} in the manifest"
