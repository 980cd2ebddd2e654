"""What an event is, by its category."""

from __future__ import annotations

import pytest

from flopwise.trace.kinds import DEVICE_KINDS, Kind, kind_of


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("cpu_op", Kind.OP),
        ("Operator", Kind.OP),
        ("hip_runtime", Kind.RUNTIME),
        ("cuda_driver", Kind.RUNTIME),
        ("gpu_user_annotation", Kind.GPU_ANNOTATION),
        ("Memset", Kind.MEMSET),
        ("KERNEL", Kind.KERNEL),
        ("ac2g", Kind.OTHER),
        ("", Kind.OTHER),
        (None, Kind.OTHER),
    ],
)
def test_categories_of_all_ages(category: str | None, kind: Kind) -> None:
    assert kind_of(category) == kind


def test_a_range_drawn_over_the_device_does_not_occupy_it() -> None:
    assert Kind.GPU_ANNOTATION not in DEVICE_KINDS
