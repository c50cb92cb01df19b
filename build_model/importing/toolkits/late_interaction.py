"""Folders of PyLate and of ColBERT (Khattab and Zaharia 2020): a vector for each token of a text.

PyLate saves a folder of sentence-transformers with Dense modules of its own; ColBERT itself the
linear layer beside the tensors of BERT, and its settings in artifact.metadata.
"""

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transferry.build_model.importing.huggingface.folder import (
    CONFIG,
    REMEDY,
    PretrainedFolder,
    Settings,
)
from transferry.build_model.importing.huggingface.settings_table import MODULE, READING, SENTENCE
from transferry.build_model.importing.toolkits.sentence_transformers import (
    LEAST,
    MODULES,
    SentenceModules,
    linear_layers,
    module_folder,
    reading_of,
)
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.bundle.head import HeadSettings, Side
from transferry.runtime.errors import InputError
from transferry.runtime.io.documents import read_document
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer

METADATA = "artifact.metadata"
DENSE = "pylate.models.Dense.Dense"
COLBERT = "HF_ColBERT"
HEAD = HeadSettings("embed", default_prompt="document", vectors="tokens")
# Keys of the prefix, the length and the default prefix of each side.
PYLATE = {
    "query": ("query_prefix", "query_length", "[Q] ", 32),
    "document": ("document_prefix", "document_length", "[D] ", 180),
}
STANFORD = {
    "query": ("query_token_id", "query_maxlen", "[unused0]", 32),
    "document": ("doc_token_id", "doc_maxlen", "[unused1]", 180),
}


@dataclass
class LateInteraction(SentenceModules):
    """The modules of a folder whose texts get a vector for each token.

    Attributes:
        texts: The file that tells how texts are read.
        prefixes: Token before the texts of each side; may be empty.
        lengths: Tokens of each side.
        expands: Whether queries are filled up with masks.
        attends: Whether tokens see these masks.
        skipped: Words of documents without a vector.
        inside: Whether the linear layer is among the Transformer's tensors.
    """

    texts: Settings = field(default_factory=lambda: Settings(Path(), {}))
    prefixes: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    expands: bool = True
    attends: bool = False
    skipped: tuple[str, ...] = ()
    inside: bool = False

    @property
    def table(self) -> dict[str, str]:
        """Our tensors by those of `tensors`."""
        own = {"linear.weight": "head.layers.0.linear.weight"}
        return own if self.inside else super().table

    def finished(
        self,
        head: HeadSettings,
        shape: ModelConfig,
        tokenizer: AnyTokenizer,
        pretrained: PretrainedFolder,
    ) -> tuple[HeadSettings, ModelConfig]:
        """Returns head and shape with the ids of tokens.

        The folder names the tokens for masks and for unknown words; PyLate skips unknown words
        where a word to skip is no token.
        """
        known = tokenizer.vocabulary()
        special = tokenizer.special
        if len(special.before) != 1 or shape.architecture != "encoder-only" or shape.causal:
            raise InputError(
                f"{self.texts.path}: a vector for each token needs an encoder whose texts begin "
                f"with one special token, found {len(special.before)} of a {shape.architecture}"
            )
        for name, prefix in self.prefixes.items():
            if prefix and known.get(prefix, shape.vocabulary_size) >= shape.vocabulary_size:
                self.texts.refuse(f"prefix of a {name}", prefix, "a token of the tokenizer")
        mask, unknown = (known.get(_named(pretrained, each), -1) for each in ("mask", "unk"))
        if self.expands and mask < 0:
            self.texts.refuse("do_query_expansion", True, "false without a mask token")
        hides = self.expands and not self.attends
        shown = min([self.lengths["query"], *filter(None, shape.windows)])
        if hides and (shape.disentangled is not None or shown < self.lengths["query"]):
            kind = "disentangled attention" if shape.disentangled else f"a window of {shown}"
            supported = f"true, or false without {kind}"
            self.texts.refuse("attend_to_expansion_tokens", False, supported)
        ids = [known.get(word, unknown) for word in self.skipped]
        if -1 in ids:
            word = self.skipped[ids.index(-1)]
            self.texts.refuse("skiplist_words", word, "tokens of the tokenizer")
        sides = {
            name: Side(
                min(self.lengths[name], shape.max_positions),
                (known[prefix],) if prefix else (),
                fill=mask if name == "query" and self.expands else -1,
                skipped=tuple(dict.fromkeys(ids)) if name == "document" else (),
            )
            for name, prefix in self.prefixes.items()
        }
        shape = replace(shape, unseen_token=mask if hides else -1)
        return replace(head, sides=sides, longest=sides["document"].longest), shape


def _named(pretrained: PretrainedFolder, kind: str) -> str:
    """Returns the text of a special token, by default BERT's."""
    files, name = (pretrained.special_tokens, pretrained.tokenizer), f"{kind}_token"
    found = [each for each in (file.get(name) for file in files) if each is not None]
    token = found[-1] if found else f"[{kind.upper()}]"
    return str(token.get("content") if isinstance(token, dict) else token)


def read_late_interaction(
    folder: Path, ignored: frozenset[str] = frozenset()
) -> LateInteraction | None:
    """Reads a folder of PyLate or ColBERT; None if it is neither."""
    if (folder / MODULES).exists():
        listed = read_document(folder / MODULES, list[dict[str, Any]], REMEDY)
        pylate = [each for each in listed if str(each.get("type")).startswith("pylate.")]
        return _pylate(folder, listed, ignored) if pylate else None
    config = Settings.read(folder / CONFIG, required=False)
    if config.values.get("architectures") != [COLBERT]:
        return None
    texts = Settings.read(folder / METADATA, required=False, ignored=ignored)
    words = string.punctuation if texts.flag("mask_punctuation", True) else ""
    fields = {"head_widths": (texts.whole("dim", 128),), "head_activations": ("none",)}
    return LateInteraction(
        folder,
        *({**fields, "head_biases": (False,), "unit_length": True}, [], HEAD),
        **_sides(texts, STANFORD),
        lower=False,
        attends=texts.flag("attend_to_mask_tokens", False),
        skipped=tuple(words),
        inside=True,
    )


def _pylate(folder: Path, listed: list[dict[str, Any]], ignored: frozenset[str]) -> LateInteraction:
    first, *others = listed
    if not str(first.get("type")).endswith(".Transformer") or any(
        each.get("type") != DENSE for each in others
    ):
        kinds = ", ".join(str(each.get("type")) for each in listed)
        raise InputError(
            f"{folder / MODULES}: the modules are {kinds}, which cannot be imported; supported for "
            f"a vector for each token: Transformer, any number of {DENSE}"
        )
    transformer = module_folder(folder, first)
    texts = Settings.read(folder / SENTENCE, required=False, ignored=ignored)
    reading = reading_of(transformer, "feature-extraction", ignored)
    reading.get("max_seq_length")  # each side has a length of its own
    places = [module_folder(folder, each) for each in others]
    linear, dense, layers = linear_layers(places, "torch.nn.modules.linear.Identity", ignored)
    for settings in layers:
        for name in ("module_input_name", "module_output_name"):
            settings.only(name, "token_embeddings", "sentence_embedding")
    prompts = texts.get("prompts", {})
    if not isinstance(prompts, dict) or any(prompts.values()):
        texts.refuse("prompts", prompts, "empty ones beside query_prefix and document_prefix")
    texts.get("default_prompt_name")
    texts.only("truncate_dim", None)
    words = texts.get("skiplist_words", [*string.punctuation])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        texts.refuse("skiplist_words", words, "a list of words")
    return LateInteraction(
        transformer,
        *({**linear, "unit_length": True}, dense, HEAD),
        **_sides(texts, PYLATE),
        lower=reading.flag("do_lower_case", False),
        files=[(SENTENCE, texts), (READING, reading), *((MODULE, each) for each in layers)],
        expands=texts.flag("do_query_expansion", True),
        attends=texts.flag("attend_to_expansion_tokens", False),
        skipped=tuple(words),
    )


def _sides(texts: Settings, keys: Mapping[str, tuple[str, str, str, int]]) -> dict[str, Any]:
    prefixes, lengths = dict[str, str](), dict[str, int]()
    for name, (prefix, length, usual, tokens) in keys.items():
        prefixes[name] = texts.get(prefix, usual)
        if not isinstance(prefixes[name], str):
            texts.refuse(prefix, prefixes[name], f"a token, such as {json.dumps(usual)}")
        lengths[name] = texts.whole(length, tokens)
        if lengths[name] <= LEAST:
            texts.refuse(length, lengths[name], f"more than {LEAST}")
    return {"texts": texts, "prefixes": prefixes, "lengths": lengths}
