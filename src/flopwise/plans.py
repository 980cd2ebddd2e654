"""plan.toml: written by a tune, read by people, checked before it is applied. A plan is untrusted input."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flopwise.errors import PlanError, UsageError
from flopwise.hardware.host import cpu_model
from flopwise.launch.command import Job
from flopwise.records.plan import OLDER, SCHEMA, Plan, PlannedFix
from flopwise.records.verdict import Trial

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Fixes that can be tried and planned, in the order in which they are tried: the input first, since another
#: bottleneck hides the rest; compilation last, since it is the slowest to try. (code, name)
FIXES = (
    ("FW101", "loader-workers"),
    ("FW109", "device-prefetch"),
    ("FW110", "host-settings"),
    ("FW102", "fused-optimizer"),
    ("FW119", "late-loss-reads"),
    ("FW103", "channels-last"),
    ("FW106", "tf32-matmul"),
    ("FW104", "bf16-autocast"),
    ("FW107", "needless-mask"),
    ("FW117", "unpadded-batches"),
    ("FW111", "padded-dimension"),
    ("FW112", "labelled-logits"),
    ("FW123", "chunked-loss"),
    ("FW113", "recompute-off"),
    ("FW114", "cudnn-benchmark"),
    ("FW116", "allocator-settings"),
    ("FW105", "compile-model"),
    ("FW118", "cross-batch-packing"),
    ("FW115", "cuda-graphs"),
    ("FW120", "tuned-kernels"),
)

#: Fixes that change more than time and rounding, and what they change: only tried when asked for by name, or allowed.
#: The same as in their classes.
OPT_IN: dict[str, str] = {
    "FW118": "which sequences share a step: some wait a few steps until they fill a row; the number of optimizer steps stays, "
    "and the sequences that wait at the end of the training (two rows at most) are not trained on",
    "FW119": "what the script shows of its loss, not the training: values are those of the step before, except in the first step "
    "and in the last of each epoch",
    "FW120": "how a run begins, and whether two runs agree to the bit: where the compile cache does not hold the kernels, "
    "minutes are spent on a search, and another search may choose others",
}

#: Fixes that are variables set before the process starts, tried in processes of their own: the variables and the values
#: that are accepted, since a plan is untrusted input.
ENVIRONMENT: dict[str, dict[str, str]] = {
    "FW116": dict.fromkeys(
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), r"[A-Za-z0-9_:,.\[\] -]{1,200}"
    ),
}

#: A plan has some kilobytes; what is larger is another file.
LARGEST_BYTES = 256 * 1024


def load(path: Path) -> Plan:
    """Returns the plan stored at `path`, checked field by field.

    Raises:
        PlanError: missing, not TOML, of another version, or with a field of the wrong type.
    """
    import msgspec

    try:
        with open(path, "rb") as stream:
            content = stream.read(LARGEST_BYTES + 1)
        if len(content) > LARGEST_BYTES:
            raise PlanError(
                f"{path}: larger than {LARGEST_BYTES} bytes, which no plan is. Nothing was started"
            )
        data = tomllib.loads(content.decode("utf-8").replace("\r\n", "\n"))
    except OSError as error:
        raise PlanError(
            f"{path}: cannot be read ({error.strerror}). Nothing was started"
        ) from error
    except (ValueError, RecursionError) as error:  # of which TOMLDecodeError is one
        raise PlanError(f"{path}: not TOML ({error}). Nothing was started") from error
    if data.get("schema") not in (SCHEMA, *OLDER):
        raise PlanError(
            f"{path}: schema {str(data.get('schema'))[:60]!r}, this flopwise reads {SCHEMA!r}. Nothing was started"
        )
    try:
        return msgspec.convert(data, Plan)
    except msgspec.ValidationError as error:
        raise PlanError(f"{path}: {error}. Edited by hand? Nothing was started") from error


def dump(plan: Plan) -> str:
    """Returns a plan as TOML with a comment that says what it is, and what its opt-ins change."""
    import tomli_w

    head = (
        "# A plan of flopwise: fixes that were measured to make this script faster, with the evidence.\n"
        "# ratio is t_new / t_old. Use it with: flopwise run --plan THIS_FILE SCRIPT ...\n"
    )
    head += "".join(f"# {words}\n" for words in changes(plan.fixes)) + "\n"
    return head + tomli_w.dumps(_without_none(dataclasses.asdict(plan)))


def check(plan: Plan, job: Job, *, force: bool) -> list[str]:
    """Returns how the plan differs from what it was made for; differences are allowed only with `force`.

    Raises:
        PlanError: the script, torch or the device is another one, and `force` was not given.
    """
    differences = []
    sha = sha256_of(job)
    if plan.script_sha256 and sha:
        if sha != plan.script_sha256:
            differences.append(
                f"{job.script} has changed since (or is another script than {plan.script})"
            )
    elif plan.script != job.script:
        differences.append(f"it was made for {plan.script}, not for {job.script}")
    torch = torch_version() if job.argv[:1] == [sys.executable] else None
    if torch is not None and plan.torch != torch:
        differences.append(f"torch is {torch}, it was {plan.torch}")
    device = device_name()
    if plan.device != device:
        differences.append(f"the device is {device}, it was {plan.device}")
    if differences and not force:
        raise PlanError(
            f"the plan does not fit: {'; '.join(differences)}. Nothing was started; tune again, or give --force-plan"
        )
    return differences


def to_apply(plan: Plan) -> list[dict[str, Any]]:
    """Returns the plan's fixes, each as its code and its setting.

    Raises:
        PlanError: no fixes in it, one twice, or one that this flopwise does not know.
    """
    codes = [fix.code for fix in plan.fixes]
    if not codes:
        raise PlanError("the plan holds no fix: there is nothing to apply. Run without --plan")
    known = dict(FIXES)
    for code in codes:
        if code not in known:
            raise PlanError(
                f"the plan's fix {code[:40]!r} is unknown to this flopwise; known are {', '.join(known)}. "
                "Nothing was started"
            )
        if codes.count(code) > 1:
            raise PlanError(f"the plan holds {code} twice. Edited by hand? Nothing was started")
    environment(plan.fixes)
    return [{"code": fix.code, "setting": dict(fix.setting)} for fix in plan.fixes]


def changes(fixes: Sequence[PlannedFix | Trial]) -> list[str]:
    """Returns what opt-ins among these fixes change beside time and rounding, one sentence each."""
    return [
        f"{code} {fix.name} was allowed, and changes more than time and rounding: {OPT_IN[code]}"
        for fix in fixes
        if (code := fix.code if isinstance(fix, PlannedFix) else fix.fix) in OPT_IN
    ]


def codes_of(fixes: str | None, allow: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the codes of the fixes to try, in their order.

    Args:
        fixes: codes or names with commas between: only these; None: all that are no opt-ins.
        allow: the same, of opt-ins that are tried beside.

    Raises:
        UsageError: a name is unknown, none is given, or a fix that is allowed needs no leave.
    """
    plain = [code for code, _ in FIXES if code not in OPT_IN]
    wanted = set(plain if fixes is None else _named("--fixes", fixes))
    for text in allow:
        allowed = _named("--allow", text)
        free = [f"{code} {name}" for code, name in FIXES if code in allowed and code not in OPT_IN]
        if free:
            raise UsageError(
                f"--allow {text}: {', '.join(free)} is no opt-in, and tried anyway. Opt-ins are "
                f"{', '.join(_shown(OPT_IN)) or 'none'}. Nothing was started"
            )
        wanted |= allowed
    return tuple(code for code, _ in FIXES if code in wanted)


def _named(option: str, text: str) -> set[str]:
    """Returns the codes of the fixes that the text of an option names."""
    codes = {word.lower(): code for code, name in FIXES for word in (code, name)}
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    known = OPT_IN if option == "--allow" else dict(FIXES)
    for word in words:
        if word not in codes:
            near = difflib.get_close_matches(word, codes, n=3, cutoff=0.5)
            shown = ", ".join(_shown(dict.fromkeys(codes[one] for one in near) or known))
            kind = "nearest" if near else "known"
            raise UsageError(
                f"{option} {text}: {word[:40]!r} is no fix; {kind}: {shown}. Nothing was started"
            )
    if not words:
        names = ", ".join(_shown(known)) or "none"
        raise UsageError(f"{option} {text!r} names no fix; known: {names}. Nothing was started")
    return {codes[word] for word in words}


def _shown(codes: Iterable[str]) -> list[str]:
    names = dict(FIXES)
    return [f"{code} {names[code]}" for code in codes]


def environment(fixes: Sequence[PlannedFix | Trial]) -> dict[str, str]:
    """Returns the variables that a process with these fixes starts with.

    Raises:
        PlanError: one that is not the fix's, or a value that is none of it; two fixes that set one differently.
    """
    found: dict[str, str] = {}
    for fix in fixes:
        code = fix.code if isinstance(fix, PlannedFix) else fix.fix
        for name, value in checked_environment(code, fix.environment).items():
            if found.setdefault(name, value) != value:
                raise PlanError(
                    f"two fixes of the plan set {name} differently. Nothing was started"
                )
    return found


def checked_environment(code: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of one fix.

    Raises:
        PlanError: one is not the fix's, or its value is none of it.
    """
    allowed = ENVIRONMENT.get(code, {})
    for name, value in variables.items():
        if name not in allowed or not re.fullmatch(allowed[name], value):
            raise PlanError(
                f"{code[:40]} sets {name[:60]!r} to {value[:60]!r}, which it may not. Edited by hand? Nothing was started"
            )
    return dict(variables)


def sha256_of(job: Job) -> str:
    """Returns the SHA-256 of the script's bytes; "" where there is no script file."""
    if job.file is None:
        return ""
    try:
        return hashlib.sha256(Path(job.file).read_bytes()).hexdigest()
    except OSError:
        return ""


def torch_version() -> str | None:
    """Returns `torch.__version__` of the torch that is installed beside flopwise, without importing it.

    Not the version of the package: that of a CUDA build lacks the "+cu130".
    """
    try:
        spec = importlib.util.find_spec("torch")
        path = Path(spec.origin or "").with_name("version.py") if spec is not None else None
        if path is not None:
            found = re.search(r"^__version__ *= *'([^']+)'", path.read_text("utf-8"), re.MULTILINE)
            if found:
                return found.group(1)
        return importlib.metadata.version("torch")
    except (ImportError, OSError, ValueError):  # PackageNotFoundError is an ImportError
        return None


def device_name() -> str:
    """Returns the name of the first NVIDIA device, or the CPU's model."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
            return name.decode() if isinstance(name, bytes) else str(name)
        finally:
            pynvml.nvmlShutdown()
    except Exception:
        return cpu_model()


def _without_none(value: Any) -> Any:
    """TOML has no null: what is None is left out."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value
