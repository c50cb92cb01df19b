"""Tokenizers that a few texts train."""

import io
from collections.abc import Iterable, Sequence
from typing import Any


def byte_level(
    texts: Iterable[str],
    size: int,
    special: Sequence[str] = (),
    *,
    blank: bool = False,
    **model: Any,
) -> Any:
    """Byte-level BPE of `tokenizers` as GPT-2 has it, perhaps with a blank before each text."""
    import tokenizers

    bytewise = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    made.pre_tokenizer = bytewise(add_prefix_space=blank)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*special],
        initial_alphabet=bytewise.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def sentencepiece_model(texts: Iterable[str], **settings: Any) -> bytes:
    """A model of SentencePiece."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=written,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return written.getvalue()
