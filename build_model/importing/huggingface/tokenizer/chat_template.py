"""Chat templates of folders of Hugging Face, and the special tokens that they write."""

from pathlib import Path

import jinja2
import jinja2.nodes
import msgspec

from transferry.build_model.importing.huggingface.folder import PretrainedFolder
from transferry.build_model.importing.huggingface.tokenizer.fast_tokenizer import FastTokenizer
from transferry.runtime.errors import InputError
from transferry.runtime.io.documents import MOST_JSON
from transferry.runtime.io.whole import read_bytes
from transferry.runtime.tokenizer.chat import TEMPLATE_FILE, ChatTemplate
from transferry.runtime.tokenizer.chat_worker import environment


class NamedTemplate(msgspec.Struct):
    """One of several chat templates in tokenizer_config.json."""

    name: str
    template: str


def chat_template(pretrained: PretrainedFolder, found: FastTokenizer) -> ChatTemplate | None:
    """The default chat template, with the tokens that are special only where it writes them."""
    templates = chat_templates(pretrained)
    if not templates:
        return None
    (origin, source), others = templates.pop("default", ("", "")), ", ".join(sorted(templates))
    if others:
        pretrained.notes.append(f"chat templates left out, not being the default: {others}")
    if not source:
        return None
    try:
        tree = environment().parse(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise InputError(
            f"{origin}: expected a chat template for jinja2, found an error: {error}; correct it"
        ) from error
    written = [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
    constants = tree.find_all(jinja2.nodes.Const)
    written += [node.value for node in constants if isinstance(node.value, str)]
    listed = pretrained.tokenizer.get("chat_control_tokens")
    control = {
        token.content: number
        for number, token in found.tokenizer.get_added_tokens_decoder().items()
        # Not white space, such as Gemma's line break, which templates write as text.
        if token.special
        or (
            any(token.content in text for text in written) and not token.content.isspace()
            if listed is None
            else token.content in listed
        )
    }
    template = ChatTemplate(source, found.named, control)
    if lost := template.lost_token():
        pretrained.notes.append(
            f"chat template left out: it builds {lost} from parts, so a message could too"
        )
        return None
    return template


def chat_templates(pretrained: PretrainedFolder) -> dict[str, tuple[str, str]]:
    """Returns file and source of each chat template; files take precedence, as in transformers."""
    folder, settings = pretrained.folder, pretrained.tokenizer
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (path := folder / TEMPLATE_FILE).exists():
        files["default"] = path
    if files:
        return {name: (str(path), _source(path)) for name, path in files.items()}
    found = settings.get("chat_template", [])
    if isinstance(found, str):
        found = [{"name": "default", "template": found}]
    try:
        named = msgspec.convert(found, list[NamedTemplate])
    except msgspec.ValidationError:
        settings.refuse("chat_template", found, "a text, or a list of names and templates")
    return {each.name: (str(settings.path), each.template) for each in named}


def _source(path: Path) -> str:
    try:
        return read_bytes(path, MOST_JSON).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error}); restore the file") from error
