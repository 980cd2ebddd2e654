from __future__ import annotations

import pytest
import torch

from flopwise.kit.memory.operands import Defect, defects


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


class TestMatmul:
    @pytest.mark.parametrize(
        "tensor",
        [
            bf16(64, 64),
            bf16(7, 64),  # rows are no multiple of anything: no load crosses them
            bf16(64, 7).t().contiguous().t()[:, :0],
            bf16(2, 64, 128).transpose(-1, -2),
            bf16(50304, 64)[:50257],
            bf16(1, 7),
            bf16(7, 1),
            bf16(7),
            bf16(64, 72)[:, :64],
            torch.empty(3, 68),  # FP32 needs 4
        ],
        ids=lambda t: f"{list(t.shape)} {t.stride()}",
    )
    def test_aligned_operands_have_no_defect(self, tensor: torch.Tensor) -> None:
        assert [d for d in defects(tensor, "matmul") if d.grade == "slow"] == []

    def test_an_odd_inner_size(self) -> None:
        assert defects(bf16(8, 50257), "matmul") == [
            Defect("50257 columns are no multiple of 8", "columns 50257 -> 50304", "slow")
        ]
        assert defects(bf16(50257, 8).t(), "matmul") == []
        assert defects(bf16(8, 50257).t(), "matmul") == [
            Defect("50257 rows are no multiple of 8", "rows 50257 -> 50304", "slow")
        ]
        assert defects(bf16(8, 12), "matmul")[0].cure == "columns 12 -> 16"

    def test_a_pointer_between_two_vectors(self) -> None:
        assert defects(bf16(65).narrow(0, 1, 64).view(8, 8), "matmul") == [
            Defect(
                "its pointer is a multiple of 2 bytes only (it begins 1 elements into its storage)",
                "copy it once (`.clone()`), or slice at a multiple of 8 elements",
                "slow",
            )
        ]

    def test_rows_that_are_an_uneven_distance_apart(self) -> None:
        assert defects(bf16(64, 65)[:, :64], "matmul") == [
            Defect(
                "its rows are 65 elements apart, no multiple of 16 bytes",
                "a buffer whose rows are 72 apart",
                "slow",
            )
        ]

    def test_matrices_of_a_batch_that_are_an_uneven_distance_apart(self) -> None:
        batch = torch.empty_strided((3, 8, 8), (67, 8, 1), dtype=torch.bfloat16)
        assert "67 elements apart" in defects(batch, "matmul")[0].what

    def test_no_contiguous_dimension(self) -> None:
        found = defects(bf16(64, 64, 2)[..., 0], "matmul")
        assert len(found) == 1
        assert found[0].what.startswith("neither of its last two dimensions is contiguous")

    def test_partly_filled_tiles_are_of_another_grade(self) -> None:
        assert defects(bf16(8, 72), "matmul") == [
            Defect("72 columns are no multiple of 64 (128 bytes)", "columns 72 -> 128", "edge")
        ]


class TestConvolution:
    def test_channels(self) -> None:
        assert defects(bf16(2, 3, 8, 8), "convolution") == [
            Defect("3 channels are no multiple of 8", "channels 3 -> 8", "slow")
        ]
        assert defects(bf16(2, 8, 7, 7), "convolution") == []

    def test_weights_are_looked_at_for_their_pointer_only(self) -> None:
        assert defects(bf16(5, 3, 3, 3), "other") == []


def test_a_tensor_without_memory() -> None:
    assert defects(torch.empty(8, 7, device="meta"), "matmul")[0].cure == "columns 7 -> 8"


@pytest.mark.parametrize(
    ("size", "to"), [(3, 4), (33, 36), (65, 72), (509, 512), (1001, 1024), (50257, 50272)]
)
def test_the_cure_adds_an_eighth_at_most_where_it_can(size: int, to: int) -> None:
    found = [d.cure for d in defects(torch.zeros(2, size), "matmul") if d.grade == "slow"]
    assert found == [f"columns {size} -> {to}"]
