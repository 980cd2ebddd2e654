from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flopwise.fixes.unpadding.padding import Padding, look, mask_problem

MASKS = st.integers(1, 5).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=1, max_size=4
    )
)


@given(MASKS)
def test_what_a_mask_says(rows: list[list[int]]) -> None:
    found = look(torch.tensor(rows))
    width = len(rows[0])
    assert found == Padding(
        rows=len(rows),
        width=width,
        lengths=tuple(map(sum, rows)),
        used_width=max(i + 1 if v else 0 for row in rows for i, v in enumerate(row)),
        right=all(row[0] == 1 and row == sorted(row, reverse=True) for row in rows),
        plain=True,
        ignored=True,
    )
    assert found.tokens == sum(map(sum, rows))
    assert found.positions == len(rows) * width


@given(MASKS, st.data())
def test_labels_without_a_token_count_or_do_not(rows: list[list[int]], data: st.DataObject) -> None:
    labels = [[data.draw(st.sampled_from((-100, 0, 7))) for _ in row] for row in rows]
    stray = any(
        label != -100 and not held
        for row, line in zip(rows, labels, strict=True)
        for held, label in zip(row, line, strict=True)
    )
    assert look(torch.tensor(rows), torch.tensor(labels)).ignored == (not stray)


@pytest.mark.parametrize(
    ("mask", "plain"),
    [([[1, 1, 2, 2]], False), ([[1, -1]], False), ([[True, False]], True), ([[0, 0]], True)],
)
def test_masks_that_number_sequences_are_told(mask: list[list[int]], plain: bool) -> None:
    assert look(torch.tensor(mask)).plain == plain


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(2, 3), "float32"),
        (torch.ones(2, 4, dtype=torch.int64), "shape (2, 4)"),
        (torch.ones(2, 1, 3, 3, dtype=torch.bool), "shape (2, 1, 3, 3)"),
    ],
)
def test_masks_that_say_nothing(mask: torch.Tensor, words: str) -> None:
    assert words in str(mask_problem(mask, torch.zeros(2, 3, dtype=torch.int64)))


def test_a_mask_that_does() -> None:
    assert mask_problem(torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3).long()) is None
