"""Windows hold every token once an epoch, masks hide what they should, and epochs differ."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from transferry.build_model.train.data import CHOSEN, MaskedWindows, Windows, read_text
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.byte_pair import PASSAGES, PROMPTS

MASK, PAD = 3, 0
ORDINARY = range(4, 400)


def masked(tokens: list[int], context: int) -> MaskedWindows:
    return MaskedWindows(tokens, context, PASSAGES, ORDINARY)


@pytest.mark.parametrize("count", [2, 3, 9, 10, 11, 101])
@pytest.mark.parametrize("context", [1, 3, 10, 500])
def test_every_token_but_the_first_is_to_be_said_once(count: int, context: int) -> None:
    tokens = list(range(count))
    windows = Windows(tokens, context)
    assert [token for window in windows for token in window.target] == tokens[1:]
    assert [token for window in windows for token in window.target_input] == tokens[:-1]
    assert all(len(window.target) <= context and window.source == [] for window in windows)
    assert windows[-1] == windows[len(windows) - 1]
    assert windows[:2] == list(windows)[:2]
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_epochs_cut_elsewhere_and_the_same_epoch_in_the_same_place() -> None:
    windows = Windows(list(range(1000)), 50)
    starts = {windows.epoch(seed, n)[0].target_input[0] for seed in (0, 1) for n in range(40)}
    assert len(starts) > 30
    assert starts < set(range(50))
    # Whatever epochs came before, as a resumed training needs it.
    assert list(windows.epoch(0, 3)) == list(windows.epoch(0, 1).epoch(0, 3))
    assert list(windows.epoch(0, 3)) != list(windows.epoch(1, 3))


def test_an_epoch_holds_the_whole_text() -> None:
    windows = Windows(list(range(1000)), 50).epoch(3, 7)
    said = Counter(token for window in windows for token in window.target)
    assert len(said) == 999
    assert set(said.values()) == {1}


@pytest.mark.parametrize("count", [2, 8, 9, 10, 100])
def test_masked_windows_hold_every_token_once(count: int) -> None:
    tokens = [100 + number for number in range(count)]
    windows = masked(tokens, 11)
    assert windows.context == 9
    whole = []
    for window in windows:
        assert (window.source[0], window.source[-1]) == (1, 2)
        assert (window.target[0], window.target[-1]) == (PAD, PAD)
        assert len(window.source) == len(window.target) <= 11
        assert window.target_input == []
        assert any(wanted != PAD for wanted in window.target)
        whole += [
            wanted if wanted != PAD else read
            for read, wanted in zip(window.source[1:-1], window.target[1:-1], strict=True)
        ]
    assert whole == tokens


def test_what_is_hidden_is_what_devlin_et_al_hide() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(4, 400, size=60_000).tolist()
    fates: Counter[str] = Counter()
    for window in masked(tokens, 128).epoch(1, 2):
        assert any(wanted != PAD for wanted in window.target)
        for read, wanted in zip(window.source[1:-1], window.target[1:-1], strict=True):
            if wanted == PAD:
                fates["left alone"] += 1
            elif read == MASK:
                fates["hidden"] += 1
            elif read == wanted:
                fates["kept"] += 1
            else:
                fates["replaced"] += 1
                assert read in ORDINARY
    chosen = 60_000 - fates["left alone"]
    assert chosen / 60_000 == pytest.approx(CHOSEN, abs=0.012)
    assert fates["hidden"] / chosen == pytest.approx(0.8, abs=0.02)
    assert fates["replaced"] / chosen == pytest.approx(0.1, abs=0.015)
    assert fates["kept"] / chosen == pytest.approx(0.1, abs=0.015)


def test_masks_differ_by_epoch_and_repeat_with_it() -> None:
    windows = masked(list(range(100, 400)), 32)
    assert list(windows.epoch(0, 1)) == list(windows.epoch(0, 1))
    assert list(windows) == list(windows)
    first, second = windows.epoch(0, 1), windows.epoch(0, 2)
    assert [w.source for w in first] != [w.source for w in second]


def test_too_little_text() -> None:
    with pytest.raises(InputError, match="at least 2 tokens, found 1; give more text"):
        Windows([5], 10)


def test_a_tokenizer_without_a_mask_cannot_hide() -> None:
    with pytest.raises(InputError, match="expected a tokenizer with a mask"):
        MaskedWindows([5, 6, 7], 10, PROMPTS, ORDINARY)


def test_a_file_is_one_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one\n\n two \r\nthree", encoding="utf-8", newline="")
    assert read_text(path) == "one\n\n two \nthree"
    path.write_text(" \n\n")
    with pytest.raises(InputError, match=r"text\.txt: expected text, found nothing"):
        read_text(path)
