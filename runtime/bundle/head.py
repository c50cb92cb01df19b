"""The head of an encoder-only model: its task, labels and prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from transferry.runtime.errors import UsageError
from transferry.runtime.settings import Whole, shown

# How tokens with labels are joined to entities; see `runtime/engine/tasks/entities.py`.
Aggregation = Literal["none", "simple", "first", "average", "max"]


@dataclass(frozen=True)
class HeadSettings:
    """What the head of an encoder-only model is for, and how texts are read for it.

    Attributes:
        task: "embed" makes a vector of a text, "classify" scores labels of a text or of a pair of
            texts, "tag" scores labels of each token.
        labels: Names of the scores; none for vectors.
        probabilities: What makes probabilities of scores: "softmax" where one label is right,
            "sigmoid" where each is for itself, "none" where scores are the answer (regression).
        rank: What makes the score of a pair of its only label.
        longest: Tokens that rows are cut to, special tokens included; 0 means that they are not.
        prompts: Texts that may be put before each text, by name.
        default_prompt: Name of that which is put there unless told otherwise; may be empty.
    """

    task: Literal["embed", "classify", "tag"]
    labels: tuple[str, ...] = ()
    probabilities: Literal["softmax", "sigmoid", "none"] = "none"
    rank: Literal["sigmoid", "none"] = "none"
    longest: Whole = 0
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""

    def prompt(self, name: str | None) -> str:
        """Returns the text to put before each text.

        Args:
            name: Name of a prompt; the default one if None.

        Raises:
            UsageError: There is no prompt of that name.
        """
        name = self.default_prompt if name is None else name
        if name and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise UsageError(f"prompt must be one of the bundle's: {known}; found {shown(name)}")
        return self.prompts[name] if name else ""
