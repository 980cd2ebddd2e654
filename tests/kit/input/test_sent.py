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
