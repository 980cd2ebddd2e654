"""A script that writes, apart from the user's files: it finds what it wrote, as without us, and the user's files stay as they are.

Each script runs twice: bare in a copy of the folder, and apart in the folder itself. It must print the same.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from flopwise.launch import apart as apart_module
from flopwise.launch import command, landlock
from flopwise.launch.apart import Apart, together
from flopwise.records.verdict import Write

HEAD = """
import os, sys, shutil, pathlib, io, glob, stat
HERE = os.getcwd()
def tree(top="."):
    for where, inner, names in os.walk(top):
        inner.sort()
        for name in sorted(names):
            path = os.path.join(where, name)
            if os.path.islink(path):
                print("link", path, os.readlink(path).replace(HERE, "HERE"))
            elif name.endswith((".db", ".pt")):
                print("file", path)
            else:
                print("file", path, open(path, "rb").read()[:200])
        if not inner and not names:
            print("empty", where)
def tries(what, *args, **kw):
    try:
        print("ok", what(*args, **kw))
    except OSError as error:
        print(type(error).__name__, str(error).replace(HERE, "HERE"))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, text in {
        "data.txt": "first\n",
        "ckpt/step1.txt": "one",
        "ckpt/step2.txt": "two",
        "ckpt/step3.txt": "three",
        "logs/run/events.txt": "e",
        "empty/keep/.x": "",
        "notes.md": "notes",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "latest").symlink_to("ckpt/step3.txt")
    (folder / "current").symlink_to("ckpt")
    (folder / "absolute").symlink_to(folder / "logs")
    return folder


def fingerprint(folder: Path) -> list[tuple[str, int, int, str]]:
    found = []
    for path in sorted(folder.rglob("*")):
        at = path.lstat()
        what = os.readlink(path) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink():
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        found.append((str(path), at.st_mode, at.st_mtime_ns, what))
    return found


def both(
    project: Path, script: str, *, before: str = "", allowed: tuple[str, ...] = ()
) -> tuple[str, str, list[Write]]:
    """Returns what a script prints bare, what it prints apart, and what it was seen to write."""
    code = before + HEAD + textwrap.dedent(script)
    copy = project.with_name("copy")
    shutil.copytree(project, copy, symlinks=True)
    (copy / "absolute").unlink()
    (copy / "absolute").symlink_to(copy / "logs")
    bare = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=False
    )
    run = project.with_name("run")
    run.mkdir()
    apart = Apart(run, run, allowed, guarded=[str(project)])
    was = fingerprint(project)
    with apart.process(command.environment(run)) as (env, first):
        env[command.DISABLE] = "1"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, env=env, preexec_fn=first,
            check=False,
        )  # fmt: skip
    assert fingerprint(project) == was
    assert not (run / "apart").exists()
    return bare.stdout + bare.stderr, done.stdout + done.stderr, apart.writes


SCRIPTS = {
    "writes, appends, exclusive": """
        open("data.txt", "a").write("second\\n"); print(open("data.txt").read())
        with open("data.txt", "r+") as f: f.write("FIRST"); f.seek(0); print(f.read(), f.name)
        open("new.txt", "w").write("new"); print(open("new.txt").read(), os.path.getsize("new.txt"))
        tries(open, "new.txt", "x"); tries(open, "notes.md", "x"); tries(open, "nowhere/x", "w"); tries(open, "ckpt", "w")
        tries(open, "missing"); tries(open, "data.txt/x", "w"); tries(open, "")
        open(os.path.join(HERE, "abs.txt"), "w").write("a"); print(pathlib.Path("abs.txt").read_text())
        open(b"bytes.txt", "wb").write(b"b"); print(os.listdir(b".").count(b"bytes.txt"))
        tree()
    """,
    "os.open": """
        fd = os.open("data.txt", os.O_RDWR); os.write(fd, b"XX"); os.lseek(fd, 0, 0); print(os.read(fd, 99)); os.close(fd)
        fd = os.open("low", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o640); os.write(fd, b"l"); os.fsync(fd); os.close(fd)
        print(oct(os.stat("low").st_mode))
        tries(os.open, "low", os.O_CREAT | os.O_EXCL | os.O_WRONLY); tries(os.open, "nope", os.O_WRONLY)
        d = os.open("ckpt", os.O_RDONLY); fd = os.open("inner", os.O_CREAT | os.O_WRONLY, dir_fd=d); os.write(fd, b"i"); os.close(fd)
        print(sorted(os.listdir(d)), os.stat("inner", dir_fd=d).st_size); os.unlink("step1.txt", dir_fd=d); os.close(d)
        os.truncate("notes.md", 2); os.utime("notes.md", (1, 1)); os.chmod("notes.md", 0o600)
        print(os.stat("notes.md").st_mtime, oct(os.stat("notes.md").st_mode)); tries(os.chmod, "nope", 0o600)
        tree()
    """,
    "checkpoint rotation": """
        for n in range(4, 9):
            os.makedirs(f"ckpt/{n}", exist_ok=True)
            open(f"ckpt/{n}/model.txt.tmp", "w").write(str(n)); os.replace(f"ckpt/{n}/model.txt.tmp", f"ckpt/{n}/model.txt")
            for old in sorted(p for p in os.listdir("ckpt") if p.isdigit())[:-2]: shutil.rmtree(f"ckpt/{old}")
        for path in sorted(glob.glob("ckpt/step*.txt"))[:-1]: os.remove(path)
        print(sorted(glob.glob("ckpt/**", recursive=True))); tries(os.remove, "ckpt/step1.txt"); tries(os.rmdir, "ckpt")
        if os.path.lexists("latest"): os.remove("latest")
        os.symlink("ckpt/8/model.txt", "latest"); print(open("latest").read()); tries(os.symlink, "x", "latest")
        tree()
    """,
    "links": """
        open("latest", "a").write("!"); print(open("ckpt/step3.txt").read())
        open("current/via.txt", "w").write("v"); print(open("ckpt/via.txt").read(), os.path.realpath("current/via.txt") == os.path.join(HERE, "ckpt/via.txt"))
        open("absolute/run/more.txt", "w").write("m"); print(os.listdir("logs/run").count("more.txt"))
        os.symlink("ckpt", "other"); print(sorted(os.listdir("other"))); os.remove("other/step1.txt"); tries(open, "ckpt/step1.txt")
        os.symlink(HERE + "/ckpt/via.txt", "there"); print(open("there").read()); os.link("data.txt", "hard"); open("hard", "a").write("h"); tries(os.link, "data.txt", "hard")
        os.symlink("loop2", "loop1"); os.symlink("loop1", "loop2"); tries(open, "loop1"); print(os.path.exists("loop1"), os.path.lexists("loop1"))
        print(open("notes.md").read(), os.path.samefile("latest", "ckpt/step3.txt"), os.path.islink("latest"), os.access("there", os.R_OK))
    """,
    "moves": """
        os.rename("data.txt", "moved.txt"); tries(open, "data.txt"); print(open("moved.txt").read())
        os.rename("ckpt", "old"); print(sorted(os.listdir("old"))); tries(os.listdir, "ckpt"); os.mkdir("ckpt"); print(os.listdir("ckpt"))
        open("ckpt/fresh", "w").write("f"); shutil.move("old/step2.txt", "ckpt"); os.replace("notes.md", "ckpt/fresh"); print(open("ckpt/fresh").read())
        tries(os.rename, "ckpt", "logs"); tries(os.rename, "nope", "x"); tries(os.rename, "moved.txt", "logs"); tries(os.rename, "logs", "moved.txt")
        tries(os.rename, "logs", "logs/run/in")
        shutil.copytree("logs", "copied"); shutil.rmtree("logs"); os.makedirs("logs/run"); print(os.listdir("logs/run")); os.removedirs("empty/keep") if not os.remove("empty/keep/.x") else 0
        tree()
    """,
    "pathlib": """
        from pathlib import Path
        p = Path("ckpt"); (p / "a" / "b").mkdir(parents=True, exist_ok=True); (p / "a" / "b" / "c.txt").write_text("c"); (p / "t").touch(); (p / "step1.txt").unlink()
        print(sorted(map(str, p.rglob("*")))); print((p / "t").exists(), (p / "step1.txt").exists(), (p / "a").is_dir(), sorted(x.name for x in p.iterdir()))
        (p / "step2.txt").rename(p / "renamed.txt"); print((p / "renamed.txt").read_text(), (p / "a/b").resolve().relative_to(HERE)); tries((p / "nope").unlink); (p / "nope").unlink(missing_ok=True)
        with (p / "step3.txt").open("a") as f: f.write("+")
        print(sorted(map(str, Path(".").glob("**/*.txt")))); tries((p / "a").rmdir); tries(p.mkdir); p.mkdir(exist_ok=True); print((p / "t").stat().st_size, Path.cwd() == Path(HERE))
        tree()
    """,
    "tempfile and shutil": """
        import tempfile
        with tempfile.NamedTemporaryFile("w", dir="ckpt", delete=False) as f: f.write("t")
        os.replace(f.name, "ckpt/final.txt"); print(open("ckpt/final.txt").read())
        with tempfile.TemporaryDirectory(dir=".") as d: open(os.path.join(d, "x"), "w").write("x"); print(os.listdir(d))
        with tempfile.TemporaryFile(dir=".") as f: f.write(b"y"); f.seek(0); print(f.read())
        with tempfile.TemporaryDirectory() as d: shutil.copy("data.txt", d); shutil.move(os.path.join(d, "data.txt"), "back.txt"); shutil.copy2("notes.md", d); os.rename(os.path.join(d, "notes.md"), "n2.md")
        shutil.copyfile("notes.md", "ckpt/notes.md"); shutil.make_archive("logs_zip", "zip", "logs"); shutil.unpack_archive("logs_zip.zip", "unpacked"); print(sorted(os.listdir("unpacked")))
        os.remove("logs_zip.zip"); print(shutil.disk_usage(".").total > 0); tree()
    """,
    "the working folder": """
        os.makedirs("made/inner"); os.chdir("made"); open("f", "w").write("f"); print(os.getcwd() == HERE + "/made", os.listdir("."), open(HERE + "/made/f").read(), os.path.abspath("f") == HERE + "/made/f")
        print(open("../data.txt").read(), sorted(os.listdir(".."))); os.chdir("inner"); open("../g", "w").write("g"); os.chdir(HERE); print(sorted(os.listdir("made")))
        os.chdir("ckpt"); open("h", "w").write("h"); print(sorted(os.listdir())); os.chdir(".."); print(os.getcwdb() == os.fsencode(HERE)); tries(os.chdir, "nowhere"); tree()
    """,
    "sqlite, mmap, archives": """
        import sqlite3, mmap, zipfile, tarfile, gzip, json, pickle, logging, csv
        c = sqlite3.connect("runs.db"); c.execute("create table if not exists t (a)"); c.execute("insert into t values (1)"); c.commit(); c.close()
        c = sqlite3.connect("runs.db"); print(c.execute("select count(*) from t").fetchall()); c.close()
        c = sqlite3.connect("file:runs.db?mode=ro", uri=True); print(c.execute("select * from t").fetchall()); c.close(); c = sqlite3.connect(":memory:"); c.close(); tries(print, os.path.exists("runs.db"))
        with open("data.txt", "r+b") as f, mmap.mmap(f.fileno(), 0) as m: m[:5] = b"MMAPD"; m.flush()
        print(open("data.txt").read()); zipfile.ZipFile("z.zip", "w").writestr("a", "b"); print(zipfile.ZipFile("z.zip").namelist()); gzip.open("g.gz", "wt").write("g"); print(gzip.open("g.gz", "rt").read())
        with tarfile.open("t.tar", "w") as t: t.add("ckpt")
        with tarfile.open("t.tar") as t: print(sorted(t.getnames()))
        log = logging.FileHandler("train.log"); log.emit(logging.LogRecord("n", 20, "p", 1, "hello", None, None)); log.close(); print(open("train.log").read())
        f = io.FileIO("raw.bin", "w"); f.write(b"r"); f.close(); print(isinstance(open("raw.bin", "rb", 0), io.FileIO), pickle.loads(pickle.dumps(os.stat)) is os.stat); print(io.FileIO("raw.bin").read())
        with open("m.csv", "w", newline="") as f: csv.writer(f).writerow([1, 2])
        print(open("m.csv", newline="").read()); os.mkfifo("pipe"); print(stat.S_ISFIFO(os.stat("pipe").st_mode)); os.remove("pipe"); print(sorted(os.listdir(".")))
    """,
    "processes of its own": """
        import multiprocessing, subprocess
        open("parent.txt", "w").write("p"); os.remove("notes.md")
        def child(q): q.put((open("parent.txt").read(), os.path.exists("notes.md"))); open("child.txt", "w").write("c")
        fork = multiprocessing.get_context("fork"); q = fork.Queue(); p = fork.Process(target=child, args=(q,)); p.start(); print(q.get()); p.join(); print(open("child.txt").read())
        code = "import os; open('sub.txt', 'w').write(open('parent.txt').read() + str(os.path.exists('notes.md')))"
        subprocess.run([sys.executable, "-c", code], check=True); print(open("sub.txt").read())
        tree()
    """,
    "entries": """
        open("ckpt/own", "w").write("o"); os.mkdir("ckpt/folder"); os.symlink("own", "ckpt/link")
        with os.scandir("ckpt") as them:
            for e in sorted(them, key=lambda e: e.name): print(e.name, e.path, e.is_dir(), e.is_file(), e.is_symlink(), e.stat().st_size, os.fspath(e), e.is_file(follow_symlinks=False), e.inode() > 0)
        print(sorted(e.name for e in os.scandir(b"ckpt")), sorted(os.listdir("logs"))); tries(os.scandir, "nope"); tries(os.scandir, "data.txt"); tries(os.listdir, "ckpt/own")
        fd = os.open("ckpt", os.O_RDONLY); print(sorted(e.name for e in os.scandir(fd))); os.close(fd)
    """,
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_what_it_prints_without_us_and_the_users_files_stay(
    project: Path, name: str
) -> None:
    bare, apart, writes = both(project, SCRIPTS[name])
    assert apart == bare
    assert "Traceback" not in bare
    assert writes
    assert {w.what for w in writes} <= {"written", "removed"}


RANDOM = """
import random
rng = random.Random(SEED)
NAMES = ["a", "b", "ckpt", "ckpt/step1.txt", "ckpt/a", "ckpt/b", "logs", "logs/run", "logs/run/a", "latest", "current", "current/a", "data.txt",
         "absolute", "absolute/run/a", "empty/keep", "empty", "notes.md", "b/a", "a/b", "current/../b"]
def write(p, mode):
    with open(p, mode) as f: f.write(str(n))
    return open(p).read()[:40] if os.path.isfile(p) else None
OPS = [lambda p, q: write(p, "w"), lambda p, q: write(p, "a"), lambda p, q: write(p, "r+"), lambda p, q: write(p, "x"), lambda p, q: os.remove(p),
       lambda p, q: os.mkdir(p), lambda p, q: os.rmdir(p), lambda p, q: os.rename(p, q), lambda p, q: os.symlink(rng.choice([q, os.path.basename(q), HERE + "/" + q]), p),
       lambda p, q: os.link(p, q), lambda p, q: sorted(os.listdir(p)), lambda p, q: stat.S_IFMT(os.lstat(p).st_mode), lambda p, q: stat.S_IFMT(os.stat(p).st_mode),
       lambda p, q: open(p).read()[:40], lambda p, q: os.makedirs(p, exist_ok=True), lambda p, q: None if (os.path.realpath(q) + "/").startswith(os.path.realpath(p) + "/") else shutil.copytree(p, q, symlinks=True), lambda p, q: os.path.realpath(p).replace(HERE, "HERE"),
       lambda p, q: os.readlink(p).replace(HERE, "HERE"), lambda p, q: os.truncate(p, 1), lambda p, q: sorted(glob.glob(p + "/*")), lambda p, q: shutil.rmtree(p) if n % 3 == 0 and not os.path.islink(p) else None,
       lambda p, q: os.path.samefile(p, q), lambda p, q: shutil.copy(p, q)]
for n in range(400):
    p, q, k = rng.choice(NAMES), rng.choice(NAMES), rng.randrange(len(OPS))
    try: seen = OPS[k](p, q)
    except RecursionError: seen = "deep"
    except (OSError, shutil.Error) as error: seen = type(error).__name__
    print(n, k, p, q, seen)
tree()
"""


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_changes_is_seen_as_without_us(project: Path, seed: int) -> None:
    bare, apart, _ = both(project, RANDOM.replace("SEED", str(seed)))
    assert apart == bare
    assert "Traceback" not in bare


def test_libraries_that_open_files_by_themselves(project: Path) -> None:
    script = """
        import torch
        torch.save({"a": torch.ones(3)}, "ckpt/m.pt"); torch.save(torch.zeros(2), HERE + "/notes.md"); torch.save(1, os.path.join("ckpt", "\u00fc.pt"))
        print(torch.load("ckpt/m.pt"), torch.load("notes.md", mmap=True), torch.load("ckpt/\u00fc.pt"), os.path.getsize("ckpt/m.pt") > 99)
        torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1)), "jit.pt"); print(type(torch.jit.load("jit.pt")).__name__, os.path.exists("jit.pt"))
        with torch.profiler.profile() as p: torch.ones(3).sum()
        p.export_chrome_trace("trace.pt"); print(os.path.getsize("trace.pt") > 10)
        tries(torch.load, "nowhere.pt"); print(isinstance(torch._C.PyTorchFileReader("ckpt/m.pt"), torch._C.PyTorchFileReader))
        tree()
    """
    quiet = "import warnings; warnings.simplefilter('ignore')\n"
    bare, apart, writes = both(project, script, before=quiet)
    bare, apart = (re.sub(r"(?m)^.*SyncActivityProfiler.*\n", "", text) for text in (bare, apart))
    assert apart == bare
    assert "Traceback" not in bare
    assert {Path(w.path).name for w in writes} == {"m.pt", "notes.md", "ü.pt", "jit.pt", "trace.pt"}


def test_what_passes_by_pythons_functions_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if landlock.abi() < landlock.OLDEST_ABI:
        pytest.skip("this kernel has no Landlock of version 2")
    monkeypatch.setattr(apart_module, "SYSTEM", ("/dev", "/proc"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    script = """
        import subprocess, ctypes
        for words in (["cp", "notes.md", "copy.md"], ["rm", "-f", "notes.md"], ["sh", "-c", "echo x >> data.txt"], ["mkdir", "m"]):
            done = subprocess.run(words, capture_output=True, text=True); print(done.returncode != 0, "denied" in done.stderr)
        c = ctypes.CDLL(None, use_errno=True); print(c.open(b"data.txt", os.O_WRONLY), ctypes.get_errno())
        open("ours", "w").write("o"); print(open("ours").read())
    """
    _, apart, writes = both(project, script)
    assert apart.split("\n")[:4] == ["True True"] * 4
    assert apart.split("\n")[4:6] == ["-1 13", "o"]
    assert [Path(w.path).name for w in writes] == ["ours"]


def test_a_folder_that_is_allowed_is_written_to(project: Path) -> None:
    run = project.with_name("run")
    run.mkdir()
    apart = Apart(run, run, [str(project / "ckpt")], guarded=[str(project)])
    with apart.process(command.environment(run)) as (env, first):
        code = f"import os; os.chdir({str(project)!r}); open('ckpt/new', 'w'); open('new', 'w')"
        subprocess.run([sys.executable, "-c", code], env=env, preexec_fn=first, check=True)
    assert (project / "ckpt" / "new").exists()
    assert not (project / "new").exists()
    assert apart.writes == [Write(str(project / "new"), "written", 0)]


def test_everywhere_means_that_nothing_is_put_in(project: Path) -> None:
    run = project.with_name("run")
    run.mkdir()
    apart = Apart(run, run, ["/"])
    with apart.process({}) as (env, first):
        assert (first, "FLOPWISE_APART" in env, env["WANDB_MODE"]) == (None, False, "offline")


def test_what_is_changed_in_spite_of_it_is_said_first(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "restriction", lambda _: None)
    monkeypatch.chdir(project)
    run = project / "runs" / "r"
    run.mkdir(parents=True)
    apart = Apart(run, project / "runs")
    with apart.process(command.environment(run)) as (env, first):
        assert first is None
        code = "import os; open('a', 'w'); os.system('echo x > b; rm notes.md')"
        subprocess.run([sys.executable, "-c", code], env=env, check=True)
    listed, more = together([apart.writes, [Write(str(project / "a"), "written", 7)]])
    assert more == 0
    assert listed == [
        Write(str(project / "b"), "changed in spite of it", 2),
        Write(str(project / "notes.md"), "changed in spite of it", 0),
        Write(str(project / "a"), "written", 7, 2),
    ]


def test_a_process_that_cannot_be_redirected_does_not_run(tmp_path: Path) -> None:
    env = {
        **command.environment(tmp_path),
        "FLOPWISE_APART": str(tmp_path),
        "PYTHONPATH": command.SITE,
    }
    code = "import flopwise.launch.redirect"
    broken = tmp_path / "flopwise"
    shutil.copytree(
        Path(command.SITE).parent.parent, broken, ignore=shutil.ignore_patterns("kit", "trace")
    )
    (broken / "launch" / "view.py").write_text("raise RuntimeError('broken')")
    env["PYTHONPATH"] = str(broken / "launch" / "site")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 70
    assert "cannot redirect what this process writes (RuntimeError('broken'))" in done.stderr


def test_starting_a_process_costs_little(project: Path) -> None:
    """Nothing of it is loaded in a process that is not apart."""
    code = "import sys; print([n for n in sys.modules if n.startswith('flopwise')])"
    env = command.environment(project)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.strip() == "[]"
