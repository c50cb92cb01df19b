"""The head of an encoder-only model: its task, labels and prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from transferry.runtime.errors import UsageError
from transferry.runtime.settings import MOST, Whole, shown

# Ways of joining labelled tokens to entities; see `runtime/engine/tasks/tag.py`.
Aggregation = Literal["none", "simple", "first", "average", "max"]


@dataclass(frozen=True)
class Side:
    """How the texts of one side of a search are read, where each token has a vector.

    Attributes:
        longest: Tokens that rows are cut to, special tokens included.
        before: Ids between the tokenizer's first one and the text.
        fill: Id that rows are filled up with to `longest` tokens; -1 fills up nothing.
        skipped: Ids of tokens whose vectors are left out.
    """

    longest: Whole
    before: tuple[Whole, ...] = ()
    fill: Annotated[int, Meta(ge=-1, le=MOST)] = -1
    skipped: tuple[Whole, ...] = ()


@dataclass(frozen=True)
class HeadSettings:
    """Purpose of an encoder-only model's head, and how texts are read for it.

    Attributes:
        task: "embed" makes a vector of a text, "classify" scores labels of a text or of a pair of
            texts, "tag" scores labels of each token, "answer" scores each token of a question and
            a context as the start and as the end of an answer.
        labels: Names of the scores; empty for vectors.
        probabilities: Activation that turns scores into probabilities: "softmax" where one label
            (of answers, one start and one end) is right, "sigmoid" where labels are independent,
            "none" for regression.
        rank: Activation applied to a cross-encoder's single score.
        longest: Tokens that rows are cut to, special tokens included; 0 disables it.
        prompts: Texts that may be put before each text, by name.
        default_prompt: Name of the prompt that is used by default; may be empty.
        width: Numbers of a vector that are kept, the first of them; 0 keeps all.
        template: Text of a pair, with the names query and document at odd places; empty where the
            tokenizer joins pairs.
        vectors: "dense", "sparse": a weight for each token of the vocabulary, most of them 0, or
            "tokens": a vector for each token of a text.
        sides: How texts are read where queries and documents have vectors of tokens, by name;
            `default_prompt` is one of them.
    """

    task: Literal["embed", "classify", "tag", "answer"]
    labels: tuple[str, ...] = ()
    probabilities: Literal["softmax", "sigmoid", "none"] = "none"
    rank: Literal["sigmoid", "none"] = "none"
    longest: Whole = 0
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    width: Whole = 0
    vectors: Literal["dense", "sparse", "tokens"] = "dense"
    template: tuple[str, ...] = ()
    sides: Mapping[str, Side] = field(default_factory=dict)

    def side(self, name: str | None) -> Side:
        """Returns a side, by default `default_prompt`; raises UsageError for another name."""
        name = name or self.default_prompt
        if name not in self.sides:
            raise UsageError(f"prompt must be {' or '.join(self.sides)}, found {shown(name)}")
        return self.sides[name]

    def filled(self, query: str, document: str) -> str:
        """Returns the text of a pair."""
        texts = {"query": query, "document": document}
        pieces = enumerate(self.template)
        return "".join(texts.get(each, "") if place % 2 else each for place, each in pieces)

    def prompt(self, name: str | None) -> str:
        """Returns a prompt, by default `default_prompt`; raises UsageError for an unknown name."""
        name = self.default_prompt if name is None else name
        if name and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise UsageError(f"prompt must be one of the bundle's: {known}; found {shown(name)}")
        return self.prompts[name] if name else ""
