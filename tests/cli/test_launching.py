"""Which words of a command line are ours, and which are the job's, whatever they look like."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.cli import _parsers, launching, main
from flopwise.cli.launching import Words, job_of, split
from flopwise.errors import UsageError

PARSERS = _parsers()[1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train.py", Words([], ["train.py"], "script")),
        ("train.py --steps 5 -m --", Words([], ["train.py", "--steps", "5", "-m", "--"], "script")),
        ("--steps 5 train.py --steps 9", Words(["--steps", "5"], ["train.py", "--steps", "9"], "script")),
        ("--steps=5 train.py", Words(["--steps=5"], ["train.py"], "script")),
        ("--stop-after train.py", Words(["--stop-after"], ["train.py"], "script")),
        ("--out run train.py run", Words(["--out", "run"], ["train.py", "run"], "script")),
        ("-m pkg.mod -m x", Words([], ["pkg.mod", "-m", "x"], "module")),
        ("--quiet -m pkg --quiet", Words(["--quiet"], ["pkg", "--quiet"], "module")),
        ("-- bash -c x", Words([], ["bash", "-c", "x"], "command")),
        ("--steps 5 -- torchrun --steps 6 -- y", Words(["--steps", "5"], ["torchrun", "--steps", "6", "--", "y"], "command")),
        ("-- -m pkg", Words([], ["-m", "pkg"], "command")),
        ("-- -- x", Words([], ["--", "x"], "command")),
        ("--nproc_per_node 2 train.py", Words(["--nproc-per-node", "2"], ["train.py"], "script")),
        ("--nproc_per_node=2 --standalone -m pkg", Words(["--nproc-per-node=2", "--standalone"], ["pkg"], "module")),
        ("--help", Words(["--help"], [], "")),
        ("--steps", Words(["--steps"], [], "")),
        ("-m", Words([], [], "module")),
        ("--", Words([], [], "command")),
        ("", Words([], [], "")),
        ("- x", Words([], ["-", "x"], "script")),
    ],
)  # fmt: skip
def test_the_words_of_run(line: str, words: Words) -> None:
    assert split(line.split(), PARSERS["run"]) == words


def test_a_value_may_look_like_anything() -> None:
    odd = ["--out", "-m", "--json", "--", "train.py"]
    assert split(odd, PARSERS["run"]) == Words(
        ["--out", "-m", "--json", "--"], ["train.py"], "script"
    )


def test_the_options_of_tune_are_others() -> None:
    assert split(["--per-fix", "9s", "x.py"], PARSERS["tune"]).ours == ["--per-fix", "9s"]


@given(st.lists(st.text(), max_size=6), st.sampled_from(["script", "module", "command"]))
def test_the_jobs_words_come_through_untouched(words: list[str], kind: str) -> None:
    start = {"script": ["train.py"], "module": ["-m", "mod"], "command": ["--", "cmd"]}[kind]
    found = split(["--steps", "3", *start, *words], PARSERS["run"])
    assert found == Words(["--steps", "3"], [start[-1], *words], kind)


def arguments(*words: str) -> argparse.Namespace:
    found = split(words, PARSERS["run"])
    made = PARSERS["run"].parse_args(found.ours)
    made.split = found
    return made


def test_torchrun_gets_its_options_in_its_own_spelling(in_folder: Path) -> None:
    (in_folder / "x.py").touch()
    job = job_of(arguments("--nproc_per_node", "2", "--master-port=1", "--standalone", "x.py", "a"))
    assert job.argv[1:] == [
        "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=1", "--standalone", "x.py", "a",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to run: give a script"),
        (["-m"], "nothing to run: the name of a module is missing"),
        (["--"], "nothing to run: a command is missing"),
        (["--standalone", "--", "true"], "exclude each other"),
    ],
)
def test_nothing_to_run(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        job_of(arguments(*words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--steps", "0", "x.py"], "must be 1 or more"),
        (["run", "--steps", "many", "x.py"], "argument --steps: 'many' is not a whole number"),
        (["run", "--warmup", "1e9", "x.py"], "argument --warmup: '1e9' is not a whole number"),
        (["run", "--warmup", "-1", "x.py"], "must be 0 or more"),
        (["run", "--unknown", "x.py"], "unrecognized arguments: --unknown"),
        (["run", "--steps"], "expected one argument"),
    ],
)
def test_options_that_do_not_make_sense(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_every_option_of_torchrun_that_is_offered_exists_there() -> None:
    from torch.distributed.run import get_args_parser

    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    assert {*launching.TORCHRUN_VALUES, "--standalone"} <= theirs
