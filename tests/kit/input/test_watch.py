from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from flopwise.errors import ConsistencyError, InputError
from flopwise.kit.input import Watch


def ring_of(n: int = 3) -> list[torch.Tensor]:
    return [torch.zeros(64) for _ in range(n)]


def batch(step: int) -> torch.Tensor:
    return torch.full((64,), float(step + 1))


def run(buffers: Any, watch: Watch, ahead: int, steps: int = 12) -> None:
    """The loop over buffers[i % 3]: the copies run so many steps ahead of the steps that read."""
    for i in range(steps + ahead):
        if i < steps:
            buffers[i % 3].copy_(batch(i))
            watch.wrote(i % 3, i)
        if i >= ahead:
            watch.reading((i - ahead) % 3, i - ahead)
            watch.done((i - ahead) % 3, i - ahead)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_ring_whose_copies_stay_behind_its_readers_is_clean(ahead: int) -> None:
    buffers = ring_of()
    watch = Watch(buffers, raising=True)
    run(buffers, watch, ahead)
    assert watch.check() == []
    assert watch.checked == 24


def test_copies_that_do_not_wait_for_the_reader_are_caught_at_the_step() -> None:
    buffers = ring_of()
    watch = Watch(buffers)
    run(buffers, watch, ahead=3)
    found = watch.check()
    assert [f.step for f in found[:4]] == [0, 0, 1, 1]
    assert str(found[0]) == (
        "step 0, buffer 0: overwritten: when the step read it it held the batch of step 3 already: "
        "the copy did not wait for the reader"
    )
    assert "when the step was done with it" in found[1].said


def test_a_step_that_does_not_wait_for_its_copy_is_caught() -> None:
    buffers = ring_of()
    watch = Watch(buffers)
    for i in range(6):
        watch.reading(i % 3, i)  # before the copy is there
        buffers[i % 3].copy_(batch(i))
        watch.wrote(i % 3, i)
    found = watch.check()
    assert [f.kind for f in found] == ["overwritten"] * 3 + ["lost"] * 3
    assert (
        found[3].said
        == "when the step read it it still held the batch of step 0: the copy was not waited for"
    )


def test_half_a_copy_is_parts_of_several_batches() -> None:
    buffers = ring_of()
    watch = Watch(buffers)
    buffers[0].copy_(batch(0))
    watch.wrote(0, 0)
    buffers[0][:32] = 9.0
    watch.reading(0, 0)
    assert watch.check()[0].said == "when the step read it it held parts of several batches"


def test_wrong_buffers_and_steps_that_were_never_written_are_told() -> None:
    buffers = ring_of()
    watch = Watch(buffers)
    watch.wrote(0, 0)
    watch.reading(1, 0)
    watch.reading(2, 7)
    found = watch.check()
    assert [f.kind for f in found] == ["out of order", "lost"]
    assert found[0].said == "the step was written to buffer 0 and read from buffer 1"


def test_a_source_that_is_rewritten_before_its_copy_is_told() -> None:
    buffers, source = ring_of(), batch(0)
    watch = Watch(buffers)
    buffers[0].copy_(source)
    watch.wrote(0, 0, source)
    assert watch.check() == []
    source.fill_(5)
    watch.wrote(0, 1, source)
    assert "right after its copy it did not hold what the source holds" in watch.check()[0].said


def test_only_so_many_steps_are_remembered() -> None:
    buffers = ring_of(1)
    watch = Watch(buffers)
    for i in range(300):
        watch.wrote(0, i)
    watch.reading(0, 43)
    watch.reading(0, 44)
    assert [f.step for f in watch.check()] == [43]


def test_findings_are_raised_once_if_asked() -> None:
    buffers = ring_of()
    watch = Watch(buffers, raising=True)
    run(buffers, watch, ahead=3, steps=4)
    with pytest.raises(ConsistencyError, match=r"step 0, buffer 0: overwritten.*in all"):
        watch.check()
    assert watch.check() == watch.findings


def test_nested_buffers_and_none() -> None:
    nested = [{"x": torch.zeros(4), "y": [torch.zeros(2)]} for _ in range(2)]
    watch = Watch(nested)
    nested[1]["y"][0].fill_(3)  # type: ignore[index]
    watch.wrote(1, 0)
    nested[1]["y"][0].fill_(4)  # type: ignore[index]
    watch.reading(1, 0)
    assert len(watch.check()) == 1
    for none in ([], [torch.ones(1), 3]):
        with pytest.raises(InputError, match="at least one tensor"):
            Watch(none)


def test_results_that_have_not_come_are_left_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    come = [False]
    monkeypatch.setattr("flopwise.kit.input.watch._Sum.ready", lambda self: come[0])
    buffers = ring_of()
    watch = Watch(buffers)
    run(buffers, watch, ahead=0, steps=3)
    watch.check()
    assert watch.checked == 0
    come[0] = True
    watch.check()
    assert watch.checked == 6
    come[0] = False
    run(buffers, watch, ahead=0, steps=3)
    watch.check(wait=True)
    assert watch.checked == 12


def test_copies_and_steps_may_be_queued_by_two_threads() -> None:
    buffers = ring_of()
    watch = Watch(buffers, raising=True)
    written, read = threading.Semaphore(0), threading.Semaphore(2)

    def copies() -> None:
        for i in range(200):
            read.acquire()
            buffers[i % 3].copy_(batch(i))
            watch.wrote(i % 3, i)
            written.release()

    thread = threading.Thread(target=copies)
    thread.start()
    for i in range(200):
        written.acquire()
        watch.reading(i % 3, i)
        watch.done(i % 3, i)
        watch.check()
        read.release()
    thread.join()
    assert watch.checked == 400


def test_a_long_loop_that_asks_at_its_end_only_finds_what_a_loop_finds_that_asks_at_every_step() -> (
    None
):
    buffers = ring_of()
    watch = Watch(buffers)
    run(buffers, watch, 0, steps=700)
    assert len(watch._noted) <= 2 * 257  # what is outstanding is bounded
    assert watch.check(wait=True) == []
    assert watch.checked == 1400
    run(buffers, late := Watch(buffers), 3, steps=700)
    found = late.check(wait=True)
    assert [f.step for f in found if f.kind == "overwritten"] == [
        s for s in range(697) for _ in "rd"
    ]
