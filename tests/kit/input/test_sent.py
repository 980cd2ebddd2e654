from __future__ import annotations

import torch

from flopwise.kit.input.sent import Sent


def test_writes_through_torch_are_noticed() -> None:
    x, y = torch.ones(2), torch.ones(2)
    sent = Sent(0, None)
    sent.keep([x, y], None)
    assert sent.unchanged()
    view = y[:1]
    view.add_(1)
    assert not sent.unchanged()


def test_of_tensors_made_in_inference_mode_nobody_knows() -> None:
    sent = Sent(0, None)
    with torch.inference_mode():
        sent.keep([torch.ones(2)], None)
    assert not sent.unchanged()
