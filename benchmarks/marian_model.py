"""Conversion of a checkpoint to transformers' MarianMTModel, and generation with it.

MarianMT is the Transformer of Vaswani et al. (2017), so it can hold our post-norm models.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sentences import Answer, require_fields
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.importing.huggingface.encoder_decoder import MARIAN
from transferry.build_model.importing.huggingface.tables import ACTIVATIONS, NoPlace
from transferry.build_model.model.transformer import greedy
from transferry.runtime.decoding.batching import length_batches
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.errors import UsageError
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer

# Values of ModelConfig that MarianMTModel can hold.
ALLOWED: dict[str, Sequence[object]] = {
    "architecture": ("encoder-decoder",),
    "norm": ("layer",),
    "norm_order": ("post",),
    "norm_epsilon": (1e-5,),
    "positions": ("sinusoidal", "learned"),
    "activation": ("relu", "gelu", "gelu-tanh", "swish"),
    "key_value_heads": (0,),
    "tied": (True,),
    "bias": (True,),
    "embedding_norm": (False,),
    "output_transform": (False,),
}


def marian_model(checkpoint: Checkpoint) -> Any:
    """Returns a MarianMTModel with the checkpoint's weights, in eval mode.

    Raises:
        ImportError: transformers is missing.
        UsageError: MarianMTModel cannot hold the model.
    """
    transformers: Any = importlib.import_module("transformers")
    config, special = checkpoint.model.config, checkpoint.tokenizer.special
    require_fields(config, ALLOWED, "MarianMTModel")
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    model = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=config.vocabulary_size,
            d_model=config.d_model,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_attention_heads=config.heads,
            decoder_attention_heads=config.heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            max_position_embeddings=config.max_positions,
            activation_function=activations[config.activation],
            scale_embedding=config.scale_embedding,
            pad_token_id=special.pad_id,
            bos_token_id=special.bos_id,
            eos_token_id=special.eos_id,
            decoder_start_token_id=special.bos_id,
            forced_eos_token_id=None,
        )
    )
    with torch.no_grad():
        theirs = model.state_dict()
        for name, tensor in _tensors(checkpoint).items():
            # Reshaped, because `copy_` would broadcast a wrong shape.
            theirs[name].copy_(tensor.reshape(theirs[name].shape))
            del theirs[name]
    if theirs:
        raise UsageError(f"MarianMTModel has tensors without a counterpart: {', '.join(theirs)}")
    # Without Marian's default rules, such as forbidding padding, which our search does not have.
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=special.pad_id,
        bos_token_id=special.bos_id,
        eos_token_id=special.eos_id,
        decoder_start_token_id=special.bos_id,
    )
    model.eval()
    return model


def _tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Our tensors under MarianMT's names: the importer's table, inverted."""
    model, config = checkpoint.model, checkpoint.model.config
    ours = {
        "output_bias": torch.zeros(config.vocabulary_size),
        # A table, because Marian's sinusoids have another order.
        "positions": model.positions,
        # One matrix here, two more names there.
        **dict.fromkeys(("source_embedding.weight", "output.weight"), model.embedding.weight),
        **model.state_dict(),
    }
    layers = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    tensors = {}
    for pattern, place in MARIAN.items():
        if isinstance(place, NoPlace):
            continue
        source = place if isinstance(place, str) else place.ours[0]
        prefix = "" if pattern in ("lm_head.weight", "final_logits_bias") else "model."
        for number in range(layers[pattern.split(".")[0]] if "#" in pattern else 1):
            for ending in ("weight", "bias") if pattern.endswith("*") else ("",):
                name, origin = (
                    text.replace("#", str(number)).replace("*", ending)
                    for text in (pattern, source)
                )
                if origin in ours:
                    tensors[prefix + name] = ours[origin]
    return tensors


def optimum_model(marian: Any, folder: Path, provider: str = "cpu") -> Any:
    """Exports a MarianMTModel with Optimum and opens it in ONNX Runtime, cache included.

    Args:
        marian: The model in float32, on the CPU.
        folder: Folder for the graphs.
        provider: "cpu" or "cuda".

    Raises:
        ImportError: optimum-onnx is missing.
    """
    from optimum.exporters.onnx import onnx_export_from_model
    from optimum.onnxruntime import ORTModelForSeq2SeqLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer
        # From memory: save_pretrained omits the positions, which are ours and not Marian's.
        onnx_export_from_model(
            marian, folder, task="text2text-generation-with-past", do_validation=False
        )
    model = ORTModelForSeq2SeqLM.from_pretrained(
        folder, use_cache=True, provider=f"{provider.upper()}ExecutionProvider"
    )
    model.generation_config = marian.generation_config
    return model


def transformers_rows(
    model: Any, source: torch.Tensor, mask: torch.Tensor, options: GenerationOptions
) -> list[list[int]]:
    """Generates with transformers' own search, configured like ours."""
    with torch.inference_mode():
        found = model.generate(
            input_ids=source.to(model.device),
            attention_mask=mask.long().to(model.device),
            num_beams=options.beam,
            do_sample=False,
            max_new_tokens=options.max_length,
            min_new_tokens=options.min_length or None,
            **(
                {"length_penalty": options.length_penalty, "early_stopping": options.early_stopping}
                if options.beam > 1
                else {}
            ),
        )
    eos_id = int(model.generation_config.eos_token_id)
    rows = found[:, 1:].tolist()
    return [row[: row.index(eos_id)] if eos_id in row else row for row in rows]


def torch_rows(
    checkpoint: Checkpoint, source: torch.Tensor, mask: torch.Tensor, options: GenerationOptions
) -> list[list[int]]:
    """Generates with the plain torch loop: greedy, with a cache."""
    special = checkpoint.tokenizer.special
    device = checkpoint.model.embedding.weight.device
    return greedy(
        checkpoint.model,
        source.to(device),
        mask.to(device),
        bos_id=special.bos_id,
        eos_id=special.eos_id,
        max_length=options.max_length,
    )


def batched_answers(
    generate: Callable[[torch.Tensor, torch.Tensor, GenerationOptions], list[list[int]]],
    tokenizer: AnyTokenizer,
    texts: Sequence[str],
    options: GenerationOptions,
    batch_rows: int,
) -> list[Answer]:
    """Answers each text in order, with our tokenizer and length-sorted batches."""
    sources = [tokenizer.special.wrap(ids) for ids in tokenizer.encode_batch(texts)]
    answers = [Answer("", ())] * len(sources)
    for batch in length_batches([len(source) for source in sources], batch_rows, batch_rows << 7):
        ids, mask = pad_sources([sources[index] for index in batch], tokenizer.special.pad_id)
        rows = generate(torch.from_numpy(ids), torch.from_numpy(mask), options)
        for index, row in zip(batch, rows, strict=True):
            answers[index] = Answer(tokenizer.decode(row), tuple(row))
    return answers
