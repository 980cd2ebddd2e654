"""Hidden waits for the device and switches left on: one test a case. On a CPU they are counted, not timed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flopwise.records.verdict import Trial, TuneRecord
from flopwise.reports.terminal import render
from flopwise.trials.compare import PairedComparison
from flopwise.trials.schedule import Pair

CPU = "what a read costs needs a GPU to be measured"


def line_of(marker: str) -> str:
    """Returns the end of a place in this file: the line with this marker."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    at = [n for n, line in enumerate(lines, start=1) if line.endswith(f"# {marker}")]
    assert len(at) == 1, marker
    return f"test_kind_2_syncs.py:{at[0]}"


def loop(
    in_step: Callable[[int, torch.Tensor], Any] = lambda step, loss: None,
    steps: int = 12,
    forward: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> Callable[[], None]:
    """Returns a training script that calls `in_step` in every step."""

    def train() -> None:
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(net.parameters())
        for step in range(steps):
            optimizer.zero_grad()
            loss = net(forward(torch.randn(8, 16))).square().mean()
            loss.backward()
            optimizer.step()
            in_step(step, loss.detach())

    return train


def test_a_clean_script_has_no_findings(run_case: Any) -> None:
    case = run_case(loop())
    assert case.record.findings == []
    assert "findings" not in case.report
    # AdamW reads its own counts of steps, which live on the host: seen, and no finding.
    assert {r.on_host for r in case.rank.surroundings.reads} == {True}
    assert case.rank.surroundings.read_steps == 1


class TestSY01:
    def test_every_read_of_the_loss_is_found_with_its_line(self, run_case: Any) -> None:
        logged: list[Any] = []

        def log(step: int, loss: torch.Tensor) -> None:
            logged.append(loss.item())  # SY-01 item
            logged.append(f"{loss:.4f}")  # SY-01 text
            logged.append(str(loss))  # SY-01 printed

        found = run_case(loop(log)).finding("host-read")
        assert [w.rpartition("/")[2] for w in found.where] == [
            line_of("SY-01 item"),
            line_of("SY-01 text"),
            line_of("SY-01 printed"),
        ]
        assert found.evidence.startswith("3 reads a step: 1 scalar read at ")
        assert "1 printed tensor at" in found.evidence
        assert CPU in found.evidence
        assert "one step was looked at" in found.evidence
        assert found.share_frac is None
        assert found.predicted_gain_frac is None
        assert found.certainty == "counted"

    def test_a_read_every_20_steps_is_no_read_a_step(self, run_case: Any) -> None:
        def log(step: int, loss: torch.Tensor) -> None:
            if step % 20 == 0:
                loss.item()

        assert run_case(loop(log, steps=24)).causes() == []

    def test_a_read_every_20_steps_that_was_seen_is_said_to_be_of_one_step(
        self, run_case: Any
    ) -> None:
        def log(step: int, loss: torch.Tensor) -> None:
            if step % 20 == 2:  # behind the second step, in the interval that is counted
                loss.item()

        found = run_case(loop(log, steps=24)).finding("host-read")
        assert "one step was looked at" in found.evidence

    def test_after_the_fix_the_same_values_are_logged_and_the_last_is_not_lost(
        self, run_case: Any
    ) -> None:
        """What the advice says, done: values stay on the device until the end."""
        read: list[float] = []
        kept: list[torch.Tensor] = []

        def log(step: int, loss: torch.Tensor) -> None:
            kept.append(loss.clone())

        torch.manual_seed(1)
        loop(lambda step, loss: read.append(loss.item()))()
        torch.manual_seed(1)
        case = run_case(loop(log))
        assert case.causes() == []
        assert [value.item() for value in kept] == read
        assert len(read) == 12

    def test_reads_of_an_evaluation_are_not_the_steps(self, run_case: Any) -> None:
        held_out = nn.Linear(4, 1)

        def evaluate(step: int, loss: torch.Tensor) -> None:
            held_out.eval()
            with torch.no_grad():
                held_out(torch.ones(2, 4)).sum().item()
            held_out.train()

        case = run_case(loop(evaluate))
        assert "host-read" not in case.causes()


class TestSY02:
    def test_mask_reads_and_writes_are_told_by_their_ops(self, run_case: Any) -> None:
        mask = torch.arange(4096) % 3 == 0
        values = torch.randn(4096)
        grid = torch.zeros(8, 3, 4096)

        def forward(x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                values[mask]  # SY-02 read
            rows = torch.ones(8, int(4096 / 3) + 1)
            grid[:, 1, mask] = rows  # SY-02 write
            return x

        case = run_case(loop(forward=forward))
        found = case.finding("data-dependent-shape")
        assert [w.rpartition("/")[2] for w in found.where] == [
            line_of("SY-02 read"),
            line_of("SY-02 write"),
        ]
        assert found.evidence.startswith("21 waits a step on a GPU: 20 mask reads of 4096 elements")
        assert "(aten::index)" in found.evidence
        assert "1 mask write of 4096 elements (aten::index_put_)" in found.evidence
        assert "masked_fill" in found.advice
        assert "Where the rows themselves are needed, leave it" in found.advice
        assert "host-read" not in case.causes()  # the scalar-read counter sees nothing of it

    def test_fixed_shape_forms_are_no_finding(self, run_case: Any) -> None:
        mask = torch.arange(16) % 3 == 0

        def forward(x: torch.Tensor) -> torch.Tensor:
            y = torch.where(mask, x, 0.0) + x.masked_fill(mask, 1.0) + x * mask
            y[:, torch.arange(4)] = 0.0
            y[y > 100] = 0.0  # one mask and one number: torch makes a masked fill of it
            return y

        assert run_case(loop(forward=forward)).causes() == []

    @pytest.mark.parametrize(
        ("ask", "op"),
        [
            (torch.nonzero, "aten::nonzero"),
            (torch.unique, "aten::_unique2"),
            (lambda x: x.masked_select(x > 0), "aten::masked_select"),
        ],
    )
    def test_other_sizes_that_hang_on_values(self, run_case: Any, ask: Any, op: str) -> None:
        case = run_case(loop(lambda step, loss: ask(loss.reshape(1))))
        assert f"({op})" in case.finding("data-dependent-shape").evidence


class TestSY03:
    """A GPU is needed to see a sync pay; what is tested is that no gain is claimed without a measured one."""

    @pytest.mark.parametrize(
        ("change", "outcome", "verdict", "said"),
        [
            (1.00, "not shown", "not kept", "no gain shown: a gain of"),
            (1.04, "slower", "not kept", "slower: a step takes 1.04"),
            (0.90, "faster", "kept", "less time a step"),
        ],
    )
    def test_a_removed_sync_counts_only_with_a_measured_gain(
        self, change: float, outcome: str, verdict: str, said: str
    ) -> None:
        from flopwise.fixes.reasons import verdict_reason

        noise = random.Random(3)
        comparison = PairedComparison()
        for index in range(40):
            old = [0.010 * noise.lognormvariate(0, 0.01) for _ in range(8)]
            new = [0.010 * change * noise.lognormvariate(0, 0.01) for _ in range(8)]
            comparison.add(Pair(index, old, new, new_first=index % 2 == 0, control=False))
        found = comparison.comparison()
        assert found is not None
        assert found.outcome == outcome
        kept = found.outcome == "faster"
        trial = Trial(
            "FW000", "drop-sync", "kept" if kept else "not kept", verdict_reason(found, 0.0), found.ratio,
            found.ci95, found,
        )  # fmt: skip
        assert trial.verdict == verdict
        assert said in trial.reason
        record = TuneRecord(
            "flopwise.tune/1", "0", "now", ["train.py"], "train.py", 0.010, None,
            0.010 * (found.ratio if kept else 1.0), None, 0.01, None, [trial], ["FW000"] if kept else [],
            None, None, 1.0, [],
        )  # fmt: skip
        text = " ".join(render(record, width=160, color=False).split())
        assert (f"drop-sync {verdict}" in text) or (f"FW000 drop-sync {verdict}" in text)
        assert (
            "as fast" in text
        ) is False  # no speed-up is claimed beside the trial's own interval


class TestSY04:
    @pytest.mark.parametrize("strict", [True, False])
    def test_the_strict_clip_reads_once_and_the_other_never(
        self, run_case: Any, strict: bool
    ) -> None:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def train() -> None:
            for _ in range(10):
                optimizer.zero_grad()
                weight.square().sum().backward()
                nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=strict)  # SY-04
                optimizer.step()

        case = run_case(train)
        assert sum(r.count for r in case.rank.surroundings.reads) == (1 if strict else 0)
        if not strict:
            assert case.causes() == []
            return
        found = case.finding("strict-clip")
        assert found.evidence.startswith(
            "1 read a step by clip_grad_norm_(error_if_nonfinite=True)"
        )
        assert found.where[0].endswith(line_of("SY-04"))
        assert "The early error is lost with it" in found.advice
        assert case.causes() == ["strict-clip"]


class TestSY05:
    @pytest.mark.parametrize(
        ("fused", "wrapper", "reads"),
        [(False, False, 2), (True, False, 0), (False, True, 3), (True, True, 1)],
    )
    def test_the_scaler_reads_its_flag_unless_the_optimizer_takes_it(
        self, run_case: Any, fused: bool, wrapper: bool, reads: int
    ) -> None:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], fused=fused)
        scaler = torch.amp.GradScaler("cpu")

        def train() -> None:
            for _ in range(10):
                optimizer.zero_grad()
                scaler.scale(weight.square().sum()).backward()
                scaler.step(optimizer)  # SY-05 step
                scaler.update()
                if wrapper:  # has the step been skipped?
                    scaler.get_scale()  # SY-05 scale

        case = run_case(train)
        # Of the two of the plain one, AdamW's own is of a count that lives on the host.
        assert sum(r.count for r in case.rank.surroundings.reads) == reads
        if fused and not wrapper:
            assert case.causes() == []
            return
        found = case.finding("scaler-read")
        assert case.causes() == ["scaler-read"]
        assert ("1 read of the overflow flag a step" in found.evidence) == (not fused)
        assert ("fused=True takes the flag on the device" in found.advice) == (not fused)
        assert ("1 read of the scale" in found.evidence) == wrapper
        assert ("the scale itself is not read" in found.evidence) == (not wrapper)
        where = {w.rpartition("/")[2] for w in found.where}
        assert (line_of("SY-05 step") in where) == (not fused)
        assert (line_of("SY-05 scale") in where) == wrapper


class Accuracy:
    """A metric as the libraries have them: update, compute, reset."""

    def __init__(self, validate_args: bool) -> None:
        self.validate_args = validate_args
        self.reset()

    def reset(self) -> None:
        self.right, self.seen = torch.tensor(0), 0

    def update(self, predicted: torch.Tensor, target: torch.Tensor) -> None:
        if self.validate_args:
            self._validate(target)
        self.right = self.right + (predicted == target).sum()
        self.seen += target.numel()

    def _validate(self, target: torch.Tensor) -> None:
        if len(torch.unique(target)) > 10:  # SY-06 unique
            raise ValueError("too many labels")
        if torch.isnan(target.float()).any():  # SY-06 nan
            raise ValueError("NaN")

    def compute(self) -> float:
        return self.right.item() / self.seen


class TestSY06:
    """torchmetrics is not a dependency: a metric with the same checks and the same three methods stands for it."""

    @pytest.mark.parametrize("validate", [True, False])
    def test_the_metric_that_checks_its_inputs_is_named(
        self, run_case: Any, validate: bool
    ) -> None:
        metric = Accuracy(validate)
        target = torch.arange(8) % 2

        def train() -> None:
            loop(lambda step, loss: metric.update(target, target))()  # SY-06 update
            assert metric.compute() == 1.0  # once, at the end: no read of a step

        case = run_case(train)
        if not validate:
            assert case.causes() == []
            return
        found = case.finding("metric-read")
        assert case.causes() == ["metric-read"]
        assert found.evidence.startswith("Accuracy reads 2 values a step: ")
        assert "1 call of aten::_unique2 at" in found.evidence
        assert "1 call of aten::_local_scalar_dense at" in found.evidence
        assert {w.rpartition("/")[2] for w in found.where} >= {
            line_of("SY-06 unique"),
            line_of("SY-06 nan"),
        }
        assert "validate_args=False" in found.advice
        assert (
            "labels out of range, wrong numbers of classes and NaN are then no longer reported"
            in (found.advice)
        )


def read(kind: str, where: str, count: int, n_bytes: int) -> Any:
    from flopwise.records.surroundings import HostRead

    return HostRead("aten::_to_copy", kind, where, None, "", None, count, 1, n_bytes // 4, n_bytes)


class TestSY07:
    """Both need a GPU to run; the rule is tested in tests/meter/test_reads.py, and here what is said of its results."""

    def test_two_findings_with_bytes_and_copies_a_step(self, run_case: Any, conclude: Any) -> None:
        import dataclasses

        from flopwise.meter.reads import PAGEABLE, SMALL_COPY

        rank = run_case(loop()).rank
        reads = [
            read(PAGEABLE, "train.py:7", 1, 32_000_000),
            read(SMALL_COPY, "model.py:3", 1, 1024),
        ]
        surroundings = dataclasses.replace(rank.surroundings, reads=reads)
        on_gpu = dataclasses.replace(
            rank, device_type="cuda", device_name="NVIDIA H200", surroundings=surroundings
        )
        case = conclude(on_gpu)
        assert case.causes() == ["pageable-copy", "parked-on-host"]
        pageable, parked = case.finding("pageable-copy"), case.finding("parked-on-host")
        assert pageable.where == ["train.py:7"]
        assert "1 copy (32 MB) a step to the device from pageable memory" in pageable.evidence
        assert "non_blocking=True has no effect there" in pageable.evidence
        assert parked.where == ["model.py:3"]
        assert (
            "1 copy (1.02 kB) a step to the device of values that live on the host"
            in parked.evidence
        )
        assert "cost not measured" in parked.evidence


class TestSY08:
    @staticmethod
    def deep() -> None:
        net = nn.Sequential(*[m for _ in range(20) for m in (nn.Linear(64, 64), nn.ReLU())])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(10):
            optimizer.zero_grad()
            net(torch.randn(8, 64)).square().mean().item()
            net(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()

    @pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
    @pytest.mark.parametrize("how", ["for good", "around backward"])
    def test_anomaly_detection_is_the_first_finding(self, run_case: Any, how: str) -> None:
        def train() -> None:
            if how == "for good":
                torch.autograd.set_detect_anomaly(True)  # SY-08 call
                self.deep()
                return
            net = nn.Linear(64, 1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            for _ in range(10):
                optimizer.zero_grad()
                with torch.autograd.detect_anomaly():  # SY-08 block
                    net(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()

        try:
            case = run_case(train)
        finally:
            torch.autograd.set_detect_anomaly(False)
        found = case.finding("debug-switch")
        assert case.record.findings[0] is found
        assert "autograd anomaly detection is on" in found.evidence
        assert "The factor was not measured" in found.evidence
        assert found.share_frac is None
        assert found.predicted_gain_frac is None
        marker = "SY-08 call" if how == "for good" else "SY-08 block"
        assert [w.rpartition("/")[2] for w in found.where] == [line_of(marker)]
        assert "results do not change where nothing is NaN" in found.advice
        # Its own search for NaN is no read of the script's.
        assert sum(r.count for r in case.rank.surroundings.reads) == (how == "for good")

    @pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
    def test_anomaly_detection_of_one_early_step_is_no_finding(self, run_case: Any) -> None:
        def train() -> None:
            net = nn.Linear(64, 1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            for step in range(14):
                optimizer.zero_grad()
                with torch.autograd.set_detect_anomaly(step == 0):
                    net(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()

        assert "debug-switch" not in run_case(train, warmup=6).causes()

    def test_the_command_says_who_set_what_first_of_all(self, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text(
            "import torch\n"
            "torch.autograd.set_detect_anomaly(True)\n"
            "net = torch.nn.Linear(64, 64)\n"
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
            "for _ in range(14):\n"
            "    optimizer.zero_grad()\n"
            "    loss = net(torch.randn(8, 64)).square().mean()\n"
            "    loss.backward()\n"
            "    optimizer.step()\n"
            "    loss.item()\n",
            encoding="utf-8",
        )
        json_path = tmp_path / "run.json"
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "flopwise",
                "run",
                "--peak",
                "1e12",
                "--json",
                str(json_path),
                "train.py",
            ],
            cwd=tmp_path,
            env={**os.environ, "CUDA_LAUNCH_BLOCKING": "1", "COLUMNS": "150"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        findings = json.loads(json_path.read_text(encoding="utf-8"))["findings"]
        assert [f["cause"] for f in findings] == ["debug-switch", "debug-switch", "host-read"]
        assert findings[0]["where"] == ["train.py:2"]
        assert findings[1]["where"] == ["CUDA_LAUNCH_BLOCKING (environment)"]
        assert "CUDA_LAUNCH_BLOCKING=1 (no effect on a CPU)" in findings[1]["evidence"]
        assert findings[2]["where"] == ["train.py:10"]
        shown = [line.strip() for line in done.stderr.splitlines()]
        assert "findings, most urgent first" in shown
        first = shown[shown.index("findings, most urgent first") + 1]
        assert "D301 debug-switch" in first
        assert "train.py:2" in first

    def test_deterministic_algorithms_are_a_choice(self, run_case: Any) -> None:
        torch.use_deterministic_algorithms(True)
        try:
            case = run_case(loop())
        finally:
            torch.use_deterministic_algorithms(False)
        found = case.finding("deterministic-algorithms")
        assert "leave it if runs must repeat to the bit" in found.advice
