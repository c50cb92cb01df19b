"""Conversion of a checkpoint to CTranslate2, and that model as text in, text out.

    pip install ctranslate2

Its vocabulary is "t0", "t1", ..., so that our tokenizer serves both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sentences import Answer, require_fields
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.errors import UsageError
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer, load_tokenizer

if TYPE_CHECKING:
    from transferry.build_model.checkpoint import Checkpoint

# CTranslate2's names of activations.
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu-tanh": "GELUTanh", "swish": "SWISH"}
# Values of ModelConfig that can be converted.
ALLOWED: dict[str, Sequence[object]] = {
    "architecture": ("encoder-decoder",),
    "norm": ("layer",),
    "positions": ("sinusoidal", "learned"),
    "activation": tuple(ACTIVATIONS),
    "output_transform": (False,),
}


def import_ctranslate2() -> Any:
    """Imports the module; raises UsageError where it is not installed."""
    try:
        import ctranslate2
    except ImportError as error:
        raise UsageError(
            f"this comparison needs ctranslate2 ({error}): pip install ctranslate2"
        ) from error
    return ctranslate2


def write_ctranslate2(checkpoint: Checkpoint, folder: Path, precision: str) -> None:
    """Writes a checkpoint as a CTranslate2 model, in "float32" or "int8", all matrices quantised.

    Raises:
        UsageError: ctranslate2 is missing, or cannot hold the model.
    """
    config, special = checkpoint.model.config, checkpoint.tokenizer.special
    heads = {"key_value_heads": (0, config.heads)}
    require_fields(config, ALLOWED | heads, "CTranslate2")
    import_ctranslate2()
    from ctranslate2.specs import common_spec, transformer_spec

    spec = transformer_spec.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.heads,
        pre_norm=config.norm_order == "pre",
        activation=common_spec.Activation[ACTIVATIONS[config.activation]],
        layernorm_embedding=config.embedding_norm,
    )
    _Weights(checkpoint).fill(spec)
    tokens = [f"t{number}" for number in range(config.vocabulary_size)]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    # Nothing is unknown, so any token that no source contains will do.
    spec.config.unk_token = tokens[special.pad_id]
    spec.config.bos_token = spec.config.decoder_start_token = tokens[special.bos_id]
    spec.config.eos_token = tokens[special.eos_id]
    # Our tokenizer adds the special tokens of sources.
    spec.config.add_source_bos = spec.config.add_source_eos = False
    spec.config.layer_norm_epsilon = config.norm_epsilon
    folder.mkdir(parents=True, exist_ok=True)
    spec.validate()
    spec.optimize(precision)
    spec.save(str(folder))
    (folder / "lists.txt").unlink(missing_ok=True)


class _Weights:
    """Fills a specification from a checkpoint's tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.model.config
        # Copied, because quantisation changes arrays in place.
        self.tensors = {
            name: tensor.detach().numpy().copy()
            for name, tensor in (
                *checkpoint.model.state_dict().items(),
                ("positions", checkpoint.model.positions),
            )
        }

    def fill(self, spec: Any) -> None:
        config, tensors = self.config, self.tensors
        spec.encoder.embeddings[0].weight = tensors["embedding.weight"]
        spec.decoder.embeddings.weight = tensors["embedding.weight"]
        spec.decoder.projection.weight = tensors[
            "embedding.weight" if config.tied else "output.weight"
        ]
        if config.output_bias:
            spec.decoder.projection.bias = tensors["output_bias"]
        for name, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
            stack.scale_embeddings = config.scale_embedding
            stack.position_encodings.encodings = tensors["positions"]
            if config.embedding_norm:
                self.norm(stack.layernorm_embedding, "embedding_norm")
            if config.norm_order == "pre":
                self.norm(stack.layer_norm, f"{name}_norm")
            for number, layer in enumerate(stack.layer):
                self.layer(layer, f"{name}.{number}", cross=name == "decoder")

    def layer(self, spec: Any, name: str, *, cross: bool) -> None:
        attention = f"{name}.self_attention"
        names = [f"{attention}.{name}" for name in ("query", "key", "value")]
        self.linear(spec.self_attention.linear[0], *names)
        self.linear(spec.self_attention.linear[1], f"{attention}.output")
        self.norm(spec.self_attention.layer_norm, f"{name}.self_residual.norm")
        if cross:
            attention = f"{name}.cross_attention"
            self.linear(spec.attention.linear[0], f"{attention}.query")
            self.linear(spec.attention.linear[1], f"{attention}.key", f"{attention}.value")
            self.linear(spec.attention.linear[2], f"{attention}.output")
            self.norm(spec.attention.layer_norm, f"{name}.cross_residual.norm")
        self.linear(spec.ffn.linear_0, f"{name}.feed_forward.inner")
        self.linear(spec.ffn.linear_1, f"{name}.feed_forward.outer")
        self.norm(spec.ffn.layer_norm, f"{name}.feed_forward_residual.norm")

    def linear(self, spec: Any, *names: str) -> None:
        """Fills one matrix, or several of the same input, concatenated."""
        spec.weight = np.concatenate([self.tensors[f"{name}.weight"] for name in names])
        if self.config.bias:
            spec.bias = np.concatenate([self.tensors[f"{name}.bias"] for name in names])

    def norm(self, spec: Any, name: str) -> None:
        spec.gamma = self.tensors[f"{name}.weight"]
        spec.beta = self.tensors.get(f"{name}.bias", np.zeros_like(spec.gamma))


class CTranslate2Model:
    """A CTranslate2 model with our tokenizer: text in, text out."""

    def __init__(
        self, folder: Path, tokenizer_folder: Path, precision: str, inter: int, intra: int
    ) -> None:
        """Opens a model: `inter` concurrent batches of `intra` threads.

        On AMD CPUs CTranslate2 uses oneDNN. With the environment variable CT2_USE_MKL=1 it uses
        MKL, which was 1.5 to 7 times slower, so its own choice stands.
        """
        self.tokenizer: AnyTokenizer = load_tokenizer(tokenizer_folder)
        self.translator = import_ctranslate2().Translator(
            str(folder), "cpu", compute_type=precision, inter_threads=inter, intra_threads=intra
        )

    def answer(
        self, texts: Sequence[str], options: GenerationOptions, batch_rows: int
    ) -> list[Answer]:
        """Answers each text, in order.

        Only beam, lengths and length penalty of the options count. CTranslate2 sorts sentences by
        length before batching, as the engine does.
        """
        special = self.tokenizer.special
        results = self.translator.translate_batch(
            [
                [f"t{token}" for token in special.wrap(ids)]
                for ids in self.tokenizer.encode_batch(texts)
            ],
            beam_size=options.beam,
            num_hypotheses=1,
            max_batch_size=batch_rows,
            batch_type="examples",
            max_input_length=0,
            # Both sides count the end token in the maximum and not in the minimum length.
            max_decoding_length=options.max_length,
            min_decoding_length=options.min_length,
            length_penalty=options.length_penalty,
            return_scores=options.scores,
        )
        answers = []
        for result in results:
            tokens = tuple(int(token[1:]) for token in result.hypotheses[0])
            answers.append(Answer(self.tokenizer.decode(tokens), tokens))
        return answers
