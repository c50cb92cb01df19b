"""Stored weights of a bundle beside the checkpoint's: bit for bit, without running a graph.

Sees faults that rounding hides: one integer of a rare row, a scale off by a percent. The names are
those that torch's exporter and `export.optimise` give.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from transferry.build_model.model.transformer import Transformer
from transferry.export.oracle.rounding import ATTENTIONS
from transferry.export.recipes import RECIPES
from transferry.export.rewrite.calibration import KINDS, Calibration
from transferry.export.rewrite.kv_scales import fold_kv_scales
from transferry.export.rewrite.rounded_weights import bits_of, blocks, quantised
from transferry.export.trace.canonical import COMPUTED
from transferry.export.trace.store import SMALLEST
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.precision import FLOAT32, Precision
from transferry.runtime.proof.report import Claim

WEIGHTS = "weights"  # name of the claim
ANOTHER = "was not exported from this checkpoint"
UNLIKE = "has stored weights unlike the checkpoint's"
# Kinds of values that an int8 variant stores of its calibration, not of a trained weight.
CALIBRATED = ("input_scale", "input_zero", "divided_scale", "wide_inputs")
BLOCK = 1 << 20  # entries compared at once, in float64


class CheckpointWeights:
    """Values that a variant of a checkpoint stores, by the name of an initializer."""

    def __init__(
        self, model: Transformer, precision: Precision, calibration: Calibration | None = None
    ) -> None:
        self._calibration, self._pairs = calibration, not precision.weights_only
        self._bits = precision.block_bits
        if calibration is not None:
            model = fold_kv_scales(model, calibration.kv_scales)
        elif precision != FLOAT32 and not precision.rounded:
            model = copy.deepcopy(model).to(getattr(torch, precision.name))
        self._config = model.config
        self._weights = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
        self._tables = {
            name: table for name, table in model.named_buffers() if name not in self._weights
        }
        self._kv_scales = {
            f"scale.{role}.{number}.{kind}": getattr(scales, kind)[:, None]
            for number in range(model.config.decoder_layers)
            for role, attention in ATTENTIONS.items()
            if calibration is not None
            and (scales := calibration.kv_scales.get(f"decoder.{number}.{attention}")) is not None
            for kind in KINDS
        }
        # Of the last weight alone: all of them would take as much memory as the variant.
        self._integers: tuple[str, Sequence[Tensor]] = "", ()
        self._blocks: tuple[str, Sequence[Tensor]] = "", ()
        self.release = model.release

    def find(self, name: str) -> tuple[Tensor, float] | None:
        """Returns a weight and by how much of an entry it may be off, or None without one."""
        if (weight := self._weights.get(name.removeprefix("model."))) is not None:
            return weight, 0.0
        if (table := self._tables.get(name.removeprefix("model."))) is not None:
            return table, COMPUTED
        if (scale := self._kv_scales.get(name)) is not None:
            return scale, 0.0
        if (width := re.fullmatch(r"zeros_(\d+)", name)) is not None:
            return torch.zeros(1, int(width[1])), 0.0
        base, _, kind = name.removesuffix(".column").rpartition(".")
        weight = self._weights.get(base)
        if weight is None:
            return None
        if kind in ("int8", "scales"):
            if self._integers[0] != base:
                found = quantised(weight.numpy(), pairs=self._pairs, wide=self._wide(base))
                self._integers = base, [*map(torch.from_numpy, found)]
            part = self._integers[1][kind == "scales"]
            return (part[:, None] if name.endswith(".column") else part), 0.0
        if kind in ("blocks", "block_scales", "divided_scales"):
            if self._blocks[0] != base:
                packed = blocks(weight.numpy(), bits_of(base, self._bits))
                both = packed.packed(), packed.scales
                self._blocks = base, [*map(torch.from_numpy, both)]
            part = self._blocks[1][kind != "blocks"]
            return (part / self._divisor(base) if kind == "divided_scales" else part), 0.0
        if kind == "wide":
            return weight[:, list(self._wide(base))], 0.0
        return self._input(base, kind)

    def _wide(self, name: str) -> Sequence[int]:
        activations = self._calibration.activations if self._calibration else {}
        return activations[name].wide if name in activations else ()

    def _divisor(self, name: str) -> float:
        """Divisor of the attention scores in the layer of a weight, of the logits outside."""
        found = re.match(r"(encoder|decoder|rereading)\.(\d+)\.", name)
        if found is None:
            return self._config.output_softcap or 1.0
        encodes = found[1] == "encoder"
        return float(
            (self._config.encoder_config() if encodes else self._config).divisor(int(found[2]))
        )

    def trained(self, name: str) -> bool:
        """Whether an initializer holds a trained weight, or integers or scales of one."""
        base, _, kind = name.removesuffix(".column").rpartition(".")
        whole = name.removeprefix("model.") in self._weights
        return whole or (base in self._weights and kind not in CALIBRATED)

    def _input(self, base: str, kind: str) -> tuple[Tensor, float] | None:
        """Returns the other values that an integer variant stores of a linear layer."""
        bias = self._weights.get(f"{base.removesuffix('weight')}bias")
        found = {"divided_bias": bias / self._divisor(base) if bias is not None else None}
        activations = self._calibration.activations if self._calibration else {}
        if (activation := activations.get(base)) is not None:
            found |= {
                "input_scale": torch.tensor(activation.scale),
                "input_zero": torch.tensor(activation.zero_point, dtype=torch.uint8),
                "divided_scale": torch.tensor(activation.scale / self._divisor(base)),
                "wide_inputs": torch.tensor(activation.wide, dtype=torch.int64),
            }
        value = found.get(kind)
        return None if value is None else (value, COMPUTED if "divided" in kind else 0.0)


def weights_claim(
    model: Transformer, bundle: Bundle, variant: Variant, calibration: Calibration | None
) -> Claim:
    """Compares every stored weight of a variant with the checkpoint's.

    If half of them differ, the checkpoint is another one; else those weights are wrong.
    """
    recipe = RECIPES.get(variant.name)
    weights = CheckpointWeights(model, recipe.precision if recipe else FLOAT32, calibration)
    found: dict[str, str] = {}
    for key, problem in _problems(weights, bundle, variant):
        found[key] = found.get(key) or problem
    if not (wrong := [key for key in found if found[key]]):
        return Claim(WEIGHTS)
    trained, differing = (sum(map(weights.trained, keys)) for keys in (found, wrong))
    counted = f"{differing:,} of {trained:,} stored weights differ; {found[wrong[0]]}"
    if 2 * differing >= trained:
        remedy = "give the checkpoint that was exported, or export this one"
        return Claim(WEIGHTS, counted, f"{ANOTHER}: {counted}; {remedy}")
    problem = counted if len(wrong) > 1 else found[wrong[0]]
    return Claim(WEIGHTS, problem, f"{UNLIKE}: {problem}; do not deploy it")


def _problems(
    weights: CheckpointWeights, bundle: Bundle, variant: Variant
) -> Iterator[tuple[str, str]]:
    """Yields the key of each stored weight, and how it differs."""
    for name, spec in variant.graphs.items():
        graph = ir.load(bundle.graph(spec)).graph
        for key, value in graph.initializers.items():
            if (tensor := value.const_value) is None:
                continue
            if (wanted := weights.find(key)) is not None:
                place = f"{key.removeprefix('model.')} in graph {name}"
                yield key, _difference(place, *wanted, tensor.numpy())
            elif tensor.nbytes >= SMALLEST:
                yield key, f"{name}: {key} is no weight of the checkpoint"
            weights.release()
    if not variant.screen or "lm_head" not in variant.graphs:  # manifest_claims refuses that
        return
    head = ir.load(bundle.graph(variant.graphs["lm_head"])).graph
    biased = ("bias",) if len(next(iter(head)).inputs) > 2 else ()
    if {*variant.screen} != (parts := {"weight", "quantised", "scales", *biased}):
        wanted_parts, held = (", ".join(sorted(each)) for each in (parts, variant.screen))
        yield "screen", f"the screen holds {held}, expected {wanted_parts}"
    for part, stored in variant.screen.items():
        found = stored.read(bundle.files)
        wanted = weights.find(_screened(head, part))
        if wanted is None:
            yield part, f"{part} of the screen is no weight of the checkpoint"
        else:
            yield part, _difference(f"{part} of the screen", *wanted, found)


def _screened(head: ir.Graph, part: str) -> str:
    """Returns the initializer's name of a part of `Variant.screen`."""
    product = next(node for node in head if node.op_type == "Gemm")
    weight, bias = (str(value.name) for value in (*product.inputs, product.inputs[1])[1:3] if value)
    rounded = weight.removeprefix("model.")
    names = {"weight": weight, "bias": bias, "quantised": f"{rounded}.int8"}
    return names.get(part, f"{rounded}.{part}")


def _difference(place: str, wanted: Tensor, slack: float, found: NDArray[Any]) -> str:
    """Describes how a stored weight differs; empty if it does not."""
    kind = str(wanted.dtype).removeprefix("torch.")
    if str(found.dtype) != kind or found.shape != tuple(wanted.shape):
        return (
            f"{place}: expected {kind} {list(wanted.shape)} as in the checkpoint, "
            f"found {found.dtype} {list(found.shape)}"
        )
    flat, values = wanted.reshape(-1), found.reshape(-1)
    count, first = 0, -1
    for begin in range(0, len(values), BLOCK):
        block = slice(begin, begin + BLOCK)
        # bfloat16 is no type of numpy's; float64 holds every number of every type.
        run, stored = flat[block].double().numpy(), values[block].astype(np.float64)
        # NaN, which is not equal to itself, is different too.
        wrong = np.flatnonzero(~(np.abs(stored - run) <= slack * np.abs(run)))
        if len(wrong) and first < 0:
            first = begin + int(wrong[0])
        count += len(wrong)
    if not count:
        return ""
    at = [int(index) for index in np.unravel_index(first, found.shape)]
    return (
        f"{count:,} of {found.size:,} entries of {place} differ, first {at}: "
        f"{float(values[first]):.9g} in place of {float(flat[first]):.9g}"
    )
