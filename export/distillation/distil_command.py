"""The command that trains a student on the answers of a teacher.

It imports what it needs when it runs, so that --help is instant.
"""

import dataclasses
from typing import Any

import click

from transferry.build_model.commands import (
    training_options,
    training_pairs_options,
    validation_pairs_options,
)
from transferry.build_model.train.presets import PRESETS
from transferry.export.distillation import OF_JOB
from transferry.runtime.console.fields import fields_as_options, together
from transferry.runtime.console.group import command
from transferry.runtime.console.progress import say
from transferry.runtime.console.shared_options import (
    FILE,
    check_settings,
    configurable,
    explicit,
    option,
    session_options,
)
from transferry.runtime.errors import UsageError
from transferry.runtime.jobs.job_options import JobOptions

STUDENTS = [name for name, preset in PRESETS.items() if preset.architecture == "encoder-decoder"]
TEACHER = "Teacher"
teacher_options = together(
    option(
        "--beam",
        panel=TEACHER,
        type=click.IntRange(1, 10_000),
        default=4,
        help="Beams of the teacher.",
    ),
    option(
        "--n-best",
        panel=TEACHER,
        type=click.IntRange(1, 10_000),
        help="Hypotheses to choose from by sentence BLEU. Default: beam with references, else 1.",
    ),
    fields_as_options(
        JobOptions,
        leave_out=[f.name for f in dataclasses.fields(JobOptions) if f.name not in OF_JOB],
        panel=TEACHER,
    ),
)


@command(
    epilog="""\b
Examples:
  transferry distil bundles/ende --source train.en.gz --target train.de.gz \\
      --valid-source val.en.gz --valid-target val.de.gz --out runs/student
  transferry distil bundles/ende --source a.en --preset tiny --out runs/tiny
  transferry distil --out runs/student --resume
"""
)
@configurable
@click.argument("teacher", metavar="TEACHER", type=FILE, required=False)
@training_pairs_options
@validation_pairs_options
@teacher_options
@session_options
@training_options(
    "student",
    presets=STUDENTS,
    vocabulary="the teacher's if `train` made it, else preset",
    leave_out=["architecture"],
)
@click.pass_context
def distil(context: click.Context, /, **options: Any) -> None:
    """Train a student on the answers of TEACHER, a bundle.

    The teacher answers --source or the sources of --pairs. With references, the student learns the
    hypothesis with the highest sentence BLEU, and the references too. Unusable pairs and rows with
    an error are dropped and counted. OUT/distilled keeps answers and pairs. The same command
    continues an interrupted distillation.
    """
    from transferry.build_model import checkpoint_folder as run_folder
    from transferry.export.distillation.distil import distil as distilled

    out = options["out"]
    if options.pop("resume"):
        options = run_folder.recall(out, options, explicit(context), "distil")
        options.pop("resume", None)
        check_settings(context, out / run_folder.SETTINGS)
    if options["teacher"] is None:
        raise UsageError("expected a TEACHER, the bundle that answers; name it")
    say(f"{distilled(**options)}; {out}")
