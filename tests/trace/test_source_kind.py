"""What a file is."""

from __future__ import annotations

import gzip
import json
import pickle
import sqlite3
from pathlib import Path
from typing import Any

from flopwise.trace.sources import find

EVENT = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 2}


def test_content_tells_what_a_file_is(tmp_path: Path, trace: Any) -> None:
    trace(tmp_path / "really.txt")
    (tmp_path / "array.json").write_text(json.dumps([EVENT]))
    dump = {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": []}
    (tmp_path / "fr_0").write_bytes(pickle.dumps(dump, 2))
    (tmp_path / "fr_1.json").write_text(json.dumps(dump))
    (tmp_path / "out.txt").write_text("hello\nhost:1:1 [0] NCCL INFO cudaDriverVersion 12040\n")
    with sqlite3.connect(tmp_path / "export") as database:
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER)")
    database.close()
    kinds = {one.path.name: one.kind for one in find([tmp_path])}
    assert kinds == {
        "really.txt": "kineto", "array.json": "kineto", "fr_0": "flight", "fr_1.json": "flight", "out.txt": "nccl-log",
        "export": "nsys",
    }  # fmt: skip


def test_a_bomb_is_looked_at_only_so_far(tmp_path: Path, trace: Any) -> None:
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b" " * (64 << 20)))
    deep = tmp_path / "deep.json"
    deep.write_text('{"distributedInfo": ' + '{"a":' * 100_000)
    trace(tmp_path / "rank0.json")
    deeper = tmp_path / "deeper.json"
    deeper.write_text('{"distributedInfo": ' + '{"a":' * 50_000 + ' "traceEvents": []')
    found = find([tmp_path])
    assert {one.path.name for one in found} == {"rank0.json", "deeper.json"}
