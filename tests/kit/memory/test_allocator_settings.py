from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest

from flopwise.kit.memory import allocator_settings
from flopwise.kit.memory.allocator_settings import (
    CANDIDATES,
    compare_settings,
    environment,
    own_settings,
    reasons_against,
    settings_now,
)
from flopwise.kit.memory.arguments import ArgumentError
from flopwise.kit.memory.settings_comparison import DEFAULT, Run, SettingsError


class TestEnvironment:
    def test_both_names_are_set_and_no_other(self) -> None:
        base = {"PYTORCH_CUDA_ALLOC_CONF": "x:1", "PYTORCH_HIP_ALLOC_CONF": "y:1", "HOME": "/h"}
        assert environment("a:True", base) == {
            "PYTORCH_CUDA_ALLOC_CONF": "a:True",
            "PYTORCH_ALLOC_CONF": "a:True",
            "HOME": "/h",
        }
        assert environment(None, base) == {"HOME": "/h"}
        assert environment(own_settings(7)["pool by pointer"], base) == {"HOME": "/h"}

    def test_what_is_asked_for_now(self) -> None:
        assert settings_now({}) is None
        assert settings_now({"PYTORCH_ALLOC_CONF": "a:1"}) == "a:1"


class TestReasons:
    @pytest.mark.parametrize(
        ("setting", "kwargs", "why"),
        [
            ("expandable_segments:True", {"cuda_graphs": True}, "CUDA graphs"),
            (
                "max_split_size_mb:9, expandable_segments: True",
                {"cuda_graphs": True},
                "CUDA graphs",
            ),
            ("expandable_segments:True", {"nccl_user_buffers": True}, "NCCL's user buffers"),
            ("backend:cudaMallocAsync", {"cuda_graphs": True}, "native backend"),
            (own_settings(0)["256-byte allocator"], {"cuda_graphs": True}, "native backend"),
            ("expandable_segments:True", {"cuda": False}, "there is no CUDA device"),
        ],
    )
    def test_what_does_harm_is_not_tried(
        self, setting: str, kwargs: dict[str, bool], why: str
    ) -> None:
        assert why in str(reasons_against(setting, **{"cuda": True, **kwargs}))

    @pytest.mark.parametrize("setting", [*CANDIDATES.values(), "expandable_segments:False"])
    def test_the_rest_is(self, setting: str) -> None:
        assert reasons_against(setting, cuda=True) is None


def losses(losses: dict[str | None, float | str | None], times: dict[str | None, float]) -> Any:
    """Stands for fresh processes: what each setting gives."""
    order: list[str | None] = []

    class Process(contextlib.nullcontext):  # type: ignore[type-arg]
        def __init__(self, spec: Any, setting: str | None) -> None:
            super().__init__(self)
            self.setting = setting

        def wait_until_ready(self) -> None:
            pass

        def run(self, timeout_s: float) -> Run | str:
            order.append(self.setting)
            loss = losses.get(self.setting)
            return loss if isinstance(loss, str) else Run(times.get(self.setting, 1.0), None, loss)

    return Process, order


def run_of(spec: Any, setting: str | None, timeout_s: float = 60) -> Run | str:
    with allocator_settings._started(spec, setting) as process:
        process.wait_until_ready()
        return process.run(timeout_s)


class TestComparison:
    @pytest.fixture(autouse=True)
    def _no_setting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in allocator_settings.NAMES:
            monkeypatch.delenv(name, raising=False)

    def test_settings_take_turns_and_the_faster_is_kept(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run, order = losses({}, {"a": 0.5})
        monkeypatch.setattr(allocator_settings, "_started", run)
        result = compare_settings("m:f", {"x": "a", "y": "b"}, cuda=True)
        assert order == [None, "a", "b", "b", "a", None, None, "a", "b"]
        assert result.best() == "x"
        assert result.ratios["x"].ratio == pytest.approx(0.5)

    def test_one_that_fails_is_not_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run, order = losses({"a": "CUDA out of memory"}, {})
        monkeypatch.setattr(allocator_settings, "_started", run)
        result = compare_settings("m:f", {"x": "a"}, cuda=True)
        assert order.count("a") == 1
        assert result.failed == {"x": "CUDA out of memory"}

    def test_a_training_that_only_a_setting_lets_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run, _ = losses({None: "CUDA out of memory"}, {})
        monkeypatch.setattr(allocator_settings, "_started", run)
        result = compare_settings("m:f", {"x": "a"}, cuda=True)
        assert result.failed == {DEFAULT: "CUDA out of memory"}
        assert result.best() == "x"

    def test_one_that_always_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run, _ = losses({None: "no", "a": "no"}, {})
        monkeypatch.setattr(allocator_settings, "_started", run)
        with pytest.raises(SettingsError, match="fails under every setting; as it is: no"):
            compare_settings("m:f", {"x": "a"}, cuda=True)

    @pytest.mark.parametrize("loss", [2.0, float("nan"), None])
    def test_another_loss_is_no_choice(
        self, monkeypatch: pytest.MonkeyPatch, loss: float | None
    ) -> None:
        run, _ = losses({None: 1.0, "a": loss, "b": 1.001}, {"a": 0.1, "b": 0.5})
        monkeypatch.setattr(allocator_settings, "_started", run)
        result = compare_settings("m:f", {"x": "a", "y": "b"}, cuda=True)
        assert result.failed == {"x": f"its loss is {loss}, and 1.0 as it is"}
        assert result.best() == "y"


STEP = """
import torch
def build():
    w = torch.ones(8, requires_grad=True)
    def step():
        loss = (w * w).sum()
        loss.backward()
        return loss
    return step
def fail():
    raise MemoryError("no room")
"""


class TestProcesses:
    def test_a_function_of_a_file_in_fresh_processes(self, tmp_path: Path) -> None:
        file = tmp_path / "train.py"
        file.write_text(STEP)
        result = compare_settings(f"{file}:build", {"x": "max_split_size_mb:512"}, cuda=True)
        assert [run.loss for runs in result.runs.values() for run in runs] == [8.0] * 6
        assert all(run.step_s > 0 and run.state is None for run in result.runs["x"])

    def test_what_a_process_failed_with_is_told(self, tmp_path: Path) -> None:
        file = tmp_path / "train.py"
        file.write_text(STEP)
        with pytest.raises(SettingsError, match="as it is: MemoryError: no room"):
            compare_settings(f"{file}:fail", {})

    def test_a_command_sees_its_arguments_and_the_setting(self, tmp_path: Path) -> None:
        file = tmp_path / "train.py"
        file.write_text(
            "import os, sys\n"
            f"open({str(tmp_path / 'seen')!r}, 'a').write(' '.join(sys.argv[1:]) + ' '"
            " + os.environ.get('PYTORCH_CUDA_ALLOC_CONF', '-') + '\\n')\n"
            "sys.exit(0)\n"
        )
        spec = allocator_settings._spec([str(file), "--epochs", "1"], 1, 1)
        for setting in (None, "max_split_size_mb:512"):
            assert isinstance(run_of(spec, setting), Run)
        assert (tmp_path / "seen").read_text().splitlines() == [
            "--epochs 1 -",
            "--epochs 1 max_split_size_mb:512",
        ]

    def test_as_it_is_is_what_both_names_say(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "train.py"
        names = allocator_settings.NAMES
        file.write_text(
            f"import os\nopen({str(tmp_path / 'seen')!r}, 'a').write("
            f"' '.join(os.environ[n] for n in {names!r}) + '\\n')\n"
        )
        for name, value in zip(
            names, ("max_split_size_mb:512", "max_split_size_mb:256"), strict=True
        ):
            monkeypatch.setenv(name, value)
        spec = allocator_settings._spec([str(file)], 1, 1)
        for setting in (settings_now(), "max_split_size_mb:128"):
            assert isinstance(run_of(spec, setting), Run)
        assert (tmp_path / "seen").read_text().splitlines() == [
            "max_split_size_mb:512 max_split_size_mb:256",
            "max_split_size_mb:128 max_split_size_mb:128",
        ]

    def test_the_own_allocator_without_cuda_is_told(self, tmp_path: Path) -> None:
        file = tmp_path / "train.py"
        file.write_text(STEP)
        if allocator_settings.torch.cuda.is_available():
            pytest.skip("there is a CUDA device: test_memory_on_a_gpu.py")
        spec = allocator_settings._spec(f"{file}:build", 1, 1)
        why = run_of(spec, own_settings(1 << 20)["pool by pointer"])
        assert "no CUDA device to allocate on" in str(why)

    def test_a_process_without_end(self, tmp_path: Path) -> None:
        file = tmp_path / "train.py"
        file.write_text("while True: pass")
        spec = allocator_settings._spec([str(file)], 1, 1)
        assert run_of(spec, None, 0.5) == "no end after 0.5 s"


class TestTargets:
    def test_a_function_inside_another_cannot_be_found(self) -> None:
        def build() -> Any:
            return None

        with pytest.raises(SettingsError, match="made inside something else"):
            compare_settings(build)

    def test_a_text_without_a_function(self) -> None:
        with pytest.raises(SettingsError, match="is wanted"):
            compare_settings("train.py")

    @pytest.mark.parametrize("target", [lambda: None, functools.partial(print)])
    def test_what_has_no_name(self, target: Any) -> None:
        with pytest.raises(SettingsError, match=r"has no name of its own|made inside something"):
            compare_settings(target)

    @pytest.mark.parametrize("target", ["nowhere.py:build", ["nowhere.py", "--fast"], []])
    def test_what_is_not_there(self, target: Any) -> None:
        with pytest.raises(SettingsError, match=r"there is no file|a script and its arguments"):
            compare_settings(target)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"steps": 0}, "steps=0; a whole number from 1 on"),
        ({"warmup": -1}, "warmup=-1; a whole number from 0 on"),
        ({"rounds": 3.5}, "rounds=3.5; a whole number"),
        ({"timeout_s": float("nan")}, "timeout_s=nan; a number from 0 on"),
        ({"settings": {DEFAULT: "a:1"}}, '"as it is" names what the settings are compared with'),
        ({"settings": {"a": None}}, "names and values are meant"),
        ({"settings": "a:1"}, "names and values are meant"),
    ],
)
def test_numbers_and_settings_without_sense(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        compare_settings("m:f", **wrong)


def test_a_pool_of_less_than_nothing() -> None:
    with pytest.raises(ArgumentError, match="pool_bytes=-1"):
        own_settings(-1)
