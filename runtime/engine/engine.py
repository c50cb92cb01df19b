"""Text in, results out: everything that a bundle can do."""

from pathlib import Path

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.engine.open_bundle import OpenBundle
from transferry.runtime.engine.tasks.answer import answer
from transferry.runtime.engine.tasks.classify import classify
from transferry.runtime.engine.tasks.embed import embed
from transferry.runtime.engine.tasks.fill_mask import fill_mask
from transferry.runtime.engine.tasks.generate import generate
from transferry.runtime.engine.tasks.rank import rank
from transferry.runtime.engine.tasks.score import score
from transferry.runtime.engine.tasks.tag import tag
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.certificates.standing import fastest
from transferry.runtime.proof.recorded import verify_recorded
from transferry.runtime.proof.report import ParityReport
from transferry.runtime.settings import require_type


class Engine(OpenBundle):
    """Runs a bundle over any amount of text, in bounded memory.

        with Engine("bundles/ende") as engine:
            for result in engine.generate(lines, beam=4):
                print(result.text)

    Each task is a method with the name that it has on the command line; its module documents it.
    It takes any iterable and returns an iterator of results in the same order, for `for` and for
    `async for`.
    """

    generate = generate
    score = score
    embed = embed
    fill_mask = fill_mask
    classify = classify
    rank = rank
    tag = tag
    answer = answer

    def verify(self) -> ParityReport:
        """Compares what this engine serves with the answers recorded at export; without torch."""
        return verify_recorded(self.bundle, self.model)


def verify(
    folder: Path | str, *, variant: str | None = None, options: SessionOptions | None = None
) -> ParityReport:
    """Opens a bundle and compares it with its own recorded answers.

    By default it compares the variant that is served (see `fastest`), on the CPU;
    `ParityReport.require` raises ParityError unless the report passed.

    Raises:
        InputError: The bundle is damaged.
        UsageError: It has no such variant.
        ProviderError: The provider cannot run here.
    """
    require_type("options", options, SessionOptions | None)
    require_type("variant", variant, str | None)
    bundle, options = Bundle.load(folder), options or SessionOptions()
    chosen = fastest(bundle, options) if variant is None else bundle.variant(variant)
    return verify_recorded(bundle, open_model(bundle, chosen, options))
