"""The tokenizer that AutoTokenizer of transformers 5 makes of a folder, as a tokenizer.json.

transformers does not always use tokenizer.json as it is: most classes take vocabulary, merges and
post-processor from it, set normalizer, pre-tokenizer and decoder themselves, and add the tokens of
tokenizer_config.json, special_tokens_map.json and added_tokens.json. So transformers makes the
tokenizer, and this module keeps the result.
"""

import dataclasses
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from msgspec import Meta
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors

from transferry.build_model.importing.huggingface.folder import (
    IN_FORCE,
    REMEDY,
    PretrainedFolder,
    Settings,
)
from transferry.runtime.errors import InputError, TransferryError, UsageError, install_command
from transferry.runtime.io.documents import read_document
from transferry.runtime.io.whole import MOST_BYTES, read_bytes
from transferry.runtime.tokenizer.special_tokens import panics_as_errors
from transferry.runtime.tokenizer.third_party import CLEANED, largest_id

TOKENIZER = "tokenizer.json"
COPY = "copy it from the model that this one was trained from, or download it again"
PARTS = (
    *("version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer"),
    *("post_processor", "decoder", "model"),
)
# The library makes a list of so many numbers; sixty times the largest vocabularies.
MOST_ID = 1 << 24
MOST_EXTRA = 1 << 16
ADDED_TOKENS = "added_tokens.json"
CLEAN_UP = "clean_up_tokenization_spaces"
# The class that uses tokenizer.json as it is, and the classes that set up a tokenizer themselves.
AS_IT_IS = "TokenizersBackend"
CLASSES = (
    *(AS_IT_IS, "GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "GemmaTokenizer"),
    *("LlamaTokenizer", "BertTokenizer", "DistilBertTokenizer", "MPNetTokenizer"),
    *("RobertaTokenizer", "XLMRobertaTokenizer", "T5Tokenizer", "PegasusTokenizer"),
    *("MBartTokenizer", "MBart50Tokenizer", "NllbTokenizer", "CamembertTokenizer"),
    *("DebertaV2Tokenizer", "DebertaTokenizer", "AlbertTokenizer"),
)
# Further names of these classes in folders.
SYNONYMS = (
    *("PreTrainedTokenizer", "PythonBackend", "BloomTokenizer", "MT5Tokenizer"),
    *("ElectraTokenizer", "BartTokenizer"),
)
# Classes that put a language around a text, which `vocabularies` does itself for these types.
OF_LANGUAGES = ("MBartTokenizer", "MBart50Tokenizer", "NllbTokenizer")
WITH_LANGUAGES = ("m2m_100", "mbart")
# Files that can become a tokenizer.json.
TABLES = ("*.model", "vocab.*", "merges.txt")
# Settings with an effect in every class.
READ = (
    *("tokenizer_class", "added_tokens_decoder", "extra_special_tokens", "model_input_names"),
    "split_special_tokens",
)
Ids = dict[str, Annotated[int, Meta(ge=0, le=MOST_ID)]]


@dataclass
class FastTokenizer:
    """A tokenizer of the library `tokenizers`.

    Attributes:
        content: Its tokenizer.json; that of the folder, byte for byte, where it is used as it is.
        named: Named special tokens, such as bos_token.
        segments: Whether its class numbers the segments of a pair of texts.
    """

    tokenizer: Any
    content: bytes
    named: dict[str, str]
    notes: list[str] = field(default_factory=list)
    segments: bool = False

    def id_of(self, name: str) -> int | None:
        """Returns the id of a named special token; None without one."""
        found: int | None = self.tokenizer.token_to_id(self.named.get(name, ""))
        return found

    def special(self) -> set[int]:
        """Returns the ids of all special tokens."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {token for token, each in added.items() if each.special}

    def below(self, size: int) -> Self:
        """Returns the tokenizer without the special tokens from an id on, which no text gives."""
        ids = self.tokenizer.get_vocab()
        beyond = [text for text in sorted(ids, key=ids.get) if ids[text] >= size]
        if not beyond:
            return self
        record = json.loads(self.tokenizer.to_str())
        kept = [each for each in record["added_tokens"] if each["id"] < size]
        made = None
        # Those that the vocabulary holds as well stay, and are refused.
        if {ids[text] for text in beyond} <= self.special():
            made = Tokenizer.from_str(json.dumps({**record, "added_tokens": kept}))
        if made is None or max((*made.get_vocab().values(), *made.encode("a").ids)) >= size:
            raise InputError(
                f"expected ids below vocab_size, {size}, found {ids[beyond[0]]} of the token "
                f"{beyond[0]!r}; give the model a row for it (resize_token_embeddings of "
                "transformers), or take both from one checkpoint"
            )
        note = f"{', '.join(beyond)} left out, since the model has {size} tokens"
        notes = [*self.notes, note]
        return dataclasses.replace(
            self, tokenizer=made, content=made.to_str().encode(), notes=notes
        )


def read_fast_tokenizer(pretrained: PretrainedFolder) -> FastTokenizer:
    """Makes the tokenizer of a folder.

    Raises:
        InputError: A file is missing or malformed, or names a class that is not supported.
        UsageError: transformers is not installed.
    """
    path = pretrained.folder / TOKENIZER
    content = read_bytes(path, MOST_BYTES) if path.exists() else None
    _check(pretrained)
    origin = str(path)
    if content is None:
        found = sorted(each for kind in TABLES for each in pretrained.folder.glob(kind))
        for each in found:
            read_bytes(each, MOST_BYTES)  # transformers reads a file of any size
        origin = f"{pretrained.folder} ({', '.join(each.name for each in found)})"
    try:
        with panics_as_errors():
            return _made(pretrained, content, origin)
    except TransferryError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        beside = f" or {pretrained.tokenizer.path.name}" * pretrained.tokenizer.path.exists()
        raise InputError(
            f"{origin}{beside}: expected a tokenizer that transformers reads, found something else "
            f"({reason}); {REMEDY}"
        ) from error


def _check(pretrained: PretrainedFolder) -> None:
    """Refuses settings that would run code, take all memory, or have no counterpart."""
    settings = pretrained.tokenizer
    if (found := settings.get("auto_map")) is not None:
        instead = "null; use the class of transformers itself: --ignore-setting auto_map"
        settings.refuse("auto_map", found, instead)
    settings.only("fix_mistral_regex", False)
    for name in ("extra_ids", "offset"):  # without marking them as read
        Settings(settings.path, settings.values).whole(name, 0, most=MOST_EXTRA)
    if settings.get("split_special_tokens"):
        pretrained.notes.append(
            "special tokens in a text are always split, those of a chat template never, whatever "
            "split_special_tokens says"
        )


def _made(pretrained: PretrainedFolder, content: bytes | None, origin: str) -> FastTokenizer:
    settings, record = pretrained.tokenizer, {}
    file = None
    if content is not None:
        path = pretrained.folder / TOKENIZER
        record = read_document(path, dict[str, Any], REMEDY, most=MOST_BYTES)
        if others := sorted(record.keys() - PARTS):
            raise InputError(
                f"{origin}: expected the parts {', '.join(PARTS)}, found {others[0]}; save the "
                "tokenizer with transformers"
            )
        if (largest := largest_id(content)) > MOST_ID:
            raise ValueError(f"the id {largest}")
        file = Tokenizer.from_buffer(content)
    if record.get("model", {}).get("dropout"):
        raise InputError(f"{origin}: dropout of merges gives random tokens; set it to null")
    theirs = _of_transformers(pretrained, file is None)
    name, made = type(theirs).__name__.removesuffix("Fast"), theirs.backend_tokenizer
    if name not in CLASSES:
        settings.refuse("tokenizer_class", name, ", ".join(CLASSES))
    _require_ids(pretrained, made, name, record, origin)
    # With a tokenizer.json, its post-processor counts instead.
    _mark_read(pretrained, theirs, ("add_bos_token", "add_eos_token") if file is None else ())
    if name != AS_IT_IS:
        made.no_truncation()
        made.no_padding()
    if name in OF_LANGUAGES and pretrained.config.get("model_type") in WITH_LANGUAGES:
        end = str(theirs.eos_token)
        made.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, made.token_to_id(end))]
        )
    segments = "token_type_ids" in theirs.model_input_names
    if name == AS_IT_IS and file is not None:
        _keep_special(made, file)
        _tell_unknown(pretrained, theirs, record["model"])
    notes = [] if file is None else _differences(made, file, name)
    pretrained.in_force = {name: getattr(theirs, name) for name in IN_FORCE}
    _clean_up(pretrained, made)
    _lower(pretrained, made)
    names = {key: str(text) for key, text in theirs._special_tokens_map.items() if text is not None}
    if file is not None and content is not None and made.to_str() == file.to_str():
        return FastTokenizer(made, content, names, segments=segments)
    return FastTokenizer(made, made.to_str().encode(), names, notes, segments)


def _needs_transformers(folder: Path, found: str) -> UsageError:
    command = install_command("import")
    return UsageError(
        f"{folder}: converting its tokenizer needs transformers 5, {found}; {command}"
    )


def _of_transformers(pretrained: PretrainedFolder, needs_table: bool) -> Any:
    """Returns the tokenizer of AutoTokenizer; without `needs_table` there is a tokenizer.json."""
    folder, settings, config = pretrained.folder, pretrained.tokenizer, pretrained.config
    try:
        import transformers
        from transformers.models.auto import tokenization_auto as auto
    except ImportError as error:
        raise _needs_transformers(folder, "which is not installed") from error
    if needs_table and int(transformers.__version__.partition(".")[0]) < 5:
        raise _needs_transformers(folder, f"found {transformers.__version__}")
    kind = str(config.get("model_type"))
    declared = settings.get("tokenizer_class", config.get("tokenizer_class"))
    if declared is not None and not isinstance(declared, str):
        settings.refuse("tokenizer_class", declared, ", ".join(CLASSES))
    if needs_table:
        name = (declared or auto.TOKENIZER_MAPPING_NAMES.get(kind) or AS_IT_IS).removesuffix("Fast")
        if name not in (*CLASSES, *SYNONYMS):
            settings.refuse("tokenizer_class", declared, ", ".join(CLASSES))
        found = auto.tokenizer_class_from_name(name)
        files = getattr(found, "vocab_files_names", {"tokenizer_file": TOKENIZER})
        tables = [file for key, file in files.items() if key != "tokenizer_file"]
        if not tables or name.startswith("Nllb"):  # its languages would get ids of other ones
            require_files(folder, TOKENIZER)
        require_files(folder, *tables, instead=f"{TOKENIZER} or ")
        if "vocab.json" in tables:
            read_document(folder / "vocab.json", Ids, REMEDY, most=MOST_BYTES)
    shape = transformers.AutoConfig.for_model(kind, tokenizer_class=config.get("tokenizer_class"))
    with _silent(transformers):
        return transformers.AutoTokenizer.from_pretrained(
            folder, config=shape, local_files_only=True, trust_remote_code=False
        )


@contextmanager
def _silent(transformers: Any) -> Iterator[None]:
    """Meanwhile transformers logs errors alone."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


def require_files(folder: Path, *names: str, instead: str = "") -> None:
    """Raises InputError if a tokenizer's files are not all there; `instead` names another."""
    if missing := [name for name in names if not (folder / name).exists()]:
        raise InputError(
            f"{folder}: expected the tokenizer in {instead}{' and '.join(names)}, found no "
            f"{missing[0]}; {COPY}"
        )


def _require_ids(
    pretrained: PretrainedFolder, made: Any, name: str, record: dict[str, Any], origin: str
) -> None:
    """Refuses added tokens to which the class gives other ids than the folder says."""
    listed = added_tokens(pretrained)
    if pretrained.tokenizer.get("added_tokens_decoder") is None:
        listed += [(each["content"], each["id"]) for each in record.get("added_tokens", [])]
    for text, token in listed:
        if (found := made.token_to_id(text)) != token:
            raise InputError(
                f"{origin}: expected the id {token} for the added token {text!r}, but {name} of "
                f"transformers gives it {found}; save the tokenizer with transformers"
            )


def added_tokens(pretrained: PretrainedFolder) -> list[tuple[str, int]]:
    """Returns text and id of the tokens that a folder adds outside of tokenizer.json."""
    listed = pretrained.tokenizer.get("added_tokens_decoder")
    if isinstance(listed, dict):
        return [(each["content"], int(token)) for token, each in listed.items()]
    path = pretrained.folder / ADDED_TOKENS
    return list(read_document(path, Ids, REMEDY).items()) if path.exists() else []


def _mark_read(pretrained: PretrainedFolder, theirs: Any, also: tuple[str, ...]) -> None:
    """Marks the settings that the class of a tokenizer follows, so that the rest is reported."""
    settings, others = pretrained.tokenizer, pretrained.special_tokens
    own = inspect.signature(type(theirs).__init__).parameters.keys() - {"errors"}
    for name, value in settings.values.items():
        is_token = name.endswith("_token") and type(value) is not bool
        if name in (*own, *READ, *also) or is_token:
            settings.get(name)
        if others.values.get(name) == value:
            others.get(name)
    if not settings.get("extra_special_tokens"):
        settings.get("additional_special_tokens")
    if settings.get("added_tokens_decoder") is None:  # else special_tokens_map.json is not read
        for name in others.values:
            others.get(name)


def _clean_up(pretrained: PretrainedFolder, made: Any) -> None:
    """Removes blanks before punctuation from the text of ids (`clean_up_tokenization`)."""
    settings, merged = pretrained.tokenizer, type(made.model).__name__ == "BPE"
    forced = settings.flag(f"{CLEAN_UP}_for_bpe_even_though_it_will_corrupt_output", False)
    if not settings.flag(CLEAN_UP, False) or (merged and not forced):
        return
    # Without a decoder pieces are joined by blanks, as if each began a word.
    joined = made.decoder or decoders.WordPiece("\0" * 9, cleanup=False)
    replaced = [decoders.Replace(found, content) for found, content in CLEANED]
    made.decoder = decoders.Sequence([joined, decoders.Fuse(), *replaced])


def _lower(pretrained: PretrainedFolder, made: Any) -> None:
    """Lower-cases texts first, as sentence-transformers does (`do_lower_case`)."""
    found = made.normalizer
    several = isinstance(found, normalizers.Sequence)
    each = list(found) if several else [] if found is None else [found]
    if pretrained.lower and not any(isinstance(one, normalizers.Lowercase) for one in each):
        made.normalizer = normalizers.Sequence([normalizers.Lowercase(), *each])


def _keep_special(made: Any, file: Any) -> None:
    """Gives special tokens of tokenizer.json the flags that the library keeps following.

    Read again with other flags, they stay special and are found in the text as before.
    """
    now = made.get_added_tokens_decoder()
    for token, each in file.get_added_tokens_decoder().items():
        if each.special:
            sides = {
                side: getattr(now[token], side) for side in ("single_word", "lstrip", "rstrip")
            }
            kept = AddedToken(each.content, special=True, normalized=each.normalized, **sides)
            made.add_special_tokens([kept])


def _tell_unknown(pretrained: PretrainedFolder, theirs: Any, model: dict[str, Any]) -> None:
    """Notes that the tokenizer of a tagger has an unknown token and transformers another."""
    named = model.get("unk_token")
    unknown = model.get("unk_id") if named is None else theirs.convert_tokens_to_ids(named)
    tags = "ForTokenClassification" in str(pretrained.config.values.get("architectures"))
    if tags and unknown not in (None, theirs.unk_token_id):
        pretrained.notes.append(
            "in tag --aggregation first, average and max an unknown token begins a word; in "
            "transformers it may continue one, until tokenizer_config.json has it as unk_token"
        )


def _differences(made: Any, file: Any, name: str) -> list[str]:
    """Describes the parts in which the class differs from tokenizer.json."""
    ours, theirs = json.loads(made.to_str()), json.loads(file.to_str())
    parts = ("normalizer", "pre_tokenizer", "decoder")
    differing = [part for part in parts if ours[part] != theirs[part]]
    if made.encode("").ids != file.encode("").ids:  # there are several forms of the same
        differing.append("post_processor")
    if not differing:
        return []
    return [f"{' and '.join(differing)} as {name} of transformers sets them, not {TOKENIZER}"]
