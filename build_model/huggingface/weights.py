"""Conversion of tensors by a family's table; errors name the tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from transferry.build_model.config import ModelConfig
from transferry.build_model.huggingface.tables import Family, Move, NoPlace, Table
from transferry.build_model.transformer import Transformer
from transferry.runtime.errors import InputError

# Names in the first versions of BERT.
OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}


@dataclass
class Converted:
    """Tensors of a checkpoint, converted.

    Attributes:
        state: Our tensors by name, float32.
        left_out: Count of numbers that are not in `state`, by what they belong to.
        computed: Count of numbers in `state` that a formula gave, not the file.
    """

    state: dict[str, Tensor] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    computed: int = 0

    @property
    def parameters(self) -> int:
        """Number of parameters of our model."""
        return sum(tensor.numel() for tensor in self.state.values())

    def leave_out(self, what: str, tensor: Tensor) -> None:
        """Counts a tensor that is not in `state`."""
        self.left_out[what] = self.left_out.get(what, 0) + tensor.numel()


def convert_weights(
    family: Family, config: ModelConfig, tensors: Iterable[tuple[str, Tensor]], origin: str
) -> Converted:
    """Converts the tensors of a checkpoint to the state of our model.

    Args:
        family: Table of the conversion.
        config: Shape of our model.
        tensors: Names and tensors of any floating type. float16 and bfloat16 convert exactly,
            float64 is rounded.
        origin: Name of the checkpoint for errors.

    Raises:
        InputError: A tensor is unknown, missing, of another shape, not finite or not floating, or
            two that must be equal differ.
    """
    expected = _shapes(config)
    converted = Converted()
    came_from: dict[str, str] = {}
    additions: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        move, layer = _place(family.table, name.removeprefix(family.prefix))
        if move is None:
            raise InputError(
                f"{origin}: the tensor {name} is unknown; it belongs to another model than that of "
                "config.json, or to a head that cannot be imported"
            )
        if isinstance(move, NoPlace):
            if move.what:
                converted.leave_out(move.what, tensor)
            continue
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise InputError(
                f"{origin}: expected finite numbers in the tensor {name}, found others in "
                f"{tensor.dtype}; the file is damaged or quantised"
            )
        for ours, piece in _pieces(move, layer, tensor):
            if config.tied and ours == "output.weight":
                ours = "embedding.weight"
            if ours not in expected:
                raise InputError(
                    f"{origin}: the tensor {name} has no place in the model of config.json; take "
                    "both from one checkpoint"
                )
            shape = [1, *expected[ours][1:]] if move.adds else expected[ours]
            if list(piece.shape) != shape:
                raise InputError(
                    f"{origin}: the tensor {name} of shape {list(tensor.shape)} does not fit: by "
                    f"config.json {ours} must have the shape {shape}, found {list(piece.shape)}"
                )
            if move.adds:
                additions.append((ours, piece.float()))
                converted.leave_out(move.adds, tensor)
            elif ours not in converted.state:
                converted.state[ours], came_from[ours] = piece.float().contiguous(), name
            elif not torch.equal(converted.state[ours], piece.float()):
                raise InputError(
                    f"{origin}: expected equal tensors {came_from[ours]} and {name}, but they "
                    "differ; only models that share them can be imported"
                )
    for ours, tensor in family.computes(config).items():
        if ours not in converted.state:
            converted.state[ours] = tensor
            converted.computed += tensor.numel()
    missing = [_theirs(family, ours) for ours in expected if ours not in converted.state]
    missing += [
        name
        for name, place in family.table.items()
        if isinstance(place, Move) and place.adds and place.adds not in converted.left_out
    ]
    if missing:
        more = f", and {len(missing) - 1} more" if missing[1:] else ""
        raise InputError(
            f"{origin}: the tensor {missing[0]}{more} is missing; the file is cut short, or of "
            "another model than that of config.json"
        )
    for ours, piece in additions:
        converted.state[ours] = converted.state[ours] + piece
    return converted


def _shapes(config: ModelConfig) -> dict[str, list[int]]:
    """Name and shape of each tensor of our model, without allocating it."""
    with torch.device("meta"):
        state = Transformer(config).state_dict()
    return {name: list(tensor.shape) for name, tensor in state.items()}


def _place(table: Table, name: str) -> tuple[Move | NoPlace | None, dict[str, str]]:
    """Table entry of a tensor, and the values of its "#" and "*"."""
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


def _pieces(move: Move, meaning: dict[str, str], tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Our tensors from one of theirs; one of unexpected rank is unchanged and fails later."""
    names = [ours.replace("#", meaning["#"]).replace("*", meaning["*"]) for ours in move.ours]
    if tensor.dim() not in (1, 2):
        return [(names[0], tensor)]
    return list(zip(names, move.change(tensor), strict=True))


def _theirs(family: Family, ours: str) -> str:
    """Their name of one of our tensors."""
    for pattern, place in family.table.items():
        for candidate in _our_patterns(place):
            expression = re.escape(candidate).replace("\\#", r"(?P<layer>\d+)")
            expression = expression.replace("\\*", "(?P<ending>weight|bias)")
            if match := re.fullmatch(expression, ours):
                found = match.groupdict()
                return pattern.replace("#", found.get("layer") or "#").replace(
                    "*", found.get("ending") or "*"
                )
    return f"of our {ours}"


def _our_patterns(place: str | Move | NoPlace) -> tuple[str, ...]:
    if isinstance(place, str):
        return (place,)
    return place.ours if isinstance(place, Move) else ()
