"""What is written where, and what is left alone with its reason."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.errors import PatchError, PlanError
from flopwise.patching import patch
from flopwise.patching.edits import Edits, with_keywords
from flopwise.patching.script import Script
from flopwise.records.plan import SCHEMA, Plan, PlannedFix

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
    def forward(self, x):
        return self.conv(x).mean((2, 3))

class Data(Dataset):
    pass

class Other(Dataset):
    pass

"""
LOOP = """\
for x, y in loader:
    out = net(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
"""


@pytest.fixture
def made(in_folder: Path) -> Any:
    def make(code: str, name: str, **setting: str) -> tuple[str, Any]:
        (in_folder / "s.py").write_text(HEAD + textwrap.dedent(code))
        plan = Plan(SCHEMA, "0", "", "s.py", "", "", "", [PlannedFix("FW1", name, setting)])
        found = patch(plan, "s.py", force=True)
        added = [line[1:] for line in found.diff.decode().splitlines()[2:] if line.startswith("+")]
        return "\n".join(added), found.outcomes[0]

    return make


WORKERS = {"num_workers": "4", "pin_memory": "true", "persistent_workers": "false"}


class TestLoaders:
    def written(self, made: Any, code: str, **setting: str) -> tuple[str, Any]:
        return made(code, "loader-workers", **WORKERS, **setting)  # type: ignore[no-any-return]

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("DataLoader(d, 8)", "DataLoader(d, 8, num_workers=4, pin_memory=True)"),
            ("DataLoader(d, 8, True, None, None, 2)", "DataLoader(d, 8, True, None, None, 4, pin_memory=True)"),
            (
                "DataLoader(d, 8, True, None, None, 0, c, False)",
                "DataLoader(d, 8, True, None, None, 4, c, True)",
            ),
            ("DataLoader(d, **kw)", 'DataLoader(d, **{**kw, "num_workers": 4, "pin_memory": True})'),
            ("DataLoader(d, num_workers=n, **kw)", 'DataLoader(d, num_workers=4, **{**kw, "pin_memory": True})'),
            ("DataLoader(d,)", "DataLoader(d, num_workers=4, pin_memory=True,)"),
            ("DataLoader(dataset=d)", "DataLoader(dataset=d, num_workers=4, pin_memory=True)"),
        ],
    )  # fmt: skip
    def test_arguments_go_where_they_belong(self, made: Any, before: str, after: str) -> None:
        had = "2" if before.endswith("2)") else "0"
        added, _ = self.written(made, f"loader = {before}\n", had_workers=had)
        assert added == f"loader = {after}"

    def test_one_argument_a_line_stays_one_a_line_with_its_comments(self, made: Any) -> None:
        code = """\
        loader = DataLoader(
            d,  # the data
            batch_size=8,  # small
        )
        """
        assert self.written(made, code)[0] == "    num_workers=4,\n    pin_memory=True,"

    def test_what_a_flag_set_is_named(self, made: Any) -> None:
        _, outcome = self.written(made, "loader = DataLoader(d, num_workers=args.workers)\n")
        assert outcome.note.startswith("in place of num_workers=args.workers")

    MATCH = "Data, batch 8, RandomSampler"

    @pytest.mark.parametrize(
        "other",
        [
            "DataLoader(Other(), batch_size=8, shuffle=True)",
            "DataLoader(Data(), batch_size=9, shuffle=True)",
            "DataLoader(Data(), batch_size=8)",
            "DataLoader(Data(), batch_size=8, shuffle=False)",
            "DataLoader(Data(), batch_size=8, shuffle=True, num_workers=2)",
        ],
    )
    def test_only_the_loader_of_the_plan_is_written(self, made: Any, other: str) -> None:
        code = f"a = DataLoader(Data(), batch_size=8, shuffle=True)\nb = {other}\n"
        added, outcome = self.written(made, code, match=self.MATCH)
        assert added.startswith("a = ")
        assert len(outcome.lines) == 1

    def test_where_the_text_does_not_tell_the_one_that_feeds_training_is_written(
        self, made: Any
    ) -> None:
        code = """\
        def train(net, loader):
            for step, (x, y) in enumerate(loader):
                loss = F.cross_entropy(net(x), y)
                loss.backward()
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        a = DataLoader(Data(), batch_size=args.size, shuffle=True)
        b = DataLoader(Data(), batch_size=args.size, shuffle=True)
        train(net, b)
        """
        added, _ = self.written(made, code, match=self.MATCH)
        assert added.startswith("b = ")

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("x = 1", "no call of torch's DataLoader was found"),
            ("a = DataLoader(Other())", "no DataLoader call is that of the plan"),
            ("a = DataLoader(data(), args.n, True)\nb = DataLoader(data(), args.m, True)", "lines 19, 20 may all be that"),
            ("a = DataLoader(*given)", "it unpacks its positional arguments"),
        ],
    )  # fmt: skip
    def test_otherwise_it_is_left_with_what_to_add(self, made: Any, code: str, said: str) -> None:
        added, outcome = self.written(made, code, match=self.MATCH)
        assert added == ""
        assert said in outcome.note
        assert outcome.by_hand == ("DataLoader(..., num_workers=4, pin_memory=True)",)

    def test_a_loader_of_another_name_is_not_torchs(self, made: Any) -> None:
        code = "class DataLoader:\n    pass\nloader = DataLoader()\n"
        assert not self.written(made, code)[1].written


class TestOptimizers:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("torch.optim.AdamW(p, lr=1)", "torch.optim.AdamW(p, lr=1, fused=True)"),
            ("torch.optim.Adam(p, foreach=True)", "torch.optim.Adam(p, fused=True)"),
            ("torch.optim.SGD(p, **kw)", 'torch.optim.SGD(p, **{**kw, "fused": True, "foreach": False})'),
            ("torch.optim.SGD(p, fused=False)", "torch.optim.SGD(p, fused=True)"),
        ],
    )  # fmt: skip
    def test_the_flag(self, made: Any, before: str, after: str) -> None:
        assert made(f"o = {before}\n", "fused-optimizer", fused="true")[0] == f"o = {after}"

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("o = getattr(torch.optim, name)(p)", "no optimizer of torch is made by name"),
            ("o = torch.optim.RMSprop(p)", "RMSprop: no fused form"),
            ("o = torch.optim.SGD(p, fused=True)", "are fused already"),
            ("o = torch.optim.Adam(p, capturable=True)", "capturable is set"),
            ("o = torch.optim.lr_scheduler.StepLR(o, 1)", "no optimizer of torch"),
        ],
    )
    def test_what_is_left(self, made: Any, code: str, said: str) -> None:
        added, outcome = made(code, "fused-optimizer", fused="true")
        assert (added, outcome.written) == ("", False)
        assert said in outcome.note


class TestSwitches:
    def test_go_behind_the_imports(self, made: Any, in_folder: Path) -> None:
        added, _ = made("x = 1\n", "tf32-matmul", precision="tf32")
        assert added == '\ntorch.set_float32_matmul_precision("high")'
        (in_folder / "t.py").write_text('"""Doc."""\n# why\nfrom torch import nn\nx = nn\n')
        plan = Plan(SCHEMA, "", "", "t", "", "", "", [PlannedFix("FW1", "cudnn-benchmark")])
        assert "+import torch\n+\n+torch.backends.cudnn.benchmark = True\n" in patch(
            plan, "t.py", force=True
        ).diff.decode().replace("+\n x", "+\n x")

    @pytest.mark.parametrize(
        ("name", "code"),
        [
            ("tf32-matmul", 'torch.set_float32_matmul_precision("highest")'),
            ("tf32-matmul", "torch.backends.cuda.matmul.allow_tf32 = False"),
            ("cudnn-benchmark", "torch.backends.cudnn.benchmark = args.benchmark"),
        ],
    )
    def test_are_left_to_a_script_that_sets_them(self, made: Any, name: str, code: str) -> None:
        added, outcome = made(code + "\n", name)
        assert added == ""
        assert "line 19 sets it already" in outcome.note


MODEL = "net = Net()\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\nloader = []\n"


class TestAutocast:
    def written(self, made: Any, code: str) -> tuple[str, Any]:
        return made(code, "bf16-autocast", dtype="bfloat16")  # type: ignore[no-any-return]

    def test_a_tensor_is_cast_behind_the_forward(self, made: Any) -> None:
        assert self.written(made, MODEL + LOOP)[0] == (
            "    with torch.autocast(next(net.parameters()).device.type, dtype=torch.bfloat16):\n"
            "        out = net(x)\n"
            "    out = out.float()"
        )

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("with torch.autocast('cpu'):\n    pass\n", "the script has mixed precision itself"),
            ("scaler = torch.amp.GradScaler()\n", "the script has mixed precision itself"),
            ("for x, y in loader:\n    net(x).mean().backward()\n", "in one expression"),
            ("for x, y in loader:\n    loss = helper(x)\n    loss.backward()\n", "no call of a trained model"),
            ("for x, y in loader: F.mse_loss(net(x), y).backward()\n", "a suite on one line"),
            ("for x, y in loader:\n    out = net(x)\n    s = out @ out.T\n    loss = s.mean()\n    loss.backward()\n",
             "line 24: what is computed there"),
            ("for x, y in loader:\n    out = net(x)\n    loss = ssim(out)\n    loss.backward()\n", "line 24: what is"),
            ("for x, y in loader:\n    loss = F.binary_cross_entropy(net(x), y)\n    loss.backward()\n", "does not run"),
            ("x = 1\n", "no backward() was found"),
        ],
    )  # fmt: skip
    def test_what_is_left(self, made: Any, code: str, said: str) -> None:
        added, outcome = self.written(made, MODEL + code)
        assert (added, outcome.written) == ("", False)
        assert said in outcome.note

    def test_the_cast_is_what_the_plan_does_also_where_the_loss_is_unsafe(self, made: Any) -> None:
        code = MODEL + LOOP.replace("F.cross_entropy(out, y)", "F.binary_cross_entropy(out, y)")
        assert "out = out.float()" in self.written(made, code)[0]

    def test_only_the_trained_model_counts(self, made: Any) -> None:
        code = """\
        teacher = Net()
        for p in teacher.parameters():
            p.requires_grad = False
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for x, y in loader:
            wanted = teacher(x)
            out = net(x)
            loss = F.mse_loss(out, wanted)
            loss.backward()
        """
        added, outcome = self.written(made, code)
        assert "teacher" not in added
        assert len(outcome.lines) == 1


class TestModels:
    def test_the_place_is_before_the_optimizer_and_its_comment(self, made: Any) -> None:
        code = "net = Net()\n\n# the optimizer\n" + MODEL.split("\n", 1)[1] + LOOP
        added, outcome = made(
            code, "compile-model", mode="default", parts="whole", deadline_s="120"
        )
        assert added == "net.compile()"
        assert outcome.lines == (22,)
        added, _ = made(code, "compile-model", mode="max-autotune")
        assert added == 'net.compile(mode="max-autotune")'

    def test_images_are_laid_out_where_the_model_begins_with_a_convolution(self, made: Any) -> None:
        added, outcome = made(MODEL + LOOP, "channels-last", memory_format="channels_last")
        assert added == (
            "net = net.to(memory_format=torch.channels_last)\n"
            "    x = x.to(memory_format=torch.channels_last)"
        )
        assert outcome.note == ""
        other = "class Flat(nn.Module):\n    def forward(self, x):\n        return x.flatten(1)\n"
        added, outcome = made(other + MODEL.replace("Net()", "Flat()") + LOOP, "channels-last")
        assert added == "net = net.to(memory_format=torch.channels_last)"
        assert "lays images out by itself" in outcome.note

    @pytest.mark.parametrize(
        ("code", "setting", "said"),
        [
            (MODEL + LOOP, {"parts": "blocks"}, "its blocks are compiled one by one"),
            (MODEL + LOOP, {"mode": "odd"}, "has no form in a script"),
            (MODEL + LOOP, {"scope": "layer"}, "its setting (scope) has no form"),
            (MODEL + "net = torch.compile(net)\n" + LOOP, {}, "the script compiles by itself"),
            (MODEL.replace("Net()", "nn.Sequential(Net())") + LOOP, {}, "leaves uncompiled"),
            ("net = Net()\nclip = nn.utils.clip_grad_norm_(net.parameters(), 1)\n" + LOOP, {}, "cannot be told where"),
        ],
    )  # fmt: skip
    def test_what_is_left(self, made: Any, code: str, setting: dict[str, str], said: str) -> None:
        added, outcome = made(code, "compile-model", **setting)
        assert (added, outcome.written) == ("", False)
        assert said in outcome.note


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("indent", ["  ", "\t", "    "])
def test_indents_and_line_endings_are_the_scripts_own(
    in_folder: Path, ending: str, indent: str
) -> None:
    code = (HEAD + MODEL + LOOP).replace("    ", indent).replace("\n", ending)
    (in_folder / "s.py").write_bytes(code.encode())
    fixes = [PlannedFix("FW1", n) for n in ("bf16-autocast", "channels-last", "tf32-matmul")]
    diff = patch(Plan(SCHEMA, "", "", "s", "", "", "", fixes), "s.py", force=True).diff.decode()
    added = [line for line in diff.split("\n")[2:] if line.startswith("+")]
    assert all(line.endswith("\r") == (ending == "\r\n") for line in added)
    assert f"+{indent}{indent}out = net(x)" in [line.rstrip("\r") for line in added]
    if indent == "\t":
        assert not any(" " * 2 in line for line in added)


def test_a_plan_without_fixes_and_a_plan_of_another_script_are_refused(in_folder: Path) -> None:
    (in_folder / "s.py").write_text("x = 1\n")
    with pytest.raises(PlanError, match="holds no fix"):
        patch(Plan(SCHEMA, "", "", "s.py", "", "", "", []), "s.py", force=True)
    plan = Plan(SCHEMA, "", "", "s.py", "0" * 64, "", "", [PlannedFix("FW1", "tf32-matmul")])
    with pytest.raises(PlanError, match="has changed since"):
        patch(plan, "s.py")
    assert patch(plan, "s.py", force=True).notes


def test_syntax_that_is_none_is_refused_with_its_line(in_folder: Path) -> None:
    (in_folder / "s.py").write_text("import torch\nfor x in:\n    pass\n")
    plan = Plan(SCHEMA, "", "", "s.py", "", "", "", [PlannedFix("FW1", "tf32-matmul")])
    with pytest.raises(PatchError, match=r"s\.py:2: is not Python"):
        patch(plan, "s.py", force=True)


ARGS = st.lists(st.sampled_from(["a", "b=1", "c=2,  # why", "fused=0", "*x", "**k"]), max_size=4)


@settings(max_examples=60, deadline=None)
@given(args=ARGS, lines=st.booleans(), trailing=st.booleans())
def test_any_call_takes_a_keyword_once(args: list[str], lines: bool, trailing: bool) -> None:
    """The call stays Python, has the keyword once, and no argument or comment is lost."""
    plain = [a.split(",")[0] for a in args]
    order = [a for a in plain if "=" not in a and "*" not in a]
    order += [a for a in plain if a == "*x"] + sorted({a for a in plain if "=" in a})
    order += [a for a in plain if a == "**k"]
    inside = (",\n    " if lines else ", ").join(order) + ("," if trailing and order else "")
    code = f"f(\n    {inside}\n)\n" if lines else f"f({inside})\n"
    seen: dict[str, Any] = {}

    def f(*given: Any, **named: Any) -> None:
        seen.update(given=given, named=named)

    names = {"f": f, "a": 1, "b": 2, "x": (3,), "k": {"fused": 5, "z": 6}}
    try:
        exec(code, names)
    except (SyntaxError, TypeError):  # not a call that works
        return
    before = dict(seen)
    script = Script(code)
    edits = Edits(script)
    edits.change(script.calls[0], with_keywords({"fused": "True"}))
    exec(edits.applied(), names)
    assert seen["given"] == before["given"]
    assert seen["named"] == {**before["named"], "fused": True}
