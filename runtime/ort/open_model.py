"""Opens a variant of a bundle, by its architecture and its cache."""

from typing import Any, Protocol

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import STANDARD, Variant
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.decoder import ObservableDecoder
from transferry.runtime.errors import ProviderError, TransferryError, UsageError
from transferry.runtime.hardware import huge_pages
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.fused_decoder import FusedDecoder, RecurrentDecoder
from transferry.runtime.ort.graph_runner import runtime_of
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions, kernels
from transferry.runtime.precision import Precision


class ServedDecoder(ObservableDecoder[Any], Protocol):
    """A decoder that runs a variant of a bundle.

    Attributes:
        shares_prompts: Whether `start` reads a common beginning of prompts once. No bit of an
            answer depends on it.
    """

    variant: Variant
    options: SessionOptions
    batches: BatchOptions
    shares_prompts: bool

    def describe(self) -> dict[str, Any]:
        """Returns everything that determines the numbers; see `graph_runner.describe`."""


ServedModel = ServedDecoder | EncoderModel


def open_model(bundle: Bundle, variant: Variant, options: SessionOptions) -> ServedModel:
    """Opens the graphs of a variant.

    Raises:
        ProviderError: The requested provider or a package cannot run here.
        InputError: A graph cannot be opened.
        UsageError: The session cannot run such a variant.
    """
    if error := refusal(options, variant):
        raise error
    with huge_pages():
        return model_class(variant)(bundle, variant, options)


def refusal(options: SessionOptions, variant: Variant) -> TransferryError | None:
    """Returns the error of a session that cannot run a variant; None if it can.

    TensorRT does not promise that an output may lie where an input lies.
    """
    tensorrt, name = options.provider == "tensorrt", variant.name
    if name not in STANDARD and (tensorrt or runtime_of(options).standard_alone):
        who = "provider tensorrt" if tensorrt else f"runtime {options.runtime}"
        return UsageError(
            f"{who} runs variants of standard operators alone, not "
            f"{name}; choose --variant {' or '.join(STANDARD)}"
        )
    if not Precision.of(variant.precision).kernels:
        return None
    if options.provider != "cpu" or options.optimisation == "disable":
        return UsageError(
            f"variant {name} needs provider cpu, with optimisation basic or more, found provider "
            f"{options.provider}, optimisation {options.optimisation}; choose another variant"
        )
    package = kernels()
    if not package.remedy:
        return None
    return ProviderError(
        f"variant {name} needs transferry-kernels, which {package.found}. {package.remedy}"
    )


def model_class(
    variant: Variant,
) -> type[EncoderModel | FusedDecoder | RecurrentDecoder | PortableDecoder]:
    """Returns the class that runs a variant."""
    if variant.cache is None:
        return EncoderModel
    if not variant.in_place:
        return PortableDecoder
    return RecurrentDecoder if variant.recurrent else FusedDecoder
