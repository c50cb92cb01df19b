"""Good pairs come through unchanged; bad ones are named or counted; batches keep their budget."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from tests.build_model.train.small import BYTES
from transferry.build_model.train.data import (
    BadPair,
    Example,
    ReadReport,
    SentencePair,
    collate,
    encode_pairs,
    read_pair_file,
    read_pairs,
    token_batches,
)
from transferry.runtime.errors import InputError, UsageError

PAIRS = [SentencePair("A dog.", "Ein Hund."), SentencePair("Two\u2028cats.", "Zwei\u2028Katzen.")]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def lines(*texts: str) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_two_files(tmp_path: Path, suffix: str) -> None:
    source = write(tmp_path / f"en{suffix}", lines(*(pair.source for pair in PAIRS)))
    target = write(tmp_path / f"de{suffix}", lines(*(pair.target for pair in PAIRS)))
    assert read_pairs(source, target) == (PAIRS, ReadReport(read=2, kept=2, dropped={}))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_one_file(tmp_path: Path, suffix: str) -> None:
    tsv = write(tmp_path / f"pairs.tsv{suffix}", lines(*("\t".join(pair) for pair in PAIRS)))
    objects = (json.dumps({"id": 7, **pair._asdict()}) for pair in PAIRS)
    jsonl = write(tmp_path / f"pairs.jsonl{suffix}", lines(*objects))
    assert read_pair_file(tsv) == read_pair_file(jsonl) == (PAIRS, ReadReport(2, 2, {}))


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize(("more", "fewer"), [(5, 3), (3, 2)])
def test_unequal_counts(tmp_path: Path, more: int, fewer: int, skip_bad: bool) -> None:
    long = write(tmp_path / "long", lines(*["x"] * more))
    short = write(tmp_path / "short", lines(*["x"] * fewer))
    with pytest.raises(InputError, match=f"found {more} in .*long and {fewer} in .*short"):
        read_pairs(long, short, skip_bad=skip_bad)
    with pytest.raises(InputError, match=f"found {fewer} in .*short and {more} in .*long"):
        read_pairs(short, long, skip_bad=skip_bad)


@pytest.mark.parametrize(
    ("bad_line", "reason", "message"),
    [
        (b"", "empty", "line 2: expected text, found nothing"),
        (b"caf\xe9", "invalid UTF-8", "line 2: expected UTF-8, found the byte 0xe9"),
        (b"x" * 10_001, "too many characters", "line 2: expected at most 10000 characters"),
    ],
)
@pytest.mark.parametrize("bad_side", ["source", "target"])
def test_bad_lines(
    tmp_path: Path, bad_side: str, bad_line: bytes, reason: str, message: str
) -> None:
    good = lines("one", "two", "x" * 10_000)
    paths = {"source": write(tmp_path / "source", good), "target": write(tmp_path / "target", good)}
    write(paths[bad_side], b"eins\n" + bad_line + b"\ndrei\n")

    with pytest.raises(BadPair, match=f"{bad_side}, {message}"):
        read_pairs(paths["source"], paths["target"])

    pairs, report = read_pairs(paths["source"], paths["target"], skip_bad=True)
    assert [set(pair) for pair in pairs] == [{"one", "eins"}, {"x" * 10_000, "drei"}]
    assert report == ReadReport(read=3, kept=2, dropped={reason: 1})


@pytest.mark.parametrize(
    ("name", "line", "reason", "message"),
    [
        ("p.tsv", b"one column", "malformed", "line 2: .*found 1 columns"),
        ("p.tsv", b"a\t", "empty", "line 2: .*found nothing"),
        ("p.jsonl", b'{"source": "a"', "malformed", "line 2: "),
        ("p.jsonl", b'{"source": "a"}', "malformed", "line 2: expected {.*, found '{"),
        ("p.jsonl", b'{"source": "a", "target": 1}', "malformed", "line 2: expected {"),
        ("p.jsonl", b'{"source": "a", "target": "\\ud800"}', "malformed", "line 2: .*utf-8"),
        ("p.jsonl", b"[" * 100_000, "malformed", "line 2: "),
        ("p.jsonl", b"[%b]" % (b"1" * 5000), "malformed", r"has 5000 digits\.$"),
        ("p.jsonl", b'{"source": "a", "target": "\xff"}', "invalid UTF-8", "line 2: .*0xff"),
        ("p.jsonl", b'{"source": "", "target": "b"}', "empty", "line 2: .*found nothing"),
    ],
)
def test_bad_lines_of_one_file(
    tmp_path: Path, name: str, line: bytes, reason: str, message: str
) -> None:
    good = b'{"source": "a", "target": "b"}' if name == "p.jsonl" else b"a\tb"
    path = write(tmp_path / name, b"\n".join([good, line, good, b""]))
    with pytest.raises(BadPair, match=message):
        read_pair_file(path)
    assert read_pair_file(path, skip_bad=True) == (
        [SentencePair("a", "b")] * 2,
        ReadReport(read=3, kept=2, dropped={reason: 1}),
    )


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_nothing_usable(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "text", content)
    with pytest.raises(InputError, match=f"found none in {len(content)}"):
        read_pairs(path, path, skip_bad=True)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pairs\.csv: expected a name ending in \.tsv"):
        read_pair_file(tmp_path / "pairs.csv")


def test_encoding_ends_each_side_and_shifts_the_target() -> None:
    examples, report = encode_pairs([SentencePair("ab", "c")], BYTES, max_tokens=3)
    a, b, c = (3 + ord(letter) for letter in "abc")
    assert examples == [Example([a, b, 2], [c, 2], [1, c])]
    assert report == ReadReport(1, 1, {})


@pytest.mark.parametrize("pair", [SentencePair("abc", "a"), SentencePair("a", "abc")])
def test_too_many_tokens(pair: SentencePair) -> None:
    pairs = [SentencePair("ab", "ab"), pair]
    with pytest.raises(BadPair, match="pair 2: expected at most 3 tokens, found 4 in 'abc'"):
        encode_pairs(pairs, BYTES, max_tokens=3)
    examples, report = encode_pairs(pairs, BYTES, max_tokens=3, skip_bad=True)
    assert len(examples) == 1
    assert report == ReadReport(read=2, kept=1, dropped={"too many tokens": 1})


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """Lengths 1 to 40 in every combination."""
    return [
        Example([9] * source, [9] * target, [9] * target)
        for source in range(1, 41)
        for target in range(1, 41)
    ]


def longest(examples: list[Example], batch: list[int]) -> int:
    return max(len(side) for index in batch for side in examples[index])


def test_batches_hold_everything_once_within_the_budget(examples: list[Example]) -> None:
    batches = token_batches(examples, 200, seed=1, epoch=0)
    assert sorted(index for batch in batches for index in batch) == list(range(len(examples)))
    padded = [len(batch) * longest(examples, batch) for batch in batches]
    assert max(padded) <= 200
    assert sum(padded) > 0.9 * 200 * len(batches), "batches are well filled"


def test_an_example_that_fills_the_budget_is_a_batch(examples: list[Example]) -> None:
    assert token_batches([Example([9] * 7, [9], [1])] * 2, 7, seed=0, epoch=0) in (
        [[0], [1]],
        [[1], [0]],
    )
    with pytest.raises(UsageError, match=r"batch_tokens must be at least 40.*found 39"):
        token_batches(examples, 39, seed=0, epoch=0)


def test_batches_are_a_function_of_seed_and_epoch(examples: list[Example]) -> None:
    def batches(seed: int, epoch: int) -> list[list[int]]:
        return token_batches(examples, 200, seed=seed, epoch=epoch)

    assert batches(1, 0) == batches(1, 0)
    assert batches(1, 0) != batches(1, 1)
    assert batches(1, 0) != batches(0, 1)


def test_an_epoch_is_shuffled(examples: list[Example]) -> None:
    first, second = (token_batches(examples, 200, seed=0, epoch=epoch) for epoch in (0, 1))
    lengths = [longest(examples, batch) for batch in first]
    assert lengths != sorted(lengths), "short and long batches take turns"
    assert not {frozenset(batch) for batch in first} & {
        frozenset(batch) for batch in second if len(batch) > 8
    }, "neighbours change"


def test_collate_pads() -> None:
    examples = [
        Example([5, 6, 2], [7, 2], [1, 7]),
        Example([8, 2], [9, 10, 11, 2], [1, 9, 10, 11]),
    ]
    batch = collate(examples, 0, "cpu")
    assert batch.source.tolist() == [[5, 6, 2], [8, 2, 0]]
    assert batch.source_mask.tolist() == [[True, True, True], [True, True, False]]
    assert batch.target_input.tolist() == [[1, 7, 0, 0], [1, 9, 10, 11]]
    assert batch.target_output.tolist() == [[7, 2, 0, 0], [9, 10, 11, 2]]
    assert {tensor.dtype for tensor in batch} == {torch.int64, torch.bool}
