"""The report says what was paid and what came of it."""

from __future__ import annotations

from collections import Counter

from flopwise.kit.graph.compile_report import CompileReport, varying
from flopwise.kit.graph.events import GraphBreak, Recompile


def report(**changes: object) -> CompileReport:
    values: dict[str, object] = {
        "modules": 6, "shared": 1, "cured": (), "frames": 2, "breaks": (), "recompiles": (), "compile_s": 12.0,
        "eager_s": 0.010, "compiled_s": 0.004, "break_even_steps": 2000, "evaluation_frames": 0, "limits": 0,
        "sizes": (), "cudagraph_skips": 0, "reason": None,
    }  # fmt: skip
    return CompileReport(**(values | changes))  # type: ignore[arg-type]


def test_whole_texts() -> None:
    assert str(report()) == (
        "compiled: 6 modules, 2 frames, 12.0 s; 10 ms eager, 4 ms compiled, paid back after 2000 steps"
    )
    assert str(report(eager_s=None, compiled_s=None)) == "compiled: 6 modules, 2 frames, 12.0 s"
    sizes = ((0, {2: 1, 3: 1, 30: 1}),)
    assert str(
        report(
            reason="slower by 70 %",
            cured=("", "body"),
            breaks=(GraphBreak("print", "m.py:3"),),
            recompiles=(Recompile("size mismatch at index 0", "", 3, 1.5),),
            limits=1,
            sizes=sizes,
            cudagraph_skips=2,
        )
    ).splitlines() == [
        "eager: slower by 70 %",
        "module.compile() had had no effect on the model",
        "module.compile() had had no effect on body",
        "graph break at m.py:3: print",
        "recompiled for size mismatch at index 0: 3 recompiles, 1.5 s",
        "the limit of recompiles was met 1 times: now running eager there",
        "3 sizes of dimension 0: padded to 3, 30, at most a tenth would be padding",
        "torch's CUDA graphs passed over 2 compiled regions",
    ]


def test_the_dimensions_that_vary() -> None:
    seen = Counter({((4, 8), (4,)): 3, ((5, 8), (5,)): 2})
    assert varying(seen) == ((0, {4: 3, 5: 2}),)
    assert varying(Counter({((4, 8),): 3})) == ()
