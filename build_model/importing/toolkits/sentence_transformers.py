"""Folders of sentence-transformers: modules.json, and the modules after the Transformer.

A folder lists its modules: a Transformer in the format of transformers, then Pooling, Dense and
Normalize. They become the head of the model. A cross-encoder is a Transformer alone, which has a
head of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from transferry.build_model.importing.formats.tensors import NamedTensors, Tensors, open_weights
from transferry.build_model.importing.huggingface.folder import CONFIG, REMEDY, Settings
from transferry.build_model.importing.huggingface.heads import RANKS
from transferry.build_model.importing.huggingface.settings_table import MODULE, READING, SENTENCE
from transferry.build_model.model.parts.heads import HeadActivation, Pooling
from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.errors import InputError
from transferry.runtime.io.documents import read_document
from transferry.runtime.settings import shown

MODULES = "modules.json"
# Of the Transformer: the first that there is.
TRANSFORMER = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# By their names in a folder, with the names in flags; in this order where there is a flag for each.
POOLINGS: dict[str, tuple[str, Pooling]] = {
    "cls": ("cls_token", "first"),
    "max": ("max_tokens", "max"),
    "mean": ("mean_tokens", "mean"),
    "mean_sqrt_len_tokens": ("mean_sqrt_len_tokens", "root-mean"),
    "weightedmean": ("weightedmean_tokens", "weighted"),
    "lasttoken": ("lasttoken", "last"),
}
ACTIVATIONS: dict[str, HeadActivation] = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "swish",
    "torch.nn.modules.linear.Identity": "none",
}
# Tokens of a row: one and those around it. The tokenizers cut to fewer in ways of their own.
LEAST = 3
LONGEST_NAME = 99  # of a folder; file systems take 255 bytes
IN_ORDER = "Transformer, Pooling, any number of Dense, Normalize; or Transformer, SpladePooling"


@dataclass
class SentenceModules:
    """The modules of a folder, but for the numbers of its tensors.

    Attributes:
        fields: Fields of ModelConfig that describe the head.
        settings: How texts are read; `longest` as the folder says, if it does.
        lower: Whether texts are lower-cased before the tokenizer reads them.
        scores: Ids of the tokens whose logits score a pair, of a reranker.
        structured: Whether its chat template reads lists of parts; None where no file tells.
        answer: Whether its chat template begins the answer.
        files: All settings that were read, with their keys in `settings_table`.
    """

    transformer: Path
    fields: dict[str, Any]
    dense: list[Tensors]
    settings: HeadSettings
    lower: bool
    scores: tuple[int, ...] = ()
    structured: bool | None = None
    answer: bool = False
    files: list[tuple[str, Settings]] = field(default_factory=list)

    @property
    def table(self) -> dict[str, str]:
        """Our tensors by those of `tensors`."""
        return {
            f"dense{number}.linear.*": f"head.layers.{number}.linear.*"
            for number in range(len(self.dense))
        }

    def tensors(self, transformer: Tensors) -> Tensors:
        """Returns the tensors of all modules, each Dense with its number in front."""
        places = {name: (transformer, name) for name in transformer.shapes}
        for number, file in enumerate(self.dense):
            # No digits between dots, which stand for the number of a layer.
            places |= {f"dense{number}.{name}": (file, name) for name in file.shapes}
        return NamedTensors(transformer.origin, places)


def read_sentence_transformers(
    folder: Path, ignored: frozenset[str] = frozenset()
) -> SentenceModules | None:
    """Reads the modules of a folder; None if it has no modules.json."""
    if not (folder / MODULES).exists():
        return None
    listed = read_document(folder / MODULES, list[dict[str, Any]], REMEDY)
    modules = [_module(folder, entry) for entry in listed]
    # Dropout is inactive outside of training.
    modules = [(kind, place) for kind, place in modules if kind != "Dropout"]
    kinds = [kind for kind, _ in modules]
    texts = Settings.read(folder / SENTENCE, required=False, ignored=ignored)
    if texts.values.get("model_type") == "CrossEncoder" and kinds == ["Transformer"]:
        texts.get("model_type")
        reading = reading_of(modules[0][1], "sequence-classification", ignored)
        return _made(modules[0][1], (texts, reading), task="classify", rank=_rank(texts))
    if (read := PAIRS.get(tuple(kinds))) is not None:
        return read(modules[0][1], modules[1][1], texts, ignored)
    layers = kinds[2:-1] if kinds[-1:] == ["Normalize"] else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or set(layers) - {"Dense"}:
        raise InputError(
            f"{folder / MODULES}: the modules are {', '.join(kinds) or 'none'}, which cannot be "
            f"imported; supported: {IN_ORDER}"
        )
    texts.only("model_type", "SentenceTransformer")
    reading = reading_of(modules[0][1], "feature-extraction", ignored)
    pooling = Settings.read(modules[1][1] / CONFIG, ignored=ignored)
    fields: dict[str, Any] = {"unit_length": kinds[-1] == "Normalize"}
    fields["pooling"] = _pooling(pooling, texts)
    places = [place for kind, place in modules if kind == "Dense"]
    linear, dense, files = linear_layers(places, next(iter(ACTIVATIONS)), ignored)
    files = [pooling, *files]
    if fields["unit_length"]:
        files.append(Settings.read(modules[-1][1] / CONFIG, required=False, ignored=ignored))
    for settings in files:
        for name in ("module_input_name", "module_output_name"):
            settings.only(name, "sentence_embedding")
    return _made(modules[0][1], (texts, reading, *files), fields=fields | linear, dense=dense)


def linear_layers(
    places: Sequence[Path], usual: str, ignored: frozenset[str]
) -> tuple[dict[str, Any], list[Tensors], list[Settings]]:
    """Returns fields, tensors and settings of Dense modules with a `usual` activation."""
    files = [Settings.read(place / CONFIG, ignored=ignored) for place in places]
    for settings in files:
        settings.only("use_residual", False)
        settings.whole("in_features")
    fields = {
        "head_widths": tuple(each.whole("out_features") for each in files),
        "head_activations": tuple(
            each.choice("activation_function", ACTIVATIONS, usual) for each in files
        ),
        "head_biases": tuple(each.flag("bias", True) for each in files),
    }
    return fields, [open_weights(place) for place in places], files


def _made(
    transformer: Path,
    files: Sequence[Settings],
    *,
    fields: dict[str, Any] | None = None,
    dense: list[Tensors] | None = None,
    scores: tuple[int, ...] = (),
    **head: Any,
) -> SentenceModules:
    """Returns modules, from the settings of texts, reading and modules, in this order."""
    texts, reading, *others = files
    settings = replace(_settings(texts, _longest(reading)), **head)
    return SentenceModules(
        *(transformer, fields or {}, dense or [], settings),
        *(reading.flag("do_lower_case", False), scores),
        files=[(SENTENCE, texts), (READING, reading), *((MODULE, each) for each in others)],
    )


def _rank(texts: Settings) -> Literal["sigmoid", "none"]:
    return texts.choice("activation_fn", RANKS, next(iter(RANKS)))


def _sparse_encoder(
    transformer: Path, pooling: Path, texts: Settings, ignored: frozenset[str]
) -> SentenceModules:
    texts.only("model_type", "SparseEncoder")
    reading = reading_of(transformer, "fill-mask", ignored)
    settings = Settings.read(pooling / CONFIG, ignored=ignored)
    logs = settings.choice("activation_function", {"relu": "", "log1p_relu": "log-"}, "relu")
    kind = settings.choice("pooling_strategy", {"max": "max", "sum": "sum"}, "max")
    for name in ("word_embedding_dimension", "embedding_dimension", "chunk_size"):
        settings.get(name)
    texts.only("max_active_dims", None)
    fields = {"pooling": (f"splade-{logs}{kind}",), "unit_length": False}
    return _made(transformer, (texts, reading, settings), fields=fields, vectors="sparse")


def _reranker(
    transformer: Path, score: Path, texts: Settings, ignored: frozenset[str]
) -> SentenceModules:
    """Reads a causal language model whose logits of one or two tokens score a pair."""
    texts.only("model_type", "CrossEncoder")
    reading = reading_of(transformer, "text-generation", ignored, chats=True)
    scoring = Settings.read(score / CONFIG, ignored=ignored)
    scoring.only("module_input_name", "causal_logits")
    tokens: tuple[int, ...] = (scoring.whole("true_token_id"),)
    if scoring.get("false_token_id") is not None:
        tokens += (scoring.whole("false_token_id"),)
    modes, named = reading.get("modality_config", {}), reading.get("processing_kwargs", {})
    message = modes.get("message") if isinstance(modes, dict) else None
    if message is None or not isinstance(message, dict):
        reading.refuse("modality_config", modes, "message, for pairs in a chat template")
    chat = named.get("chat_template", {}) if isinstance(named, dict) else named
    answer = chat.get("add_generation_prompt", False) if isinstance(chat, dict) else chat
    if named not in ({}, {"chat_template": chat}) or type(answer) is not bool:
        reading.refuse("processing_kwargs", named, "add_generation_prompt of chat_template")
    files = texts, reading, scoring
    made = _made(transformer, files, scores=tokens, task="classify", rank=_rank(texts))
    kinds = {"structured": True, "flat": False}
    made.structured = kinds.get(str(dict(message or {}).get("format")))
    made.answer = answer
    return made


# Readers of two modules that are no sentence encoder.
PAIRS: Mapping[tuple[str, ...], Callable[..., SentenceModules]] = {
    ("Transformer", "LogitScore"): _reranker,
    ("Transformer", "SpladePooling"): _sparse_encoder,
    ("MLMTransformer", "SpladePooling"): _sparse_encoder,
}


def reading_of(
    folder: Path, task: str, ignored: frozenset[str], *, chats: bool = False
) -> Settings:
    """Returns how the Transformer reads texts."""
    found = [folder / name for name in TRANSFORMER if (folder / name).exists()]
    path = found[0] if found else folder / READING
    reading = Settings.read(path, required=False, ignored=ignored)
    for name in ("tokenizer_args", "processor_kwargs", *["processing_kwargs"] * (not chats)):
        reading.only(name, {})
    reading.only("transformer_task", task)
    return reading


def _longest(reading: Settings) -> int:
    """Returns max_seq_length; 0 without one."""
    if reading.get("max_seq_length") is None:
        return 0
    if (longest := reading.whole("max_seq_length")) < LEAST:
        reading.refuse("max_seq_length", longest, f"at least {LEAST}")
    return longest


def _module(folder: Path, entry: Mapping[str, Any]) -> tuple[str, Path]:
    """Returns class and folder of a module."""
    name = entry.get("type")
    if not isinstance(name, str) or not name.startswith("sentence_transformers."):
        raise InputError(
            f"{folder / MODULES}: expected modules of sentence_transformers, found {name!r}; code "
            "of others is not run"
        )
    return name.rpartition(".")[2], module_folder(folder, entry)


def module_folder(folder: Path, entry: Mapping[str, Any]) -> Path:
    """Returns the folder of a module; raises InputError if it lies outside of `folder`."""
    path = entry.get("path", "")
    short = isinstance(path, str) and len(path) <= LONGEST_NAME and "\0" not in path
    if not isinstance(path, str) or not short or Path(path).name != path:
        raise InputError(f"{folder / MODULES}: expected folders in {folder}, found {shown(path)}")
    return folder / path


def _pooling(settings: Settings, texts: Settings) -> tuple[Pooling, ...]:
    named = POOLINGS.items()
    flags = [kind for kind, (flag, _) in named if settings.flag(f"pooling_mode_{flag}", False)]
    given = settings.get("pooling_mode", flags or ["mean"])
    kinds = given if isinstance(given, list) else [given]
    for kind in kinds:
        if not isinstance(kind, str) or kind not in POOLINGS:
            settings.refuse("pooling_mode", kind, " or ".join(POOLINGS))
    # A prompt is part of the text, as by default; the last token belongs to no prompt.
    prompts = texts.get("prompts", {})
    if set(kinds) != {"lasttoken"} and isinstance(prompts, dict) and any(prompts.values()):
        settings.only("include_prompt", True)
    settings.get("include_prompt")
    settings.get("word_embedding_dimension", settings.get("embedding_dimension"))
    return tuple(POOLINGS[kind][1] for kind in kinds)


def _settings(texts: Settings, longest: int) -> HeadSettings:
    prompts = texts.get("prompts", {})
    if not isinstance(prompts, dict) or not all(isinstance(each, str) for each in prompts.values()):
        texts.refuse("prompts", prompts, "texts by name")
    default = texts.get("default_prompt_name", "")
    if default and (not isinstance(default, str) or default not in prompts):
        texts.refuse("default_prompt_name", default, f"a name of prompts: {', '.join(prompts)}")
    # Of the vector as it is, not scaled to length 1 again.
    width = texts.whole("truncate_dim", 0)
    if width == 0 and texts.get("truncate_dim") is not None:
        texts.refuse("truncate_dim", width, "at least 1")
    return HeadSettings(
        "embed", longest=longest, prompts=prompts, default_prompt=default, width=width
    )
