"""Files that users load beside another tool's graphs, compared with those of the reference.

Each group of files takes the place of the reference's in a folder of links, which `import` reads:
its tokenizer, labels, pooling and generation settings must be the reference's.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transferry.build_model.importing.huggingface.folder import TOKENIZER_CONFIG
from transferry.build_model.importing.huggingface.importer import read_pretrained
from transferry.build_model.importing.imported import Imported
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.documents import read_document
from transferry.runtime.io.folders import is_checkpoint, temporary_folder
from transferry.runtime.proof.report import Claim
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer, TextError

VOCABULARY = ("tokenizer.json", "vocab.*", "merges.txt", "*.model", "*.spm", "target_vocab.json")
CONFIG, GENERATION, LABELS = "config.json", "generation_config.json", ("id2label", "label2id")
# Files by name or pattern; a group is compared on its own.
GROUPS: Mapping[str, Sequence[str]] = {
    "tokenizer": (
        *VOCABULARY,
        *(TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"),
        "chat_template.jinja",
    ),
    # Older files have settings of generation in config.json.
    "labels and special tokens": (CONFIG, GENERATION),
    "sentence-transformers": (
        *("modules.json", "sentence_*_config.json", "config_sentence_transformers.json"),
        "[0-9]*_*/config.json",
    ),
    "preprocessor": ("preprocessor_config.json",),
}
MOST_SHOWN = 3
SPACED = "Is it 's ? No , it is n't !  Yes ."  # whose blanks some settings remove
REMEDY = "write it again"


@dataclass(frozen=True)
class Beside:
    """The files beside graphs, and the folder that they should agree with.

    Attributes:
        reference: A folder that `import` reads; None for a checkpoint.
        texts: Texts that both tokenizers encode, beside the vocabulary.
    """

    folder: Path
    reference: Path | None
    texts: Sequence[str] = ()

    @cached_property
    def examined(self) -> tuple[list[Claim], str]:
        """The claims of each group of files, and their coverage in words."""
        if self.reference is None:
            absent = "the reference is a checkpoint; name the folder that it was imported from"
            return [], f"graphs; not covered: {', '.join(GROUPS)} ({absent})"
        expected = read_pretrained(self.reference)
        claims, told, missing = [], ["graphs"], []
        for group, patterns in GROUPS.items():
            files = list(_matching(self.folder, patterns))
            if not files:
                missing.append(group)
                continue
            covered, problems = self._compared(group, files, expected)
            parts = {group: problems}
            if GENERATION in {path.name for path in files}:
                of_search = [each for each in problems if each.startswith("generation: ")]
                rest = [each for each in problems if each not in of_search]
                parts = {group: rest, "generation settings": of_search}
            for name, found in parts.items():
                shown = [*found[:MOST_SHOWN], *["..."][: len(found) - MOST_SHOWN]]
                claims.append(Claim(f"{name} beside the graphs", "; ".join(shown)))
                told.append(f"{name}: {len(found)} differ" if found else f"{name}: {covered}")
        return claims, "; ".join([*told, *([f"not covered: {', '.join(missing)}"] * bool(missing))])

    def contents(self) -> dict[str, bytes]:
        """Returns the content of each file, by its path in the folder."""
        files = (path for patterns in GROUPS.values() for path in _matching(self.folder, patterns))
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}

    def _compared(
        self, group: str, files: Sequence[Path], expected: Imported
    ) -> tuple[str, list[str]]:
        """Compares a group; returns the coverage in words, and the differences."""
        assert self.reference is not None
        if group == "preprocessor":
            ours = _settings(self.reference / files[0].name)
            return "equal", _differences(_settings(files[0]), ours, both=True)
        with temporary_folder() as made:
            overlay = made / "folder"
            _link(self.reference, overlay)
            _replace(overlay, self.folder, files)
            try:
                found = read_pretrained(overlay)
            except InputError as error:
                return "", [str(error).replace(str(overlay), str(self.folder))]
        problems = _differences(_facts(found), _facts(expected))
        if group == "labels and special tokens":
            theirs, ours = (_ids(each / CONFIG) for each in (self.folder, self.reference))
            problems += _differences(theirs, ours, both=True)
        if group != "tokenizer":
            return "equal", problems
        texts, first = compared_texts(found.tokenizer, expected.tokenizer, self.texts)
        return f"{texts:,} texts equal", [*first, *problems, *_lacked(found, expected)]


def beside_graphs(graphs: Path, reference: Path, texts: Sequence[str]) -> Beside:
    """Finds the files beside graphs, or beside their subfolder `onnx`."""
    folder = graphs if graphs.is_dir() else graphs.parent
    if folder.resolve().name == "onnx" and not (folder / CONFIG).exists():
        folder = folder.parent
    return Beside(folder, None if is_checkpoint(reference) else reference, texts)


def compared_texts(
    found: AnyTokenizer, expected: AnyTokenizer, texts: Sequence[str]
) -> tuple[int, list[str]]:
    """Encodes texts and the text of each token; returns their number and the differences.

    Tokenizers of one kind also decode each token, and read special tokens in texts from then on.
    """
    pieces = (expected.decode([token]) for token in range(expected.vocabulary_size))
    whole = [text for text in dict.fromkeys([*texts, *pieces]) if text]
    rows = zip(_encoded(found, whole), _encoded(expected, whole), strict=True)
    problems = []
    for number, (text, (ids, wanted)) in enumerate(zip(whole, rows, strict=True)):
        if ids != wanted:
            kind = f"text {number + 1}" if number < len(texts) else "token"
            problems.append(f"{kind} {text[:40]!r} is {ids[:8]}, the reference has {wanted[:8]}")
    if type(found) is type(expected):
        problems = [*_differences(_table(found), _table(expected)), *problems]
    return len(whole), problems


def _lacked(found: Imported, expected: Imported) -> list[str]:
    """Returns the notes on tokens without a row in the model that one of the two alone has."""
    ours, theirs = (
        {note for note in each.notes if "left out, since the model has" in note}
        for each in (found, expected)
    )
    return [*sorted(ours - theirs), *(f"the reference: {each}" for each in sorted(theirs - ours))]


def _table(tokenizer: AnyTokenizer) -> dict[str, Any]:
    """Returns the id of each token and its text, and how special tokens are read in texts."""
    size = tokenizer.vocabulary_size
    found: dict[str, Any] = {
        f"id of {piece!r}": token for piece, token in tokenizer.vocabulary().items()
    }
    found |= {f"text of id {token}": tokenizer.decode([token]) for token in range(size)}
    with suppress(TextError):
        found["decoded text"] = tokenizer.decode(tokenizer.encode_target(SPACED))
    with suppress(UsageError):  # a kind that knows none
        tokenizer.read_special_tokens()
    texts = [f"a {each} a{each}a" for each in tokenizer.special_texts()]
    return found | dict(zip(texts, _encoded(tokenizer, texts), strict=True))


def _encoded(tokenizer: AnyTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text; empty for a text that the tokenizer cannot encode."""
    try:
        return tokenizer.encode_batch(texts)
    except TextError:
        if len(texts) == 1:
            return [[]]
        half = len(texts) // 2
        return [*_encoded(tokenizer, texts[:half]), *_encoded(tokenizer, texts[half:])]


def _facts(imported: Imported) -> dict[str, Any]:
    """Settings that decide answers, by a name for people."""
    head = {} if imported.head is None else asdict(imported.head)
    generation = imported.generation | {
        name: value
        for name, value in imported.ignored.items()
        if not name.startswith(CONFIG)  # replaced by those of the other file
    }
    chat = imported.tokenizer.chat
    named = {} if chat is None else asdict(chat)
    return {
        **{f"model: {name}": value for name, value in asdict(imported.config).items()},
        **{f"head: {name}": value for name, value in head.items()},
        **{f"generation: {name}": value for name, value in generation.items()},
        **{f"special tokens: {k}": v for k, v in asdict(imported.tokenizer.special).items()},
        **{f"chat template: {name}": value for name, value in named.items()},
        **imported.in_force,
    }


def _ids(path: Path) -> dict[str, Any]:
    settings = _settings(path)
    return {k: v for k, v in settings.items() if k in LABELS or k.endswith("_token_id")}


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_document(path, dict[str, Any], REMEDY)


def _differences(
    found: Mapping[str, Any], expected: Mapping[str, Any], both: bool = False
) -> list[str]:
    """Describes each value that differs; with `both`, only of keys that both sides have."""
    names = [name for name in expected if name in found] if both else [*{**expected, **found}]
    return [
        f"{name} is {_short(found.get(name))}, the reference has {_short(expected.get(name))}"
        for name in names
        if found.get(name) != expected.get(name)
    ]


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:80]


def _matching(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(path for path in folder.glob(pattern) if path.is_file())


def _link(folder: Path, overlay: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            link = overlay / path.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())


def _replace(overlay: Path, folder: Path, files: Sequence[Path]) -> None:
    """Puts files of a folder in the place of the overlay's; a vocabulary replaces every other."""
    if any(path.match(pattern) for path in files for pattern in VOCABULARY):
        for path in _matching(overlay, VOCABULARY):
            path.unlink()
    for path in files:
        place = overlay / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        shutil.copyfile(path, place)
