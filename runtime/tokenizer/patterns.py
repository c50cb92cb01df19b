"""The regular expressions that split text into words before BPE.

A pattern comes with the tokenizer, perhaps from a stranger, and tiktoken's regex engine can panic
or run for ever on a bad one. So an unknown pattern is first tried in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys

from transferry.runtime.errors import InputError

# cl100k_base (GPT-4) in tiktoken 0.14's form: the possessive quantifiers keep a run of a million
# blanks from overflowing the stack of its regex engine. "{1,3}" has none: "{1,3}+" has another
# meaning in the engine of `tokenizers`.
WORD_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Copied from tiktoken's openai_public.py, since loading these encodings needs a network.
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
OURS = (WORD_PATTERN, GPT2_PATTERN, CL100K_PATTERN, O200K_PATTERN)
SECONDS = 10.0
# Long runs of one kind of character and of mixtures: a bad pattern goes back and forth in them.
_TRIAL = """
import sys, tiktoken
ranks = {bytes([value]): value for value in range(256)}
encoding = tiktoken.Encoding(
    "trial", pat_str=sys.stdin.buffer.read().decode(), mergeable_ranks=ranks, special_tokens={}
)
for kind in (*"aZé日7 '!", "", "\\n", "\\u0301", "aB", "a ", "1a", "'s!"):
    encoding.encode_ordinary(kind * 5000)
"""


def check_pattern(pattern: str) -> None:
    """Tries an unknown pattern; raises InputError if it is slow or makes tiktoken panic."""
    if pattern in OURS:
        return
    try:
        command = [sys.executable, "-I", "-c", _TRIAL]
        subprocess.run(
            command, input=pattern.encode(), check=True, timeout=SECONDS, capture_output=True
        )
    except (subprocess.SubprocessError, UnicodeEncodeError) as error:
        raise InputError(
            f"expected a regular expression that splits any text into words, found {pattern[:80]!r}"
        ) from error
