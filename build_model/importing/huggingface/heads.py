"""Purposes of model classes: heads of classification, and decoders that only read."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.tables import (
    ACTIVATIONS,
    Classifier,
    Family,
    Move,
    NoPlace,
)
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.parts.heads import HeadActivation
from transferry.runtime.bundle.head import HeadSettings

# Activation that turns scores into probabilities, by problem_type.
PROBLEMS: dict[str, Literal["softmax", "sigmoid", "none"]] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}
# Activations of a cross-encoder, by their names in folders.
RANKS: dict[str, Literal["sigmoid", "none"]] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "none",
}

SPAN = ("start", "end")  # scores of a token in extractive question answering


def labels_of(config: Settings) -> tuple[str, ...]:
    """Names of the scores; transformers names those without names LABEL_0, LABEL_1, ..."""
    named = config.get("id2label")
    config.get("label2id")
    count = config.whole("num_labels", len(named) if isinstance(named, dict) else 2)
    # transformers makes names anew where there are more or fewer than scores.
    if named is None or (isinstance(named, dict) and len(named) != count):
        return tuple(f"LABEL_{number}" for number in range(count))
    texts = named.values() if isinstance(named, dict) else ()
    ids = {str(number) for number in range(len(texts))}
    if not texts or set(named) != ids or not all(isinstance(each, str) for each in texts):
        config.refuse("id2label", named, "names of the labels 0, 1, 2 and so on")
    return tuple(named[str(number)] for number in range(len(named)))


def problem_of(config: Settings, labels: tuple[str, ...]) -> Literal["softmax", "sigmoid", "none"]:
    """Activation that turns scores into probabilities; of a single score none."""
    usual = "regression" if len(labels) == 1 else "single_label_classification"
    kind = config.choice("problem_type", PROBLEMS, usual)
    if kind == "softmax" and len(labels) == 1:  # always 1; transformers refuses it too
        config.refuse("problem_type", config.get("problem_type"), "regression for a single label")
    return kind


def rank_of(config: Settings) -> Literal["sigmoid", "none"]:
    """Activation that CrossEncoder of sentence-transformers applies to the score of a pair."""
    former = config.get("sbert_ce_default_activation_function")
    said = config.get("sentence_transformers", {})
    name = said.get("activation_fn", former) if isinstance(said, dict) else said
    if name is None:
        return "sigmoid"
    if name not in RANKS:
        config.refuse("sentence_transformers", said or former, " or ".join(RANKS))
    return RANKS[name]


# Activations of heads, by their names.
UNITS: dict[str, HeadActivation] = {
    **cast(dict[str, HeadActivation], ACTIVATIONS),
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}


def classifier(
    dense: str,
    last: str = "classifier",
    activation: HeadActivation = "tanh",
    *,
    setting: str = "",
    width: str = "hidden_size",
    modern: bool = False,
    poolings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[Settings], Classifier | None]:
    """Returns how a type's heads are read, by the names of the two layers that score a text.

    `setting` names another activation of the first, which scores tokens too, and has a norm, where
    it is `modern`, as in ModernBERT. `poolings` are fields by the values of classifier_pooling, the
    default first.
    """

    def read(config: Settings) -> Classifier | None:
        task = task_of(config)
        if task is None:
            return None
        settings = _settings_of(config, task)
        two = task == "classify" or modern
        unit = config.choice(setting, UNITS, activation) if setting else activation
        bias = True
        token = "classifier" if modern or task == "tag" else "qa_outputs"
        names = {last if task == "classify" else token: int(two)}
        if two:
            names[dense] = 0
        table = {f"{theirs}.*": f"head.layers.{ours}.linear.*" for theirs, ours in names.items()}
        if modern:
            unit = cast(HeadActivation, config.choice("classifier_activation", ACTIVATIONS, "gelu"))
            bias = config.flag("classifier_bias", False)
            table["head.norm.*"] = "head.layers.0.norm.*"
        fields: dict[str, Any] = {
            "lm_head": False,
            "output_transform": False,
            "output_bias": False,
            "tied": True,
            "pooling": ("first",) if task == "classify" else (),
            "head_widths": (*[config.whole(width, 768)] * two, len(settings.labels)),
            "head_activations": (*[unit] * two, "none"),
            "head_biases": (*[bias] * two, True),
            "head_norm": modern,
        }
        if task == "classify" and poolings is not None:
            fields |= config.choice("classifier_pooling", poolings, next(iter(poolings)))
        return Classifier(fields, table, settings)

    return read


def _settings_of(config: Settings, task: Literal["classify", "tag", "answer"]) -> HeadSettings:
    if task == "answer":
        return HeadSettings(task, SPAN, "softmax")
    labels = labels_of(config)
    if task == "tag":
        return HeadSettings(task, labels, "softmax")
    return HeadSettings(task, labels, problem_of(config, labels), rank_of(config))


# Heads that no task serves.
OTHER_HEADS = ("ForNextSentencePrediction", "ForMultipleChoice")
OTHERS = (
    "…ForMaskedLM, …ForSequenceClassification, …ForTokenClassification, …ForQuestionAnswering; for "
    "the encoder alone, save AutoModel.from_pretrained(folder)"
)


def task_of(config: Settings) -> Literal["classify", "tag", "answer"] | None:
    """Returns the task of the model class that config.json names; None for another class."""
    if _class(config).endswith(OTHER_HEADS):
        config.refuse("architectures", _class(config), OTHERS)
    purpose = PURPOSES.get(_end(_class(config)))
    return None if purpose == "generate" or purpose == "read" else purpose


def scored(config: Settings) -> Classifier | None:
    """Head of a decoder: one linear layer, of a text on its last token (Ouyang et al. 2022)."""
    if (task := task_of(config)) is None:
        return None
    settings, text = _settings_of(config, task), task == "classify"
    fields: dict[str, Any] = {
        "pooling": ("last",) if text else (),
        "head_widths": (len(settings.labels),),
        "head_activations": ("none",),
        "head_biases": (not text,),
    }
    # GPT-2 and GPT-NeoX have the second name of a tagger.
    names = {"classify": ["score"], "tag": ["score", "classifier"], "answer": ["qa_outputs"]}
    table = {f"{name}.*": "head.layers.0.linear.*" for name in names[task]}
    return Classifier(fields, table, settings)


# --- Classes --------------------------------------------------------------------------------------

HEAD = NoPlace("language model head")
# Fields of a model that reads texts and has no logits.
READS: dict[str, Any] = {
    "architecture": "encoder-only",
    "decoder_layers": 0,
    **dict.fromkeys(("lm_head", "output_bias", "scale_output"), False),
    "tied": True,
}
# Purpose of a model class, by the end of its name.
PURPOSES: Mapping[str, Literal["generate", "read", "classify", "tag", "answer"]] = {
    "ForCausalLM": "generate",
    "LMHeadModel": "generate",
    "ForConditionalGeneration": "generate",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
    "ForQuestionAnswering": "answer",
    "Model": "read",
}


def _class(config: Settings) -> str:
    classes = config.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else ""


def _end(name: str) -> str:
    return next((end for end in PURPOSES if name.endswith(end)), "")


def reads(config: Settings, family: Family, shape: ModelConfig, names: set[str]) -> bool:
    """Whether a decoder-only model reads texts and does not continue them."""
    name = _class(config)
    stems, end = family.stems.split(), _end(name)
    # A file without a class generates, as does a class of somebody else named ForCausalLM.
    generates = generating(config)
    if not name and not shape.tied and not any("lm_head" in n or "embed_out" in n for n in names):
        return True
    if not generates and name not in {f"{stem}{end}" for stem in stems}:
        ends = ", ".join(end for end in PURPOSES if end[-9:] not in ("HeadModel", "eneration"))
        supported = f"names that begin with {' or '.join(stems)} and end with {ends}"
        config.refuse("architectures", config.get("architectures"), supported)
    return not generates


def generating(config: Settings) -> bool:
    """Whether config.json names a class that generates, or no class."""
    name = _class(config)
    return not name or PURPOSES.get(_end(name)) == "generate"


def as_reader(config: Settings, family: Family, shape: ModelConfig) -> tuple[Family, ModelConfig]:
    """Returns a decoder-only type as an encoder-only one in which no token sees later ones.

    Without logits a cache has no use: a text is read at once.
    """
    if shape.embedding_width and task_of(config) is None:
        width = config.get("word_embed_proj_dim")
        config.refuse("word_embed_proj_dim", width, f"{shape.d_model} without a classifier")
    windows, both_ways = shape.windows, False
    if not config.flag("is_causal", True):
        both_ways, windows = True, tuple(each and each + 1 for each in windows)
    if config.flag("use_bidirectional_attention", False):
        both_ways, windows = True, tuple(each and each // 2 + 1 for each in windows)
    read = dataclasses.replace(
        shape,
        **READS,
        encoder_layers=shape.decoder_layers,
        causal=not both_ways,
        windows=windows,
        output_softcap=0.0,
    )

    def renamed(name: str) -> str:
        return name.replace("decoder", "encoder", 1) if name.startswith("decoder") else name

    def moved(place: str | Move | NoPlace) -> str | Move | NoPlace:
        if isinstance(place, NoPlace):
            return place
        names = (place,) if isinstance(place, str) else place.ours
        if names[0] in ("output.weight", "output_bias"):
            return HEAD
        if isinstance(place, str):
            return renamed(place)
        return dataclasses.replace(place, ours=tuple(map(renamed, names)))

    table = {theirs: moved(place) for theirs, place in family.table.items()}
    computed = family.computes(shape)
    return dataclasses.replace(
        family,
        table=table,
        computes=lambda _: {renamed(name): tensor for name, tensor in computed.items()},
    ), read


def as_source_reader(
    config: Settings, family: Family, shape: ModelConfig, names: set[str], *, module: bool
) -> tuple[Family, ModelConfig]:
    """Returns an encoder-decoder type as an encoder-only one where it does not generate.

    With stems, its encoder alone is a class of transformers; `module` is one of
    sentence-transformers, which takes the encoder.
    """
    stems, tags = family.stems.split(), task_of(config) == "tag"
    encoders = {f"{stem}EncoderModel" for stem in stems}
    nameless = not _class(config) and not any("decoder." in name for name in names)
    if stems and (module or tags or nameless or _class(config) in encoders):
        return _encoder_of(family, shape)
    if family.classifier(config) is not None:
        return _rereading(config, family, shape)
    return family, shape


def _encoder_of(family: Family, shape: ModelConfig) -> tuple[Family, ModelConfig]:
    """Returns the encoder of an encoder-decoder type."""
    moved: dict[str, str | Move | NoPlace] = {"lm_head.weight": HEAD}
    moved |= {each: NoPlace("decoder") for each in family.table if each.startswith("decoder.")}
    read = dataclasses.replace(shape, **READS)
    return dataclasses.replace(family, table={**family.table, **moved}), read


def _rereading(config: Settings, family: Family, shape: ModelConfig) -> tuple[Family, ModelConfig]:
    """Returns an encoder-decoder type whose decoder reads the source, as its classifiers do."""
    # mBART's begins with the last token of the text, which must be the end token.
    begin = "eos_token_id" if config.get("model_type") == "mbart" else "decoder_start_token_id"
    if begin == "eos_token_id" and config.get("pad_token_id") == config.get(begin, 2):
        config.refuse("pad_token_id", config.get(begin, 2), "another than eos_token_id")
    read = dataclasses.replace(
        shape,
        **READS,
        rereading_layers=shape.decoder_layers,
        rereading_begin=config.whole(begin, 0 if family.stems else 2),
    )
    table = {
        name: re.sub("^decoder", "rereading", place) if isinstance(place, str) else place
        for name, place in family.table.items()
    }
    table |= {"lm_head.weight": HEAD, "final_logits_bias": HEAD}
    return dataclasses.replace(family, table=table, computes=lambda _: {}), read
