from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flopwise.fixes.unpadding.calls import Names, unknown


class Model(nn.Module):
    def forward(
        self, input_ids: Any, attention_mask: Any = None, *, labels: Any = None, **more: Any
    ) -> None:
        """Never called."""


IDS = torch.zeros(2, 3, dtype=torch.int64)


def test_arguments_by_name_however_they_are_given() -> None:
    names = Names(Model())
    assert names.known == {"input_ids", "attention_mask", "labels"}
    found = names.of((1, 2), {"labels": 3, "use_cache": False})
    assert found == {"input_ids": 1, "attention_mask": 2, "labels": 3, "use_cache": False}
    assert names.of((), {"input_ids": 1}) == {"input_ids": 1}


def test_a_call_that_does_not_fit_has_no_names() -> None:
    assert Names(Model()).of((1, 2, 3), {}) is None


@pytest.mark.parametrize(
    "named",
    [
        {"input_ids": IDS, "labels": IDS, "token_type_ids": None, "position_ids": IDS},
        {"return_dict": True, "output_hidden_states": True, "output_attentions": False},
        {"num_items_in_batch": torch.tensor(4), "use_cache": False, "logits_to_keep": 0},
    ],
)
def test_arguments_that_are_known(named: dict[str, Any]) -> None:
    assert unknown(named) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inputs_embeds", torch.zeros(2, 3, 4)),
        ("head_mask", torch.zeros(4)),
        ("output_attentions", True),
        ("use_cache", True),
        ("logits_to_keep", 5),
        ("past_key_values", object()),
        ("extra", [IDS]),
        ("position_ids", "arange"),
    ],
)
def test_arguments_that_are_not(name: str, value: Any) -> None:
    assert unknown({"input_ids": IDS, name: value}) == name
