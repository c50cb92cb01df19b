"""A checkpoint as a CTranslate2 model, and that model as text in, text out.

    pip install ctranslate2

Its vocabulary is "t0", "t1" and so on, so that our tokenizer serves both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sentences import Answer
from transferry.build_model.config import ModelConfig
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.errors import UsageError
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer, load_tokenizer

if TYPE_CHECKING:
    from transferry.build_model.checkpoint import Checkpoint

# CTranslate2's names of the activations of its feed-forward layer.
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu-tanh": "GELUTanh", "swish": "SWISH"}
# What its specification cannot hold, or what is not carried over here: field, what is needed.
NEEDED: tuple[tuple[str, Sequence[object]], ...] = (
    ("architecture", ("encoder-decoder",)),
    ("norm", ("layer",)),
    ("positions", ("sinusoidal", "learned")),
    ("activation", tuple(ACTIVATIONS)),
    ("output_transform", (False,)),
)


def import_ctranslate2() -> Any:
    """Returns the module.

    Raises:
        UsageError: It is not installed.
    """
    try:
        import ctranslate2
    except ImportError as error:
        raise UsageError(
            f"this comparison needs ctranslate2 ({error}): pip install ctranslate2"
        ) from error
    return ctranslate2


def require_shape(config: ModelConfig) -> None:
    """Does nothing if the shape can be carried over.

    Raises:
        UsageError: It cannot; the message names the field.
    """
    for name, allowed in NEEDED:
        if getattr(config, name) not in allowed:
            raise UsageError(
                f"a CTranslate2 model needs {name} to be one of "
                f"{', '.join(map(str, allowed))}, but the checkpoint has {getattr(config, name)}; "
                "compare another model"
            )
    if config.kv_heads != config.heads:
        raise UsageError(
            f"a CTranslate2 model needs key_value_heads as many as heads, {config.heads}, but the "
            f"checkpoint has {config.kv_heads}; compare another model"
        )


def write_ctranslate2(checkpoint: Checkpoint, folder: Path, precision: str) -> None:
    """Writes the checkpoint's weights as a CTranslate2 model.

    Args:
        checkpoint: What to carry over; its weights are not changed.
        folder: Where to; it is made.
        precision: "float32", or "int8" for its own dynamic quantisation of all matrices.

    Raises:
        UsageError: ctranslate2 is missing, or its specification cannot hold the model.
    """
    config, special = checkpoint.model.config, checkpoint.tokenizer.special
    require_shape(config)
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
    # Where nothing is unknown, the unknown token can be any that no source holds.
    spec.config.unk_token = tokens[special.pad_id]
    spec.config.bos_token = spec.config.decoder_start_token = tokens[special.bos_id]
    spec.config.eos_token = tokens[special.eos_id]
    # Sources come wrapped by our tokenizer.
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
        # Copied, since the quantisation multiplies arrays where they lie.
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
        parts = [f"{attention}.{part}" for part in ("query", "key", "value")]
        self.linear(spec.self_attention.linear[0], *parts)
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
        """One matrix, or several that read the same and lie one under the other."""
        spec.weight = np.concatenate([self.tensors[f"{name}.weight"] for name in names])
        if self.config.bias:
            spec.bias = np.concatenate([self.tensors[f"{name}.bias"] for name in names])

    def norm(self, spec: Any, name: str) -> None:
        spec.gamma = self.tensors[f"{name}.weight"]
        spec.beta = self.tensors.get(f"{name}.bias", np.zeros_like(spec.gamma))


class CTranslate2Model:
    """A CTranslate2 model with our tokenizer around it: text in, text out."""

    def __init__(
        self, folder: Path, tokenizer_folder: Path, precision: str, inter: int, intra: int
    ) -> None:
        """Opens a model.

        On AMD processors CTranslate2 takes oneDNN by itself, and the environment variable
        CT2_USE_MKL=1, read when it is imported, makes it take MKL. Where that was tried MKL was
        1.5 to 7 times slower, so its own choice stands.

        Args:
            folder: What `write_ctranslate2` wrote.
            tokenizer_folder: The bundle or the run whose tokenizer the model has.
            precision: "float32" or "int8".
            inter: Batches in progress at a time.
            intra: Threads of each.
        """
        self.tokenizer: AnyTokenizer = load_tokenizer(tokenizer_folder)
        self.translator = import_ctranslate2().Translator(
            str(folder), "cpu", compute_type=precision, inter_threads=inter, intra_threads=intra
        )

    def answer(
        self, texts: Sequence[str], options: GenerationOptions, batch_rows: int
    ) -> list[Answer]:
        """Answers each text, in order.

        Args:
            texts: What to answer.
            options: beam, lengths and length penalty are used.
            batch_rows: Most sentences of a batch. CTranslate2 sorts the sentences by length
                before it cuts them into batches, as the engine does.
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
            # Both sides count what is generated, so that the end token takes up one of the
            # longest length, and forbid that token for as many steps as the shortest.
            max_decoding_length=options.max_length,
            min_decoding_length=options.min_length,
            length_penalty=options.length_penalty,
            return_scores=getattr(options, "scores", True),
        )
        answers = []
        for result in results:
            tokens = tuple(int(token[1:]) for token in result.hypotheses[0])
            answers.append(Answer(self.tokenizer.decode(tokens), tokens))
        return answers
