"""The page of findings and the causes are the same list."""

from __future__ import annotations

import re
from pathlib import Path

from flopwise.diagnosis import findings

ROOT = Path(__file__).parents[2]
CAUSES = ROOT / "src" / "flopwise" / "diagnosis" / "causes"


def test_every_code_is_documented_with_its_cause_and_certainty() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (D\d+) \| ([\w-]+) \| .* \| (\w+) \|$", page, flags=re.MULTILINE)
    found = []
    for file in CAUSES.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        made = re.findall(
            r'code="(D\d+)",\s+cause="([\w-]+)".*?certainty=(\w+)', text, flags=re.DOTALL
        )
        found += [(code, cause, certainty.lower()) for code, cause, certainty in made]
    assert sorted(found) == rows
    assert len({code for code, *_ in rows}) == len(rows)


def test_every_file_of_a_cause_is_asked() -> None:
    asked = {cause.__module__.rpartition(".")[2] for cause in findings.CAUSES}
    assert asked == {file.stem for file in CAUSES.glob("*.py")} - {"__init__"}


def test_the_causes_need_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys; import flopwise.diagnosis.findings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
