"""A variant of our own bundle as the subject of a proof."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
import torch

from transferry.build_model.checkpoint import Checkpoint
from transferry.export.oracle.followed import ShownModel
from transferry.export.recipes import RECIPES
from transferry.export.rewrite.calibration import Calibration
from transferry.export.subject.bundle_copy import BundleCopy
from transferry.export.subject.subject import CopiedSubject
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.ort.open_model import ServedModel, open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.precision import FLOAT32, Precision
from transferry.runtime.proof.certificates.strength import CHECKPOINT
from transferry.runtime.proof.one_graph import OneGraph


class BundleSubject(CopiedSubject[Any]):
    """A variant of a bundle, opened as it is served.

    Attributes:
        whole: Whether faults are planted in the graph `generate`, not in the step graphs.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: Path,
        name: str,
        options: SessionOptions,
        *,
        whole: bool = False,
    ) -> None:
        self.checkpoint, self.folder = checkpoint, folder
        self.name, self.options, self.whole = name, options, whole

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, bundle: Bundle, model: ServedModel, *, whole: bool = False
    ) -> BundleSubject:
        """Returns the subject of a bundle that is loaded, and of a variant that is open."""
        found = cls(checkpoint, bundle.folder, model.variant.name, model.options, whole=whole)
        found.bundle, found.model, found.variant = bundle, model, model.variant
        return found

    @cached_property
    def bundle(self) -> Bundle:
        """The bundle, loaded once."""
        return Bundle.load(self.folder)

    @cached_property
    def variant(self) -> Variant:
        """The variant, as the bundle describes it."""
        return self.bundle.variant(self.name)

    def open(self) -> ServedModel:
        """Opens the variant."""
        return open_model(self.bundle, self.variant, self.options)

    @cached_property
    def one_graph(self) -> OneGraph:
        """The graph `generate`, opened once."""
        return OneGraph(self.bundle, self.variant, self.options)

    @property
    def decodes(self) -> bool:
        """Whether there is a decoder."""
        return self.variant.cache is not None

    @property
    def precision(self) -> Precision:
        """The precision that export gives this variant.

        The manifest may lie: a lower precision would widen the tolerance.
        """
        recipe = RECIPES.get(self.name)
        return recipe.precision if recipe else FLOAT32

    @cached_property
    def calibration(self) -> Calibration | None:
        """The calibration of an int8 variant."""
        return Calibration.of(self.bundle, self.variant) if self.precision.calibrated else None

    @cached_property
    def shown(self) -> ShownModel | None:  # type: ignore[override]
        """An int8 variant opened once more, unless it is large.

        Of a prompt in a cache of floats, no integers say which products reach the cache.
        """
        model, calibration = self.checkpoint.model, self.calibration
        if calibration is None or model.mapped is not None:
            return None
        followed = model.config.encoder_layers or calibration.kv_scales
        return ShownModel(self.bundle, self.model) if followed else None

    def describe(self) -> Mapping[str, Any]:
        """Returns the settings that decide the numbers, for the report."""
        head = self.checkpoint.head
        return {
            **self.model.describe(),
            "torch": torch.__version__,
            "onnx": onnx.__version__,
            "against": CHECKPOINT,
            "run_sha256": self.checkpoint.sha256,
            **({} if head is None else {"task": head.task}),
        }

    def copy(self, folder: Path) -> BundleCopy:
        """Returns an editable copy."""
        return BundleCopy(self.bundle, self.variant, folder, whole=self.whole)

    def reopened(self, folder: Path) -> BundleSubject:
        """Returns the same variant of a copy."""
        given = self.checkpoint, folder, self.name, self.options
        return BundleSubject(*given, whole=self.whole)
