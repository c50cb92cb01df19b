"""What is imported answers as transformers does, or is refused by name; nothing is half-written."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.build_model.importing.test_model_types import exact
from tests.commands import call, done
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.formats.tensors import HeldTensors
from transferry.build_model.importing.huggingface.encoder_decoder import marian_positions
from transferry.build_model.importing.huggingface.folder import PretrainedFolder, Settings
from transferry.build_model.importing.huggingface.importer import (
    FAMILIES,
    import_checkpoint,
    read_checkpoint,
)
from transferry.build_model.importing.huggingface.vocabularies import TOKENIZERS, ranks_of
from transferry.build_model.importing.huggingface.weights import convert_weights
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.train.vocabulary import byte_of_character
from transferry.export.torch_model import TorchDecoder
from transferry.runtime.bundle.specs import REFERENCE
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.proof.recorded import Reference
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer, load_tokenizer

REASON = "a test dependency, which is not installed: it is what the import is held against"
transformers = pytest.importorskip("transformers", reason=REASON)
spm = pytest.importorskip("sentencepiece", reason=REASON)
tokenizers = pytest.importorskip("tokenizers", reason=REASON)

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
SIZES = dict(hidden_size=32, num_attention_heads=4, intermediate_size=48)


# --- small checkpoints, as save_pretrained writes them -------------------------------------------


def sentencepiece_model(**settings: Any) -> bytes:
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return written.getvalue()


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
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = byte_level(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.model.save(str(folder))
    ids = json.loads((folder / "vocab.json").read_text())
    ids["<|endoftext|>"] = len(ids)
    (folder / "vocab.json").write_text(json.dumps(ids))
    return len(ids)


def llama_vocabulary(folder: Path) -> int:
    """tokenizer.json of Llama's kind: BPE of SentencePiece, bytes for what it has not seen."""
    model = sentencepiece_model(
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    (folder / "tokenizer.model").write_bytes(model)
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


def marian_model(size: int, depth: int = 2) -> Any:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": depth, "attention_heads": 4, "ffn_dim": 48}.items()
    }
    model = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=size,
            d_model=32,
            max_position_embeddings=64,
            activation_function="swish",
            scale_embedding=True,
            pad_token_id=size - 1,
            decoder_start_token_id=size - 1,
            eos_token_id=0,
            forced_eos_token_id=None,
            **sides,
        )
    )
    model.generation_config.bad_words_ids = [[size - 1]]
    return model


def gpt2_model(size: int, depth: int = 2) -> Any:
    shape = dict(n_embd=32, n_layer=depth, n_head=4, n_positions=64)
    end = dict(bos_token_id=size - 1, eos_token_id=size - 1)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=size, **shape, **end))


def llama_model(size: int, depth: int = 2, **changes: Any) -> Any:
    shape = {
        **SIZES,
        "num_hidden_layers": depth,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        **changes,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=size, **shape))


def bert_model(size: int, depth: int = 2, kind: str = "BertForPreTraining") -> Any:
    shape = {**SIZES, "num_hidden_layers": depth, "max_position_embeddings": 64}
    config = transformers.BertConfig(vocab_size=size, **shape)
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


def on_a_grid(tensor: Tensor) -> Tensor:
    """Multiples of 2^-10, so that the sum of two rows of BERT's embeddings is no rounded number."""
    return (tensor * 1024).round() / 1024


def randomise(model: Any, kind: str) -> None:
    """Every weight, bias and norm becomes its own number, and outputs come to an end."""
    torch.manual_seed(5)
    tables = [module for module in model.modules() if "Sinusoidal" in type(module).__name__]
    kept = {id(module.weight) for module in tables}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in kept:
                continue
            centre = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            parameter.copy_(on_a_grid(centre + 0.3 * torch.randn_like(parameter)))
        if kind == "marian":
            bias = on_a_grid(torch.randn_like(model.final_logits_bias))
            # What must not come would come all the time, and the end comes now and then.
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
    randomise(model, kind)
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
        import_checkpoint(self.folder, self.run, say=self.said.append)

    def theirs(self) -> Any:
        """The model as transformers reads it, in float64."""
        return float64(type(self.model), self.folder)

    def ours(self) -> Transformer:
        return load_checkpoint(self.run).model.double()

    def sources(self) -> list[list[int]]:
        """What the model reads of lines of unequal length."""
        tokenizer = load_tokenizer(self.run)
        return [tokenizer.special.wrap(tokenizer.encode(line)) for line in LINES]


@contextlib.contextmanager
def edited(folder: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a checkpoint, to be changed."""
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors")


Makes = Callable[[str], Made]
Copies = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Makes:
    """Checkpoints and runs by type, each made once. Copy before changing anything."""
    cache: dict[str, Made] = {}

    def make(kind: str) -> Made:
        if kind not in cache:
            cache[kind] = Made(kind, tmp_path_factory.mktemp(kind))
        return cache[kind]

    return make


def require_equal(ours: Tensor, theirs: Tensor) -> None:
    """To 1e-9 of the largest, in float64."""
    assert ours.dtype == theirs.dtype == torch.float64
    assert ours.shape == theirs.shape
    assert theirs.abs().max() > 0.1
    assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max()


# --- numbers and tokens ---------------------------------------------------------------------------


@torch.inference_mode()
def require_same_logits(ours: Transformer, theirs: Any) -> None:
    size, architecture = ours.config.vocabulary_size, ours.config.architecture
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(size, (3, 11), generator=generator)
    target = torch.randint(size, (3, 9), generator=generator)
    mask = torch.arange(11) < torch.tensor([11, 6, 1])[:, None]

    def read(*inputs: Tensor, **options: Any) -> Any:
        with exact():
            return theirs(*inputs, **options)

    if architecture == "decoder-only":
        nothing = source[:, :0]
        require_equal(ours(nothing, nothing.bool(), source), read(source).logits)
        return
    if architecture == "encoder-only":
        found = read(source, attention_mask=mask.long(), output_hidden_states=True)
        require_equal(ours.encode(source, mask)[mask], found.hidden_states[-1][mask])
        scores = found.prediction_logits if "prediction_logits" in found else found.logits
        require_equal(ours(source, mask, source)[mask], scores[mask])
        return
    found = read(source, attention_mask=mask.long(), decoder_input_ids=target)
    require_equal(ours(source, mask, target), found.logits)


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_theirs(kind: str, made: Makes) -> None:
    require_same_logits(made(kind).ours(), made(kind).theirs())


VARIATIONS = {
    "llama, tied, a base of its own": (
        "llama",
        lambda size: llama_model(
            size,
            tie_word_embeddings=True,
            num_key_value_heads=1,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
    ),
    "bert, the head alone": ("bert", lambda size: bert_model(size, kind="BertForMaskedLM")),
    "gpt2, untied": (
        "gpt2",
        lambda size: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                **dict(vocab_size=size, n_embd=32, n_layer=1, n_head=4, n_positions=64),
                **dict(n_inner=40, activation_function="relu", tie_word_embeddings=False),
                **dict(bos_token_id=size - 1, eos_token_id=size - 1),
            )
        ),
    ),
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_the_logits_of_variations_are_theirs(name: str, tmp_path: Path) -> None:
    kind, make = VARIATIONS[name]
    model = save(kind, tmp_path / "theirs", make)
    import_checkpoint(tmp_path / "theirs", tmp_path / "run")
    theirs = float64(type(model), tmp_path / "theirs")
    require_same_logits(load_checkpoint(tmp_path / "run").model.double(), theirs)


@torch.inference_mode()
def generate(model: Any, sources: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """What transformers answers to each source, the tokens around the answer left out."""
    answers = []
    end = model.generation_config.eos_token_id
    for source in sources:
        prompt = torch.tensor([source])
        mask = torch.ones_like(prompt)
        found = model.generate(prompt, attention_mask=mask, do_sample=False, **options)[0].tolist()
        answer = found[1:] if model.config.is_encoder_decoder else found[len(source) :]
        answers.append(answer[: answer.index(end)] if end in answer else answer)
    return answers


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("kind", ["marian", "gpt2", "llama"])
def test_greedy_and_beam_search_give_their_tokens(kind: str, beam: int, made: Makes) -> None:
    run, sources = load_checkpoint(made(kind).run), made(kind).sources()
    assert len(set(map(len, sources))) > 1
    early = {"early_stopping": True} if beam > 1 else {}
    theirs = made(kind).theirs()
    with exact():
        wanted = generate(theirs, sources, num_beams=beam, max_new_tokens=14, **early)
    suppress = tuple(run.generation.get("suppress", ()))
    options = GenerationOptions(beam=beam, max_length=14, suppress=suppress)
    found = search(TorchDecoder.oracle(run.model), sources, options, run.tokenizer.special)
    assert [list(row[0].tokens) for row in found] == wanted
    # Neither all the same nor all cut off.
    assert len(set(map(tuple, wanted))) > 1
    assert {len(answer) < 14 for answer in wanted} == {True, False}


def test_the_position_table_is_theirs_number_by_number() -> None:
    kind = transformers.models.marian.modeling_marian.MarianSinusoidalPositionalEmbedding
    for length, width in ((512, 512), (40, 32)):
        config = ModelConfig(9, width, 4, 1, 1, 8, max_positions=length, positions="learned")
        assert torch.equal(
            marian_positions(config)["positions"], kind(length, width).create_weight()
        )


def test_a_position_table_of_the_file_is_taken(tmp_path: Path) -> None:
    """opus-mt checkpoints of older versions hold it, once for either side."""
    save("marian", tmp_path)
    table = on_a_grid(torch.randn(64, 32))
    with edited(tmp_path) as tensors:
        for side in ("encoder", "decoder"):
            tensors[f"model.{side}.embed_positions.weight"] = table.clone()
    converted = read_checkpoint(tmp_path).weights
    assert torch.equal(converted.state["positions"], table)
    assert converted.computed == {}
    with edited(tmp_path) as tensors:
        tensors["model.decoder.embed_positions.weight"] = table + 1
    converted = read_checkpoint(tmp_path).weights
    with pytest.raises(InputError, match=r"embed_positions.weight and .* differ"):
        converted.write({})


# --- how many there are ---------------------------------------------------------------------------


def published(kind: str, tmp_path: Path, **config: Any) -> ModelConfig:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **config}))
    return FAMILIES[kind].shape(Settings.read(path), set())


def nothing_of(shapes: dict[str, Tensor]) -> HeldTensors:
    """Tensors of a shape that take no memory."""
    return HeldTensors(shapes, "nothing")


def test_the_parameters_of_known_models_add_up(tmp_path: Path) -> None:
    gpt2 = dict(vocab_size=50257, n_embd=768, n_head=12, n_layer=12, n_positions=1024)
    config = published("gpt2", tmp_path, **gpt2)
    with torch.device("meta"):
        theirs = transformers.GPT2Model(transformers.GPT2Config()).state_dict()
    converted = convert_weights(FAMILIES["gpt2"], config, nothing_of(theirs), "gpt2")
    assert converted.parameters == 124_439_808
    assert converted.left_out == {}

    bert = dict(vocab_size=30522, hidden_size=768, num_attention_heads=12)
    config = published("bert", tmp_path, **bert, num_hidden_layers=12, intermediate_size=3072)
    with torch.device("meta"):
        theirs = transformers.BertModel(transformers.BertConfig()).state_dict()
    converted = convert_weights(FAMILIES["bert"], config, nothing_of(theirs), "bert")
    assert converted.left_out["pooler"] == 590_592
    assert sum(converted.left_out.values()) == 590_592 + 2 * 768
    assert converted.parameters + sum(converted.left_out.values()) == 109_482_240

    llama = dict(vocab_size=32000, hidden_size=4096, num_attention_heads=32)
    depth = dict(num_hidden_layers=32, intermediate_size=11008, max_position_embeddings=4096)
    config = published("llama", tmp_path, **llama, **depth, rms_norm_eps=1e-5)
    with torch.device("meta"):
        ours = Transformer(config)
    assert sum(parameter.numel() for parameter in ours.parameters()) == 6_738_415_616


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_imported_and_left_out_is_told(kind: str, made: Makes) -> None:
    (said,) = made(kind).said
    total = sum(parameter.numel() for parameter in made(kind).model.parameters())
    if kind == "marian":
        # Two tables of positions are theirs, as numbers that are not trained; the bias is ours.
        total += made(kind).model.final_logits_bias.numel() - 2 * 64 * 32
        assert f"computed: positions {64 * 32:,}\n" in said
        last = made(kind).model.config.vocab_size - 1
        defaults = f"early_stopping False, max_length 20, suppress ({last},)"
        assert f"generation defaults: {defaults}" in said
    assert f"{kind}, {load_checkpoint(made(kind).run).model.config.architecture}: " in said
    assert f" of {total:,} parameters\n" in f"{said}\n"
    if kind == "bert":
        assert "left out: token types (the first is in the positions) 64, " in said
        assert "pooler 1,056" in said
        assert "next-sentence head 66" in said
        assert f"imported {total - 64 - 1056 - 66:,} of" in said
    else:
        assert "left out" not in said


def test_tensors_are_counted_while_they_are_copied(made: Makes) -> None:
    weights = read_checkpoint(made("gpt2").folder).weights
    shown: list[tuple[str, int, int]] = []
    weights.write({}, lambda *state: shown.append(state))
    total = len(shown) - 1
    assert shown == [("copying tensors", number, total) for number in range(total + 1)]
    assert total > 20


def test_what_is_not_used_is_told(copied: Copies, tmp_path: Path) -> None:
    theirs, said = copied("llama"), list[str]()
    change(theirs / "config.json", attention_dropout=0.1, initializer_range=0.02, novelty="x" * 99)
    change(theirs / "tokenizer_config.json", model_max_length=512, sp_model_kwargs={}, added=None)
    import_checkpoint(theirs, tmp_path / "run", say=said.append)
    (line,) = [line for line in said[0].splitlines() if line.startswith("not used: ")]
    config, tokenizer = line.removeprefix("not used: ").split("; tokenizer_config.json: ")
    assert {"attention_dropout 0.1", "initializer_range 0.02"} <= set(config.split(", "))
    assert f'novelty "{"x" * 39}…' in config
    assert "hidden_size" not in config
    assert "model_max_length 512" in tokenizer
    assert "sp_model_kwargs {}" in tokenizer
    assert "added null" not in tokenizer


# --- tokenizers -----------------------------------------------------------------------------------


def bert_cased(folder: Path) -> int:
    size = bert_vocabulary(folder)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    return size


def saved_anew(kind: str, make: Callable[[Path], int]) -> Callable[[Path], int]:
    """As transformers writes it today, tokenizer.json and nothing else."""

    def write(folder: Path) -> int:
        size = make(folder)
        theirs = getattr(transformers, kind).from_pretrained(folder)
        for path in folder.iterdir():
            path.unlink()
        theirs.save_pretrained(folder)
        assert {path.name for path in folder.iterdir()} == {
            "tokenizer.json",
            "tokenizer_config.json",
        }
        return size

    return write


def llama_sentencepiece(folder: Path) -> int:
    size = llama_vocabulary(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    return size


TOKENIZER_FILES: dict[str, tuple[str, str, Callable[[Path], int]]] = {
    "marian": ("marian", "MarianTokenizer", marian_vocabulary),
    "gpt2, vocab.json": ("gpt2", "GPT2Tokenizer", gpt2_vocabulary),
    "gpt2, tokenizer.json": (
        "gpt2",
        "GPT2Tokenizer",
        saved_anew("GPT2Tokenizer", gpt2_vocabulary),
    ),
    "llama, tokenizer.json": ("llama", "LlamaTokenizer", llama_vocabulary),
    "llama, tokenizer.model": ("llama", "LlamaTokenizer", llama_sentencepiece),
    "bert, vocab.txt": ("bert", "BertTokenizer", bert_vocabulary),
    "bert, vocab.txt, cased": ("bert", "BertTokenizer", bert_cased),
    "bert, tokenizer.json": ("bert", "BertTokenizer", saved_anew("BertTokenizer", bert_cased)),
}
# Ids in config.json; the last of the vocabulary is negative.
IDS: dict[str, dict[str, Any]] = {
    "marian": {"pad_token_id": -1, "decoder_start_token_id": -1, "eos_token_id": 0},
    "gpt2": {"eos_token_id": -1},
    "llama": {"bos_token_id": 1, "eos_token_id": [2]},
    "bert": {},
}


def imported_tokenizer(kind: str, make: Callable[[Path], int], folder: Path) -> AnyTokenizer:
    size = make(folder)
    ids = {name: size - 1 if value == -1 else value for name, value in IDS[kind].items()}
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **ids}))
    shape = ModelConfig(size, 8, 2, 1, 0, 8, architecture="encoder-only", output_transform=True)
    return TOKENIZERS[kind](PretrainedFolder(folder), shape)


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_text_becomes_their_ids_and_they_become_their_text(name: str, tmp_path: Path) -> None:
    kind, class_name, make = TOKENIZER_FILES[name]
    ours = imported_tokenizer(kind, make, tmp_path)
    theirs = getattr(transformers, class_name).from_pretrained(tmp_path)
    # SentencePiece puts a blank before a text that begins with one, as before any other; the
    # LlamaTokenizer of transformers 5 does not. The library that the model came with is followed.
    texts = TEXTS if name == "llama, tokenizer.model" else [*TEXTS, LEADING_BLANKS]
    for text in texts:
        wanted = theirs(text, split_special_tokens=True).input_ids
        ids = ours.special.wrap(ours.encode(text))
        assert ids == wanted, text
        assert ours.decode(ids) == theirs.decode(wanted, skip_special_tokens=True), text
        target = theirs(text_target=text, split_special_tokens=True).input_ids
        assert ours.special.wrap(ours.encode_target(text)) == target, text
    assert ours.encode_batch(texts) == [ours.encode(text) for text in texts]
    if name == "llama, tokenizer.model":
        assert ours.decode(ours.encode(LEADING_BLANKS)) == LEADING_BLANKS
    # Ids that stand for no text of the model.
    assert ours.decode([*ours.special.ids()]) == ""
    (tmp_path / "saved").mkdir()
    ours.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved") == ours
    assert ours.vocabulary_size == len(theirs)


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_no_text_becomes_a_special_token(name: str, tmp_path: Path) -> None:
    kind, class_name, make = TOKENIZER_FILES[name]
    ours = imported_tokenizer(kind, make, tmp_path)
    theirs = getattr(transformers, class_name).from_pretrained(tmp_path)
    special = {str(token) for token in theirs.all_special_tokens}
    assert special & {"</s>", "[MASK]", "<|endoftext|>"}
    # Unknown to SentencePiece, it would come out whole, and transformers takes that for the token.
    for token in [*special, "</s>"]:
        for text in (token, f"a{token}b", f"x {token} y"):
            assert not ours.special.ids().intersection(ours.encode(text)), text


def test_a_source_may_begin_with_its_language(tmp_path: Path) -> None:
    ours = imported_tokenizer("marian", marian_vocabulary, tmp_path)
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path)
    language = theirs.convert_tokens_to_ids(">>fra<<")
    assert ours.encode(">>fra<< hello") == theirs(">>fra<< hello").input_ids[:-1]
    assert ours.encode(">>fra<< hello")[0] == language
    assert language not in ours.encode_target(">>fra<< hello")
    # What is no language of the table is text, and transformers makes one unknown token of it.
    assert len(ours.encode(">>xyz<< hello")) > len(theirs(">>xyz<< hello").input_ids)


@pytest.mark.parametrize(
    ("said", "around"),
    [
        ({"add_bos_token": True}, ((1,), ())),
        ({"add_bos_token": False, "add_eos_token": True}, ((), (2,))),
        ({"add_bos_token": True, "add_eos_token": True}, ((1,), (2,))),
    ],
)
def test_llama_begins_and_ends_as_its_folder_says(
    said: dict[str, bool], around: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def write(folder: Path) -> int:
        size = llama_sentencepiece(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps(said))
        return size

    special = imported_tokenizer("llama", write, tmp_path).special
    assert (special.before, special.after) == around
    theirs = transformers.LlamaTokenizer.from_pretrained(tmp_path)
    assert special.wrap(theirs("ok", add_special_tokens=False).input_ids) == theirs("ok").input_ids


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> <s> $A </s>"])
def test_what_lies_around_a_text_is_seen_in_tokenizer_json(template: str, tmp_path: Path) -> None:
    llama_vocabulary(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    path = tmp_path / "tokenizer.json"
    found = tokenizers.Tokenizer.from_file(str(path))
    found.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    # What a training leaves behind must not cut or fill a text.
    found.enable_truncation(3)
    found.enable_padding(length=20)
    found.save(str(path))
    ours = imported_tokenizer("llama", lambda folder: found.get_vocab_size(), tmp_path)
    before, _, after = template.partition("$A")
    ids = {"<s>": 1, "</s>": 2}
    assert ours.special.before == tuple(ids[token] for token in before.split())
    assert ours.special.after == tuple(ids[token] for token in after.split())
    assert len(ours.encode("hello world, this is a test")) not in (3, 20)


BYTES = list(byte_of_character())


def vocabulary(*tokens: str, first: int = 0) -> dict[str, int]:
    return {token: number for number, token in enumerate([*BYTES, *tokens], start=first)}


def test_ids_in_the_order_of_merges_are_ranks() -> None:
    merges = [("b", "c"), ("a", "bc"), ("abc", "bc")]
    tokens = ["bc", "abc", "abcbc"]
    ranks, first = ranks_of(vocabulary(*tokens), merges, "x")
    assert first == 0
    assert [ranks[token.encode()] for token in tokens] == [256, 257, 258]
    assert ranks[b" "] == BYTES.index("Ġ")
    ranks, first = ranks_of(vocabulary(*tokens, first=7), merges, "x")
    assert (first, ranks[b"bc"]) == (7, 256)


@pytest.mark.parametrize(
    ("ids", "merges", "message"),
    [
        (vocabulary("bc", "ab"), [("a", "b"), ("b", "c")], "order of the merges"),
        (vocabulary("ab", "x", "bc"), [("a", "b"), ("b", "c")], "order of the merges"),
        # One token, two ways.
        (
            vocabulary("ab", "bc", "abc"),
            [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")],
            "order of the merges",
        ),
        # By ranks, "abc" would be reached through "bc", which is joined first, and is not.
        (vocabulary("bc", "ab", "abc"), [("b", "c"), ("a", "b"), ("ab", "c")], "merge ab c"),
        (vocabulary("ab"), [("a", "b"), ("b", "c")], "no 'bc'"),
        ({"a": 0, "b": 1, "ab": 2}, [("a", "b")], "all 256 bytes"),
    ],
)
def test_what_cannot_be_ranks_is_refused(
    ids: dict[str, int], merges: list[tuple[str, str]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ranks_of(ids, merges, "x")


# --- refusals -------------------------------------------------------------------------------------


@pytest.fixture
def copied(made: Makes, tmp_path: Path) -> Copies:
    """Copies a checkpoint, so that it may be changed."""
    return lambda kind: Path(shutil.copytree(made(kind).folder, tmp_path / "theirs"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("llama", "model_type", "mamba"),
        ("llama", "model_type", None),
        ("llama", "hidden_act", "mish"),
        ("llama", "attention_bias", "yes"),
        ("llama", "rope_parameters", [1]),
        ("llama", "quantization_config", {"bits": 4}),
        ("llama", "num_hidden_layers", "2"),
        ("llama", "rms_norm_eps", "small"),
        ("llama", "tie_word_embeddings", "no"),
        ("llama", "num_attention_heads", 0),
        ("gpt2", "activation_function", "tanh"),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "vocab_size", 99),
        ("bert", "hidden_act", "mish"),
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "is_decoder", True),
        ("bert", "add_cross_attention", True),
        ("marian", "decoder_vocab_size", 40),
        ("marian", "normalize_before", True),
        ("marian", "normalize_embedding", True),
        ("marian", "add_final_layer_norm", True),
        ("marian", "static_position_embeddings", False),
        ("marian", "activation_function", "tanh"),
    ],
)
def test_a_setting_is_refused_by_name(kind: str, name: str, value: Any, copied: Copies) -> None:
    theirs = copied(kind)
    change(theirs / "config.json", **{name: value})
    # A vocabulary that is too small lacks the end token first.
    told = {"num_attention_heads": "heads", "vocab_size": "eos_token_id"}.get(name, name)
    found = "" if value is None else re.escape(json.dumps(value))
    with pytest.raises(InputError, match=rf"config\.json: {told} (is|must be) .*{found}|'{value}'"):
        read_checkpoint(theirs)


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        ({"rope_type": "proportional"}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.0}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}, "mrope_section"),
        ({"type": "yarn", "factor": 2.0, "beta_fast": "fast"}, "beta_fast"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "short_factor"),
        ({"partial_rotary_factor": "all"}, "partial_rotary_factor"),
        ({"rope_theta": 0.5}, "partial_rotary_factor"),
    ],
)
def test_rotary_settings_are_refused_by_name(
    rope: dict[str, Any], name: str, copied: Copies
) -> None:
    theirs = copied("llama")
    change(theirs / "config.json", rope_parameters=rope)
    with pytest.raises(InputError, match=rf"config\.json: {name} (is|must be) "):
        read_checkpoint(theirs)


@pytest.mark.parametrize(
    ("kind", "file", "name", "value"),
    [
        ("marian", "generation_config.json", "bad_words_ids", [[3, 100_000]]),
        ("marian", "generation_config.json", "bad_words_ids", [[100_000]]),
        ("marian", "generation_config.json", "bad_words_ids", "pad"),
        ("llama", "generation_config.json", "bos_token_id", [1, 5]),
        ("gpt2", "tokenizer_config.json", "tokenizer_class", "CamembertTokenizer"),
        ("gpt2", "tokenizer_config.json", "auto_map", ["a.B", None]),
        ("llama", "tokenizer_config.json", "fix_mistral_regex", True),
    ],
)
def test_a_setting_of_another_file_is_refused_by_name(
    kind: str, file: str, name: str, value: Any, copied: Copies
) -> None:
    theirs = copied(kind)
    if not (theirs / file).exists():
        (theirs / file).write_text("{}")
    change(theirs / file, **{name: value})
    with pytest.raises(InputError, match=rf"{re.escape(file)}: {name} is .*supported: "):
        read_checkpoint(theirs)


def test_several_end_tokens_are_kept_in_their_order(copied: Copies, tmp_path: Path) -> None:
    theirs = copied("llama")
    change(theirs / "generation_config.json", eos_token_id=[7, 2, 7, 5])
    import_checkpoint(theirs, tmp_path / "run")
    special = load_tokenizer(tmp_path / "run").special
    assert (special.ends, special.ids() & {5}) == ((7, 2, 5), set())
    for ids, found in (([2, 10**6], "10{6}"), (10**6, "10{6}"), ([2, -1], "-1"), ([2, "x"], "'x'")):
        change(theirs / "generation_config.json", eos_token_id=ids)
        with pytest.raises(InputError, match=rf"eos_token_id must be .*, found {found}"):
            read_checkpoint(theirs)


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def rename(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name.replace("up_proj", "op_proj")] = tensors.pop(name)


def turn(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


def widen(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][None, None].clone()


def spoil(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"][3] = float("nan")


def pack(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.scales"] = torch.ones(4)
    tensors["model.layers.0.mlp.qweight"] = torch.ones(4, dtype=torch.int32)


def quantise(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)


def deepen(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.2.input_layernorm.weight"] = tensors["model.norm.weight"].clone()


def classify(tensors: dict[str, Tensor]) -> None:
    tensors["score.weight"] = tensors["model.norm.weight"].clone()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, r"the tensor layers\.1\.mlp\.up_proj\.weight is missing"),
        (rename, r"the tensor model\.layers\.1\.mlp\.op_proj\.weight is unknown"),
        (
            turn,
            r"layers\.0\.mlp\.up_proj\.weight .* must have the shape \[48, 32\]",
        ),
        (widen, r"model\.norm\.weight of shape \[1, 1, 32\] does not fit"),
        (quantise, r"found int8 in the tensor lm_head\.weight: they are quantised\. Import"),
        (pack, r"found the tensor model\.layers\.0\.mlp\.qweight: they are quantised\. Import"),
        (deepen, r"the tensor model\.layers\.2\.input_layernorm\.weight has no place"),
        (classify, r"the tensor score\.weight is unknown"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    damage: Callable[[dict[str, Tensor]], None], message: str, copied: Copies
) -> None:
    theirs = copied("llama")
    with edited(theirs) as tensors:
        damage(tensors)
    with pytest.raises(InputError, match=message):
        read_checkpoint(theirs)


def test_a_tensor_without_value_is_named_and_nothing_is_written(copied: Copies) -> None:
    theirs = copied("llama")
    with edited(theirs) as tensors:
        spoil(tensors)
    with pytest.raises(InputError, match=r"finite numbers in the tensor model\.norm\.weight"):
        import_checkpoint(theirs, theirs.parent / "run")
    assert listing(theirs.parent) == {"theirs", *(f"theirs/{name}" for name in listing(theirs))}


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_that_is_missing_is_named(kind: str, copied: Copies) -> None:
    theirs = copied(kind)
    whole = load_file(theirs / "model.safetensors")
    # A file may lack these; of BERT the first tells that there is a head.
    dispensable = ("cls.predictions.bias", "pooler", "seq_relationship", "final_logits_bias")
    for name in whole:
        if any(part in name for part in dispensable):
            continue
        save_file(
            {other: tensor for other, tensor in whole.items() if other != name},
            theirs / "model.safetensors",
        )
        known = re.escape(name.removeprefix(FAMILIES[kind].prefixes[0]))
        with pytest.raises(InputError, match=rf"the tensor {known}\b.* (is|are) missing"):
            read_checkpoint(theirs)


def test_an_output_that_is_not_the_embedding_is_refused(copied: Copies) -> None:
    theirs = copied("gpt2")
    with edited(theirs) as tensors:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    converted = read_checkpoint(theirs).weights
    with pytest.raises(InputError, match=r"lm_head\.weight .*differ|wte\.weight .*differ"):
        converted.write({})


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_what_older_versions_wrote_is_read(kind: str, copied: Copies, made: Makes) -> None:
    """Names without the prefix of a head, norms as gamma and beta, buffers, and tied copies."""
    theirs = copied(kind)
    wanted = read_checkpoint(made(kind).folder).weights.state
    with edited(theirs) as tensors:
        for name in list(tensors):
            old = name.removeprefix("transformer.")
            if "LayerNorm" in name:
                old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
                old = old.replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(name)
        if kind == "gpt2":
            tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
            tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
            # Of other types; no type reads these names.
            tensors["embeddings.position_ids"] = torch.arange(64)[None]
            tensors["layers.0.rotary_emb.inv_freq"] = torch.ones(2)
            tensors["lm_head.weight"] = tensors["wte.weight"].clone()
        else:
            tensors["bert.embeddings.position_ids"] = torch.arange(64)[None]
            tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    found = read_checkpoint(theirs).weights.state
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_kept_as_it_is(
    kind: str, dtype: torch.dtype, made: Makes, copied: Copies
) -> None:
    """The run takes half the room, and the model has the same numbers in float32."""
    theirs = copied(kind)
    copy.deepcopy(made(kind).model).to(dtype).save_pretrained(theirs)
    with edited(theirs) as tensors:
        assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    run = theirs.parent / "run"
    import_checkpoint(theirs, run)
    stored = load_file(run / "model.safetensors")
    # Sums and formulas are float32.
    own = {"bert": {"positions"}, "marian": {"positions"}}.get(kind, set())
    assert {name for name in stored if stored[name].dtype == torch.float32} == own
    state = load_checkpoint(run).model.state_dict()
    assert all(torch.equal(state[name], stored[name].float()) for name in state)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    size = (run / "model.safetensors").stat().st_size
    assert size < 0.6 * (made(kind).run / "model.safetensors").stat().st_size


def test_several_files_are_one_model(made: Makes, copied: Copies) -> None:
    theirs = copied("llama")
    (theirs / "model.safetensors").unlink()
    made("llama").model.save_pretrained(theirs, max_shard_size="30KB")
    shards = sorted(theirs.glob("model-*.safetensors"))
    assert len(shards) > 2
    found = read_checkpoint(theirs).weights.state
    wanted = read_checkpoint(made("llama").folder).weights.state
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    shards[1].unlink()
    with pytest.raises(InputError, match=f"{shards[1].name} is missing"):
        read_checkpoint(theirs)
    change(theirs / "model.safetensors.index.json", weight_map={"x": "../x.safetensors"})
    with pytest.raises(InputError, match=r"index.json: expected files of its own folder"):
        read_checkpoint(theirs)


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_refused(kept: float, copied: Copies) -> None:
    theirs = copied("llama")
    path = theirs / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(InputError, match=r"model\.safetensors is not a whole safetensors file"):
        read_checkpoint(theirs)


@pytest.mark.parametrize(
    ("kind", "file", "message"),
    [
        ("llama", "config.json", r"config\.json is missing"),
        ("llama", "model.safetensors", r"model\.safetensors is missing; .*pytorch_model\.bin"),
        ("marian", "target.spm", r"found no target\.spm; copy it from the model"),
        ("marian", "vocab.json", r"found no vocab\.json; copy it from the model"),
        (
            "gpt2",
            "merges.txt",
            r"tokenizer\.json or vocab\.json and merges\.txt, found no merges",
        ),
        ("bert", "vocab.txt", r"in tokenizer\.json or vocab\.txt, found no vocab\.txt; copy it"),
    ],
)
def test_a_missing_file_is_named(kind: str, file: str, message: str, copied: Copies) -> None:
    theirs = copied(kind)
    (theirs / file).unlink()
    with pytest.raises(InputError, match=message):
        read_checkpoint(theirs)


@pytest.mark.parametrize(
    ("kind", "file"),
    [("llama", "model.safetensors"), ("llama", "tokenizer.json"), ("marian", "source.spm")],
)
def test_a_pointer_of_git_lfs_is_refused(kind: str, file: str, copied: Copies) -> None:
    theirs = copied(kind)
    (theirs / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    with pytest.raises(InputError, match=rf"{re.escape(file)}: expected the file, .*git lfs pull"):
        read_checkpoint(theirs)


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("llama", "config.json"),
        ("llama", "tokenizer.json"),
        ("marian", "source.spm"),
        ("marian", "vocab.json"),
        ("gpt2", "vocab.json"),
        ("bert", "vocab.txt"),
    ],
)
def test_rubbish_is_refused(kind: str, file: str, copied: Copies) -> None:
    theirs = copied(kind)
    (theirs / file).write_bytes(b"\xff\x00{[rubbish")
    with pytest.raises(InputError, match=rf"{re.escape(file)}"):
        read_checkpoint(theirs)


# --- the run --------------------------------------------------------------------------------------


def listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_nothing_is_half_written(
    made: Makes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        "transferry.build_model.importing.formats.writer.TensorWriter.__setitem__", full
    )
    with pytest.raises(InputError, match="No space left on device; nothing was written"):
        import_checkpoint(made("gpt2").folder, tmp_path / "run")
    assert listing(tmp_path) == set()


def test_a_run_is_replaced_with_force_only(made: Makes, tmp_path: Path) -> None:
    out = tmp_path / "run"
    import_checkpoint(made("gpt2").folder, out)
    with pytest.raises(UsageError, match="is not empty; replace it with --force"):
        import_checkpoint(made("bert").folder, out)
    assert load_checkpoint(out).model.config.architecture == "decoder-only"
    import_checkpoint(made("bert").folder, out, force=True)
    assert load_checkpoint(out).model.config.architecture == "encoder-only"
    assert listing(tmp_path) == {"run", *(f"run/{name}" for name in listing(out))}
    (out / "settings.toml").unlink()
    with pytest.raises(UsageError, match="is not a run"):
        import_checkpoint(made("gpt2").folder, out, force=True)
    with pytest.raises(InputError, match="it is a file"):
        import_checkpoint(made("gpt2").folder, out / "config.json", force=True)


@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_run_has_no_training(kind: str, made: Makes) -> None:
    run = made(kind).run
    assert load_checkpoint(run).config is None
    record = json.loads((run / "config.json").read_text())
    assert record["train"] is None
    wanted: dict[str, Any] = {"early_stopping": False, "max_length": 20}
    if kind == "marian":
        wanted["suppress"] = [record["model"]["vocabulary_size"] - 1]
    assert record.get("generation", {}) == ({} if kind == "bert" else wanted)
    result = call("train", "--out", run, "--resume")
    assert result.exit_code == 2
    assert "was imported, so it has no training to continue" in result.stderr


# --- from end to end ------------------------------------------------------------------------------


@pytest.mark.usefixtures("traces")
@pytest.mark.parametrize("kind", KINDS)
def test_from_their_folder_to_answers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferry.export.oracle.effort.RECORDED_LENGTH", 6)
    made = Made(kind, tmp_path, depth=1)  # the time that export takes grows with the layers
    run, bundle, lines = tmp_path / "imported", tmp_path / "bundle", tmp_path / "lines.txt"
    lines.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    result = done("import", made.folder, "--out", run)
    assert f"{kind}, " in result.stderr
    assert result.stdout == ""
    assert call("import", made.folder, "--out", run).exit_code == 2
    assert done("import", made.folder, "--out", run, "--force", "--quiet").stderr == ""
    # Of others than Marian, tests/export/test_imported.py has the fused variant.
    variant = ("--variant", "cpu-fp32" if kind == "marian" else "portable")
    done("export", run, "--out", bundle, "--text", lines, *variant)
    report = done("verify", bundle, "--checkpoint", run, "--text", lines).stdout
    searches = {"fill-mask"} if kind == "bert" else {"greedy", "beam 4"}
    assert all(name in report for name in searches)
    done("verify", bundle)
    recorded = Reference.load(bundle / REFERENCE).searches
    if kind == "marian":
        assert recorded
        assert all("suppress" in item.options for item in recorded)
    if kind == "bert":
        require_their_readings(made, bundle, tmp_path)
        return
    sources = made.sources()
    wanted = generate(made.model, sources, num_beams=1, max_new_tokens=14)
    suppress = Engine.load(bundle).default_options().suppress
    assert suppress == ((load_tokenizer(run).vocabulary_size - 1,) if kind == "marian" else ())
    out = tmp_path / "answers.jsonl"
    done("run", bundle, lines, "-o", out, "--max-length", "14")
    found = [json.loads(line)["text"] for line in out.read_text(encoding="utf-8").splitlines()]
    assert found == [load_tokenizer(run).decode(answer) for answer in wanted]
    options = GenerationOptions(max_length=14, suppress=suppress)
    rows = [row.hypotheses[0].tokens for row in Engine.load(bundle).generate(LINES, options)]
    assert [list(tokens) for tokens in rows] == wanted
    pairs = ("--target", lines) if kind == "marian" else ()
    scores = tmp_path / "scores.jsonl"
    done("score", bundle, lines, *pairs, "-o", scores)
    if kind == "marian":
        require_the_target_model(bundle, lines, scores)


def require_the_target_model(bundle: Path, lines: Path, scores: Path) -> None:
    """Targets and prefixes are split by target.spm, sources by source.spm."""
    engine = Engine.load(bundle)
    tokenizer, prefix = engine.bundle.tokenizer, "hello world"
    assert tokenizer.encode(prefix) != tokenizer.encode_target(prefix)
    for line, row in zip(LINES, scores.read_text(encoding="utf-8").splitlines(), strict=True):
        assert json.loads(row)["tokens"] == [*tokenizer.encode_target(line), 0]
    options_said = ("--prefix", prefix, "--max-length", "20", "--format", "jsonl")
    given = done("run", bundle, lines, *options_said).stdout.splitlines()
    options = GenerationOptions(
        max_length=20,
        prefix=tuple(tokenizer.encode_target(prefix)),
        suppress=engine.default_options().suppress,
    )
    answers = [round(row.hypotheses[0].score, 6) for row in engine.generate(LINES, options)]
    assert [json.loads(line)["score"] for line in given] == answers


@torch.inference_mode()
def require_their_readings(made: Made, bundle: Path, tmp_path: Path) -> None:
    """Vectors and filled masks of an exported BERT."""
    theirs = transformers.BertTokenizer.from_pretrained(made.folder)
    ours = load_tokenizer(made.run)
    lines, out = tmp_path / "masked.txt", tmp_path / "filled.jsonl"
    texts = ["the [MASK] sat on", "[MASK] world, this is", "Straße über [MASK]"]
    lines.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    done("run", bundle, lines, "-o", out, "--task", "fill-mask")
    for text, line in zip(texts, out.read_text(encoding="utf-8").splitlines(), strict=True):
        read = theirs(text, return_tensors="pt")
        scores = made.model(**read).prediction_logits[0]
        best = scores[read.input_ids[0] == theirs.mask_token_id].argmax()
        assert json.loads(line)["masks"][0][0]["text"] == ours.decode([int(best)])
    vectors = tmp_path / "vectors.npy"
    done("run", bundle, lines, "-o", vectors, "--task", "embed", "--pooling", "first")
    for text, vector in zip(texts, np.load(vectors), strict=True):
        # Here the mask is text, as every special token is.
        read = theirs(text, split_special_tokens=True, return_tensors="pt")
        wanted = made.model.bert(**read).last_hidden_state[0, 0]
        assert np.abs(vector - wanted.numpy()).max() < 1e-5


def test_a_bert_without_a_head_is_for_embedding(tmp_path: Path) -> None:
    save("bert", tmp_path / "theirs", lambda size: bert_model(size, kind="BertModel"))
    said: list[str] = []
    import_checkpoint(tmp_path / "theirs", tmp_path / "run", say=said.append)
    assert "only --task embed works" in said[0]
    run = load_checkpoint(tmp_path / "run")
    assert run.tokenizer.special.mask_id is None
    assert not run.model.config.output_transform
    theirs = transformers.BertModel.from_pretrained(tmp_path / "theirs", dtype=torch.float64)
    source = torch.randint(run.tokenizer.vocabulary_size, (2, 12))
    mask = torch.ones_like(source, dtype=torch.bool)
    with torch.inference_mode():
        found = theirs.eval()(source).last_hidden_state
        require_equal(run.model.double().encode(source, mask), found)
