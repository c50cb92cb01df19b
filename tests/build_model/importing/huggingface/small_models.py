"""Small checkpoints of four types, as save_pretrained writes them."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.build_model.importing.huggingface.drawn import (
    REASON,
    exact,
    on_a_grid,
    randomise,
    tokenizers,
    transformers,
)
from tests.runtime.tokenizer import vocabularies
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.runtime.errors import UsageError
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer, load_tokenizer
from transferry.runtime.tokenizer.third_party import HuggingFaceTokenizer, SentencePieceTokenizer

spm = pytest.importorskip("sentencepiece", reason=REASON)

KINDS = ("marian", "gpt2", "llama", "bert")
CORPUS = [
    "Straße über Häuser läuft die Zeit",
    "日本語 のテキスト 東京",
    "hello world, this is a test of  double blanks",
    "Emoji 😀 👩‍👩‍👧‍👦 ok",
    "</s> <s> [MASK] [CLS] <|endoftext|> <pad> <unk>",
    "the cat sat on the mat, didn't it? 12345 67",
] * 20
TEXTS = [
    "Straße über die Häuser",
    "日本語 東京",
    "a  b   c ",
    "😀 👩‍👩‍👧‍👦",
    "</s> [MASK] <|endoftext|> <s>x</s> <pad> <unk> [SEP]",
    "",
    "\tTab\n line",
    "Ünïcode ﬁ Ａ e\u0301",
    "didn't they're 123",
    "x >>fra<< <<",
    "\u00a0nbsp \u2028 sep \ufeff",
]
LEADING_BLANKS = "  two blanks"
LINES = ["the cat sat on", "hello world, this is", "Straße über die", "日本語 東京 test", "ok"]
SIZES: dict[str, Any] = dict(
    hidden_size=32, num_attention_heads=4, intermediate_size=48, max_position_embeddings=64
)


sentencepiece_model = partial(vocabularies.sentencepiece_model, CORPUS)


def llama_pieces(**settings: Any) -> bytes:
    """A SentencePiece model of Llama's kind: BPE, bytes for unseen text."""
    settings |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    return sentencepiece_model(vocab_size=330, model_type="bpe", byte_fallback=True, **settings)


def marian_vocabulary(folder: Path) -> int:
    """source.spm, target.spm and vocab.json; the number of ids comes back, the last is <pad>."""
    pieces = ["</s>", "<unk>"]
    for name, kind in (("source", "unigram"), ("target", "bpe")):
        content = sentencepiece_model(vocab_size=110, model_type=kind)
        (folder / f"{name}.spm").write_bytes(content)
        model = spm.SentencePieceProcessor(model_proto=content)
        found = [model.id_to_piece(number) for number in range(3, model.get_piece_size())]
        pieces += [piece for piece in found if piece not in pieces]
    # A piece without an id, as SentencePiece models of Marian have them.
    del pieces[40]
    pieces += [">>fra<<", "<pad>"]
    ids = {piece: number for number, piece in enumerate(pieces)}
    (folder / "vocab.json").write_text(json.dumps(ids, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text('{"source_lang": "en", "target_lang": "de"}')
    return len(pieces)


def gpt2_vocabulary(folder: Path) -> int:
    """vocab.json and merges.txt; the number of ids comes back, the last is <|endoftext|>."""
    vocabularies.byte_level(CORPUS, 330).model.save(str(folder))
    ids = json.loads((folder / "vocab.json").read_text())
    ids["<|endoftext|>"] = len(ids)
    (folder / "vocab.json").write_text(json.dumps(ids))
    return len(ids)


def llama_vocabulary(folder: Path) -> int:
    """tokenizer.model and tokenizer.json of Llama's kind."""
    (folder / "tokenizer.model").write_bytes(llama_pieces())
    # As Llama's own folder says it.
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true, "add_eos_token": false}'
    )
    theirs = transformers.LlamaTokenizer.from_pretrained(folder)
    theirs.save_pretrained(folder)
    return len(theirs)


def bert_vocabulary(folder: Path) -> int:
    """vocab.txt, and no word on lower case, which is lower case."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    ids = made.get_vocab()
    lines = "".join(f"{token}\n" for token in sorted(ids, key=ids.__getitem__))
    (folder / "vocab.txt").write_text(lines, encoding="utf-8")
    return len(ids)


def marian_model(size: int, depth: int = 2, **changes: Any) -> Any:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": depth, "attention_heads": 4, "ffn_dim": 48}.items()
    }
    tokens = {"pad_token_id": size - 1, "decoder_start_token_id": size - 1, "eos_token_id": 0}
    shape = dict(d_model=32, max_position_embeddings=64, scale_embedding=True)
    options = dict(activation_function="swish", forced_eos_token_id=None)
    config = transformers.MarianConfig(
        vocab_size=size, **{**shape, **sides, **options, **tokens, **changes}
    )
    model = transformers.MarianMTModel(config)
    model.generation_config.bad_words_ids = [[config.pad_token_id]]
    return model


def gpt2_model(size: int, depth: int = 2) -> Any:
    shape = dict(n_embd=32, n_layer=depth, n_head=4, n_positions=64)
    end = dict(bos_token_id=size - 1, eos_token_id=size - 1)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=size, **shape, **end))


def llama_model(size: int, depth: int = 2, **changes: Any) -> Any:
    shape = {**SIZES, "num_hidden_layers": depth, "num_key_value_heads": 2, **changes}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=size, **shape))


def bert_model(size: int, depth: int = 2, kind: str = "BertForPreTraining") -> Any:
    config = transformers.BertConfig(vocab_size=size, num_hidden_layers=depth, **SIZES)
    return getattr(transformers, kind)(config)


VOCABULARIES: dict[str, Callable[[Path], int]] = {
    "marian": marian_vocabulary,
    "gpt2": gpt2_vocabulary,
    "llama": llama_vocabulary,
    "bert": bert_vocabulary,
}
MODELS: dict[str, Callable[..., Any]] = {
    "marian": marian_model,
    "gpt2": gpt2_model,
    "llama": llama_model,
    "bert": bert_model,
}
ENDS = {"marian": 0, "gpt2": -1, "llama": 2}


def randomise_ending(model: Any, kind: str) -> None:
    """Every weight, bias and norm becomes its own number, and outputs come to an end."""
    torch.manual_seed(5)
    randomise(model)
    with torch.no_grad():
        if kind == "marian":
            bias = on_a_grid(torch.randn_like(model.final_logits_bias))
            # A forbidden token would come all the time, and the end comes now and then.
            bias[0, -1], bias[0, 0] = 30.0, 6.0
            model.final_logits_bias.copy_(bias)
        elif kind in ENDS:
            output = model.get_output_embeddings().weight
            output[ENDS[kind]] *= {"gpt2": 8.0, "llama": 4.0}[kind]


def save(kind: str, folder: Path, model: Any = None) -> Any:
    """Writes a checkpoint of a small random model; the model in eval mode comes back."""
    folder.mkdir(exist_ok=True)
    size = VOCABULARIES[kind](folder)
    model = MODELS[kind](size) if model is None else model(size)
    randomise_ending(model, kind)
    model.eval().save_pretrained(folder)
    return model


def float64(kind: type[Any], folder: Path) -> Any:
    """A model of transformers in float64, its tables too."""
    read = kind.from_pretrained(folder).double()
    with exact():
        made = kind(read.config)
    made.load_state_dict(read.state_dict())
    made.generation_config = getattr(read, "generation_config", None)
    return made.double().eval()


class Made:
    """A checkpoint, its model, and the run that was made of it."""

    def __init__(self, kind: str, folder: Path, depth: int = 2) -> None:
        self.kind, self.folder, self.run = kind, folder / "theirs", folder / "run"
        self.model = save(kind, self.folder, lambda size: MODELS[kind](size, depth))
        self.said: list[str] = []
        import_pretrained(self.folder, self.run, say=self.said.append)


@contextlib.contextmanager
def edited(folder: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a checkpoint, to be changed."""
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors")


Makes = Callable[[str], Made]
Copies = Callable[[str], Path]


def require_their_tokens(ours: AnyTokenizer, theirs: Any, texts: Iterable[str]) -> None:
    """Ids of texts in which special tokens are text, and texts of these ids; and as tokens."""
    reads = type(ours)._restore(ours._settings(), ours.special, ours._contents())
    alone = isinstance(ours, SentencePieceTokenizer)
    with pytest.raises(UsageError) if alone else contextlib.nullcontext():
        reads.read_special_tokens()
    languages = set(ours.special.languages.values())
    for text in texts:
        wanted = theirs(text, split_special_tokens=True).input_ids
        assert ours.special.wrap(ours.encode(text)) == wanted, text
        written = [token for token in wanted if token not in languages]
        assert ours.decode(wanted) == theirs.decode(written, skip_special_tokens=True), text
        if alone:
            continue
        wanted = theirs(text, split_special_tokens=False).input_ids
        assert reads.special.wrap(reads.encode(text)) == wanted, text


def require_uncut(ours: AnyTokenizer) -> None:
    """The kept tokenizer.json neither cuts nor fills a text."""
    assert isinstance(ours, HuggingFaceTokenizer)
    (content,) = ours.files.values()
    record = json.loads(content)
    assert (record["truncation"], record["padding"]) == (None, None)


def require_saved(tokenizer: AnyTokenizer, folder: Path) -> AnyTokenizer:
    """Returns the tokenizer as a checkpoint or a bundle holds it."""
    (folder / "saved").mkdir()
    tokenizer.save(folder / "saved")
    loaded = load_tokenizer(folder / "saved")
    assert loaded == tokenizer
    return loaded


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
