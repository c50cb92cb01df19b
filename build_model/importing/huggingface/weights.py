"""Conversion of tensors by a family's table; errors name the tensor.

Everything but the numbers is checked before any of them is read, and then one tensor at a time
goes from file to file.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from transferry.build_model.checkpoint import STORED, is_finite
from transferry.build_model.importing.formats.lora import AdaptedTensors, Adapter
from transferry.build_model.importing.formats.tensors import FLOATING, Tensors, TensorWriter, meta
from transferry.build_model.importing.huggingface.tables import (
    BUFFER,
    SHARED,
    Family,
    Move,
    NoPlace,
    Table,
)
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.runtime.errors import InputError

# Names in the first versions of BERT.
OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}
# Constants that versions of transformers have saved in models of any type.
CONSTANTS = (
    *("embeddings.position_ids", "embeddings.token_type_ids", "rotary_emb.inv_freq"),
    *("rotary_emb.cos_cached", "rotary_emb.sin_cached", "encoder.version", "decoder.version"),
)
WRAPPERS = {  # beginnings of names: the model within DistributedDataParallel, torch.compile, PEFT
    "module.": "model.module",
    "_orig_mod.": "model._orig_mod",
    "base_model.": "model.merge_and_unload()",
}
# Parts of a quantised matrix, where config.json does not say that it is one.
QUANTISED = (".qweight", ".qzeros", ".g_idx", ".SCB", ".weight_scale", ".absmax")
# Tensors that a file may lack.
FORMULAS = {
    "positions": "positions",
    "padding_position": "positions",
    "output_bias": "output bias (zeros)",
    "head.layers.1.linear.weight": "difference of two logits",
}


@dataclass
class Converted:
    """Tensors of a pretrained, converted when they are written.

    Attributes:
        shapes: Our tensors by name, without numbers, of the types that they are stored in: as in
            the checkpoint where that is float32, bfloat16 or float16, else float32.
        left_out: Number of parameters without a place, by part of the model.
        computed: Number of parameters that a formula gives and not the file, by part.
    """

    tensors: Tensors
    config: ModelConfig
    shapes: dict[str, Tensor] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    computed: Counter[str] = field(default_factory=Counter)
    _steps: dict[str, tuple[Move, list[str]]] = field(default_factory=dict)
    _formulas: dict[str, Tensor] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Number of parameters of our model."""
        return sum(tensor.numel() for tensor in self.shapes.values())

    @property
    def state(self) -> dict[str, Tensor]:
        """All tensors, in memory."""
        state: dict[str, Tensor] = {}
        self.write(state)
        # Not the pages of a file that may change.
        return {name: tensor.clone() for name, tensor in state.items()}

    def write(
        self,
        out: TensorWriter | dict[str, Tensor],
        show: Callable[[str, int, int], None] = lambda *state: None,
    ) -> None:
        """Reads, converts and hands on one tensor after the other; `show` gets done and total."""
        for ours, tensor in self._formulas.items():
            out[ours] = tensor
        came_from: dict[str, str] = {}
        # A summand comes after the tensor that it is added to.
        names = sorted(self._steps, key=lambda name: bool(self._steps[name][0].adds))
        for number, name in enumerate(names):
            show("copying tensors", number, len(names))
            move, places = self._steps[name]
            pieces = move.change(self.tensors.read(name), self.config)
            for ours, piece in zip(places, pieces, strict=True):
                kept = piece.to(self.shapes[ours].dtype)
                if not is_finite(kept):
                    raise InputError(
                        f"{self.tensors.origin}: expected finite numbers in the tensor {name}, "
                        "found NaN or infinity; the file is damaged, or the training failed"
                    )
                if move.adds:
                    out[ours] = out[ours] + kept
                elif ours not in came_from:
                    out[ours], came_from[ours] = kept.contiguous(), name
                elif not torch.equal(out[ours], kept):
                    raise InputError(
                        f"{self.tensors.origin}: expected equal tensors {came_from[ours]} and "
                        f"{name}, but they differ; only models that share them can be imported"
                    )
        show("copying tensors", len(names), len(names))


def convert_weights(
    family: Family, config: ModelConfig, tensors: Tensors, origin: str = ""
) -> Converted:
    """Plans the conversion of a checkpoint to the state of our model.

    Tensors may have any floating type; float64 is rounded to float32. Errors name `origin`.
    """
    origin = origin or tensors.origin
    expected = _shapes(config)
    converted = Converted(tensors, config)
    quantised = [name for name in tensors.shapes if name.endswith(QUANTISED)]
    for name, tensor in tensors.shapes.items():
        plain = _without(family.prefixes, name)
        if plain == SHARED and config.source_vocabulary_size:
            converted.left_out["embedding that neither side uses"] += tensor.numel()
            continue
        move, layer = _place(family.table, plain)
        if move is None:
            raise _unknown(origin, name, quantised)
        pieces = [] if isinstance(move, NoPlace) else _pieces(move, layer, tensor, config)
        if isinstance(move, NoPlace) or (move.what and pieces[0][0] not in expected):
            if move.what:
                converted.left_out[move.what] += tensor.numel()
            continue
        if tensor.dtype not in FLOATING:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise _is_quantised(origin, f"{kind} in the tensor {name}")
        for ours, piece in pieces:
            _require_fitting(expected.get(ours), move, (name, tensor), (ours, piece), origin)
            kept = tensor.dtype if tensor.dtype in STORED and not move.adds else torch.float32
            known = converted.shapes.get(ours)
            # A sum, or one of two types, is float32.
            same = known is None or known.dtype == kept
            converted.shapes[ours] = meta(expected[ours], kept if same else torch.float32)
        if move.adds:
            converted.left_out[move.adds] += tensor.numel()
        converted._steps[name] = move, [ours for ours, _ in pieces]
    for ours, tensor in family.computes(config).items():
        if ours not in converted.shapes:
            converted.shapes[ours] = meta(tensor.shape, tensor.dtype)
            converted._formulas[ours] = tensor
            usual = "norms (ones and zeros)" if "norm" in ours else "biases (zeros)"
            converted.computed[FORMULAS.get(ours, usual)] += tensor.numel()
    _require_all(family, expected, converted, origin)
    return converted


def untied_output(family: Family, config: ModelConfig, tensors: Tensors) -> str:
    """Returns the output projection of a tied model that differs from the embedding, or "".

    transformers keeps such a matrix, whatever tie_word_embeddings says.
    """
    if not config.tied or not config.lm_head:
        return ""
    found: dict[str, str] = {}
    for name in tensors.shapes:
        place = _place(family.table, _without(family.prefixes, name))[0]
        if isinstance(place, Move) and len(place.ours) == 1:
            found.setdefault(place.ours[0], name)
    embedding, output = found.get("embedding.weight"), found.get("output.weight")
    if embedding is None or output is None:
        return ""
    return "" if torch.equal(tensors.read(embedding), tensors.read(output)) else output


def _require_fitting(
    expected: list[int] | None,
    move: Move,
    theirs: tuple[str, Tensor],
    ours: tuple[str, Tensor],
    origin: str,
) -> None:
    """Refuses a tensor that has no place in our model, or does not fit there."""
    (name, tensor), (own, piece) = theirs, ours
    if expected is None:
        raise InputError(
            f"{origin}: the tensor {name} has no place in the model of config.json; take both from "
            "one checkpoint"
        )
    shape = [1, *expected[1:]] if move.adds else expected
    if list(piece.shape) != shape:
        raise InputError(
            f"{origin}: the tensor {name} of shape {list(tensor.shape)} does not fit: by "
            f"config.json {own} must have the shape {shape}, found {list(piece.shape)}"
        )


def adapted(family: Family, config: ModelConfig, tensors: Tensors, adapter: Adapter) -> Tensors:
    """Merges an adapter into a checkpoint's tensors."""

    def move_of(name: str) -> Move | NoPlace | None:
        return _place(family.table, _without(family.prefixes, name))[0]

    def turned(name: str) -> bool:
        move = move_of(name)
        # Norms and biases of such a layer are in the same row of the table.
        return isinstance(move, Move) and move.turned and name.endswith("weight")

    shared = [
        name
        for name in (*adapter.changes, *adapter.replaced)
        if isinstance(move := move_of(name), Move)
        and set(move.ours) & {"embedding.weight", "output.weight"}
    ]
    if config.tied and config.lm_head and len(shared) == 1:
        raise InputError(
            f"{adapter.tensors.origin}: it changes {shared[0]}, which the model shares between "
            "embedding and output, and not the other; give the model tie_word_embeddings=False and "
            "a copy as output, merge_and_unload() with PEFT, save_pretrained(DIR), and import DIR"
        )
    return AdaptedTensors(tensors, adapter, lambda name: _without(family.prefixes, name), turned)


def _unknown(origin: str, name: str, quantised: list[str]) -> InputError:
    if quantised:
        return _is_quantised(origin, f"the tensor {quantised[0]}")
    if inner := next((WRAPPERS[each] for each in WRAPPERS if name.startswith(each)), ""):
        return InputError(
            f"{origin}: the tensor {name} is named by a wrapper around the model; save the model "
            f"inside: {inner}.save_pretrained(FOLDER)"
        )
    return InputError(
        f"{origin}: the tensor {name} is unknown; it belongs to another model than config.json, or "
        "to a head that cannot be imported or that architectures lacks"
    )


def _is_quantised(origin: str, found: str) -> InputError:
    return InputError(
        f"{origin}: expected floating-point weights, found {found}: they are quantised. Import the "
        "checkpoint from before the quantisation"
    )


def _require_all(
    family: Family, expected: Mapping[str, list[int]], converted: Converted, origin: str
) -> None:
    made = {
        ours for move, places in converted._steps.values() if not move.adds for ours in places
    } | converted._formulas.keys()
    missing = [_theirs(family, ours) for ours in expected if ours not in made]
    missing += [
        name
        for name, place in family.table.items()
        if isinstance(place, Move)
        and not place.optional
        and place.adds
        and place.adds not in converted.left_out
    ]
    if missing:
        more = f" and {len(missing) - 1} more are" if missing[1:] else " is"
        raise InputError(
            f"{origin}: the tensor {missing[0]}{more} missing; the file is cut short, or of "
            "another model than config.json"
        )


def _shapes(config: ModelConfig) -> dict[str, list[int]]:
    """Name and shape of each tensor of our model, without allocating it."""
    with torch.device("meta"):
        state = Transformer(config).state_dict()
    return {name: list(tensor.shape) for name, tensor in state.items()}


def _place(table: Table, name: str) -> tuple[Move | NoPlace | None, dict[str, str]]:
    """Table entry of a tensor, and the values of its "#" and "*"."""
    if f".{name}".endswith(CONSTANTS):
        return BUFFER, {}
    if name.startswith("v_head."):  # of TRL, beside a model of any type
        return NoPlace("value head"), {}
    for old, new in OLD_NAMES.items():
        if name.endswith(old):
            name = name.removesuffix(old) + new
    layer = re.search(r"\.(\d+)\.", name)
    ending = re.search(r"\.(weight|bias)$", name)
    meaning = {"#": layer[1] if layer else "#", "*": ending[1] if ending else "*"}
    pattern = re.sub(r"\.\d+\.", ".#.", name, count=1)
    place = table.get(pattern)
    if place is None and ending:
        place = table.get(pattern.removesuffix(ending[1]) + "*")
    return (Move((place,)) if isinstance(place, str) else place), meaning


def _without(prefixes: Iterable[str], name: str) -> str:
    return next((name.removeprefix(each) for each in prefixes if name.startswith(each)), name)


def _pieces(
    move: Move, meaning: dict[str, str], tensor: Tensor, config: ModelConfig
) -> list[tuple[str, Tensor]]:
    """Our tensors from one of theirs; one of an unexpected shape is unchanged and fails later."""
    names = [ours.replace("#", meaning["#"]).replace("*", meaning["*"]) for ours in move.ours]
    if "@" in names[0]:
        names = [names[0].replace("@", str(layer)) for layer in range(config.encoder_layers)]
    shared = ["output.weight"] if config.tied else []
    shared += [] if config.source_vocabulary_size else ["source_embedding.weight"]
    names = ["embedding.weight" if name in shared else name for name in names]
    if tensor.dim() not in (1, 2):
        return [(names[0], tensor)]
    try:
        return list(zip(names, move.change(tensor, config), strict=True))
    except (RuntimeError, ValueError):  # of another size than in config.json
        return [(names[0], tensor)]


def _theirs(family: Family, ours: str) -> str:
    """Their name of one of our tensors."""
    for pattern, place in family.table.items():
        for candidate in (place,) if isinstance(place, str) else getattr(place, "ours", ()):
            expression = re.escape(candidate).replace("\\#", r"(?P<layer>\d+)")
            expression = expression.replace("@", r"\d+")
            expression = expression.replace("\\*", "(?P<ending>weight|bias)")
            if match := re.fullmatch(expression, ours):
                found = {"layer": "#", "ending": "*"} | match.groupdict()
                return pattern.replace("#", found["layer"]).replace("*", found["ending"])
    return f"of our {ours}"
