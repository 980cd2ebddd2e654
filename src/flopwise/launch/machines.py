"""Whether a job spans several machines, as far as its command line says so."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from flopwise.launch.command import Job

#: Options that give the number of machines, by the launcher whose they are. Sources: torch/distributed/run.py
#: (pytorch/pytorch); commands/launch.py (huggingface/accelerate); launcher/runner.py (deepspeedai/DeepSpeed); srun(1).
LAUNCHERS = {
    "torchrun": ("--nnodes",),
    "torch.distributed.run": ("--nnodes",),
    "torch.distributed.launch": ("--nnodes",),
    "accelerate": ("--num-machines",),
    "deepspeed": ("--num-nodes",),
    "srun": ("--nodes", "-N"),
}
#: What torchrun takes where the option is not given. Source: `env` of torch/distributed/argparse_util.py.
VARIABLE = "PET_NNODES"


def several(job: Job, environment: Mapping[str, str] | None = None) -> str | None:
    """Returns the words by which a job spans several machines, None where nothing says that it does.

    Args:
        job: that is to be started.
        environment: of this process; None: as it is.
    """
    variables = os.environ if environment is None else environment
    words = _before_the_script(job)
    for at, word in enumerate(words):
        options = LAUNCHERS.get(os.path.basename(word))
        if options is None:
            continue
        given = _option(words[at + 1 :], options)
        if given is None and options == LAUNCHERS["torchrun"] and "--standalone" not in words:
            given = VARIABLE, variables.get(VARIABLE, "")
        if given is not None and _most(given[1]) > 1:
            return "=".join(given)
    return None


def _before_the_script(job: Job) -> Sequence[str]:
    """Returns the words of the command that are not the script's own."""
    for name in (job.file, job.script):
        if name in job.argv:
            return job.argv[: job.argv.index(name)]
    return job.argv


def _option(words: Sequence[str], names: Sequence[str]) -> tuple[str, str] | None:
    """Returns the first of some options as it was typed, and its value."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            return name, value if equals else "".join(words[at + 1 : at + 2])
        if name[:2] in names and name[2:].isdigit():  # -N4
            return name[:2], name[2:]
    return None


def _most(value: str) -> int:
    """Returns the number of machines, of a range the most; 1 where it is no number."""
    last = value.replace("-", ":").rpartition(":")[2]
    return int(last) if last.isdigit() else 1
