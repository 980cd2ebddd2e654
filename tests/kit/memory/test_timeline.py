from __future__ import annotations

import pytest
import torch
from torch import nn

from flopwise.kit.memory.timeline import Timeline, memory_timeline
from flopwise.units import size

WIDTH, ROWS = 32, 64
WEIGHT, BIAS, ACTIVATION = WIDTH * WIDTH * 4, WIDTH * 4, ROWS * WIDTH * 4


class Net(nn.Module):
    """Two layers, between which a square root is kept for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).exp())  # type: ignore[no-any-return]


@pytest.fixture
def record() -> tuple[Net, Timeline]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    with memory_timeline(net, [optimizer]) as recorder:
        x = torch.ones(ROWS, WIDTH)
        recorder.mark("batch")
        y = net(x)
        recorder.mark("forward")
        y.sum().backward()
        del y
        recorder.mark("backward")
        optimizer.step()
        recorder.mark("step")
        optimizer.zero_grad()
        recorder.mark("zero")
    return net, recorder.timeline


PARAMETERS = 2 * (WEIGHT + BIAS)


class TestCategories:
    def test_before_the_forward(self, record: tuple[Net, Timeline]) -> None:
        assert record[1].at_mark("batch").by_category == {
            "parameters": PARAMETERS,
            "inputs": ACTIVATION,
        }

    def test_after_the_forward_lives_what_backward_needs_and_the_output(
        self, record: tuple[Net, Timeline]
    ) -> None:
        assert record[1].at_mark("forward").by_category == {
            "parameters": PARAMETERS,
            "inputs": ACTIVATION,
            "activations": ACTIVATION,  # of exp; what went into it is gone
            "temporaries": ACTIVATION,  # the output, which no one saved
        }

    def test_after_backward_gradients_are_there_and_activations_are_gone(
        self, record: tuple[Net, Timeline]
    ) -> None:
        assert record[1].at_mark("backward").by_category == {
            "parameters": PARAMETERS,
            "inputs": ACTIVATION,
            "gradients": PARAMETERS,
        }

    def test_after_the_first_step_the_optimizer_has_two_moments(
        self, record: tuple[Net, Timeline]
    ) -> None:
        held = record[1].at_mark("step").by_category
        assert held["optimizer state"] == 2 * PARAMETERS + 4 * 4  # and four counts of steps
        assert held["gradients"] == PARAMETERS

    def test_zero_grad_frees_the_gradients(self, record: tuple[Net, Timeline]) -> None:
        assert "gradients" not in record[1].at_mark("zero").by_category

    def test_state_and_gradients_that_are_there_before_are_told_apart(self) -> None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
        net(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        with memory_timeline(net, [optimizer]) as recorder:
            recorder.mark("start")
        assert recorder.timeline.at_mark("start").by_category == {
            "parameters": PARAMETERS,
            "gradients": PARAMETERS,
            "optimizer state": PARAMETERS,
        }

    def test_a_batch_may_be_given(self) -> None:
        x = torch.ones(ROWS, WIDTH)
        with memory_timeline(Net(), inputs={"x": [x]}) as recorder:
            recorder.mark("start")
        assert recorder.timeline.at_mark("start").by_category["inputs"] == ACTIVATION


class TestPeak:
    def test_it_is_the_largest_of_the_curve_and_says_who_holds_it(
        self, record: tuple[Net, Timeline]
    ) -> None:
        line = record[1]
        assert line.peak.total_bytes == max(m.total_bytes for m in line.curve())
        held = line.at_peak_by_module()
        assert sum(n for _, _, n in held) == line.peak.total_bytes
        assert held == sorted(held, key=lambda h: -h[2])

    def test_activations_belong_to_the_module_that_made_them(self) -> None:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
        with memory_timeline(net) as recorder:
            y = net(torch.ones(ROWS, WIDTH))
            recorder.mark("now")
        assert ("1", "activations", ACTIVATION) in recorder.timeline.at_peak_by_module()
        del y

    def test_what_is_made_outside_of_layers_is_told_by_its_op(self) -> None:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        with memory_timeline(net, inputs=torch.ones(3, 3)) as recorder:
            y = net(torch.ones(ROWS, WIDTH)).log_softmax(1)
        line = recorder.timeline
        assert ("", "activations", "aten._log_softmax.default", ACTIVATION) in line.at_peak_by_op()
        text = str(line)
        assert f"  outside of layers, _log_softmax: {size(ACTIVATION)} of activations" in text
        assert "  -:" not in text
        assert text.count("parameters") == 1
        del y

    def test_it_is_told_in_words(self, record: tuple[Net, Timeline]) -> None:
        text = str(record[1])
        assert text.startswith("peak 53.6 kB on cpu after aten.")
        assert "\n  parameters: 8.45 kB\n" in text

    def test_without_events(self) -> None:
        with memory_timeline(nn.Identity()) as recorder:
            pass
        assert recorder.timeline.peak.total_bytes == 0
        assert list(recorder.timeline.curve()) == []


class TestIsNoTrace:
    def test_results_are_those_without_it(self) -> None:
        net, x = Net(), torch.ones(ROWS, WIDTH)
        net(x).sum().backward()
        plain = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
        with memory_timeline(net):
            net(x).sum().backward()
        for p, grad in zip(net.parameters(), plain, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, grad)

    def test_hooks_and_references_are_gone_afterwards(self) -> None:
        net = Net()

        def fail() -> None:
            with memory_timeline(net):
                net(torch.ones(1, WIDTH))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        for module in net.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
        events = None
        with memory_timeline(net) as recorder:
            kept = net(torch.ones(ROWS, WIDTH))
            events = len(recorder.timeline.events)
        del kept
        assert len(recorder.timeline.events) == events

    def test_a_mark_that_is_not_there(self, record: tuple[Net, Timeline]) -> None:
        with pytest.raises(KeyError):
            record[1].at_mark("tomorrow")

    def test_views_are_not_counted_twice_and_other_devices_not_at_all(self) -> None:
        with memory_timeline(nn.Identity()) as recorder:
            x = torch.ones(ROWS, WIDTH)
            views = [x.t(), x[1:], x.view(-1), torch.empty(8, device="meta")]
            recorder.mark("now")
        assert recorder.timeline.at_mark("now").total_bytes == ACTIVATION
        del views
