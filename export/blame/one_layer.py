"""A large model with one layer of each stack, for a runtime that is too slow for all of them.

The exporter writes every layer with the same operators. What a runtime makes of these shows in the
first layer, in a hundredth of the time and memory.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from pathlib import Path

from torch import nn

from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.transformer import Transformer
from transferry.export.blame.backends import ReferenceBackend
from transferry.export.blame.plain_decoder import plain_model
from transferry.export.checks.numbers import compare_cases
from transferry.export.make import describe, make
from transferry.export.oracle.cases import cross_check_cases
from transferry.export.oracle.oracle import Oracle
from transferry.export.recipes import RECIPES
from transferry.export.trace.store import write_graphs
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import Manifest
from transferry.runtime.bundle.specs import PORTABLE
from transferry.runtime.io.sealed_folder import records
from transferry.runtime.proof.compare import Comparison, Tolerance


def one_layer(model: Transformer) -> Transformer:
    """Returns a model with the first layer of each stack, which shares all weights with it."""
    config = model.config
    shallow = copy.copy(model)
    shallow._modules = dict(model._modules)
    for name in ("encoder", "decoder"):
        if (layers := getattr(model, name)) is not None:
            setattr(shallow, name, nn.ModuleList(list(layers)[:1]))
    shallow.config = replace(
        config,
        encoder_layers=min(1, config.encoder_layers),
        decoder_layers=min(1, config.decoder_layers),
        windows=config.windows[:1],  # of one stack
        unrotated=tuple(layer for layer in config.unrotated if layer == 0),
    )
    return shallow


def check_one_layer(checkpoint: Checkpoint) -> list[Comparison]:
    """Compares onnx's evaluator with torch on the portable graphs of one layer."""
    model = one_layer(checkpoint.model)
    oracle = Oracle.of(model, checkpoint.tokenizer.special, Tolerance())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe, config = RECIPES[PORTABLE], model.config
        graphs = make(model, recipe)
        write_graphs([(graph.model, folder / graph.spec.file) for graph in graphs.values()])
        variants = {PORTABLE: (variant := describe(recipe, graphs))}
        files = records(folder)
        manifest = Manifest(config.architecture, config.to_dict(), {}, variants, files, {})
        bundle = Bundle(folder, manifest, checkpoint.tokenizer)
        evaluator = plain_model(variant, ReferenceBackend(bundle, variant))
        return compare_cases(oracle, evaluator, cross_check_cases(config))
