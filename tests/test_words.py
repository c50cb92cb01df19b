"""Text names things: no "what", "which", "none" or "so" in the place of a noun.

`python tests/test_words.py FOLDER ...` lists the hits in folders or files of the checkout.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
CODE = ("build_model", "export", "runtime", "benchmarks", "tests")
# Pages whose text is generated from the help, or of former releases.
GENERATED = {"cli.md", "CHANGELOG.md"}

# Each with a better form, for the message.
PATTERNS = {
    r"^(?-i:What)\b(?! to\b|[^.?]*\?)": "begin with a noun: 'Result of a row'",
    r"^(?-i:Which)\b(?![^.?]*\?)|\bthat which\b|\bwhich it is\b": "name the thing",
    r"\bof which\b": "'whose', or two sentences",
    r"\b(?:of|in|by|from|with|on|for|at|as|to|than|against|and|or) what\b(?! to\b| is wrong\b)": (
        "name the thing"
    ),
    r"\b(?:returns?|is|are|was|were|refuses|writes|reads|holds) what\b(?! to\b| is wrong\b)": (
        "name the thing"
    ),
    r"\bwhat (?:the|an?|its?|their|each|every|one|this|that|they|all)\b[\w' -]{0,40}?"
    r" (?:says?|has|have|had|declares?|lacks?|wants?|gives?|asks?|leaves?)\b": "name the thing",
    r"\b(?:is|are|was|were|be|or|if|and|but|there) (?-i:none)\b": ("'no X', 'without X': name X"),
    r"\bnone of (?:them|it|its|these|those|ours|that)\b": "'no X', or 'neither'",
    r"\b(?:is|are|was|were) so\b(?=$|[.,;:)|])|\b(?:does|do|says?|said|it) so\b(?! that\b)"
    r"|\d so\b|, so (?:is|are|does|do|has|have)\b": "repeat the verb or the noun",
    r"\b(?:0|1|None) means (?:not|none)\b|\bmeans not\b": "'0 disables ...'",
    r"\b(?:says?|said|tells?|told|asked|declares?|knows?) of (?:it|its|itself|them)\b": (
        "name the thing"
    ),
    r"\b(?:is|are|was|were) (?:said|asked|told)\b(?! to\b| for\b)": "active voice: 'prints'",
    r"\bas such\b|\bthe one of\b": "name the thing",
    r"\b(?:than|of|is|are|as|with|to|by|from|in|and|or|for|on|like|between) that of\b": (
        "repeat the noun, or use the possessive"
    ),
    r"\bthe (?:former|latter)\b": "repeat the noun",
    r"\b(?:is|are|has|have|falls?|fell|gives?|says?|does|do) otherwise\b|\botherwise than\b": (
        "'differs', 'in another way'"
    ),
    # Of write-good, proselint and alex: words that say nothing.
    r"\bin order to\b(?! another)": "'to'",
    r"\b(?:due to|despite|given) the fact that\b": "'because', 'although'",
    r"\b(?:obviously|basically|actually|simply|of course|needless to say)\b": "leave it out",
    r"\b(?:very|really|quite|extremely|rather) (?!than\b)(?=[a-z]+\b)": "leave it out, or a number",
    r"\b(?:utili[sz]e|leverage|facilitate)[sd]?\b": "'use', 'help'",
    r"\b(?:it should be noted|please note|it is important to)\b": "leave it out",
    r"\b(?:a variety of|various|several different)\b": "a number, or 'several'",
    r"\bthere (?:is|are|exists?) (?:no |an? |several |many )?[\w-]+ (?:that|which)\b": (
        "begin with the noun"
    ),
    r"(?-i:\b([a-z]{2,}) \1\b)": "a word twice",
}


def paragraphs(text: str) -> list[tuple[int, str]]:
    """First line and the words of each paragraph of prose, list item, heading or table row."""
    found: list[tuple[int, str]] = []
    begins = True
    for number, line in enumerate(text.splitlines()):
        words = re.sub(r"`[^`]*`", "`x`", line.strip())
        starts = re.match(r"(?:#+|[-*]|\d+\.|\||>)\s*", words)
        if not words or begins or starts:
            found.append((number, words[starts.end() :] if starts else words))
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]} {words}")
        begins = not words or words.startswith("#")
    return [(number, words) for number, words in found if words]


def comments(source: str) -> Iterator[tuple[int, str]]:
    """First line and the text of each comment; lines that follow each other are one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = [(each.start[0], each.string) for each in tokens if each.type == tokenize.COMMENT]
    for _, block in groupby(enumerate(lines), lambda pair: pair[1][0] - pair[0]):
        numbers, texts = zip(*(line for _, line in block), strict=True)
        yield numbers[0], "\n".join(text.lstrip("# ") for text in texts)


def strings(source: str, docstrings_only: bool) -> Iterator[tuple[int, str]]:
    """First line and the text of each docstring, or of each string of several words."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or (docstrings_only and id(node) not in docstrings):
            continue
        if isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Line and words of each paragraph that people read; strings of tests are data."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        unfenced = re.sub(
            r"^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), text, flags=re.S | re.M
        )
        yield from ((number + 1, words) for number, words in paragraphs(unfenced))
        return
    data = path.is_relative_to(CHECKOUT / "tests")
    for first, block in [*comments(text), *strings(text, docstrings_only=data)]:
        for number, words in paragraphs(block):
            yield first + number, words


def files(places: list[Path]) -> list[Path]:
    found = {
        path for place in places for path in ([place] if place.is_file() else place.rglob("*"))
    }
    return sorted(p for p in found if p.suffix in (".py", ".md") and p.name not in GENERATED)


def hits(places: list[Path]) -> list[str]:
    """Each use of a pattern as file, line, the words around it and advice."""
    found = []
    for path in files(places):
        for line, words in prose(path):
            for pattern, better in PATTERNS.items():
                for use in re.finditer(pattern, words, re.I):
                    around = words[max(0, use.start() - 30) : use.end() + 40]
                    place = f"{path.relative_to(CHECKOUT)}:{line}"
                    found.append(f"{place}: …{around}… ({use[0]!r}: {better})")
    return found


@pytest.mark.parametrize(
    "place", [*CODE, "docs", "cli.py", "README.md", "CONTRIBUTING.md", "js/README.md"]
)
def test_text_names_things(place: str) -> None:
    path = CHECKOUT / place
    found = hits([path]) if path.exists() else []
    if found:
        pytest.fail("\n".join(found))


@pytest.mark.parametrize(
    "text",
    [
        *("What became of a row.", "Which of them is served."),
        *("The labels, of which the first counts.", "Differs from what the graph declares."),
        *("Returns what was rounded.", "Mistakes in what a bundle declares, and what the run has"),
        *("There are none.", "A folder of files, none of them read.", "Declared types: 2 of 2 so"),
        *("Each shows that it is so.", "Threads of a session; 0 means not."),
        *("What the bundle says of itself: 7 of 7", "The path is said."),
        *("A file that is read as such.", "The cache is twice as large as that of int8."),
        *("The latter is served.", "Rows that fell otherwise in a batch."),
        "Text where a sentence\nis longer than what\nthe graph reads.",
        *("In order to open it, the the file is read.", "A very large file."),
        *("There is no weight that fits.", "Utilises various kernels."),
    ],
)
def test_a_pattern_is_found(text: str) -> None:
    assert any(re.search(each, words, re.I) for _, words in paragraphs(text) for each in PATTERNS)


@pytest.mark.parametrize(
    "text",
    [
        *("What does a step cost?", "The message tells users what to do."),
        "The result is None if the graph has no such input, so that callers can tell.",
        *("Scores are equal, so one search drives both sides.", "`of which` in code is a name."),
    ],
)
def test_good_text_passes(text: str) -> None:
    assert not [
        each for _, words in paragraphs(text) for each in PATTERNS if re.search(each, words, re.I)
    ]


if __name__ == "__main__":
    print(
        *hits([CHECKOUT / place for place in sys.argv[1:] or [*CODE, "docs", "cli.py"]]), sep="\n"
    )
