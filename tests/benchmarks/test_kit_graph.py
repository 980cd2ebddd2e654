"""The benchmark of the graph part of the kit, small and on a CPU."""

from __future__ import annotations

import json
import sys

import pytest


@pytest.fixture
def run(benchmark_module, tmp_path, monkeypatch):
    module = benchmark_module("kit_graph")

    def start(*words: str) -> dict:
        out = tmp_path / "more" / "out.json"
        monkeypatch.setattr(
            sys, "argv", ["kit_graph.py", "--tiny", "--device", "cpu", "--out", str(out), *words]
        )
        module.main()
        return json.loads(out.read_text("utf-8"))

    start.module = module
    return start


def test_sections_give_their_figures(run):
    found = run("--only", "captured_equal", "fold", "optimizer_forms", "--model", "gpt2")[
        "sections"
    ]
    equal = found["captured_equal"]["AdamW"]
    assert equal["losses_equal"]
    assert equal["state_equal"]
    assert equal["generators_equal"]
    assert equal["reason"] == "devices of type cpu have no graphs"
    folded = found["fold"]["float32 contiguous"]
    assert folded["folded"]["conv+bn"] == 11
    assert folded["nodes_before"] - folded["nodes_after"] == 11
    assert folded["error_after"] < 1e-5
    assert set(found["optimizer_forms"]["gpt2"]["times_s"]) == {"fused", "foreach", "for-loop"}


def test_arms_are_measured_in_turns(run, monkeypatch):
    how = run.module.How
    chosen = {
        "eager": how(),
        "TF32": how(bf16=False),
        "attention by hand": how(by_hand=True),
        "fused": how(True),
        "captured": how(True, captured=True, base="fused"),
    }
    monkeypatch.setattr(run.module, "arms_of", lambda images, by_hand: chosen)
    arms = run("--only", "parts", "--model", "gpt2")["sections"]["parts gpt2"]["arms"]
    assert list(arms) == list(chosen)
    assert all(row["step_ms"] > 0 and row["rounds"] == 2 for row in arms.values())
    assert arms["captured"]["captured_reason"] == "devices of type cpu have no graphs"
    assert arms["captured"]["base"] == "fused"
    assert arms["captured"]["set_up_steps"] == 18
    for row in arms.values():
        assert all(0 < h <= s for h, s in zip(row["host_s"], row["step_s"], strict=True))
        assert row["allocations"] == [0, 0]


def test_an_arm_that_fails_is_in_the_result_and_the_others_go_on(run, monkeypatch):
    how = run.module.How
    chosen = {"eager": how(), "in place": how(compiled="in place"), "fused": how(True)}
    monkeypatch.setattr(run.module, "arms_of", lambda images, by_hand: chosen)

    def fails(*_, **__):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(run.module, "compile_in_place", fails)
    arms = run("--only", "parts", "--model", "gpt2")["sections"]["parts gpt2"]["arms"]
    assert arms["in place"]["error"] == "RuntimeError: no compiler"
    assert arms["fused"]["step_ms"] > 0


def test_arms_that_differ_in_the_optimizer_only_share_their_compiled_code(run, monkeypatch):
    how, made = run.module.How, []
    chosen = {"together": how(True, compiled="in place"), "in place": how(compiled="in place")}
    monkeypatch.setattr(run.module, "arms_of", lambda images, by_hand: chosen)
    real = run.module.compile_in_place

    def once(model, **settings):
        made.append(settings)
        return real(model, backend="eager", **settings)

    monkeypatch.setattr(run.module, "compile_in_place", once)
    arms = run("--only", "parts", "--model", "gpt2")["sections"]["parts gpt2"]["arms"]
    assert len(made) == 1
    assert made[0]["deadline_s"] >= 20
    assert all(row["frames"] == 1 and row["reason"] is None for row in arms.values())
    assert all(row["recompiles"] == [] for row in arms.values())


def test_every_arm_of_a_convolutional_model_has_its_layout(run):
    how = run.module.How
    names = run.module.arms_of(True)
    assert names["in place together"] == how(True, True, "in place", base="eager together")
    assert run.module.arms_of(False)["in place together"] == how(
        True, False, "in place", base="fused"
    )
    assert "channels last" not in run.module.arms_of(False)
    for images in (True, False):
        arms = run.module.arms_of(images, not images)
        assert {how.base for how in arms.values()} <= set(arms)


def test_a_section_that_fails_and_one_without_time_are_in_the_result(run, monkeypatch):
    def fails(*_):
        raise RuntimeError("no such device")

    monkeypatch.setattr(run.module, "captured_equal", fails)
    found = run("--only", "captured_equal", "fold")["sections"]
    assert "no such device" in found["captured_equal"]["error"]
    assert "float32 contiguous" in found["fold"]
    left = run("--only", "fold", "--budget-s", "0")["sections"]
    assert left["fold"]["left_out"] == "no time left"
