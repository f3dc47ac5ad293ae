"""What the demo's agent says and hears: a short coding session, written for the demo."""

from __future__ import annotations

Message = dict[str, str | bytes]

SYSTEM = """You are a careful coding agent. You work in a repository on the user's machine through tools, one
call at a time, and you finish what you begin.

How to work:
- Read before you write. Open the files a change touches, the tests beside them, and the places that call them.
- Make the smallest change that solves the whole problem. Leave unrelated code as you found it.
- Name things with the words the project already uses. Follow its formatting, its error types and its test style.
- After a change run the tests that cover it, then the linter. A failing test is information: read it to the end.
- Never hide an error. If a step cannot be done, say what blocks it and what you tried.
- Do not invent files, functions, flags or results. If you have not seen it, look.
- Ask only when two readings of the task lead to different code and the repository does not settle it.

Tools:
- read_file(path, first_line, last_line): returns numbered lines of a file. Paths are relative to the repository root.
- search(pattern, path): returns matching lines with file name and line number, at most fifty of them.
- edit(path, old, new): replaces one exact occurrence of old by new. It fails when old is missing or not unique.
- run(command, timeout_seconds): runs a shell command in the repository root and returns its exit status and output.
- spawn(task): starts a sub-agent with an empty context on a self-contained task and returns its report.

How to answer:
- Before a tool call, one sentence that says what you expect to learn or change.
- After the last call, a summary of at most five lines: what was wrong, what you changed, how you know it works.
- Quote code exactly. Give file names with line numbers. Write plain sentences, without praise and without apology.

Safety:
- Commands that delete, publish, deploy or send need the user's word first, each time.
- Secrets you come across are neither printed nor copied. Credentials in a log are replaced by three dots.
- Network access is limited to the package index that the repository already configures."""

TASK = """The command `stock report` prints the wrong total when a file has a blank line in the middle. Here
is the file that I think matters. Find the cause, fix it, and add a test.

# stock/report.py
import csv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Item:
    name: str
    count: int
    price_cents: int


def load_items(path: Path) -> list[Item]:
    items = []
    with path.open(newline="") as file:
        reader = csv.reader(file)
        next(reader)
        for row in reader:
            if not row:
                break
            name, count, price = row
            items.append(Item(name, int(count), round(float(price) * 100)))
    return items


def total_cents(items: list[Item]) -> int:
    return sum(item.count * item.price_cents for item in items)


def report(path: Path) -> str:
    items = load_items(path)
    lines = [f"{item.name:20} {item.count:6} {item.price_cents / 100:10.2f}" for item in items]
    lines.append(f"total {total_cents(items) / 100:10.2f}")
    return "\\n".join(lines)"""

TOOL_RESULTS = (
    """read_file tests/test_report.py
1  from pathlib import Path
2
3  from stock.report import load_items, report, total_cents
4
5
6  def write(path: Path, *lines: str) -> Path:
7      path.write_text("\\n".join(("name,count,price", *lines)) + "\\n")
8      return path
9
10
11 def test_total_adds_every_line(tmp_path: Path) -> None:
12     path = write(tmp_path / "stock.csv", "bolt,10,0.25", "nut,20,0.10")
13     assert total_cents(load_items(path)) == 450
14
15
16 def test_report_ends_with_the_total(tmp_path: Path) -> None:
17     path = write(tmp_path / "stock.csv", "bolt,10,0.25")
18     assert report(path).splitlines()[-1].split() == ["total", "2.50"]
exit status 0""",
    """edit stock/report.py
replaced 1 occurrence at line 20:
-                break
+                continue
run pytest -q tests/test_report.py
..                                                                       [100%]
2 passed in 0.03s
search "load_items" .
stock/report.py:13: def load_items(path: Path) -> list[Item]:
stock/report.py:32:     items = load_items(path)
stock/__main__.py:18:     for item in load_items(arguments.path):
tests/test_report.py:3: from stock.report import load_items, report, total_cents
tests/test_report.py:13:     assert total_cents(load_items(path)) == 450
exit status 0""",
    """The sub-agent reports: three other readers of csv files in this repository skip blank lines with
`continue`; none of them stops at one. The changelog has a section for unreleased fixes, in the past tense,
one line each.
run pytest -q
...............                                                          [100%]
15 passed in 0.21s
exit status 0""",
)

FORK_TASK = """Before you go on: try the other way as well. Filter the blank rows where the reader is made
instead of in
the loop, and tell me which of the two you would keep."""

SUBAGENT_SYSTEM = """You are a sub-agent that reads code and reports. You have read_file and search, and you
change nothing. Answer with facts, each with its file and line. If you find nothing, say so. Stop when the
question is answered."""

SUBAGENT_TASK = """Which other places in this repository read csv files, and what does each of them do at a
blank line? Look at stock/orders.py, stock/suppliers.py and stock/prices.py, and say how the changelog is
kept."""

COMPACTED = """Summary of the work so far: `stock report` stopped reading at the first blank line, because
load_items in stock/report.py left its loop with `break` on an empty row. It now uses `continue`, as the other
readers do. The two tests in tests/test_report.py pass, and so do all fifteen of the repository. Still to do:
a test for a file with a blank line in
the middle, and one line in the changelog under unreleased fixes."""

NEXT_STEP = "Write the missing test and the changelog line, then give the summary."
BACKGROUND = "Say in one sentence what a prefix cache is."
