"""The bundle on disk: a folder that describes itself. The reader owns the contract.

    BUNDLE/
      manifest.json            everything below, with sha256 and size of every other file
      FOLDER/*.onnx            the graphs of a variant, or of several that share weights
      FOLDER/weights.bin       their weights, stored once and shared by the graphs
      tokenizer.json ...       the tokenizer: its settings, and the files of its kind
      reference.npz            inputs, and torch's answers to them

The runtime hard-codes no tensor name: each tensor of a graph has a role, and tensors of one role
are matched in the order in which the manifest lists them (the i-th present is the next step's i-th
past). See docs/bundle.md.
"""

import hashlib
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

from transferry.runtime.bundle.manifest import MANIFEST, REMEDY, Manifest
from transferry.runtime.bundle.specs import GraphSpec, Variant
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.documents import MOST_JSON
from transferry.runtime.io.folders import found_at
from transferry.runtime.io.sealed_folder import SealedFolder
from transferry.runtime.io.whole import read_bytes
from transferry.runtime.settings import path_of
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer, load_tokenizer
from transferry.runtime.tokenizer.chat import TEMPLATE_FILE


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files match its manifest.

    Attributes:
        folder: Its folder.
        manifest: The parsed manifest.
        tokenizer: Its tokenizer.
        files: The files that the manifest lists.
    """

    folder: Path
    manifest: Manifest
    tokenizer: AnyTokenizer
    opened: InitVar[tuple[SealedFolder, bytes] | None] = None
    files: SealedFolder = field(init=False, repr=False, compare=False)
    _content: bytes | None = field(init=False, repr=False, compare=False)

    def __post_init__(self, opened: tuple[SealedFolder, bytes] | None) -> None:
        """Takes the checked files and the text of the manifest, where `load` has read them."""
        files, content = opened or (SealedFolder(self.folder, self.manifest.files), None)
        object.__setattr__(self, "files", files)
        object.__setattr__(self, "_content", content)

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Opens a bundle and checks every file against the manifest.

        Raises:
            InputError: A file is missing, truncated, changed or unreadable, or the format version
                differs.
        """
        folder = path_of("folder", folder)
        content = read_manifest(folder)
        manifest = Manifest.from_json(content, str(folder / MANIFEST))
        files = SealedFolder(folder, manifest.files)
        files.check()
        tokenizer = load_tokenizer(folder, files.read)
        if tokenizer.vocabulary_size != (size := manifest.model["vocabulary_size"]):
            raise InputError(
                f"{folder}: expected a tokenizer of {size} ids as in {MANIFEST}, found "
                f"{tokenizer.vocabulary_size}; {REMEDY}"
            )
        return cls(folder, manifest, tokenizer, (files, content))

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks that the bundle can do."""
        if self.manifest.architecture != "encoder-only":
            return ["generate", "score"]
        head, found = self.manifest.head, ["embed"]
        if self.tokenizer.special.mask_id is not None:
            found.append("fill-mask")
        if head is not None and head.task != "embed":
            found.append(head.task)
            if head.task == "classify" and len(head.labels) == 1:
                found.append("rank")
        return found

    @property
    def embeds(self) -> bool:
        """Whether the model has a head that makes vectors of texts."""
        return self.manifest.head is not None and self.manifest.head.task == "embed"

    @property
    def extras(self) -> dict[str, str]:
        """Extras of the package that the bundle needs, and the tasks that need them."""
        library = getattr(self.tokenizer, "library", None)
        chat = {"chat": "chats"} if TEMPLATE_FILE in self.manifest.files else {}
        return ({library: "its tokenizer"} if library else {}) | chat

    @cached_property
    def sha256(self) -> str:
        """Hash of the manifest: of the text that was parsed, if the bundle was loaded."""
        content = self._content
        return hashlib.sha256(content or read_manifest(self.folder)).hexdigest()

    def variant(self, name: str | None = None) -> Variant:
        """Returns a variant by name, by default the first; raises UsageError for another name."""
        variants = self.manifest.variants
        if name is None:
            return next(iter(variants.values()))
        if name not in variants:
            raise UsageError(f"{self.folder} has no variant {name!r}; it has {', '.join(variants)}")
        return variants[name]

    def graph(self, spec: GraphSpec) -> Path:
        """Returns the path of a graph's file."""
        return self.folder / spec.file


def read_manifest(folder: Path) -> bytes:
    """Returns the bytes of a bundle's manifest; raises InputError for other folders."""
    if not (folder / MANIFEST).is_file():
        raise InputError(
            f"{folder}: expected a bundle, with the {MANIFEST} that `transferry export` wrote, "
            f"{found_at(folder)}"
        )
    return read_bytes(folder / MANIFEST, MOST_JSON)
