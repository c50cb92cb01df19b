"""An imported model before its tensors are copied, and its summary for the user."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transferry.build_model.importing.huggingface.weights import Converted
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.bundle.card import UNKNOWN, ModelCard
from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.settings import listed
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer

MOST_SHOWN = 40  # characters of a setting in the summary


@dataclass(frozen=True)
class Imported:
    """A pretrained, converted.

    Attributes:
        kind: Its model_type.
        generation: Fields of GenerationOptions that become the bundle's defaults.
        ignored: Settings of `generate` that do not, with value and reason.
        unused: Lines on the settings without effect.
        in_force: Settings of the tokenizer in transformers, some without effect here.
    """

    kind: str
    config: ModelConfig
    weights: Converted
    tokenizer: AnyTokenizer
    generation: dict[str, Any]
    ignored: dict[str, Any]
    notes: Sequence[str] = ()
    unused: Sequence[str] = ()
    head: HeadSettings | None = None
    card: ModelCard = UNKNOWN
    in_force: Mapping[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        """Summary for the user."""
        left_out, computed = self.weights.left_out, self.weights.computed
        imported = self.weights.parameters - sum(computed.values())
        lines = [
            f"{self.kind}, {self.config.architecture}: imported {imported:,} of "
            f"{imported + sum(left_out.values()):,} parameters"
        ]
        if known := self.card.facts():
            told = (f"{name.replace('_', ' ')} {text}" for name, text in known.items())
            lines.append(f"model card: {'; '.join(told)}")
        lines += self.notes
        for name, parts in (("left out", left_out), ("computed", computed)):
            counts = ", ".join(f"{what} {count:,}" for what, count in parts.items())
            lines += [f"{name}: {counts}"] * bool(parts)
        if not self.config.lm_head:
            tasks = ["embed"]
            if self.head is not None and self.head.task != "embed":
                tasks.append(self.head.task)
                tasks += ["rank"] * (tasks[-1] == "classify" and len(self.head.labels) == 1)
            verb = "works" if len(tasks) == 1 else "work"
            lines.append(
                f"no masked language model head: only --task {listed(tasks, 'and')} {verb}"
            )
        if self.head is not None:
            lines.append(_describe(self.head, self.config))
        left = "left out of the settings of generate"
        for name, settings in (("generation defaults", self.generation), (left, self.ignored)):
            values = ", ".join(f"{key} {value}" for key, value in settings.items())
            lines += [f"{name}: {values}"] * bool(settings)
        return "\n".join([*lines, *self.unused])


def _describe(head: HeadSettings, config: ModelConfig) -> str:
    parts = [f"head for --task {head.task}"]
    if head.labels:
        parts.append(f"labels {_cut_short(', '.join(head.labels))}")
    if config.pooling:
        parts.append(f"pooling {' and '.join(config.pooling)}")
    if config.head_widths:
        parts.append(f"layers of width {', '.join(map(str, config.head_widths))}")
    if config.unit_length:
        parts.append("length 1")
    if head.longest:
        parts.append(f"rows cut to {head.longest} tokens")
    if head.prompts:
        default = f" (default {head.default_prompt})" if head.default_prompt else ""
        parts.append(f"prompts {' '.join(head.prompts)}{default}")
    return ", ".join(parts)


def short(value: Any) -> str:
    """Returns a value as JSON, cut short."""
    return _cut_short(json.dumps(value, ensure_ascii=False))


def _cut_short(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
