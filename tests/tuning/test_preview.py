"""A dry run: the script as it is, what would be tried and why, and nothing tried."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flopwise import plans
from flopwise.errors import RecordError
from flopwise.records import preview as preview_records
from flopwise.records import store
from flopwise.records.preview import Preview
from flopwise.tuning import preview

Stage = Any  # of conftest.py
NAMES = dict(plans.FIXES)


def answer(code: str, **changes: Any) -> dict[str, Any]:
    return {
        "code": code, "name": NAMES[code], "numerics": "identical", "opt_in": False, "findings": [], "conflicts": [],
        "eligible": True, "reason": "", "predicted_gain_frac": None, "environment": {}, **changes,
    }  # fmt: skip


@pytest.fixture
def previewed(stage: Stage, tmp_path: Path) -> Any:
    def run(**how: Any) -> tuple[Preview, Path]:
        given = {"out": str(tmp_path / "dry"), "baseline": None, "quiet": True, **how}
        return preview.preview(stage.asked(codes=["FW101", "FW102"]), **given)

    return run


def test_what_would_be_tried_and_why(stage: Stage, previewed: Any, tmp_path: Path) -> None:
    stage.surveys = [
        answer("FW101", predicted_gain_frac=0.25, findings=["L101"]),
        answer("FW102", eligible=False, reason="fused already"),
        answer("FW104"),
    ]
    record, folder = previewed()
    fixes = {fix.code: fix for fix in record.fixes}
    assert set(fixes) == set(NAMES)
    assert (fixes["FW101"].outcome, fixes["FW101"].predicted_ratio) == ("would be tried", 0.75)
    assert (fixes["FW102"].outcome, fixes["FW102"].reason) == ("declined", "fused already")
    assert fixes["FW104"].outcome == "not asked for"
    assert fixes["FW105"].outcome == "unknown"
    assert record.baseline.step_s == pytest.approx(0.030, rel=0.01)
    assert list(stage.options) == ["baseline", "survey"]
    assert stage.options["baseline"]["profile"]
    assert "apply" not in stage.options["survey"]
    assert store.read(folder / "preview.json", Preview, preview_records.SCHEMA) == record
    assert folder == tmp_path / "dry"


def test_opt_ins_are_named(
    stage: Stage, previewed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(preview, "OPT_IN", {"FW105": "data order: not the script's"})
    stage.surveys = [answer("FW101", reason="60 % waits"), answer("FW105", opt_in=True)]
    path = tmp_path / "p.json"
    code = preview.preview_command(
        stage.asked(codes=["FW101", "FW102"]), out=str(tmp_path / "d"), baseline=None, json_path=str(path), quiet=True,
    )  # fmt: skip
    assert code == 0
    text = capsys.readouterr().out
    assert "dry run: nothing was tried" in text
    assert re.search(r"FW101 loader-workers +would be tried", text)
    assert "60 % waits" in text
    assert re.search(r"FW105 compile-model +only if asked for", text)
    assert "--allow compile-model tries what changes more than time and rounding" in text
    assert "compile-model: data order: not the script's" in text
    assert json.loads(path.read_text())["schema"] == "flopwise.tune-preview/1"


def test_a_run_folder_is_taken_instead_of_measuring(stage: Stage, previewed: Any) -> None:
    stage.surveys = [answer("FW101")]
    previewed()
    before = list(stage.options)
    record, _ = previewed(baseline=str(Path(record_of(stage))), out=str(stage.folder / "second"))
    assert list(stage.options) == before  # "survey" again
    assert record.baseline_folder == record_of(stage)
    with pytest.raises(RecordError, match=r"nowhere/run\.json: cannot be read"):
        previewed(baseline="nowhere", out=str(stage.folder / "third"))
    assert not (stage.folder / "third").exists()


def record_of(stage: Stage) -> str:
    return str(stage.folder.parent / "dry" / "baseline")


def test_a_script_that_ends_before_it_can_be_asked_is_said(stage: Stage, previewed: Any) -> None:
    stage.ends = {"survey": 3}
    record, folder = previewed()
    assert {fix.outcome for fix in record.fixes} == {"unknown"}
    (note,) = record.notes
    assert note.startswith("the script ended with exit code 3 before fixes could be asked; see ")
    assert note.endswith(str(folder / "survey" / "output.txt"))
