"""The table of all tasks, their options together, and the tasks of a bundle."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from transferry.runtime.engine.tasks.answer import Answer, AnswerOptions
from transferry.runtime.engine.tasks.classify import Classify
from transferry.runtime.engine.tasks.embed import Embed, EmbedOptions
from transferry.runtime.engine.tasks.fill_mask import FillMask, FillMaskOptions
from transferry.runtime.engine.tasks.generate import Generate, GenerateOptions
from transferry.runtime.engine.tasks.rank import Rank
from transferry.runtime.engine.tasks.score import Score, ScoreOptions
from transferry.runtime.engine.tasks.tag import TagOptions, TagTask
from transferry.runtime.engine.tasks.task import Task
from transferry.runtime.errors import Option, UsageError
from transferry.runtime.settings import listed

if TYPE_CHECKING:
    from transferry.runtime.bundle.bundle import Bundle

TaskName = Literal["generate", "embed", "fill-mask", "classify", "rank", "tag", "answer", "score"]
# By name; where a bundle can do several, a page offers the last.
TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Generate, Embed, FillMask, Classify, Rank, TagTask, Answer, Score)
}


@dataclass(frozen=True, kw_only=True)
class TaskOptions(
    ScoreOptions, FillMaskOptions, TagOptions, AnswerOptions, EmbedOptions, GenerateOptions
):
    """Options of all tasks; each task takes its own."""


def option_names(*tasks: type[Task]) -> set[str]:
    """Returns the names of the options that tasks take."""
    return {field.name for task in tasks for field in fields(task.options)}


def check_options(task: type[Task], options: TaskOptions) -> None:
    """Raises UsageError for options that conflict, and for those of other tasks."""
    own = option_names(task)
    for field in fields(TaskOptions):
        default: Any = {} if field.name == "generation" else field.default
        if field.name not in own and (value := getattr(options, field.name)) != default:
            name = next(iter(value)) if field.name == "generation" else field.name
            others = [each.name for each in TASKS.values() if field.name in option_names(each)]
            told = f"on task {task.name}, only on {listed(others, 'and')}; leave it out"
            raise UsageError(Option(name), f" has no effect {told}")
    task.check(options)


def default_task(bundle: Bundle) -> TaskName:
    """Returns the task of a bundle's head, else generation, else vectors."""
    head = bundle.manifest.head
    if head is not None:
        return head.task
    return "embed" if bundle.manifest.architecture == "encoder-only" else "generate"
