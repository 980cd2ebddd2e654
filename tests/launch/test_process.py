"""A job runs as it would without us: its signals, its files, its exit code."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flopwise.launch import process

#: Runs its arguments as a job, says so on stderr, and ends as the job did.
OURS = """
import os, sys
from flopwise.launch import process
code = process.run(sys.argv[1:], dict(os.environ))
print("ended", code, file=sys.stderr, flush=True)
sys.exit(process.end_like(code))
"""
#: Counts the signals it gets, until SIGTERM.
COUNTS = """
import os, signal, sys, time
got = []
def note(number, frame): got.append(signal.Signals(number).name); open("got", "a").write(got[-1] + "\\n")
for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGTERM"):
    signal.signal(getattr(signal, name), note)
open("ready", "w").close()
while "SIGTERM" not in got: time.sleep(0.01)
"""


def run(code: str, **options: object) -> int:
    return process.run([sys.executable, "-S", "-c", code], dict(os.environ), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "returned", "shown"),
    [
        ("", 0, 0),
        ("raise SystemExit(3)", 3, 3),
        ("import os; os._exit(255)", 255, 255),
        ("import os; os.kill(os.getpid(), 9)", -9, 137),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, 143),
    ],
)
def test_the_exit_code_is_the_jobs(code: str, returned: int, shown: int) -> None:
    assert run(code) == returned
    assert process.shell_code(returned) == shown


def test_what_cannot_be_started_is_an_error(in_folder: Path) -> None:
    (in_folder / "broken").write_text("no program")
    (in_folder / "broken").chmod(0o755)
    with pytest.raises(OSError, match="Exec format"):
        process.run(["./broken"], {})
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_it_is_watched_while_it_runs() -> None:
    seen: list[float] = []
    assert run("import time; time.sleep(0.6)", watch=lambda: seen.append(time.monotonic())) == 0
    assert len(seen) == 2


def test_a_watcher_ends_an_owned_job_and_no_other() -> None:
    assert run("import time; time.sleep(60)", watch=lambda: True, timeout_s=60) == -signal.SIGTERM
    assert run("import time; time.sleep(0.6)", watch=lambda: True) == 0


def test_files_that_the_caller_left_open_are_there(in_folder: Path) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    assert run(f"import os; os.write({write}, b'through')") == 0
    os.close(write)
    assert os.read(read, 20) == b"through"
    os.close(read)


def test_stdin_is_the_callers(in_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OURS, "cat"], input="words", capture_output=True, text=True, check=True
    )  # fmt: skip
    assert done.stdout == "words"


# ---------------------------------------------------------------------- signals

Ours = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def ours(in_folder: Path) -> Iterator[Ours]:
    """Starts a process of ours that runs a counting job, and waits until it counts."""
    started = []

    def start(*wrapped: str, **options: object) -> subprocess.Popen[str]:
        command = [*wrapped, sys.executable, "-c", OURS, sys.executable, "-S", "-c", COUNTS]
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True} | options
        one = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
        started.append(one)
        wait_for(in_folder / "ready")
        return one

    yield start
    for one in started:
        one.kill()
        one.wait()
        one.stderr.close()


def wait_for(path: Path, content: str = "", least_s: float = 0.0) -> str:
    """Returns what is in a file once it is there and holds at least `content`."""
    deadline = time.monotonic() + 60  # where the machine has other work, too
    while not path.exists() or len(path.read_text()) < len(content):
        assert time.monotonic() < deadline, f"{path.name} stays away"
        time.sleep(0.01)
    time.sleep(least_s)
    return path.read_text()


def test_signals_to_us_alone_are_passed_on(ours: Ours, in_folder: Path) -> None:
    one = ours()
    expected = ""
    for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM"):
        one.send_signal(getattr(signal, name))
        expected += name + "\n"
        assert wait_for(in_folder / "got", expected) == expected
    assert one.communicate()[1] == "ended 0\n"
    assert one.returncode == 0


#: Makes the terminal on stdin the controlling one, and then goes without it.
ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_the_keyboards_interrupt_reaches_the_job_once(ours: Ours, in_folder: Path) -> None:
    keyboard, terminal = pty.openpty()
    try:
        one = ours(sys.executable, "-c", ON_TERMINAL, stdin=terminal)
        for n, key in enumerate([b"\x03", b"\x1c"], 1):
            os.write(keyboard, key)
            got = wait_for(in_folder / "got", "SIGINT\n" * n, least_s=0.15)
            assert got.split() == ["SIGINT", "SIGQUIT"][:n]
        one.terminate()
        assert one.communicate()[1] == "ended 0\n"
        assert wait_for(in_folder / "got").split() == ["SIGINT", "SIGQUIT", "SIGTERM"]
    finally:
        os.close(keyboard)
        os.close(terminal)


def test_a_signal_that_is_ignored_stays_ignored(ours: Ours, in_folder: Path) -> None:
    one = ours("nohup")
    one.send_signal(signal.SIGHUP)  # ignored by us, as nohup wants it
    one.send_signal(signal.SIGUSR1)
    assert wait_for(in_folder / "got", "SIGUSR1").split() == ["SIGUSR1"]
    one.send_signal(signal.SIGTERM)
    assert one.communicate()[1].endswith("ended 0\n")


def test_killing_us_leaves_the_job_alone(ours: Ours, in_folder: Path) -> None:
    one = ours()
    children = Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().split()
    one.kill()
    one.wait()
    (job,) = map(int, children)
    os.kill(job, signal.SIGUSR1)
    assert wait_for(in_folder / "got", "SIGUSR1") == "SIGUSR1\n"
    os.kill(job, signal.SIGTERM)


@pytest.mark.parametrize(
    ("number", "seen"),
    [
        (signal.SIGINT, -signal.SIGINT),  # a shell's loop stops only at a process that died of it
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGKILL, -signal.SIGKILL),
        (signal.SIGABRT, 128 + signal.SIGABRT),  # no core dump of ours
    ],
)
def test_we_end_as_the_job_did(in_folder: Path, number: int, seen: int) -> None:
    program = f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), {number})"
    done = subprocess.run(
        [sys.executable, "-c", OURS, sys.executable, "-c", program], capture_output=True, check=False
    )  # fmt: skip
    assert done.stderr.endswith(f"ended {-number}\n".encode())
    assert done.returncode == seen


# ---------------------------------------------------------------------- jobs of ours

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0: os.setpgid(0, os.getpgid(os.getppid()))
open(f"alive-{os.getpid()}", "w").close()
time.sleep(60)
"""


def alive(folder: Path) -> list[int]:
    pids = [int(p.name.partition("-")[2]) for p in folder.glob("alive-*")]
    return [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(folder: Path) -> bool:
    """Whether all of them are gone within a moment: a killed process is there until its parent has looked."""
    deadline = time.monotonic() + 5
    while alive(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive(folder) == []


def test_a_time_limit_ends_the_job_and_what_it_has_started(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.3)
    started = time.monotonic()
    said: list[str] = []
    assert run(STUBBORN, timeout_s=0.6, on_timeout=lambda: said.append("over")) == -signal.SIGKILL
    assert said == ["over"]
    assert run("", timeout_s=60, on_timeout=lambda: said.append("over")) == 0
    assert said == ["over"]
    assert time.monotonic() - started < 5
    assert len(list(in_folder.glob("alive-*"))) == 2
    assert gone(in_folder)


def test_an_interrupt_of_ours_ends_an_owned_job_and_then_us(in_folder: Path) -> None:
    code = OURS.replace("dict(os.environ))", "dict(os.environ), timeout_s=60)")
    one = subprocess.Popen(
        [sys.executable, "-c", code, sys.executable, "-S", "-c", STUBBORN.replace("signal.signal", "#")],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 10
    while len(list(in_folder.glob("alive-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    one.send_signal(signal.SIGINT)
    _, err = one.communicate(timeout=10)
    assert one.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert "ended -" not in err
    assert gone(in_folder)


def test_an_owned_job_has_no_stdin(in_folder: Path) -> None:
    assert run("import sys; sys.exit(len(sys.stdin.read()))", timeout_s=10) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_an_owned_job_ends_when_we_are_killed(tmp_path: Path) -> None:
    sign = tmp_path / "pid"
    job = f"import os, time; open({str(sign)!r} + '.x', 'w').write(str(os.getpid())); os.rename({str(sign)!r} + '.x', {str(sign)!r}); time.sleep(60)"
    ours = f"import sys; from flopwise.launch import process; process.run([sys.executable, '-c', {job!r}], {{}}, timeout_s=50)"
    parent = subprocess.Popen([sys.executable, "-c", ours])
    deadline = time.monotonic() + 20
    while not sign.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int(sign.read_text())
    parent.kill()
    parent.wait()
    while time.monotonic() < deadline:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            break
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("the job went on")
