"""Does `verify` accuse a correct bundle?

    python benchmarks/honest.py RUN TEXT [--rows 60] [--only NAME,NAME]

Twelve bundles: RUN, an encoder-decoder, as it is (overtrained, if it is the preset tiny), with new
random weights, with tiny and with huge logits, with a bias of -1e4 on one token, with weights
rounded to bfloat16, with SSRU and with grouped queries in its decoder; and random T5, BART, Llama
and BERT, which transformers saves and `import` reads. They are exported by a process in which torch
computes without vector instructions (ATEN_CPU_CAPABILITY=default), and verified in one with them;
portable, cpu-fp32 and cpu-int8, calibrated on the lines after the first of TEXT. All must pass; for
an int8 variant that `export` refuses, JSON on the last line has the message.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sentences import read_sentences
from transferry.build_model import checkpoint as saved
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.build_model.model.transformer import Transformer
from transferry.export.bundle import Contents, export_bundle
from transferry.export.oracle.cases import fitting
from transferry.export.verify import Request, verify_against
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.errors import TransferryError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.tables import table

VARIANTS = ("portable", "cpu-fp32", "cpu-int8")
# In one bundle: an int8 variant may be refused, which leaves no bundle.
TOGETHER = (("cpu-fp32",), ("cpu-int8",))
CALIBRATED = 200
FAR = -1e4  # a bias that leaves a token out
Change = Callable[[Transformer], Transformer]


def scaled(factor: float) -> Change:
    """Returns a change that makes the embedding larger."""

    def change(model: Transformer) -> Transformer:
        model.embedding.weight.mul_(factor)
        return model

    return change


def shaped(**fields: Any) -> Change:
    """Returns a change of the shape: weights that fit stay, others are new."""

    def change(model: Transformer) -> Transformer:
        torch.manual_seed(0)
        made, weights = Transformer(replace(model.config, **fields)), model.state_dict()
        shapes = {name: weight.shape for name, weight in made.state_dict().items()}
        fitting = {name: each for name, each in weights.items() if shapes.get(name) == each.shape}
        made.load_state_dict(fitting, strict=False)
        return made.eval()

    return change


def untrained(model: Transformer) -> Transformer:
    """Returns a model with new random weights."""
    torch.manual_seed(0)
    return Transformer(model.config).eval()


def one_far(model: Transformer) -> Transformer:
    """Returns a model whose output bias leaves out one token."""
    made = shaped(output_bias=True)(model)
    for name, weight in made.named_parameters():
        if weight.shape == (model.config.vocabulary_size,) and "bias" in name:
            weight.zero_()
            weight[model.config.vocabulary_size // 2] = FAR
    return made


CHANGES: Mapping[str, Change] = {
    "overtrained": lambda model: model,
    "near-random": untrained,
    "tiny logits": scaled(0.01),
    "huge logits": scaled(30.0),
    "one logit of -1e4": one_far,
    "bfloat16": lambda model: model.bfloat16().float(),
    "SSRU": shaped(decoder_cell="ssru"),
    "GQA": shaped(key_value_heads=2),
}
# Names in transformers: of the configuration, and of the model.
CLASSES = {
    "T5": ("T5Config", "T5ForConditionalGeneration"),
    "BART": ("BartConfig", "BartForConditionalGeneration"),
    "Llama": ("LlamaConfig", "LlamaForCausalLM"),
    "BERT": ("BertConfig", "BertForSequenceClassification"),
}
NAMES = (*CHANGES, *CLASSES)


def main() -> None:
    """Exports, verifies and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--export-into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    lines = read_sentences(arguments.text, arguments.rows + CALIBRATED)
    texts, calibrate = lines[: arguments.rows], lines[arguments.rows :]
    if arguments.export_into is not None:
        export_all(arguments.run, arguments.only.split(","), arguments.export_into, calibrate)
        return
    results: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="transferry-") as place:
        plain = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
        command = [sys.executable, __file__, *sys.argv[1:], "--export-into", place]
        subprocess.run(command, env=plain, check=True)
        for name in arguments.only.split(","):
            results[name] = judge(Path(place, name), texts)
    rows = [
        (name, *(verdict(found.get(key, "not made")) for key in VARIANTS))
        for name, found in results.items()
    ]
    print(table(("bundle", *VARIANTS), rows))
    print(json.dumps(results))


def verdict(found: str) -> str:
    """Returns a word of the table."""
    return found if found == "passed" else "refused" if found.startswith("refused") else "ACCUSED"


def export_all(run: Path, names: list[str], folder: Path, calibrate: list[str]) -> None:
    """Makes runs and exports them, each into a folder of its name."""
    checkpoint = load_checkpoint(run)
    for name in names:
        place, started = folder / name, time.perf_counter()
        place.mkdir()
        if name in CHANGES:
            with torch.no_grad():
                save(
                    replace(checkpoint, model=CHANGES[name](copy.deepcopy(checkpoint.model))), place
                )
        else:
            save_pretrained(name, place / "theirs", calibrate)
            import_pretrained(place / "theirs", place / "run")
        made = load_checkpoint(place / "run")
        fit = fitting(calibrate, made.tokenizer, made.model.config)
        for variants in TOGETHER:
            out = place / variants[0]
            contents = Contents(fit, variants, fit if "cpu-int8" in variants else ())
            try:
                export_bundle(made, out, contents)
            except TransferryError as error:
                (place / f"{variants[0]}.refused").write_text(str(error))
        print(f"{name}: exported in {time.perf_counter() - started:.0f} s", file=sys.stderr)


def save(checkpoint: Checkpoint, place: Path) -> None:
    """Writes a checkpoint as training leaves it."""
    run = place / "run"
    (run / "checkpoints").mkdir(parents=True)
    saved.save_config(run, checkpoint.model.config, checkpoint.config)
    checkpoint.tokenizer.save(run)
    saved.save_tensors(run / saved.WEIGHTS, checkpoint.model.state_dict())


def save_pretrained(kind: str, folder: Path, texts: list[str]) -> None:
    """Saves a small random model of transformers with a tokenizer trained on texts."""
    theirs: Any = importlib.import_module("transformers")
    shape: dict[str, Any] = dict(vocab_size=len(save_tokenizer(folder, texts, kind)))
    shape |= dict(bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    wide = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    fields: dict[str, dict[str, Any]] = {
        "T5": dict(num_layers=2, num_heads=4, d_model=32, d_kv=8, d_ff=64),
        "BART": dict(
            **dict(encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64),
            **dict(decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64),
            **dict(d_model=32, max_position_embeddings=128),
        ),
        "Llama": dict(**wide, num_key_value_heads=2, max_position_embeddings=128),
        "BERT": dict(**wide, num_labels=3, max_position_embeddings=128),
    }
    if kind in ("Llama", "BERT"):
        del shape["decoder_start_token_id"]
    config, model = CLASSES[kind]
    torch.manual_seed(0)
    made = getattr(theirs, model)(getattr(theirs, config)(**shape, **fields[kind]))
    for weight in made.parameters():  # so that answers depend on the text
        if weight.dim() > 1:
            weight.data.mul_(4.0)
    made.eval().save_pretrained(folder)


def save_tokenizer(folder: Path, texts: list[str], kind: str) -> Any:
    """Trains and saves a tokenizer; returns it."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    folder.mkdir()
    if kind == "BERT":
        words = sorted({word for text in texts for word in text.lower().split()})
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        letters = [chr(code) for code in range(33, 127)]
        pieces = dict.fromkeys([*special, *letters, *(f"##{each}" for each in letters), *words])
        (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
        settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return pieces
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    given: dict[str, Any] = dict(special_tokens=special, initial_alphabet=alphabet)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, show_progress=False, **given)
    made.train_from_iterator(texts, trainer)
    ends = [] if kind == "Llama" else [("</s>", made.token_to_id("</s>"))]
    template = "$A </s>" if ends else "$A"
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=ends
    )
    names = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    theirs.save_pretrained(folder)
    return theirs


def judge(place: Path, texts: list[str]) -> dict[str, str]:
    """Verifies every variant; returns the message of export or verify, or "passed", by variant."""
    checkpoint = load_checkpoint(place / "run")
    fit = fitting(texts, checkpoint.tokenizer, checkpoint.model.config)
    found: dict[str, str] = {}
    for (made,) in TOGETHER:
        refused = place / f"{made}.refused"
        if refused.exists():
            found[made] = f"refused: {refused.read_text()}"
            continue
        bundle = Bundle.load(place / made)
        for name in bundle.manifest.variants:
            if name not in found:
                started = time.perf_counter()
                model = open_model(bundle, bundle.variant(name), SessionOptions())
                report = verify_against(checkpoint, bundle, model, Request(fit))
                found[name] = "; ".join(report.faults[:2]) or "passed"
                took = f"{time.perf_counter() - started:.0f} s"
                print(f"{place.name}, {name}: {found[name]} ({took})", file=sys.stderr)
    return found


if __name__ == "__main__":
    main()
