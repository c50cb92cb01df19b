"""The same answers by another way: transformers' own classes in float64, a text at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from tests.build_model.importing.huggingface.drawn import exact, transformers
from tests.build_model.importing.huggingface.heads import Theirs
from tests.build_model.importing.huggingface.small_models import edited, float64, save
from tests.build_model.importing.toolkits.test_sentence_transformers import (
    LENGTH,
    pooled,
    sentence_folder,
)
from tests.end_to_end.files import listed, number

MOST = 12  # target tokens
Answer = dict[str, Any]


class Refused(Exception):
    """A text that the model cannot take."""


@dataclass(frozen=True)
class Way(ABC):
    """A folder of a model, and the answers of transformers to texts.

    Attributes:
        folder: The folder, which `transferry import` reads.
    """

    folder: Path

    @classmethod
    @abstractmethod
    def make(cls, folder: Path) -> None:
        """Writes the folder of a small random model."""

    @abstractmethod
    def answer(self, text: str) -> Answer:
        """Returns the answer to one text; raises Refused."""

    @abstractmethod
    def read(self, record: Mapping[str, Any]) -> Answer:
        """Returns the answer that a job wrote, from a record of any format."""

    @property
    def options(self) -> list[str]:
        """Options of `run`."""
        return ["--task", NAMES[type(self)]]

    def text(self, text: str) -> str:
        """Returns a text as the task takes it."""
        return text

    @cached_property
    def tokenizer(self) -> Any:
        return transformers.AutoTokenizer.from_pretrained(self.folder)

    def require_room(self, ids: list[int], most: int = 64) -> None:
        if len(ids) > most:
            raise Refused(f"{len(ids)} tokens")


class Translate(Way):
    """An encoder-decoder."""

    @classmethod
    def make(cls, folder: Path) -> None:
        save("marian", folder)

    @cached_property
    def model(self) -> Any:
        return float64(transformers.MarianMTModel, self.folder)

    @property
    def options(self) -> list[str]:
        return ["--beam", "1", "--max-length", str(MOST), "--scores"]

    @torch.inference_mode()
    def answer(self, text: str) -> Answer:
        read = self.tokenizer(text, return_tensors="pt", split_special_tokens=True)
        self.require_room(read.input_ids[0].tolist())
        model = self.model
        with exact():
            found = model.generate(
                **read,
                num_beams=1,
                do_sample=False,
                max_new_tokens=MOST,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = found.sequences[0, 1:]
        steps = torch.stack(found.logits)[:, 0].log_softmax(dim=-1)
        score = steps.gather(1, tokens[:, None]).mean()
        return {
            "text": self.tokenizer.decode(tokens, skip_special_tokens=True),
            "score": float(score),
        }

    def read(self, record: Mapping[str, Any]) -> Answer:
        scored = {"score": number(record["score"])} if "score" in record else {}
        return {"text": record["text"], **scored}


class Score(Way):
    """A decoder, whose texts get the log-probability of each token."""

    @classmethod
    def make(cls, folder: Path) -> None:
        save("gpt2", folder)

    @cached_property
    def model(self) -> Any:
        return float64(transformers.GPT2LMHeadModel, self.folder)

    @torch.inference_mode()
    def answer(self, text: str) -> Answer:
        ids = self.tokenizer(text, split_special_tokens=True).input_ids
        self.require_room(ids)
        if len(ids) < 2:
            raise Refused("a single token")
        model = self.model
        with exact():
            steps = model(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)
        found = steps.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        return {"tokens": ids[1:], "total": float(found.sum()), "numbers": found.tolist()}

    def read(self, record: Mapping[str, Any]) -> Answer:
        return {
            "tokens": listed(record["tokens"]),
            "total": number(record["total"]),
            "numbers": listed(record["log_probabilities"]),
        }


class Encode(Way):
    """An encoder, by the class of its head."""

    SUFFIX: ClassVar = "Model"

    @cached_property
    def model(self) -> Any:
        name = f"Bert{self.SUFFIX}"
        return float64(getattr(transformers, name), self.folder)

    @torch.inference_mode()
    def output(self, text: str, **limits: Any) -> tuple[list[int], Any]:
        read = self.tokenizer(text, return_tensors="pt", split_special_tokens=True, **limits)
        ids = read.input_ids[0].tolist()
        self.require_room(ids)
        model = self.model
        with exact():
            return ids, model(**read)


class Embed(Encode):
    """Mean-pooled, normalised vectors."""

    @classmethod
    def make(cls, folder: Path) -> None:
        Theirs("bert", 0, folder, "Model")
        sentence_folder(folder, "mean", normalise=True)

    def answer(self, text: str) -> Answer:
        _, found = self.output(text, truncation=True, max_length=LENGTH)
        vector = pooled(found.last_hidden_state[0], "mean")
        return {"vector": torch.nn.functional.normalize(vector, dim=0).tolist()}

    def read(self, record: Mapping[str, Any]) -> Answer:
        return {"vector": list(record["vector"])}


class Classify(Encode):
    """Three labels that exclude each other."""

    LABELS = ("good", "bad", "neither")

    SUFFIX: ClassVar = "ForSequenceClassification"

    @classmethod
    def make(cls, folder: Path) -> None:
        named = dict(enumerate(cls.LABELS))
        Theirs("bert", 0, folder, cls.SUFFIX, num_labels=3, id2label=named)
        with edited(folder) as tensors:  # scores down to 1e-11
            tensors["classifier.bias"] = torch.tensor([0.0, -9.0, -25.0])

    def answer(self, text: str) -> Answer:
        scores = self.output(text)[1].logits[0].softmax(dim=-1)
        return {
            "label": self.model.config.id2label[int(scores.argmax())],
            "numbers": scores.tolist(),
        }

    def read(self, record: Mapping[str, Any]) -> Answer:
        if "scores" not in record:  # a table
            numbers = [number(record[f"score_{name}"]) for name in self.LABELS]
            return {"label": record["label"], "numbers": numbers}
        scores = {each["label"]: each["score"] for each in record["scores"]}
        return {"label": record["label"], "numbers": [scores[name] for name in self.LABELS]}


class Rank(Classify):
    """A cross-encoder: here the second text is always the same."""

    SECOND = "the cat"

    @classmethod
    def make(cls, folder: Path) -> None:
        Theirs("bert", 0, folder, cls.SUFFIX, num_labels=1)
        with edited(folder) as tensors:  # scores around 1e-9
            tensors["classifier.bias"] = torch.tensor([-20.0])

    @property
    def options(self) -> list[str]:
        return [*super().options, "--pair", "other"]

    def answer(self, text: str) -> Answer:
        _, found = self.output(text, text_pair=self.SECOND)
        return {"score": float(found.logits[0, 0].sigmoid())}

    def read(self, record: Mapping[str, Any]) -> Answer:
        return {"score": number(record["score"])}


class Tag(Encode):
    """Labels of tokens."""

    SUFFIX: ClassVar = "ForTokenClassification"

    @classmethod
    def make(cls, folder: Path) -> None:
        Theirs("bert", 0, folder, cls.SUFFIX, num_labels=3)

    def answer(self, text: str) -> Answer:
        _, found = self.output(text)
        read = self.tokenizer(text, split_special_tokens=True, return_offsets_mapping=True)
        scores, labels = found.logits[0, 1:-1].softmax(dim=-1).max(dim=-1)
        names = self.model.config.id2label
        places = [list(each) for each in read.offset_mapping[1:-1]]
        return {
            "tags": [
                (names[int(label)], *place) for label, place in zip(labels, places, strict=True)
            ],
            "numbers": scores.tolist(),
        }

    def read(self, record: Mapping[str, Any]) -> Answer:
        tags = listed(record["tags"])
        return {
            "tags": [(each["label"], each["start"], each["end"]) for each in tags],
            "numbers": [each["score"] for each in tags],
        }


class FillMask(Encode):
    """The likeliest tokens for a mask behind the text."""

    SUFFIX: ClassVar = "ForMaskedLM"

    @classmethod
    def make(cls, folder: Path) -> None:
        Theirs("bert", 0, folder, cls.SUFFIX)

    def text(self, text: str) -> str:
        return f"{text} [MASK]"

    def answer(self, text: str) -> Answer:
        # The mask's token does not take in the blank before it.
        ids = self.tokenizer(f"{text} ", split_special_tokens=True).input_ids
        ids.insert(-1, self.tokenizer.mask_token_id)
        self.require_room(ids)
        model = self.model
        with torch.inference_mode(), exact():
            steps = model(torch.tensor([ids])).logits[0, -2].log_softmax(dim=-1)
        best = steps.topk(5)
        return {
            "candidates": [
                self.tokenizer.decode([token], skip_special_tokens=True)
                for token in best.indices.tolist()
            ],
            "numbers": best.values.tolist(),
        }

    def read(self, record: Mapping[str, Any]) -> Answer:
        if "masks" not in record:  # a line of text
            return {}
        (mask,) = listed(record["masks"])
        return {
            "candidates": [each["text"] for each in mask],
            "numbers": [each["log_probability"] for each in mask],
        }


NAMES: dict[type[Way], str] = {
    Translate: "generate",
    Score: "score",
    Embed: "embed",
    Classify: "classify",
    Rank: "rank",
    Tag: "tag",
    FillMask: "fill-mask",
}
WAYS: dict[str, type[Way]] = {name: way for way, name in NAMES.items()}
Ways = Callable[[str], tuple[Way, Path]]
