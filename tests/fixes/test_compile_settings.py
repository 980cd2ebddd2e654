from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._inductor.config as config
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from flopwise.fixes.compile_settings import (
    CACHE,
    Surroundings,
    deadline_s,
    given_deadline_s,
    time_problem,
)
from flopwise.fixes.interface import Scene

FOLDER, THREADS = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"


class TestDeadline:
    @pytest.mark.parametrize(
        ("scene", "expected"),
        [
            (Scene(), 120.0),
            (Scene(time_left_s=600.0), 240.0),
            (Scene(time_left_s=300.0), 180.0),
            (Scene(time_left_s=600.0, steps_left=1000, step_s=0.1), 50.0),
            (Scene(steps_left=10_000, step_s=0.1), 120.0),
            (Scene(steps_left=1000), 120.0),
            (Scene(time_left_s=-3.0), 0.0),
        ],
    )
    def test_follows_the_time_and_the_steps_that_are_left(
        self, scene: Scene, expected: float
    ) -> None:
        assert deadline_s(scene) == expected

    def test_too_little_time_is_a_reason_of_its_own(self) -> None:
        assert time_problem(Scene()) is None
        assert "12 s are left for trials" in str(time_problem(Scene(time_left_s=12.0)))
        few = time_problem(Scene(time_left_s=600.0, steps_left=100, step_s=0.1))
        assert few == (
            "100 steps of 0.1 s are left: a compilation of more than 5 s would not be paid back"
        )

    @pytest.mark.parametrize(
        ("given", "expected"),
        [("200", 200.0), ("1e9", 240.0), ("0", 10.0), ("soon", 120.0), ("", 120.0)],
    )
    def test_a_plan_may_say_it_within_bounds(self, given: str, expected: float) -> None:
        assert given_deadline_s({"deadline_s": given}, Scene()) == expected

    def test_without_a_setting(self) -> None:
        assert given_deadline_s(None, Scene(time_left_s=100.0)) == 60.0


class TestSurroundings:
    @pytest.fixture(autouse=True)
    def _as_before(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        for name in (FOLDER, THREADS, CACHE):
            monkeypatch.delenv(name, raising=False)
        with config.patch(compile_threads=7):
            yield

    def test_the_folder_of_the_tune_is_used_and_given_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
        here = Surroundings(3)
        assert cache_dir() == str(tmp_path / "cache")
        assert config.compile_threads == 3
        here.restore()
        assert FOLDER not in os.environ
        assert config.compile_threads == 7

    def test_torchs_own_default_is_replaced_and_put_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(CACHE, str(tmp_path))
        monkeypatch.setenv(FOLDER, default_cache_dir())  # torch writes it there itself
        here = Surroundings(3)
        assert os.environ[FOLDER] == str(tmp_path)
        here.restore()
        assert os.environ[FOLDER] == default_cache_dir()

    def test_what_the_user_has_set_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
        monkeypatch.setenv(FOLDER, str(tmp_path / "own"))
        monkeypatch.setenv(THREADS, "5")
        here = Surroundings(3)
        assert os.environ[FOLDER] == str(tmp_path / "own")
        assert config.compile_threads == 7
        here.restore()
        assert os.environ[FOLDER] == str(tmp_path / "own")

    def test_without_a_tune_only_the_workers_change(self) -> None:
        here = Surroundings(3)
        assert FOLDER not in os.environ
        here.restore()
        here.restore()
        assert config.compile_threads == 7

    def test_what_somebody_else_sets_meanwhile_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(CACHE, str(tmp_path))
        here = Surroundings(3)
        monkeypatch.setenv(FOLDER, str(tmp_path / "own"))
        config.compile_threads = 9
        here.restore()
        assert os.environ[FOLDER] == str(tmp_path / "own")
        assert config.compile_threads == 9
