"""Tokenizers of checkpoints: byte-level BPE as tiktoken ranks, others unchanged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from transferry.build_model.config import ModelConfig
from transferry.build_model.huggingface.folder import Checkpoint
from transferry.build_model.vocabulary import byte_of_character
from transferry.runtime.errors import InputError
from transferry.runtime.files import read_bytes, read_object
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer, Tokenizer
from transferry.runtime.tokenizer.special_tokens import SpecialTokens
from transferry.runtime.tokenizer.third_party import (
    HuggingFaceTokenizer,
    SentencePiecePair,
    SentencePieceTokenizer,
    ThirdPartyTokenizer,
)

TOKENIZER = "tokenizer.json"

# Splits text into words as GPT-2 does (openai/gpt-2, src/encoder.py). The possessive quantifiers
# are tiktoken's: the same words, without overflowing the stack on a long run of blanks.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def marian_tokenizer(checkpoint: Checkpoint, config: ModelConfig) -> AnyTokenizer:
    """Two SentencePiece models and a table of ids."""
    checkpoint.tokenizer.only("separate_vocabs", False)
    eos = checkpoint.token("eos_token_id")
    special = SpecialTokens(
        pad_id=checkpoint.token("pad_token_id"),
        bos_id=checkpoint.token("decoder_start_token_id"),
        eos_id=eos,
        after=(eos,),
    )
    names = SentencePiecePair.names
    files = {name: read_bytes(checkpoint.folder / name) for name in names}
    return _third_party(SentencePiecePair, files, special, config, str(checkpoint.folder))


def gpt2_tokenizer(checkpoint: Checkpoint, config: ModelConfig) -> AnyTokenizer:
    """vocab.json and merges.txt, or their content in tokenizer.json, as tiktoken ranks."""
    vocabulary, merges = _gpt2_files(checkpoint)
    checkpoint.tokenizer.only("add_prefix_space", False)
    checkpoint.tokenizer.only("add_bos_token", False)
    ranks, first = ranks_of(vocabulary, merges, str(checkpoint.folder))
    eos = checkpoint.token("eos_token_id")
    special = SpecialTokens(
        pad_id=checkpoint.token("pad_token_id", eos),
        bos_id=checkpoint.token("bos_token_id", eos),
        eos_id=eos,
        after=(),
    )
    return Tokenizer("gpt2", GPT2_PATTERN, ranks, special=special, first_ordinary_id=first)


def _gpt2_files(checkpoint: Checkpoint) -> tuple[Mapping[str, int], Sequence[Sequence[str]]]:
    """Ids by token, and merges as pairs of tokens."""
    folder = checkpoint.folder
    if (folder / "vocab.json").exists() or not (folder / TOKENIZER).exists():
        lines = read_bytes(folder / "merges.txt").decode(errors="replace").splitlines()
        merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
        return read_object(folder / "vocab.json"), merges
    path = folder / TOKENIZER
    record = read_object(path)
    model, splitting = record.get("model") or {}, record.get("pre_tokenizer") or {}
    expected = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    found = {name: splitting.get(name, True) for name in expected}
    if model.get("type") != "BPE" or found != expected or record.get("normalizer"):
        raise InputError(
            f"{path}: expected GPT-2's byte-level BPE, found the model {model.get('type')!r} with "
            f"pre_tokenizer {json.dumps(splitting)} and normalizer "
            f"{json.dumps(record.get('normalizer'))}"
        )
    merges = [
        merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", [])
    ]
    return model.get("vocab", {}), merges


def ranks_of(
    vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]], origin: str
) -> tuple[dict[bytes, int], int]:
    """Converts ids and merges to tiktoken's ranks, if both split every text alike.

    tiktoken has no merges: it joins any two neighbours that form a token, lowest rank first. The
    result is the same if ids ascend in the order of the merges and every token is reached by its
    own merge; both are checked.

    Returns:
        The ranks, and the id of rank 0.

    Raises:
        InputError: tiktoken would split text differently.
    """
    byte_of = byte_of_character()
    order = [*byte_of, *("".join(merge) for merge in merges)]
    try:
        ids = [vocabulary[token] for token in order]
        tokens = [bytes(byte_of[character] for character in token) for token in order]
    except KeyError as error:
        raise InputError(
            f"{origin}: expected a vocabulary with all 256 bytes and a token for each merge, "
            f"found no {error}"
        ) from error
    first = min(ids)
    # The bytes may have any order, as long as they come first.
    if sorted(ids[:256]) + ids[256:] != list(range(first, first + len(ids))):
        raise InputError(
            f"{origin}: expected ids in the order of the merges, found another order; the ids "
            "cannot serve as ranks"
        )
    ranks = {token: number - first for token, number in zip(tokens, ids, strict=True)}
    for token, (left, right) in zip(tokens[256:], merges, strict=True):
        pieces = _joined(token, ranks)
        if [len(piece) for piece in pieces] != [len(left), len(right)]:
            raise InputError(
                f"{origin}: expected the merge {left} {right} to lead to its token, found {pieces} "
                "before; tiktoken would split text differently"
            )
    return ranks, first


def _joined(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """BPE of a token by the ranks below its own."""
    pieces = [token[place : place + 1] for place in range(len(token))]
    while True:
        pairs = [ranks.get(left + right, len(ranks)) for left, right in pairwise(pieces)]
        lowest = min(pairs, default=len(ranks))
        if lowest >= ranks[token]:
            return pieces
        place = pairs.index(lowest)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


def llama_tokenizer(checkpoint: Checkpoint, config: ModelConfig) -> AnyTokenizer:
    """tokenizer.json, or tokenizer.model if there is none."""
    eos = checkpoint.token("eos_token_id")
    bos = checkpoint.token("bos_token_id", eos)
    special = SpecialTokens(checkpoint.token("pad_token_id", eos), bos, eos, after=())
    path = checkpoint.folder / TOKENIZER
    if path.exists():
        return _unchanged(read_bytes(path), special, config, str(path))
    # transformers 5 ignores these two if there is a tokenizer.json.
    settings = checkpoint.tokenizer
    special = dataclasses.replace(
        special,
        before=(bos,) if settings.flag("add_bos_token", True) else (),
        after=(eos,) if settings.flag("add_eos_token", False) else (),
    )
    path = checkpoint.folder / "tokenizer.model"
    files = dict.fromkeys(SentencePieceTokenizer.names, read_bytes(path))
    return _third_party(SentencePieceTokenizer, files, special, config, str(path))


def bert_tokenizer(checkpoint: Checkpoint, config: ModelConfig) -> AnyTokenizer:
    """tokenizer.json, or one made from vocab.txt."""
    path = checkpoint.folder / TOKENIZER
    if path.exists():
        content = read_bytes(path)
        vocabulary = _vocabulary(content, str(path))
    else:
        path = checkpoint.folder / "vocab.txt"
        try:
            lines = read_bytes(path).decode().split("\n")
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 ({error}); restore the file") from error
        vocabulary = {line.removesuffix("\r"): number for number, line in enumerate(lines) if line}
        content = _word_piece(vocabulary, checkpoint)

    def token(name: str) -> int:
        value = checkpoint.tokenizer.get(f"{name}_token", f"[{name.upper()}]")
        text = value.get("content") if isinstance(value, dict) else value
        if text not in vocabulary:
            raise InputError(f"{path}: expected the {name} token {text!r}, found none")
        return vocabulary[text]

    special = SpecialTokens(
        pad_id=token("pad"),
        bos_id=token("cls"),
        eos_id=token("sep"),
        mask_id=token("mask") if config.output_transform else None,
        after=(),
    )
    return _unchanged(content, special, config, str(path))


def _word_piece(vocabulary: dict[str, int], checkpoint: Checkpoint) -> bytes:
    """The tokenizer.json that transformers makes from BERT's vocab.txt."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    settings = checkpoint.tokenizer
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.flag("do_lower_case", True),
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece("##")
    special = [f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")]
    made.add_special_tokens([token for token in special if token in vocabulary])
    ends = [(name, vocabulary[name]) for name in ("[SEP]", "[CLS]") if name in vocabulary]
    if len(ends) == 2:
        made.post_processor = processors.BertProcessing(*ends)
    return made.to_str().encode()


def _vocabulary(content: bytes, origin: str) -> dict[str, int]:
    import tokenizers

    try:
        return dict(tokenizers.Tokenizer.from_buffer(content).get_vocab())
    except ValueError as error:
        raise InputError(f"{origin} is not a tokenizer ({error}); restore the file") from error


def _unchanged(
    content: bytes, special: SpecialTokens, config: ModelConfig, origin: str
) -> AnyTokenizer:
    """A tokenizer.json; the tokens that it puts around a text are found by encoding one."""
    import tokenizers

    files = dict.fromkeys(HuggingFaceTokenizer.names, content)
    plain = _third_party(HuggingFaceTokenizer, files, special, config, origin).encode("a")
    found = tokenizers.Tokenizer.from_buffer(content)
    found.no_truncation()
    found.no_padding()
    whole = found.encode("a").ids
    for start in range(len(whole) - len(plain) + 1):
        end = start + len(plain)
        if plain and whole[start:end] == plain:
            before, after = tuple(whole[:start]), tuple(whole[end:])
            special = dataclasses.replace(special, before=before, after=after)
            return _third_party(HuggingFaceTokenizer, files, special, config, origin)
    raise InputError(
        f"{origin}: expected the tokens {plain} of 'a' within special tokens, found {whole}"
    )


def _third_party(
    kind: type[ThirdPartyTokenizer],
    files: Mapping[str, bytes],
    special: SpecialTokens,
    config: ModelConfig,
    origin: str,
) -> AnyTokenizer:
    try:
        return kind(files, special, config.vocabulary_size)
    except InputError as error:
        raise InputError(f"{origin}: {error}") from error


TOKENIZERS: Mapping[str, Callable[[Checkpoint, ModelConfig], AnyTokenizer]] = {
    "marian": marian_tokenizer,
    "gpt2": gpt2_tokenizer,
    "llama": llama_tokenizer,
    "bert": bert_tokenizer,
}
