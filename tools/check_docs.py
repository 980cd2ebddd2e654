"""Checks that the documents stay true: links resolve, nothing names one machine, marked examples run.

python tools/check_docs.py                checks links and words
python tools/check_docs.py --run          also runs the examples (a minute)
python tools/check_docs.py --run docs/getting-started.md

An example is a fenced block with a comment on the line before it:

    <!-- run -->             a sh or python block, must end with exit code 0
    <!-- run: exit 2 -->     must end with this exit code
    <!-- run: file NAME -->  is written to NAME, for the blocks after it

The blocks of one page run in order in one new folder, which has a link to examples/ in it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
#: Seconds that one example may take.
LIMIT_S = 120
#: Words that belong to one machine or one person, not into a document.
FORBIDDEN = (
    (
        re.compile(r"(?<![\w./~-])/(home|root|Users|work|mnt|data|opt|tmp)\b"),
        "a path of one machine",
    ),
    (re.compile(r"\b[A-Z]:\\"), "a path of one machine"),
    (re.compile(r"\b(TODO|FIXME|XXX|TBD)\b"), "unfinished"),
)
_LINK = re.compile(r"(?<!\\)!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
_MARK = re.compile(r"^<!-- run(?:: (file|exit) (\S+))? -->$")


@dataclass(frozen=True)
class Example:
    """A block of a page that is run, or written to a file."""

    page: Path
    line: int
    language: str
    text: str
    file: str | None
    exit_code: int


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if all is well, 1 after saying what is not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="store_true", help="run the marked examples, too")
    parser.add_argument("pages", nargs="*", type=Path, help="only these (default: every page)")
    args = parser.parse_args(argv)
    chosen = [page.resolve() for page in args.pages] or pages(ROOT)
    problems = [text for page in chosen for text in (*broken_links(page), *forbidden_words(page))]
    if args.run:
        problems += [text for page in chosen for text in run_examples(page)]
    for text in problems:
        print(text, file=sys.stderr)
    print(f"{len(chosen)} pages, {len(problems)} problems")
    return 1 if problems else 0


def pages(root: Path) -> list[Path]:
    """Returns every Markdown page of the project."""
    found = [*root.glob("*.md")]
    for folder in ("docs", "examples", "benchmarks", "changes"):
        found += (root / folder).rglob("*.md")
    return sorted(found)


def broken_links(page: Path) -> Iterator[str]:
    """Yields one line a link that leads nowhere. Addresses on the web are not followed."""
    text = without_code(page.read_text(encoding="utf-8"))
    for target in (*_LINK.findall(text), *_REFERENCE.findall(text)):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = page if not path else (page.parent / path)
        if not file.exists():
            yield f"{shown(page)}: broken link {target}"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{shown(page)}: no such heading: {target}"


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and MkDocs make them."""
    found: set[str] = set()
    for title in re.findall(
        r"^#{1,6} +(.+?) *#*$", without_code(page.read_text("utf-8"), inline=False), re.M
    ):
        plain = re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\s-]", "", plain.lower()).strip().replace(" ", "-")
        found.add(re.sub(r"-{2,}", "-", slug))
        found.add(slug)
    return found


def forbidden_words(page: Path) -> Iterator[str]:
    """Yields one line a word that does not belong into a document."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        for pattern, why in FORBIDDEN:
            match = pattern.search(line)
            if match:
                yield f"{shown(page)}:{number}: {match.group().strip()!r} is {why}"


def examples(page: Path) -> list[Example]:
    """Returns the marked blocks of a page, in order.

    Raises:
        ValueError: a mark without a block behind it.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    found = []
    for at, line in enumerate(lines):
        mark = _MARK.match(line)
        if mark is None:
            if line.startswith("<!-- run"):
                raise ValueError(f"{shown(page)}:{at + 1}: cannot be read: {line}")
            continue
        fence = re.match(r"^(`{3,})(\w+)$", lines[at + 1]) if at + 1 < len(lines) else None
        if fence is None:
            raise ValueError(f"{shown(page)}:{at + 1}: no block of code follows")
        end = lines.index(fence.group(1), at + 2)
        kind, value = mark.groups()
        found.append(
            Example(
                page,
                at + 3,
                fence.group(2),
                "\n".join(lines[at + 2 : end]) + "\n",
                value if kind == "file" else None,
                int(value) if kind == "exit" else 0,
            )
        )
    return found


def run_examples(page: Path) -> Iterator[str]:
    """Yields one paragraph an example that does not do what it must."""
    found = examples(page)
    if not found:
        return
    with tempfile.TemporaryDirectory(prefix="flopwise-docs-") as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        for example in found:
            if example.file is not None:
                (folder / example.file).write_text(example.text, encoding="utf-8")
                continue
            code, output = run_example(example, folder)
            if code != example.exit_code:
                yield (
                    f"{shown(page)}:{example.line}: exit code {code}, not {example.exit_code}:\n"
                    + "\n".join(f"    {line}" for line in output.strip().splitlines()[-15:])
                )
                return


def run_example(example: Example, folder: Path) -> tuple[int, str]:
    """Returns the exit code of an example and what it printed."""
    # The flopwise and the python of this environment come first.
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env.setdefault("OMP_NUM_THREADS", "1")
    command = {
        "sh": ["sh", "-e", "-c", example.text],
        "python": [sys.executable, "-c", example.text],
    }.get(example.language)
    if command is None:
        return -1, f"a block of {example.language} cannot be run"
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"did not end within {LIMIT_S} s"
    return done.returncode, done.stdout


def without_code(text: str, *, inline: bool = True) -> str:
    """Returns Markdown without its blocks of code, and without code in the text: nothing in there is a link."""
    text = re.sub(r"^(`{3,}|~{3,}).*?^\1[ \t]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]+`", "``", text) if inline else text


def shown(page: Path) -> str:
    """Returns a page's path as it is typed from the top of the project."""
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else str(page)


if __name__ == "__main__":
    sys.exit(main())
