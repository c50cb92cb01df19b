"""Tensors carried over by a family's table; what does not fit is an error that names the tensor."""

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

# What the first versions of BERT called them.
OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}


@dataclass
class Carried:
    """What became of a file's tensors.

    Attributes:
        state: Our tensors by name, float32.
        left_out: How many numbers are not in `state`, by what they belong to.
        made: How many numbers of `state` come of a formula and not of the file.
    """

    state: dict[str, Tensor] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    made: int = 0

    @property
    def parameters(self) -> int:
        """How many numbers our model has."""
        return sum(tensor.numel() for tensor in self.state.values())

    def leave_out(self, part: str, tensor: Tensor) -> None:
        """Counts a tensor that is not in `state`."""
        self.left_out[part] = self.left_out.get(part, 0) + tensor.numel()


def carry_over(
    family: Family, config: ModelConfig, tensors: Iterable[tuple[str, Tensor]], origin: str
) -> Carried:
    """Turns the tensors of a file into the state of our model.

    Args:
        family: Says what goes where.
        config: The shape of our model.
        tensors: Names and tensors, of any floating type: narrower ones are widened, which is exact,
            float64 is rounded.
        origin: Names the file in errors.

    Raises:
        InputError: A tensor is unknown, missing, misshapen, not finite or no floating type, or two
            that must be the same differ.
    """
    expected = _shapes(config)
    carried = Carried()
    came_from: dict[str, str] = {}
    additions: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        move, layer = _place(family.table, name.removeprefix(family.prefix))
        if move is None:
            raise InputError(
                f"{origin}: the tensor {name} is unknown; it is of another model than config.json "
                "describes, or of a head that cannot be imported"
            )
        if isinstance(move, NoPlace):
            if move.part:
                carried.leave_out(move.part, tensor)
            continue
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise InputError(
                f"{origin}: expected finite numbers in the tensor {name}, found others in "
                f"{tensor.dtype}; the file is damaged or quantised"
            )
        for ours, part in _parts(move, layer, tensor):
            if config.tied and ours == "output.weight":
                ours = "embedding.weight"
            if ours not in expected:
                raise InputError(
                    f"{origin}: the tensor {name} has no place in a model of the shape that "
                    "config.json describes; the two are not of one checkpoint"
                )
            shape = [1, *expected[ours][1:]] if move.adds else expected[ours]
            if list(part.shape) != shape:
                raise InputError(
                    f"{origin}: the tensor {name} of shape {list(tensor.shape)} does not fit: by "
                    f"config.json, {ours} has the shape {shape}, but {list(part.shape)} was found"
                )
            if move.adds:
                additions.append((ours, part.float()))
                carried.leave_out(move.adds, tensor)
            elif ours not in carried.state:
                carried.state[ours], came_from[ours] = part.float().contiguous(), name
            elif not torch.equal(carried.state[ours], part.float()):
                raise InputError(
                    f"{origin}: the tensors {came_from[ours]} and {name} differ, but must be the "
                    "same; models that do not share them cannot be imported"
                )
    for ours, tensor in family.makes(config).items():
        if ours not in carried.state:
            carried.state[ours] = tensor
            carried.made += tensor.numel()
    missing = [_theirs(family, ours) for ours in expected if ours not in carried.state]
    missing += [
        name
        for name, place in family.table.items()
        if isinstance(place, Move) and place.adds and place.adds not in carried.left_out
    ]
    if missing:
        more = f", and {len(missing) - 1} more" if missing[1:] else ""
        raise InputError(
            f"{origin}: the tensor {missing[0]}{more} is missing; the file is not whole, or not "
            "what config.json describes"
        )
    for ours, part in additions:
        carried.state[ours] = carried.state[ours] + part
    return carried


def _shapes(config: ModelConfig) -> dict[str, list[int]]:
    """Name and shape of each tensor of our model, which takes no memory."""
    with torch.device("meta"):
        return {name: list(part.shape) for name, part in Transformer(config).state_dict().items()}


def _place(table: Table, name: str) -> tuple[Move | NoPlace | None, dict[str, str]]:
    """What a table says of a tensor, and what its "#" and "*" stand for."""
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


def _parts(move: Move, meaning: dict[str, str], tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Our tensors by name; a tensor that cannot be changed stays as it is, and will not fit."""
    names = [ours.replace("#", meaning["#"]).replace("*", meaning["*"]) for ours in move.ours]
    if tensor.dim() not in (1, 2):
        return [(names[0], tensor)]
    return list(zip(names, move.change(tensor), strict=True))


def _theirs(family: Family, ours: str) -> str:
    """The name in the file that gives one of our tensors."""
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
