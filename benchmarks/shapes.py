"""Makes the random models that benchmarks time, as folders of transformers, without a download.

    pip install ".[export,peers,tokenizers,sentencepiece]"
    python benchmarks/shapes.py SHAPE TEXT FOLDER [--layers N]
    transferry import FOLDER --out CHECKPOINT
    transferry export CHECKPOINT --out BUNDLE --variant cpu-fp32 --variant cpu-int8 --calibrate TEXT

SHAPE is one of:

    small     a BART of the size of preset small: 8 million
    llama     a Llama with 4 key-value heads and a vocabulary of 8,000: 100 million
    bert      BERT-base: 109 million
    minilm    all-MiniLM-L6-v2: 23 million

The tokenizer is trained on TEXT; where TEXT has too few different words, the remaining ids stand
for nothing. Weights are drawn as transformers initialises them, from a fixed seed. Speed does not
depend on their values; answers mean nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from sentences import read_sentences
from transferry.runtime.errors import TransferryError, require

VOCABULARY = 8000
BERT_VOCABULARY = 30522
# Of a generator: random weights end no answer, and `verify` reads each answer again at each token.
POSITIONS = 64


def small(layers: int = 3) -> Any:
    """Returns a BART of the size of preset small."""
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=256,
        **{f"{side}_layers": layers for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 1024 for side in ("encoder", "decoder")},
        max_position_embeddings=POSITIONS,
        forced_eos_token_id=None,
    )
    return transformers.BartForConditionalGeneration(config)


def llama(layers: int = 14) -> Any:
    """Returns a Llama of 12 query heads and 4 key-value heads."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=POSITIONS,
    )
    return transformers.LlamaForCausalLM(config)


def bert(layers: int = 12) -> Any:
    """Returns BERT-base."""
    config = transformers.BertConfig(vocab_size=BERT_VOCABULARY, num_hidden_layers=layers)
    return transformers.BertModel(config)


def minilm(layers: int = 6) -> Any:
    """Returns the shape of all-MiniLM-L6-v2."""
    config = transformers.BertConfig(
        vocab_size=BERT_VOCABULARY,
        hidden_size=384,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    return transformers.BertModel(config)


def write_bart_tokenizer(lines: Sequence[str], folder: Path) -> None:
    """Writes vocab.json and merges.txt, a byte-pair encoding."""
    import tokenizers

    trained = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(lines, VOCABULARY, special_tokens=special, show_progress=False)
    trained.save_model(str(folder))


def write_llama_tokenizer(lines: Sequence[str], folder: Path) -> None:
    """Writes tokenizer.model, a byte-pair encoding of SentencePiece."""
    import sentencepiece

    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            vocab_size=VOCABULARY,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    # Peers read tokenizer.json.
    transformers.LlamaTokenizer.from_pretrained(folder).save_pretrained(folder)


def write_bert_tokenizer(lines: Sequence[str], folder: Path) -> None:
    """Writes vocab.txt, filled with unused tokens as BERT's own is."""
    import tokenizers

    trained = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    trained.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=special, show_progress=False
    )
    trained.train_from_iterator(lines, trainer)
    ids = trained.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    tokens += [f"[unused{number}]" for number in range(BERT_VOCABULARY - len(tokens))]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")


SHAPES: dict[str, tuple[Callable[..., Any], Callable[[Sequence[str], Path], None]]] = {
    "small": (small, write_bart_tokenizer),
    "llama": (llama, write_llama_tokenizer),
    "bert": (bert, write_bert_tokenizer),
    "minilm": (minilm, write_bert_tokenizer),
}


def make(shape: str, lines: Sequence[str], folder: Path, layers: int | None = None) -> int:
    """Writes a model and its tokenizer; returns the number of parameters."""
    of_shape, write_tokenizer = SHAPES[shape]
    torch.manual_seed(0)
    model = of_shape() if layers is None else of_shape(layers)
    folder.mkdir(parents=True)
    write_tokenizer(lines, folder)
    model.eval().save_pretrained(folder)
    return int(model.num_parameters())


def main() -> None:
    """Makes a folder and prints what it holds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="by default those of the shape")
    arguments = parser.parse_args()
    try:
        require(not arguments.folder.exists(), "FOLDER", "a new folder", arguments.folder)
        require((arguments.layers or 1) > 0, "--layers", "at least 1", arguments.layers)
        lines = read_sentences(arguments.text)
        count = make(arguments.shape, lines, arguments.folder, arguments.layers)
    except TransferryError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    print(f"{arguments.folder}: shape {arguments.shape}, {count:,} parameters, random weights")


if __name__ == "__main__":
    main()
