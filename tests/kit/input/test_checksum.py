from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.kit.input.checksum import device_checksum, host_checksum

CPU = torch.device("cpu")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=70), max_size=4))
def test_host_and_device_compute_the_same(parts: list[bytes]) -> None:
    tensors = [torch.tensor(list(p), dtype=torch.uint8) for p in parts]
    assert int(device_checksum(tensors, CPU)) == host_checksum(tensors)


def test_the_value_is_the_sum_of_the_bytes_eight_to_a_word() -> None:
    words = torch.tensor([5, -7], dtype=torch.int64)
    assert host_checksum([words]) == -2
    eleven = torch.arange(11, dtype=torch.uint8)
    expected = int.from_bytes(bytes(range(8)), "little") + 8 + 9 + 10
    assert host_checksum([eleven]) == expected
    assert host_checksum([words, eleven]) == _signed(-2 * 1_000_003 + expected)


def test_it_wraps_alike() -> None:
    large = torch.full((64,), 2**62 + 12345, dtype=torch.int64)
    assert int(device_checksum([large, large], CPU)) == host_checksum([large, large])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 99), st.integers(1, 255))
def test_any_changed_byte_shows(position: int, change: int) -> None:
    x = torch.arange(100, dtype=torch.uint8)
    y = x.clone()
    y[position] = (int(y[position]) + change) % 256
    assert host_checksum([x]) != host_checksum([y])


def test_views_that_are_not_aligned_and_odd_layouts_count_like_their_copies() -> None:
    x = torch.arange(64, dtype=torch.uint8)[3:40]
    assert host_checksum([x]) == host_checksum([x.clone()])
    image = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert host_checksum([image]) == host_checksum([image.clone()])
    assert host_checksum([torch.tensor(True), torch.zeros(0)]) == 1


def test_slices_and_expanded_tensors_count_like_their_dense_copies() -> None:
    x = torch.arange(60.0).view(6, 10)
    for part in (x[:, :-1], x[:, 1:], x[::2], x[:1].expand(5, 10), x.t()[1:], x[0, :1].expand(4)):
        assert host_checksum([part]) == host_checksum([torch.empty_like(part).copy_(part)])
    changed = x.clone()
    changed[0, 9] = -1  # what the slice leaves out does not count, what it holds does
    assert host_checksum([x[:, :-1]]) == host_checksum([changed[:, :-1]])
    assert host_checksum([x[:, 1:]]) != host_checksum([changed[:, 1:]])


def test_conjugate_and_negative_views_count_as_their_values() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert host_checksum([z.conj()]) == host_checksum([z.conj().resolve_conj()])
    assert host_checksum([z.conj().imag]) == host_checksum([torch.tensor([-2.0, 4.0])])


def test_exchanged_tensors_show() -> None:
    a, b = torch.ones(4), torch.zeros(4)
    assert host_checksum([a, b]) != host_checksum([b, a])


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
