"""Transformers that Marian trained: model.npz with its options, vocabularies beside it.

Names and formulas are those of github.com/marian-nmt/marian-dev, src/models/transformer.h. A target
begins with a zero vector in place of a token's embedding; here that is one more row of the
vocabulary, which no search may choose.
"""

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import tokenizers
import torch
from numpy.lib import format as npy
from torch import Tensor

from transferry.build_model.importing.formats.tensors import DAMAGED, Tensors, meta
from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.tables import Family, Move, Table, flat
from transferry.build_model.importing.huggingface.weights import convert_weights
from transferry.build_model.importing.imported import Imported
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.shape import Activation
from transferry.build_model.own.tokenizer import open_pieces
from transferry.runtime.errors import InputError, UsageError, from_extra
from transferry.runtime.io.arrays import ARCHIVE_FAULTS
from transferry.runtime.io.whole import open_regular, read_bytes
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer, SpecialTokens
from transferry.runtime.tokenizer.third_party import (
    HuggingFaceTokenizer,
    SentencePiecePair,
    SentencePieceTokenizer,
)

_ENDING = ".npy"


class ArrayFile(Tensors):
    """The arrays of an archive whose names do not begin with "special:", Marian's mark."""

    def __init__(self, path: Path) -> None:
        """Opens nothing yet."""
        self.origin, self._path = str(path), path

    @cached_property
    def shapes(self) -> Mapping[str, Tensor]:
        found: dict[str, Tensor] = {}
        with self._opened() as archive:
            for member in archive.namelist():
                if not member.startswith("special:"):
                    with archive.open(member) as file:
                        name = member.removesuffix(_ENDING)
                        found[name] = self._shape(name, file)
        return found

    def _shape(self, name: str, file: IO[bytes]) -> Tensor:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject or dtype.kind not in "fiub":
            raise InputError(f"{self._path}: expected numbers in {name}, found {dtype}; {DAMAGED}")
        return meta(shape, torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype)

    def read(self, name: str) -> Tensor:
        with self._opened() as archive, archive.open(name + _ENDING) as file:
            array = npy.read_array(file, allow_pickle=False)
        return torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))

    def text(self, name: str, most: int) -> str:
        """Returns a text that is stored as an array of its bytes, ended by a zero."""
        with self._opened() as archive:
            size = archive.getinfo(name + _ENDING).file_size
            if size > most:
                raise ValueError(f"{name} of {size:,} bytes")
            with archive.open(name + _ENDING) as file:
                content = npy.read_array(file, allow_pickle=False).tobytes()
        return content.rstrip(b"\0").decode(errors="replace")

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        with open_regular(self._path):
            pass
        try:
            with zipfile.ZipFile(self._path) as archive:
                yield archive
        except ARCHIVE_FAULTS as error:
            raise InputError(
                f"{self._path} is no whole .npz archive ({error}); {DAMAGED}"
            ) from error


END, UNKNOWN = "</s>", "<unk>"
OPTIONS = "special:model.yml"
_MOST_OPTIONS = 1 << 20
# Marian computes sinusoids of any position; ours are a table.
LONGEST = 1024
# Logit of the row that begins a target: of no weight beside any other, and small enough for every
# type of numbers.
NEVER = -100.0
_ACTIVATIONS: dict[str, Activation] = {"relu": "relu", "swish": "swish", "gelu": "gelu-quick"}
# Options that must have one value, where they are given.
_ONLY: dict[str, tuple[Any, ...]] = {
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-postprocess-emb": ("d", ""),
    "transformer-attention-mask": ("default",),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-tied-layers": ([],),
    "lemma-dim-emb": (0,),
    "lemma-dependency": ("",),
    "input-types": ([],),
    **dict.fromkeys(
        (
            *("right-left", "transformer-alibi-trainable", "transformer-no-affine", "ulr"),
            *("transformer-disable-position-embeddings", "transformer-no-bias"),
            *("transformer-no-projection", "transformer-pool"),
        ),
        (False,),
    ),
}
# Options that change nothing here: of the training, or of layers that are ruled out above.
_NOT_NEEDED = (
    *("transformer-aan-", "transformer-dim-aan", "transformer-dropout", "transformer-rnn-"),
    *("transformer-guided-alignment-layer", "transformer-depth-scaling", "transformer-flat"),
    *("transformer-train-position", "transformer-alibi-shift"),
)
_SEARCH = ("beam-size", "normalize", "word-penalty", "max-length-factor", "shortlist")


def read_marian(folder: Path) -> Imported:
    """Reads a folder with a Marian model, without the values of its tensors.

    Raises:
        InputError: A file is missing or damaged, or an option is unsupported.
        UsageError: The tokenizer's library, or PyYAML, is not installed.
    """
    decoding = _decoding(folder)
    path = _model(folder, decoding)
    arrays = ArrayFile(path)
    values = _yaml(arrays.text(OPTIONS, _MOST_OPTIONS), f"{path}: {OPTIONS}", typed=True)
    options = Settings(path, values)
    try:
        config = _shape(options, arrays, learned="Wpos" in arrays.shapes)
    except UsageError as error:
        raise InputError(f"{path}: {error}") from error
    tokenizer, unknown, note = _tokenizer(folder, options, decoding, config)
    start = config.vocabulary_size - 1
    suppress = (start,) if decoding.flag("allow-unk", False) else (unknown, start)
    family = Family("Marian", lambda settings, names: config, _table(config), (), _computed)
    return Imported(
        kind="marian",
        config=config,
        weights=convert_weights(family, config, arrays),
        tokenizer=tokenizer,
        generation={"suppress": tuple(sorted(suppress))},
        ignored={name: decoding.get(name) for name in _SEARCH if decoding.get(name) is not None},
        notes=[note] if note else [],
    )


def _decoding(folder: Path) -> Settings:
    """Options of marian-decoder, beside the model."""
    names = ["decoder.yml", *(path.name for path in sorted(folder.glob("*.decoder.yml")))]
    for path in (folder / name for name in names):
        if path.exists():
            content = read_bytes(path, _MOST_OPTIONS).decode(errors="replace")
            return Settings(path, _yaml(content, str(path), typed=True))
    return Settings(folder / names[0], {})


def _model(folder: Path, decoding: Settings) -> Path:
    named = decoding.get("models", [])
    if not isinstance(named, list) or len(named) > 1:
        decoding.refuse("models", named, "one model, not an ensemble")
    found = [folder / Path(str(name)).name for name in named] or sorted(
        path for path in folder.glob("*.npz") if not path.name.endswith(".optimizer.npz")
    )
    if (folder / "model.npz") in found:
        return folder / "model.npz"
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise InputError(f"{folder}: expected one model, found {names}; remove the others")
    return found[0]


def _shape(options: Settings, arrays: ArrayFile, *, learned: bool) -> ModelConfig:
    options.choice("type", {"transformer": None}, "")
    if "Wemb" not in arrays.shapes:
        raise InputError(f"{arrays.origin}: expected the tensor Wemb, found none")
    for name, supported in _ONLY.items():
        options.only(name, *supported)
    orders = [options.get(f"transformer-{name}", "") for name in ("preprocess", "postprocess")]
    # A residual is added ("a") after dropout ("d"), which nothing of is left; norms are "n".
    post = orders in (["", "dan"], ["", "an"])
    if not post and orders not in (["n", "da"], ["n", "a"]):
        orders_known = "'' with 'dan', or 'n' with 'da', in transformer-postprocess"
        options.refuse("transformer-preprocess", orders, orders_known)
    options.only("transformer-postprocess-top", *(("", "d") if post else ("", "n", "nd")))
    shared = [options.flag(f"tied-embeddings{kind}", False) for kind in ("-all", "-src")]
    if not any(shared):
        options.refuse("tied-embeddings-all", False, "true: one vocabulary for source and target")
    sizes = options.get("dim-vocabs")
    size = options.whole("transformer-dim-ffn")
    options.only("transformer-decoder-dim-ffn", 0, size)
    if not isinstance(sizes, list) or len(sizes) != 2 or sizes[0] != sizes[1]:
        options.refuse("dim-vocabs", sizes, "two equal sizes")
    heads = options.whole("transformer-heads")
    activation = options.choice("transformer-ffn-activation", _ACTIVATIONS, "swish")
    for name, value in options.unread().items():
        if name.startswith("transformer-") and not name.startswith(_NOT_NEEDED):
            options.refuse(name, value, "none")
    width = options.whole("dim-emb")
    return ModelConfig(
        vocabulary_size=arrays.shapes["Wemb"].shape[0] + 1,
        d_model=width,
        heads=heads,
        encoder_layers=options.whole("enc-depth"),
        decoder_layers=options.whole("dec-depth"),
        d_ff=size,
        max_positions=arrays.shapes["Wpos"].shape[0] if learned else LONGEST,
        norm_epsilon=1e-6,
        norm_order="post" if post else "pre",
        final_norm="n" in options.get("transformer-postprocess-top", ""),
        # A table, since sines come before cosines, and rates are in another proportion.
        positions="learned",
        activation=activation,
        tied=options.flag("tied-embeddings", False) or shared[0],
        scale_embedding=not learned,
        output_bias=True,
    )


def _turned(ours: str) -> Move:
    return Move((ours,), lambda tensor, config: (tensor.t(),), turned=True)


def _with_start(ours: str, *, turned: bool = False) -> Move:
    """One more row, with which a target begins, after those of the vocabulary."""

    def change(tensor: Tensor, config: ModelConfig) -> tuple[Tensor, ...]:
        rows = tensor.t() if turned else tensor
        return (torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))]),)

    return Move((ours,), change)


def _table(config: ModelConfig) -> Table:
    """Our tensors by Marian's names, which count layers from 1."""
    table: dict[str, str | Move] = {
        "Wemb": _with_start("embedding.weight"),
        "Wpos": "positions",
        "decoder_ff_logit_out_W": _with_start("output.weight", turned=True),
        "decoder_ff_logit_out_Wt": _with_start("output.weight"),
        "decoder_ff_logit_out_b": Move(
            ("output_bias",),
            lambda tensor, config: (torch.cat([tensor.flatten(), tensor.new_full((1,), NEVER)]),),
        ),
    }
    depths = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    suffix = "" if config.norm_order == "post" else "_pre"

    def norm(theirs: str, ours: str, suffix: str) -> None:
        table[f"{theirs}_ln_scale{suffix}"] = flat(f"{ours}.weight")
        table[f"{theirs}_ln_bias{suffix}"] = flat(f"{ours}.bias")

    def linear(theirs: str, letter: str, ours: str) -> None:
        table[f"{theirs}_W{letter}"] = _turned(f"{ours}.weight")
        table[f"{theirs}_b{letter}"] = flat(f"{ours}.bias")

    for stack, depth in depths.items():
        norm(f"{stack}_top", f"{stack}_norm", "")
        for number in range(depth):
            theirs, ours = f"{stack}_l{number + 1}", f"{stack}.{number}"
            for name, own in (("self", "self"), ("context", "cross"))[: 1 + (stack == "decoder")]:
                for letter, part in zip("qkvo", ("query", "key", "value", "output"), strict=True):
                    linear(f"{theirs}_{name}", letter, f"{ours}.{own}_attention.{part}")
                norm(f"{theirs}_{name}_Wo", f"{ours}.{own}_residual.norm", suffix)
            linear(f"{theirs}_ffn", "1", f"{ours}.feed_forward.inner")
            linear(f"{theirs}_ffn", "2", f"{ours}.feed_forward.outer")
            norm(f"{theirs}_ffn_ffn", f"{ours}.feed_forward_residual.norm", suffix)
    return table


def positions(length: int, width: int) -> Tensor:
    """Returns Marian's sinusoids [length, width], in float32 as it computes them.

    All sines come before all cosines, and rates fall from 1 to exactly 1 / 10000
    (SinusoidalPositionEmbeddings in src/tensors/cpu/tensor_operators.cpp).
    """
    pairs = np.float32(width / 2)
    step = np.log(np.float32(10000)) / (pairs - np.float32(1))
    rates = np.exp(np.arange(width // 2, dtype=np.float32) * -step)
    angles = np.arange(length, dtype=np.float32)[:, None] * rates
    return torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=1))


def _computed(config: ModelConfig) -> dict[str, Tensor]:
    bias = torch.zeros(config.vocabulary_size)  # with output-omit-bias
    bias[-1] = NEVER
    return {"positions": positions(config.max_positions, config.d_model), "output_bias": bias}


# --- vocabularies ---------------------------------------------------------------------------------


def _tokenizer(
    folder: Path, options: Settings, decoding: Settings, config: ModelConfig
) -> tuple[AnyTokenizer, int, str]:
    """Returns the tokenizer, the id of the unknown token, and a note for the user."""
    path = _vocabulary(folder, options, decoding)
    start = config.vocabulary_size - 1
    if path.suffix == ".spm":
        return _own_pieces(path, start)
    ids = _ids(path)
    if len(ids) != start:
        raise InputError(
            f"{path}: expected {start} tokens, as many as the embedding has rows, found "
            f"{len(ids)}; take both from one model"
        )
    if END not in ids or UNKNOWN not in ids:
        raise InputError(f"{path}: expected the tokens {END} and {UNKNOWN}, found other names")
    special = SpecialTokens(start, start, ids[END], after=(ids[END],))
    sides = [folder / f"{side}.spm" for side in ("source", "target")]
    if all(side.exists() for side in sides):
        contents = *map(read_bytes, sides), json.dumps(ids, ensure_ascii=False).encode()
        files = dict(zip(SentencePiecePair.names, contents, strict=True))
        try:
            return SentencePiecePair(files, special, start + 1), ids[UNKNOWN], ""
        except InputError as error:
            raise InputError(f"{folder}: {error}") from error
    if others := sorted(path.name for path in folder.glob("*.spm")):
        raise InputError(
            f"{folder}: expected source.spm and target.spm beside {path.name}, found "
            f"{', '.join(others)}; name them so, twice the same file if both languages share it"
        )
    words = {token: number for token, number in ids.items() if token != END}
    note = (
        f"tokenizer: tokens of {path.name} between blanks; give text that is split like the "
        "training data, as marian-decoder reads it"
    )
    return _split_at_blanks(words, special, start + 1), ids[UNKNOWN], note


def _split_at_blanks(
    ids: Mapping[str, int], special: SpecialTokens, size: int
) -> HuggingFaceTokenizer:
    """Returns a tokenizer of text whose tokens are separated by blanks already."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(ids), unk_token=UNKNOWN))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    files = dict.fromkeys(HuggingFaceTokenizer.names, made.to_str().encode())
    return HuggingFaceTokenizer(files, special, size)


def _vocabulary(folder: Path, options: Settings, decoding: Settings) -> Path:
    named = decoding.get("vocabs", options.get("vocabs", []))
    names = [Path(str(each)).name for each in named] if isinstance(named, list) else []
    found = [folder / name for name in names if (folder / name).exists()] or sorted(
        path for pattern in ("*vocab*.yml", "*vocab*.spm") for path in folder.glob(pattern)
    )
    if not found:
        raise InputError(
            f"{folder}: expected the vocabulary {names[0] if names else 'vocab.spm or vocab.yml'}, "
            "found none; copy it into the folder"
        )
    if any(read_bytes(path) != read_bytes(found[0]) for path in found[1:]):
        raise InputError(
            f"{folder}: expected one vocabulary for source and target, found "
            f"{' and '.join(path.name for path in found)} that differ; only shared ones can be "
            "imported"
        )
    if found[0].suffix not in (".spm", ".yml", ".yaml", ".json"):
        raise InputError(f"{found[0]}: expected a vocabulary of kind .spm or .yml, found another")
    return found[0]


def _own_pieces(path: Path, start: int) -> tuple[AnyTokenizer, int, str]:
    content, model = open_pieces(path)
    size, end, unknown = model.get_piece_size(), model.eos_id(), model.unk_id()
    if size != start or end < 0:
        raise InputError(
            f"{path}: expected {start} pieces, as many as the embedding has rows, with {END} among "
            f"them, found {size}; take both from one model"
        )
    special = SpecialTokens(start, start, end, after=(end,))
    files = dict.fromkeys(SentencePieceTokenizer.names, content)
    return SentencePieceTokenizer(files, special, start + 1), unknown, ""


def _ids(path: Path) -> dict[str, int]:
    # As texts all of them: "yes", "null" and "1" are words.
    found = _yaml(read_bytes(path).decode(errors="replace"), str(path), typed=False)
    try:
        ids = {token: int(number) for token, number in found.items()}
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: expected an id for each token ({error})") from error
    if sorted(ids.values()) != list(range(len(ids))):
        raise InputError(f"{path}: expected the ids 0 to {len(ids) - 1} once each, found others")
    return ids


def _yaml(content: str, origin: str, *, typed: bool) -> Mapping[str, Any]:
    """Reads a YAML mapping; untyped, every value is a text."""
    with from_extra("export", "models of Marian need PyYAML"):
        import yaml
    kinds = ("CSafeLoader", "SafeLoader") if typed else ("CBaseLoader", "BaseLoader")
    loader = getattr(yaml, kinds[0], None) or getattr(yaml, kinds[1])
    try:
        found = yaml.load(content, loader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{origin} is not YAML ({reason}); restore the file") from error
    if not isinstance(found, dict):
        raise InputError(f"{origin}: expected names and values, found {type(found).__name__}")
    return {str(name): value for name, value in found.items()}
