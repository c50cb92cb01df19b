"""Adapters of PEFT: low-rank changes of weights (LoRA, Hu et al. 2022), merged into them.

W + scale * B A with scale = alpha / r, or alpha / sqrt(r) with use_rslora (Kalajdzievski 2023).
With use_dora m * V / ||V|| for V = W + scale * B A, with the norm of each output (Liu et al. 2024,
eq. 5). Computed in float32, in the order of PEFT's merge_and_unload.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from transferry.build_model.importing.formats.foreign import ADAPTER_CONFIG
from transferry.build_model.importing.formats.tensors import (
    DAMAGED,
    FLOATING,
    PickledFile,
    SafetensorsFile,
    Tensors,
    meta,
)
from transferry.runtime.errors import InputError
from transferry.runtime.io.documents import read_document

WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
_REMEDY = "merge the adapter with PEFT's merge_and_unload, and import what save_pretrained writes"

# Settings that the tensors themselves tell, or that only training reads.
_NOT_NEEDED = {
    *("auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying"),
    *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern"),
    *("layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core"),
    *("modules_to_save", "peft_version", "qalora_group_size", "revision", "runtime_config"),
    *("target_modules", "task_type"),
}
_READ = {
    *("alpha_pattern", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern"),
    *("use_dora", "use_rslora"),
}
# Other kinds change the weights themselves before the training.
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
_ROLES = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_embedding_A": "row A",
    "lora_embedding_B": "row B",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}


@dataclass
class _Change:
    """Change of one module: tensor names by role, and the scale."""

    module: str
    parts: dict[str, str] = field(default_factory=dict)
    scale: float = 0.0


class Adapter:
    """A folder with adapter_config.json and its tensors.

    Attributes:
        rank: Rank, unless rank_pattern overrides it.
        changes: Low-rank changes by the name of the weight.
        replaced: Names of whole tensors by the name of the tensor that they replace.
    """

    def __init__(self, folder: Path) -> None:
        """Reads settings and names."""
        self.folder = folder
        self._path = folder / ADAPTER_CONFIG
        self._config = read_document(self._path, dict[str, Any], DAMAGED)
        self._require_known()
        safe = (folder / WEIGHTS).exists() or not (folder / PICKLED).exists()
        self.tensors: Tensors = (
            SafetensorsFile(folder / WEIGHTS) if safe else PickledFile(folder / PICKLED)
        )
        self.changes: dict[str, _Change] = {}
        self.replaced: dict[str, str] = {}
        for name, tensor in self.tensors.shapes.items():
            self._place(name, tensor)
        for weight, change in self.changes.items():
            self._complete(weight, change)

    def _require_known(self) -> None:
        config = self._config
        if config.get("peft_type") != "LORA":
            self._refuse("peft_type", "LORA")
        for name in config.keys() - _NOT_NEEDED - _READ:
            if config[name] not in (None, False, [], {}):
                self._refuse(name, "none")
        if config.get("init_lora_weights") not in _INITIAL:
            self._refuse("init_lora_weights", " or ".join(map(json.dumps, _INITIAL[3:])))
        for name in ("use_dora", "use_rslora"):
            if type(config.get(name, False)) is not bool:
                self._refuse(name, "true or false")
        self.rank = config.get("r")
        if type(self.rank) is not int or self.rank < 1:
            self._refuse("r", "a whole number of at least 1")
        for name in ("rank_pattern", "alpha_pattern"):
            patterns = config.get(name) or {}
            # Names of modules, as regular expressions that cannot take long.
            if not isinstance(patterns, dict) or not all(
                re.fullmatch(r"\^?[\w.\\]+", each) for each in patterns
            ):
                self._refuse(name, "names of modules")

    def _refuse(self, name: str, supported: str) -> NoReturn:
        raise InputError(
            f"{self._path}: {name} is {json.dumps(self._config.get(name))}, which cannot be "
            f"merged; supported: {supported}. Or {_REMEDY}"
        )

    def _place(self, name: str, tensor: Tensor) -> None:
        whole = name.removeprefix("base_model.model.")
        if tensor.dtype not in FLOATING:
            raise InputError(f"{self.tensors.origin}: {name} is quantised ({tensor.dtype})")
        for ending, role in _ROLES.items():
            if whole.endswith(f".{ending}"):
                module = whole.removesuffix(f".{ending}")
                change = self.changes.setdefault(f"{module}.weight", _Change(module))
                change.parts[role] = name
                return
        if "lora_" in whole:
            raise InputError(
                f"{self.tensors.origin}: the tensor {name} cannot be merged; {_REMEDY}"
            )
        for wrapper in (".base_layer", ".modules_to_save"):
            whole = whole.replace(wrapper, "")
        if ".original_module." not in whole:  # that of modules_to_save takes its place
            self.replaced[whole] = name

    def _complete(self, weight: str, change: _Change) -> None:
        expected, also = [{"A", "B"}, {"row A", "row B"}], ""
        if self._config.get("use_dora"):
            expected, also = [{"A", "B", "magnitude"}], " and its magnitude"
        if change.parts.keys() not in expected:
            raise InputError(
                f"{self.tensors.origin}: expected A and B of {weight}{also}, found "
                f"{' and '.join(sorted(change.parts.values()))}; {_REMEDY}"
            )
        a, b = self.factors(change, self.tensors.shapes.__getitem__)
        rank = self._setting("rank_pattern", change.module, self.rank)
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise InputError(
                f"{self.tensors.origin}: expected A and B of {weight} of rank {rank} by "
                f"{ADAPTER_CONFIG}, found {list(a.shape)} and {list(b.shape)}; take both from one "
                "adapter"
            )
        alpha = self._setting("alpha_pattern", change.module, self._config.get("lora_alpha", 8))
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            self._refuse("lora_alpha", "a number")
        change.scale = alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _setting(self, name: str, module: str, default: Any) -> Any:
        """Returns the value of the first pattern that a module's name ends in."""
        for pattern, value in (self._config.get(name) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return default

    def factors(self, change: _Change, of: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """Returns A [rank, in] and B [out, rank]; of an embedding, in is its vocabulary."""
        row = "row " if "row A" in change.parts else ""
        return of(change.parts[f"{row}A"]), of(change.parts[f"{row}B"])

    def merge(self, weight: Tensor, change: _Change, *, turned: bool) -> Tensor:
        """Returns a weight [out, in] with its change, float32; a `turned` one is [in, out]."""
        a, b = self.factors(change, lambda name: self.tensors.read(name).float())
        product = b @ a
        if turned != ("row A" in change.parts):
            product = product.t()
        merged = (product * change.scale).add_(weight)
        if "magnitude" in change.parts:
            axis = 0 if turned else 1
            length = torch.linalg.vector_norm(merged, dim=axis)
            factor = self.tensors.read(change.parts["magnitude"]).float().flatten() / length
            merged *= factor.unsqueeze(axis)
        return merged

    def describe(self) -> str:
        """Summary for the user."""
        kind = "DoRA" if self._config.get("use_dora") else "LoRA"
        made = self._config.get("base_model_name_or_path")
        replaced = f", {len(self.replaced)} tensors replaced" if self.replaced else ""
        return (
            f"adapter: {kind} of rank {self.rank}, {len(self.changes)} matrices merged{replaced}"
            + (f"; made for {made}" if made else "")
        )


class AdaptedTensors(Tensors):
    """Tensors of a model with an adapter merged into them."""

    def __init__(
        self,
        base: Tensors,
        adapter: Adapter,
        plain: Callable[[str], str],
        turned: Callable[[str], bool],
    ) -> None:
        """Places the adapter's tensors.

        `plain` leaves out the prefix of a head's model, which files may lack, from a name; `turned`
        tells the weight of a Conv1D by its name.
        """
        self.origin, self._base, self._adapter = base.origin, base, adapter
        self._turned = turned
        names = {plain(name): name for name in base.shapes}
        # An output that the file leaves out, since it is the embedding, may have been trained.
        self._replaced = {
            names.get(plain(name), name): one for name, one in adapter.replaced.items()
        }
        lost = [name for name in adapter.changes if plain(name) not in names]
        if lost:
            raise InputError(
                f"{adapter.tensors.origin}: {lost[0]} has no place in {base.origin}: the adapter "
                "is of another model, or of a class of transformers that renames the tensors of "
                "this file: then merge_and_unload() with PEFT, save_pretrained(DIR), and import DIR"
            )
        self._changes = {names[plain(name)]: one for name, one in adapter.changes.items()}
        for name, change in self._changes.items():
            self._require_shape(name, change)

    def _require_shape(self, name: str, change: _Change) -> None:
        a, b = self._adapter.factors(change, self._adapter.tensors.shapes.__getitem__)
        made = [b.shape[0], a.shape[1]]
        if self._turned(name) != ("row A" in change.parts):
            made.reverse()
        if made != list(self._base.shapes[name].shape):
            raise InputError(
                f"{self._adapter.tensors.origin}: expected a change of {name} of shape "
                f"{list(self._base.shapes[name].shape)}, found {made}; import the model that the "
                "adapter was made for"
            )

    @cached_property
    def shapes(self) -> Mapping[str, Tensor]:
        theirs = self._adapter.tensors.shapes
        found = dict(self._base.shapes)
        found |= {name: theirs[one] for name, one in self._replaced.items()}
        for name in self._changes:
            found[name] = meta(found[name].shape, torch.float32)
        return found

    def read(self, name: str) -> Tensor:
        if (whole := self._replaced.get(name)) is not None:
            tensor = self._adapter.tensors.read(whole)
        else:
            tensor = self._base.read(name)
        if (change := self._changes.get(name)) is None:
            return tensor
        return self._adapter.merge(tensor, change, turned=self._turned(name))
