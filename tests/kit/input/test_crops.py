from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flopwise.errors import InputError
from flopwise.kit.input import Normalize, RandomResizedCropBatch
from flopwise.kit.input.crops import Boxes, resize_weights


def images_of(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (3, h, w), dtype=torch.uint8, generator=g) for h, w in sizes]


def by_interpolate(
    image: torch.Tensor, box: list[int], size: tuple[int, int], flip: bool
) -> torch.Tensor:
    top, left, height, width = box
    part = image[:, top : top + height, left : left + width].double()[None]
    out = F.interpolate(part, size, mode="bilinear", antialias=True, align_corners=False)[0]
    return out.flip(-1) if flip else out


def test_crops_are_those_of_interpolate_image_by_image() -> None:
    images = images_of((50, 40), (33, 70), (8, 9), (64, 64))
    crop = RandomResizedCropBatch((12, 10), seed=3)
    boxes = crop.draw(torch.tensor([i.shape[-2:] for i in images]))
    got = crop.apply(images, boxes)
    assert got.shape == (4, 3, 12, 10)
    for k, image in enumerate(images):
        box = [int(v[k]) for v in (boxes.top, boxes.left, boxes.height, boxes.width)]
        wanted = by_interpolate(image, box, (12, 10), bool(boxes.flip[k]))
        assert (got[k].double() - wanted).abs().max() < 1e-3  # of 255: float32 rounding


def test_enlarging_and_mirroring() -> None:
    image = images_of((5, 7))
    one = torch.tensor
    boxes = Boxes(one([1]), one([2]), one([3]), one([4]), one([True]))
    got = RandomResizedCropBatch(16).apply(image, boxes)
    wanted = by_interpolate(image[0], [1, 2, 3, 4], (16, 16), True)
    assert (got[0].double() - wanted).abs().max() < 1e-3


def test_weights_sum_to_one_inside_the_stretch_and_are_nothing_outside() -> None:
    weights = resize_weights(torch.tensor([3]), torch.tensor([10]), 20, 4)[0]
    assert torch.allclose(weights.sum(1), torch.ones(4))
    assert weights[:, :3].abs().sum() == weights[:, 13:].abs().sum() == 0


def test_boxes_lie_inside_and_have_the_share_and_the_form_asked_for() -> None:
    sizes = torch.tensor([[100, 150], [300, 200]]).repeat(500, 1)
    crop = RandomResizedCropBatch(8, scale=(0.2, 0.6), ratio=(0.5, 2.0), seed=1)
    b = crop.draw(sizes)
    assert int(b.top.min()) >= 0
    assert int(b.left.min()) >= 0
    assert bool((b.top + b.height <= sizes[:, 0]).all())
    assert bool((b.left + b.width <= sizes[:, 1]).all())
    share = b.height * b.width / (sizes[:, 0] * sizes[:, 1])
    assert float(share.min()) > 0.19
    assert float(share.max()) < 0.61
    aspect = b.width / b.height
    assert float(aspect.min()) > 0.48
    assert float(aspect.max()) < 2.1
    assert abs(float(share.mean()) - 0.4) < 0.03  # uniform between the two, less what did not fit
    assert abs(float(aspect.log().mean())) < 0.1
    assert abs(float(b.flip.float().mean()) - 0.5) < 0.05


def test_where_no_crop_fits_the_middle_is_taken() -> None:
    crop = RandomResizedCropBatch(8, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip_p=0.0)
    b = crop.draw(torch.tensor([[10, 40]]))
    assert [int(v) for v in (b.top, b.left, b.height, b.width)] == [0, 15, 10, 10]


def test_draws_are_its_own_and_come_again_with_the_seed() -> None:
    images = images_of((20, 20), (20, 20))
    before = torch.get_rng_state()
    a, b = RandomResizedCropBatch(8, seed=5), RandomResizedCropBatch(8, seed=5)
    assert torch.equal(a(images), b(images))
    assert not torch.equal(a(images), RandomResizedCropBatch(8, seed=6)(images))
    assert torch.equal(torch.get_rng_state(), before)


def test_more_images_than_a_chunk_and_one_tensor_of_them() -> None:
    batch = torch.stack(images_of(*[(16, 16)] * 70))
    crop = RandomResizedCropBatch(8, seed=2)
    boxes = crop.draw(torch.tensor([[16, 16]] * 70))
    assert torch.allclose(crop.apply(batch, boxes), crop.apply(list(batch), boxes))


def test_weights_of_ten_bits_as_tf32_has_them_move_a_tenth_of_a_level_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = images_of((375, 500), (300, 200))
    crop = RandomResizedCropBatch(32, seed=4)
    boxes = crop.draw(torch.tensor([i.shape[-2:] for i in images]))
    exact = crop.apply(images, boxes)

    def rounded(*arguments: object) -> torch.Tensor:
        bits = resize_weights(*arguments).view(torch.int32)  # type: ignore[arg-type]
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)

    monkeypatch.setattr("flopwise.kit.input.crops.resize_weights", rounded)
    assert 0 < (crop.apply(images, boxes) - exact).abs().max() < 0.15


def test_normalising_is_part_of_it() -> None:
    images = images_of((20, 20))
    plain, normal = (
        RandomResizedCropBatch(8, seed=1),
        RandomResizedCropBatch(8, normalize=Normalize(), seed=1),
    )
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (Normalize().mean, Normalize().std))
    assert torch.allclose(normal(images), (plain(images) / 255 - mean) / std, atol=1e-5)


def test_as_a_transform_it_changes_one_part_of_the_batch() -> None:
    images = images_of((20, 20), (12, 30))
    crop = RandomResizedCropBatch(8)
    got = crop.at(0)([images, torch.tensor([1, 2])])
    assert got[0].shape == (2, 3, 8, 8)
    assert got[1].tolist() == [1, 2]
    assert crop.at("x")({"x": images, "y": 3})["y"] == 3


@pytest.mark.parametrize(
    "wrong",
    [{"size": 8, "scale": (0.5, 0.1)}, {"size": 8, "scale": (0, 1)}, {"size": 8, "ratio": (2, 1)}],
)
def test_ranges_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match="positive ranges are meant"):
        RandomResizedCropBatch(**wrong)  # type: ignore[arg-type]


def test_a_whole_image_at_its_own_size_is_left_as_it_is() -> None:
    image = images_of((9, 11))
    crop = RandomResizedCropBatch((9, 11), scale=(1.0, 1.0), ratio=(11 / 9, 11 / 9), flip_p=0.0)
    assert torch.allclose(crop(image)[0], image[0].float(), atol=1e-4)
    assert math.isclose(float(crop(image).mean()), float(image[0].float().mean()), rel_tol=1e-5)


@pytest.mark.parametrize(
    "images",
    [
        [],
        "images",
        [None],
        torch.zeros(3, 8, 8, dtype=torch.uint8),  # one image, which is no batch
        torch.zeros(2, 3, 8, 8),
        [torch.zeros(3, 8, 8, dtype=torch.uint8), torch.zeros(1, 8, 8, dtype=torch.uint8)],
        [torch.zeros(3, 8, 8, dtype=torch.uint8), torch.zeros(3, 8, 8)],
        [torch.zeros(3, 0, 8, dtype=torch.uint8)],
    ],
)
def test_what_are_no_images_is_told_and_not_broadcast(images: Any) -> None:
    with pytest.raises(InputError, match="uint8 images are meant"):
        RandomResizedCropBatch(4)(images)


def test_a_seed_is_a_number() -> None:
    with pytest.raises(InputError, match="seed='x'"):
        RandomResizedCropBatch(4, seed="x")  # type: ignore[arg-type]
