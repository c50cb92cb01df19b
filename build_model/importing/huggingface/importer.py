"""Import of a pretrained model as a checkpoint, which appears whole or not at all."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transferry.build_model import checkpoint, checkpoint_folder
from transferry.build_model.importing.formats.foreign import ADAPTER_CONFIG
from transferry.build_model.importing.formats.lora import Adapter
from transferry.build_model.importing.formats.tensors import tensor_writer, without_weights
from transferry.build_model.importing.huggingface import decoder_only, encoder_decoder, encoder_only
from transferry.build_model.importing.huggingface.folder import (
    CONFIG,
    GENERATION,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    PretrainedFolder,
    Settings,
    require_plain,
)
from transferry.build_model.importing.huggingface.generation import (
    SEARCH_SETTINGS,
    TOKENS,
    generation_defaults,
)
from transferry.build_model.importing.huggingface.heads import as_reader, as_source_reader, reads
from transferry.build_model.importing.huggingface.settings_table import judge
from transferry.build_model.importing.huggingface.tables import Family, Table
from transferry.build_model.importing.huggingface.tokenizer.vocabularies import TOKENIZERS
from transferry.build_model.importing.huggingface.weights import (
    adapted,
    convert_weights,
    untied_output,
)
from transferry.build_model.importing.imported import Imported, short
from transferry.build_model.importing.toolkits.late_interaction import (
    LateInteraction,
    read_late_interaction,
)
from transferry.build_model.importing.toolkits.marian import read_marian
from transferry.build_model.importing.toolkits.rerankers import joined_by, score_of, scored_by
from transferry.build_model.importing.toolkits.sentence_transformers import (
    MODULES,
    SentenceModules,
    read_sentence_transformers,
)
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.bundle.card import ModelCard
from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.errors import LOG, InputError, UsageError, require
from transferry.runtime.io.folders import (
    found_at,
    is_bundle,
    is_checkpoint,
    replace_folder,
    staged_folder,
)
from transferry.runtime.io.whole import open_regular
from transferry.runtime.settings import MOST
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

FAMILIES: Mapping[str, Family] = {
    **encoder_decoder.FAMILIES,
    **decoder_only.FAMILIES,
    **encoder_only.FAMILIES,
}


def read_pretrained(
    folder: Path,
    adapter_folder: Path | None = None,
    ignored: Collection[str] = (),
    scores: Sequence[str] = (),
) -> Imported:
    """Reads a folder of transformers or Marian, without the values of its tensors.

    An adapter of PEFT is merged, by default one beside the model. `ignored` settings are left out
    though they may change answers; the logits of `scores` make a decoder a reranker.

    Raises:
        InputError: A file is missing or damaged, a setting is unsupported, or a tensor does not
            fit.
        UsageError: The tokenizer's library is not installed, an adapter is for another kind, or
            no file has a setting to be ignored.
    """
    if is_bundle(folder) or is_checkpoint(folder):
        expected = "a folder of Hugging Face or Marian"
        raise InputError(f"{folder}: expected {expected}, {found_at(folder)}")
    if not (folder / CONFIG).exists() and any(folder.glob("*.npz")):
        require(adapter_folder is None, "--adapter", f"left out for {folder}", adapter_folder)
        require(not ignored, "--ignore-setting", f"left out for {folder}", ", ".join(ignored))
        return read_marian(folder)
    left = frozenset(ignored)
    pretrained, sentence = _modules(folder, left, scores)
    adapter = _adapter(pretrained.folder, adapter_folder)
    kind = _model_type(pretrained.config, sentence)
    family, shape, head = _shape(FAMILIES[kind], pretrained, sentence)
    pretrained.lower = sentence is not None and sentence.lower
    pretrained.size = shape.vocabulary_size
    ends = pretrained.tokens("eos_token_id") if shape.decoder_layers else []
    tokenizer = TOKENIZERS[kind](pretrained, shape)
    tokenizer.special = _with_cuts(pretrained, shape, tokenizer.special, sentence)
    if head is not None and head.task in ("classify", "answer"):
        family, shape = _with_segments(family, shape, pretrained, tokenizer)
    tensors = pretrained.tensors()
    if sentence is not None:
        head, shape = _joined(sentence, head, shape, pretrained, tokenizer)
        tensors = sentence.tensors(tensors)
    notes: list[str] = []
    generation, left_out = dict[str, Any](), dict[str, Any]()
    if shape.decoder_layers:
        notes += _end_outputs(pretrained, tokenizer, ends) + _unknown_ends(pretrained)
        generation, left_out = generation_defaults(pretrained, shape)
        generation |= {"split_lines": False} if family.reads_lines else {}
    if adapter is not None:
        tensors = adapted(family, shape, tensors, adapter)
    if output := untied_output(family, shape, tensors):
        shape = replace(shape, tied=False)
        notes.append(f"tie_word_embeddings is true, but {output} is no embedding: kept as it is")
    weights = convert_weights(family, shape, tensors, str(folder))
    notes += pretrained.text_notes + ([] if adapter is None else [adapter.describe()])
    notes += [f"tokenizer: {note}" for note in pretrained.notes] + _look_alikes(tokenizer)
    unused = _without_effect(folder, pretrained, sentence, shape, left)
    found = (kind, shape, weights, tokenizer, generation, left_out)
    return Imported(*found, notes, unused, head, in_force=pretrained.in_force)


def _adapter(folder: Path, given: Path | None) -> Adapter | None:
    """Opens an adapter; one beside the model is merged unasked, as transformers does."""
    if not (folder / ADAPTER_CONFIG).exists():
        return Adapter(given) if given is not None else None
    if given is not None and given.resolve() != folder.resolve():
        raise InputError(
            f"{folder}: expected one adapter, found {ADAPTER_CONFIG} there beside --adapter "
            f"{given}; move the one that is not meant"
        )
    return Adapter(folder)


def _modules(
    folder: Path, left: frozenset[str], scores: Sequence[str]
) -> tuple[PretrainedFolder, SentenceModules | None]:
    """Opens a folder, and its modules if it is of sentence-transformers or becomes a reranker."""
    sentence = read_late_interaction(folder, left) or read_sentence_transformers(folder, left)
    pretrained = PretrainedFolder(folder if sentence is None else sentence.transformer, left)
    if scores:
        require(sentence is None, "--score-tokens", f"left out with {MODULES}", ",".join(scores))
        sentence = scored_by(pretrained, scores)
    pretrained.pairs = sentence is not None and bool(sentence.scores)
    pretrained.take_text((*SEARCH_SETTINGS, *TOKENS))
    return pretrained, sentence


def _joined(
    sentence: SentenceModules,
    given: HeadSettings | None,
    shape: ModelConfig,
    pretrained: PretrainedFolder,
    tokenizer: AnyTokenizer,
) -> tuple[HeadSettings, ModelConfig]:
    """Adds how texts are read: cut, and as a reranker's pairs or the sides of a search."""
    own = sentence.settings
    if given is None:
        classes = pretrained.config.get("architectures")
        pretrained.config.refuse("architectures", classes, "…ForSequenceClassification")
    if isinstance(sentence, LateInteraction):
        return sentence.finished(given, shape, tokenizer, pretrained)
    longest = own.longest or pretrained.tokenizer.number("model_max_length", MOST)
    longest = int(min(longest, shape.max_positions)) - pretrained.padded
    head = replace(given, longest=longest, rank=own.rank)
    if sentence.scores:
        return replace(head, template=joined_by(pretrained, tokenizer, sentence)), shape
    if any(map(tokenizer.looks_special, own.prompts.values())):
        told = "texts without special tokens, which would be read as text"
        sentence.files[0][1].refuse("prompts", own.prompts, told)
    return replace(head, prompts=own.prompts, default_prompt=own.default_prompt), shape


def _model_type(config: Settings, sentence: SentenceModules | None) -> str:
    """Returns the model_type; refuses an unknown one, and quantised weights."""
    if config.get("model_type") is None:
        if found := without_weights(config.path.parent):
            raise InputError(f"{config.path.parent}: {found}")
        raise InputError(
            f"{config.path}: model_type must be named, found none; add that of the model's kind, "
            'such as "model_type": "bert"'
        )
    kind = config.choice("model_type", {name: name for name in FAMILIES}, "")
    encoders = [name for name, each in encoder_decoder.FAMILIES.items() if each.stems]
    known = (*encoder_only.FAMILIES, *encoders, *decoder_only.FAMILIES)
    if sentence is not None and kind not in known:
        config.refuse("model_type", kind, f"{' or '.join(known)} with {MODULES}")
    require_plain(config)
    return kind


def _shape(
    family: Family, pretrained: PretrainedFolder, sentence: SentenceModules | None
) -> tuple[Family, ModelConfig, HeadSettings | None]:
    """Returns the family with the tensors of the head, the shape with it, and its settings."""
    config = pretrained.config
    try:
        shape = family.shape(config, pretrained.names())
        generator = shape
        alone, module = shape.architecture == "decoder-only", sentence is not None
        if shape.architecture == "encoder-decoder":
            names = pretrained.names()
            embeds = sentence is not None and sentence.settings.task == "embed"
            family, shape = as_source_reader(config, family, shape, names, module=embeds)
        if alone and (reads(config, family, shape, pretrained.names()) or module):
            family, shape = as_reader(config, family, shape)
        if shape.two_stacks or not generator.two_stacks:
            config.only("is_encoder_decoder", shape.two_stacks)
        config.get("is_encoder_decoder")  # files of an encoder alone have either
        if sentence is not None and sentence.settings.task == "embed":
            fields: Mapping[str, Any] = sentence.fields
            table: Table = sentence.table
            head = sentence.settings
        elif sentence is not None and sentence.scores:
            names, rank = pretrained.names(), sentence.settings.rank
            family, (fields, table, head) = score_of(
                config, family, generator, names, sentence.scores, rank
            )
        elif (classifier := family.classifier(config)) is not None:
            fields, table, head = classifier
        else:
            return family, shape, None
        shape = replace(shape, **fields)
        return replace(family, table={**family.table, **table}), shape, head
    except UsageError as error:
        raise InputError(f"{config.path}: {error}") from error


def _end_outputs(
    pretrained: PretrainedFolder, tokenizer: AnyTokenizer, ends: list[int]
) -> list[str]:
    """Gives the tokenizer its further end tokens; returns notes on their origin."""
    notes, generation = [], pretrained.generation
    if not ends:
        ends = [tokenizer.special.eos_id]
        notes = [f"no eos_token_id in {CONFIG}: outputs end with {ends[0]}, the tokenizer's"]
    elif generation.path.exists() and generation.get("eos_token_id") is None:
        notes = [f"no eos_token_id in {GENERATION}: outputs end with eos_token_id of {CONFIG}"]
    tokenizer.special = replace(tokenizer.special, more_ends=tuple(ends[1:]))
    return notes


def _with_cuts(
    pretrained: PretrainedFolder,
    shape: ModelConfig,
    special: SpecialTokens,
    sentence: SentenceModules | None,
) -> SpecialTokens:
    """Adds how `truncation=True` of transformers cuts texts; sentence-transformers has a length."""
    settings, sides = pretrained.tokenizer, {"left": True, "right": False}
    usual = pretrained.in_force["truncation_side"]
    longest = settings.number("model_max_length", settings.number("max_len", MOST))
    if longest < (least := 1 + pretrained.padded):
        settings.refuse("model_max_length", longest, f"at least {least}")
    unlimited = sentence is not None or longest >= shape.max_positions
    return replace(
        special,
        longest=0 if unlimited else int(longest) - pretrained.padded,
        keeps_end=settings.choice("truncation_side", sides, usual),
    )


def _look_alikes(tokenizer: AnyTokenizer) -> list[str]:
    """Returns a note on texts that transformers reads as special tokens."""
    alike = ", ".join(sorted(tokenizer.special_texts(), key=len)[:3])
    note = (
        f"texts such as {alike} are read as text, where transformers reads special tokens; "
        "`run --special-tokens as-tokens` reads these too"
    )
    return [note] if alike else []


def _unknown_ends(pretrained: PretrainedFolder) -> list[str]:
    """Returns notes on end tokens that are no tokens."""
    notes = []
    for settings in (pretrained.config, pretrained.generation):
        found = settings.get("eos_token_id", [])
        listed = found if isinstance(found, list) else [found]
        if left := [each for each in listed if not 0 <= each < pretrained.size]:
            named = ", ".join(map(str, left))
            notes.append(f"{settings.path.name}: eos_token_id {named} left out, being no token")
    return notes


def _without_effect(
    folder: Path,
    pretrained: PretrainedFolder,
    sentence: SentenceModules | None,
    shape: ModelConfig,
    ignored: frozenset[str],
) -> list[str]:
    """Returns lines on the settings that change no answer, and on those that the user ignores."""
    files = [] if sentence is None else list(sentence.files)
    files += [(CONFIG, pretrained.config), (TOKENIZER_CONFIG, pretrained.tokenizer)]
    files += [(SPECIAL_TOKENS, pretrained.special_tokens)]
    files += [(GENERATION, pretrained.generation)] * bool(shape.decoder_layers)
    lines, unknown = [], set(ignored)
    for name, settings in files:
        found, place = judge(name, settings), os.path.relpath(settings.path, folder)
        if found:
            lines.append(f"{place}, without effect on answers: {'; '.join(found)}")
        if settings.ignored:
            named = ", ".join(f"{key} {short(value)}" for key, value in settings.ignored.items())
            lines.append(f"{place}, ignored by --ignore-setting: {named}")
        unknown -= settings.ignored.keys()
    if unknown:
        raise UsageError(
            f"--ignore-setting: expected settings of the folder, found {', '.join(sorted(unknown))}"
            ", which no file has; leave them out"
        )
    return lines


def _with_segments(
    family: Family, shape: ModelConfig, pretrained: PretrainedFolder, tokenizer: AnyTokenizer
) -> tuple[Family, ModelConfig]:
    """Adds segments to a model that was trained to tell the two texts of a pair apart."""
    kinds = pretrained.config.whole("type_vocab_size", 2) if family.segments else 0
    if kinds < 2 or not any(pretrained.segments):
        return family, shape
    special, found = tokenizer.special, pretrained.segments
    first = len(special.wrap(tokenizer.encode("a")))
    if (
        len(special.after) != 1
        or special.between != special.after
        or found != [0] * first + [1] * (len(found) - first)
    ):
        raise InputError(
            f"{pretrained.folder}: the tokenizer joins a pair as segments {found}, which cannot be "
            "imported; supported: each text with its end is a segment"
        )
    table = {**family.table, family.segments: "segment_embedding.weight"}
    shape = replace(shape, segments=kinds, segment_end=special.after[0])
    return replace(family, table=table), shape


def import_pretrained(
    folder: Path,
    out: Path,
    *,
    adapter: Path | None = None,
    ignored: Collection[str] = (),
    scores: Sequence[str] = (),
    force: bool = False,
    say: Callable[[str], None] = LOG.info,
    show: Callable[[str, int, int], None] = lambda *state: None,
    **card: str | None,
) -> None:
    """Imports a model as a checkpoint, which export accepts like a trained one.

    See `read_pretrained`. `show` is called for each tensor with the phase, the tensors done and the
    tensors in total; `card` are fields of ModelCard in place of those that the folder states.

    Raises:
        InputError: As `read_pretrained`; a tensor is not finite; or the disk is full.
        UsageError: `out` is not empty and `force` is off, or it holds anything but a checkpoint.
    """
    checkpoint_folder.check_folder(out, force=force)
    with staged_folder(out) as staged:  # before the long reading
        imported = read_pretrained(folder, adapter, ignored, scores)
        imported = replace(imported, card=read_card(folder).stating(**card))
        parts = imported.generation, imported.head, imported.card
        checkpoint.save_config(staged, imported.config, None, *parts)
        imported.tokenizer.save(staged)
        with tensor_writer(staged / checkpoint.WEIGHTS, imported.weights.shapes) as file:
            imported.weights.write(file, show)
        own: dict[str, Any] = {} if adapter is None else {"adapter": adapter}
        own |= {"ignore_setting": sorted(ignored)} if ignored else {}
        own |= {"score_tokens": ",".join(scores)} if scores else {}
        checkpoint_folder.remember(staged, {"huggingface": folder} | own)
        checkpoint_folder.check_folder(out, force=force)  # again, since the weights took their time
        replace_folder(staged, out)
    say(imported.to_text())


# --- Model card ----------------------------------------------------------------------------------

README = "README.md"
_FRONT = re.compile(rb"\s*---\r?\n(.*?)\r?\n---\s*(\n|\Z)", re.DOTALL)
_MOST = 1 << 20  # bytes of README.md that are read
_MOST_WORDS, _MOST_NAMES = 200, 1000
_CACHED = re.compile(r"models--(.+)")


def read_card(folder: Path) -> ModelCard:
    """Reads the card of a folder; a damaged one states nothing."""
    front = _front_matter(folder / README)
    repository, source = folder.resolve().name, ""
    revision = folder.absolute()
    if revision.parent.name == "snapshots" and (
        cached := _CACHED.fullmatch(revision.parent.parent.name)
    ):
        repository = cached[1].replace("--", "/")
        source = f"huggingface.co/{repository} at {revision.name}"[:_MOST_WORDS]
    base = _names(front.get("base_model"))
    licence = " ".join(_names(front.get("license")))
    if more := " ".join(_names(front.get("license_name")) + _names(front.get("license_link"))):
        licence = f"{licence}: {more}"
    return ModelCard(
        name=(*_names(front.get("model_name")), *_names(repository), "")[0],
        source=source or (f"made from {', '.join(base[:4])}" if base else ""),
        licence=licence[: 2 * _MOST_WORDS],
        languages=_names(front.get("language")),
        trained_on=_names(front.get("datasets")),
    )


def _front_matter(path: Path) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError:
        return {}
    try:
        with open_regular(path) as file:
            found = _FRONT.match(file.read(_MOST))
        # Untyped: the language "no" is no truth value.
        read = yaml.load(found[1], yaml.BaseLoader) if found else {}
    except (InputError, ValueError, RecursionError, TypeError, yaml.YAMLError):
        return {}
    return read if isinstance(read, dict) else {}


def _names(value: Any) -> tuple[str, ...]:
    """Returns the texts of a value, which may be one, a list, or a list of lists."""

    def each(found: Any, depth: int) -> Iterator[str]:
        if isinstance(found, str) and found.strip():
            # A name in a file system may hold bytes that are no text.
            yield " ".join(found.encode(errors="replace").decode().split())[:_MOST_WORDS]
        elif isinstance(found, list) and depth < 3:
            for one in found:
                yield from each(one, depth + 1)

    return tuple(dict.fromkeys(each(value, 0)))[:_MOST_NAMES]
