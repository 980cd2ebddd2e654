from __future__ import annotations

import pytest
import torch

from flopwise.errors import InputError
from flopwise.kit.input import IMAGENET, Normalize, Prefetcher
from flopwise.kit.input.normalize import as_normalize


def by_hand(x: torch.Tensor) -> torch.Tensor:
    """ToTensor and Normalize as torchvision computes them: one division, one subtraction, one division."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
    return x.float().div(255).sub(mean).div(std)


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 4, 5), (2, 7, 3, 4, 5)])
def test_every_value_is_that_of_totensor_and_normalize_to_the_bit(shape: tuple[int, ...]) -> None:
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert torch.equal(Normalize()(x), by_hand(x))


def test_all_levels_of_all_channels() -> None:
    x = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(3, 1, 1)
    got = Normalize()(x)
    for level in (0, 1, 127, 254, 255):
        for c in range(3):
            wanted = (torch.tensor(level / 255) - IMAGENET[0][c]) / IMAGENET[1][c]
            assert got[c, level // 16, level % 16] == pytest.approx(float(wanted), abs=1e-6)


def test_only_images_of_bytes_with_as_many_channels_are_changed() -> None:
    batch = {
        "image": torch.zeros(2, 3, 4, 4, dtype=torch.uint8),
        "mask": torch.ones(2, 1, 4, 4, dtype=torch.uint8),
        "label": torch.tensor([1, 2]),
        "float": torch.rand(2, 3, 4, 4),
        "tokens": torch.ones(3, 4, dtype=torch.uint8),
    }
    got = Normalize()(batch)
    assert got["image"].dtype == torch.float32
    assert all(got[k] is batch[k] for k in ("mask", "label", "float", "tokens"))
    assert batch["image"].sum() == 0


def test_type_and_layout_of_the_result() -> None:
    x = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    half = Normalize(dtype=torch.bfloat16, channels_last=True)(x)
    assert half.dtype == torch.bfloat16
    assert half.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(half, by_hand(x).bfloat16())
    assert Normalize()(x).is_contiguous()


@pytest.mark.parametrize(
    "arguments", [((1, 2), (1,)), ((), ()), ((0.5,), (0,)), ((0.5,), (0.5,), torch.int32)]
)
def test_what_makes_no_sense_is_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(InputError, match="one mean and one std"):
        Normalize(*arguments)  # type: ignore[arg-type]


def test_settings_of_a_prefetcher() -> None:
    assert as_normalize(None, False) is None
    own = Normalize()
    assert as_normalize(own, True) is own
    made = as_normalize((*IMAGENET, torch.float16), True)
    assert made is not None
    assert (made.mean, made.dtype, made.channels_last) == (IMAGENET[0], torch.float16, True)
    with pytest.raises(InputError, match=r"\(mean, std\), \(mean, std, dtype\) or a Normalize"):
        as_normalize("imagenet", False)


def test_a_prefetcher_hands_out_normalised_images() -> None:
    images = [torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8) for _ in range(5)]
    batches = Prefetcher(
        [(x, k) for k, x in enumerate(images)], "cpu", normalize=IMAGENET, consistency=True
    )
    for k, (got, label) in enumerate(batches):
        assert torch.equal(got, by_hand(images[k]))
        assert label == k
