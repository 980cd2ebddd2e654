"""The findings of a ledger: who is asked, in which order they come, and that nothing makes them fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.diagnosis.ledger.build import LedgerError, ledger
from flopwise.diagnosis.ledger.findings import CAUSES, worth_frac
from flopwise.records.finding import Finding

ROOT = Path(__file__).parents[3]
FILES = ROOT / "src" / "flopwise" / "diagnosis" / "ledger" / "causes"
WIDE = ([2048, 2048], "float")
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def codes_in_source() -> dict[str, str]:
    found: dict[str, str] = {}
    for file in FILES.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        said = re.findall(r'code="(L\d+)",\s+cause="([\w-]+)"', text)
        first = re.match(r'"""(L\d+) ([\w-]+): ', text)
        if file.stem != "__init__":
            assert first is not None, file.name
            assert set(said) == {first.groups()}, file.name
            assert file.stem == first[2].replace("-", "_")
        found.update(said)
    return found


def test_every_file_of_a_cause_is_asked() -> None:
    asked = [cause.__module__.rpartition(".")[2] for cause in CAUSES]
    assert sorted(asked) == sorted({file.stem for file in FILES.glob("*.py")} - {"__init__"})


@pytest.mark.parametrize("page", ["findings", "ledger"])
def test_every_code_is_documented_with_its_cause(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (L\d+) \| `?([\w-]+)`? \| ", text, flags=re.MULTILINE)
    assert rows == sorted(codes_in_source().items())


def finding(share: float | None, gain: float | None) -> Finding:
    return Finding("L101", "input-wait", share, [], "", "", gain, "measured")


@pytest.mark.parametrize(
    ("share", "gain", "worth"),
    [(0.4, 0.1, 0.1), (0.4, 0.0, 0.0), (0.4, None, 0.2), (None, None, 0.0), (None, 0.3, 0.3)],
)
def test_what_a_finding_is_worth(share: float | None, gain: float | None, worth: float) -> None:
    assert worth_frac(finding(share, gain)) == pytest.approx(worth)


def test_what_is_worth_most_comes_first(job: Any) -> None:
    def body() -> None:
        job.t.add("user_annotation", LOADER, job.host + 1, 1500)
        job.host += 1502
        name = "Memcpy HtoD (Pageable -> Device)"
        job.launch(name, 30, cat="gpu_memcpy", by="cudaMemcpyAsync")
        job.op("aten::mm", 300, WIDE, WIDE, kernel="sgemm")

    found = ledger(job.steps(6, body).t.read()).findings
    worth = [worth_frac(finding) for finding in found]
    assert [finding.cause for finding in found] == ["input-wait", "slow-dtype", "exposed-copy"]
    assert worth == sorted(worth, reverse=True)
    assert worth[0] > 0.5


OPERATORS = [
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_softmax_backward_data", "aten::masked_fill_",
    "aten::mul", "aten::add_", "aten::copy_", "aten::sum", "aten::fill_", "aten::native_layer_norm", "aten::cudnn_batch_norm",
    "aten::cudnn_convolution", "aten::convolution_backward", "aten::cudnn_convolution_backward_weight",
    "aten::_scaled_dot_product_efficient_attention", "aten::max_pool2d_with_indices", "aten::_foreach_mul_", "aten::nonsense", "triton_poi_0",
]  # fmt: skip
KERNELS = [
    "gemm",
    "nchwToNhwcKernel",
    "ncclDevKernel_AllReduce",
    "Memcpy HtoD (Pageable -> Device)",
]
shapes = st.lists(st.sampled_from([0, 1, 3, 64, 77, 1024]), max_size=4)
operands = st.lists(
    st.tuples(shapes, st.sampled_from(["float", "c10::BFloat16", "bool", "long int"])), max_size=4
)
calls = st.lists(
    st.tuples(st.sampled_from(OPERATORS), operands, st.sampled_from(KERNELS), st.integers(1, 900), st.integers(7, 8), st.booleans()),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(calls, st.booleans())
def test_of_any_operands_there_are_findings_or_none(
    timelines: Callable[[], Any], made: Any, in_optimizer: bool
) -> None:
    t = timelines()
    t.on("NVIDIA H200")
    for i in range(3):
        at = 10_000.0 * i
        for j, (name, given_, kernel, us, stream, strided) in enumerate(made):
            host = at + 20 * j
            dims = {"Input Strides": [[1] * len(shape) for shape, _ in given_]} if strided else {}
            number = t.op(name, host, 15, *given_, **dims)
            cat = "gpu_memcpy" if "Memcpy" in kernel else "kernel"
            said = {"Collective name": "allreduce", "In msg nelems": 8, "dtype": "Float"}
            more = said if strided and "nccl" in kernel else {}
            t.kernel(kernel, host + 300, us, at=host, op=number, stream=stream, cat=cat, **more)
        t.optimizer(at if in_optimizer else at + 500, 400)
        t.kernel("update", at + 9000, 10, at=at + 510)
        t.mark(i, at, 10_000)
    try:
        record = ledger(t.read())
    except LedgerError:
        return
    for finding in record.findings:
        assert finding.share_frac is None or 0 <= finding.share_frac <= 1 + 1e-9
        gain = finding.predicted_gain_frac
        assert gain is None or 0 <= gain <= 1
        assert finding.evidence
        assert finding.advice
