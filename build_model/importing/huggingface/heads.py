"""Heads of classification: labels, probabilities and layers, as config.json names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.tables import ACTIVATIONS, Classifier
from transferry.build_model.model.config import HeadActivation
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


def classifier(
    dense: str,
    last: str = "classifier",
    activation: HeadActivation = "tanh",
    *,
    width: str = "hidden_size",
    modern: bool = False,
) -> Callable[[Settings], Classifier | None]:
    """Returns how a type's heads are read.

    Args:
        dense: Name of the first of the two layers that score a text.
        last: Name of the second.
        activation: Of the first.
        width: Setting of the width of the hidden states.
        modern: Its first layer scores tokens too, and has a norm, as in ModernBERT.
    """

    def read(config: Settings) -> Classifier | None:
        task = task_of(config)
        if task is None:
            return None
        labels, two = labels_of(config), task == "classify" or modern
        unit, bias, pooling = activation, True, "first"
        names = {last if task == "classify" else "classifier": int(two)}
        if two:
            names[dense] = 0
        table = {f"{theirs}.*": f"head.layers.{ours}.linear.*" for theirs, ours in names.items()}
        if modern:
            unit = cast(HeadActivation, config.choice("classifier_activation", ACTIVATIONS, "gelu"))
            bias = config.flag("classifier_bias", False)
            table["head.norm.*"] = "head.layers.0.norm.*"
            if task == "classify":
                pooling = config.choice(
                    "classifier_pooling", {"cls": "first", "mean": "mean"}, "cls"
                )
        fields: dict[str, Any] = {
            "lm_head": False,
            "output_transform": False,
            "output_bias": False,
            "tied": True,
            "pooling": (pooling,) if task == "classify" else (),
            "head_widths": (*[config.whole(width, 768)] * two, len(labels)),
            "head_activations": (*[unit] * two, "none"),
            "head_biases": (*[bias] * two, True),
            "head_norm": modern,
        }
        settings = HeadSettings("tag", labels, "softmax")
        if task == "classify":
            usual = "regression" if len(labels) == 1 else "single_label_classification"
            problem = config.choice("problem_type", PROBLEMS, usual)
            settings = HeadSettings("classify", labels, problem, rank_of(config))
        return Classifier(fields, table, settings)

    return read


def task_of(config: Settings) -> Literal["classify", "tag"] | None:
    """Returns the task of the model class that config.json names; None for another class."""
    classes = config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    if name.endswith("ForSequenceClassification"):
        return "classify"
    return "tag" if name.endswith("ForTokenClassification") else None
