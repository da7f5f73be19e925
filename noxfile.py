# SPDX-License-Identifier: Apache-2.0
"""The fast tests over several versions of torch and Python: see docs/versions.md.

nox -l                                        list the pairs of versions
nox -s fast                                   run all of them, and write each row of the page
nox -s "fast(python='3.11', torch='newest')"  run one; arguments after -- go to pytest
"""

import datetime
import platform
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PAGE = ROOT / "docs" / "versions.md"
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = "torch,checkpoint,train,plan,plots,test"
# The JAX engine knows nothing of torch: jax is not installed here, which these tests need. Those in
# the second line read the source and the pages, which are the same with every version.
LEFT_OUT = [
    *("tests/jax_engine", "tests/train/test_jax_models.py", "tests/train/test_jax_training.py"),
    *("tests/train/test_jax_engine_apart.py", "tests/checkpoint/test_jax.py"),
    *(
        "tests/test_architecture.py",
        "tests/test_page_claims.py",
        "tests/test_refused_page.py",
    ),
    "tests/test_documents.py",
]
TABLE = "tests/engine/test_private_names.py::test_versions_are_the_same_everywhere"  # is made here
# Where the engine touches torch: names, tensors of its own, optimizers, state dicts, training.
SAMPLE = [
    f"tests/engine/test_{name}.py"
    for name in (
        *("public_names", "private_names", "parameter", "rules", "rows", "optim", "merged_step"),
        *("modes", "parity", "precision", "kinds_of_parameters", "state_dicts", "initialisation"),
    )
]

nox.needs_version = ">=2024.4"
nox.options.sessions = ["fast"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False


def pinned_torch() -> str:
    """Return the version that development uses."""
    return re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


def requirements() -> dict[str, str]:
    """Requirements of torch by name: each minor version from the oldest, the pinned, the newest."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = next(
        each for each in extras["optional-dependencies"]["torch"] if re.match(r"torch\b(?!-)", each)
    )
    oldest, pinned = int(re.search(r">=2\.(\d+)", wanted)[1]), pinned_torch()
    minors = {f"2.{n}": f"torch==2.{n}.*" for n in range(oldest, int(pinned.split(".")[1]))}
    return {**minors, pinned: f"torch=={pinned}", "newest": f"torch>{pinned}"}


TORCHES = requirements()
# Every torch on the oldest Python, every Python with the pinned and with the newest torch.
PAIRS = [
    (python, torch)
    for python in PYTHONS
    for torch in TORCHES
    if python == PYTHONS[0] or torch in (pinned_torch(), "newest")
]


@nox.session(venv_backend="venv")
@nox.parametrize(("python", "torch"), PAIRS)
def fast(session: nox.Session, torch: str) -> None:
    """Install one torch, run the fast tests, and write the row of docs/versions.md."""
    run_tests(session, torch, "fast", session.posargs)


@nox.session(venv_backend="venv")
@nox.parametrize(("python", "torch"), PAIRS)
def sample(session: nox.Session, torch: str) -> None:
    """Do the same with a sample of the fast tests, in about a minute."""
    run_tests(session, torch, "sample", [*SAMPLE, *session.posargs])


def run_tests(session: nox.Session, torch: str, what: str, chosen: list[str]) -> None:
    """Install, run ``chosen`` tests that are fast (all, if none), and write the row."""
    folder = Path(session.create_tmp())
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    # What pins torch would pin, this session chooses; the rest stays as it is in development.
    (folder / "pins.txt").write_text("\n".join(p for p in pins if not p.startswith("torch==")))
    session.install("-c", f"{folder}/pins.txt", TORCHES[torch], "-e", f".[{EXTRAS}]")
    report = folder / "fast.xml"
    session.run(
        *("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"),
        *(f"--ignore={path}" for path in LEFT_OUT),
        f"--junitxml={report}",
        f"--deselect={TABLE}",
        *chosen,
        success_codes=[0, 1],  # tests that fail are in the row
        env={"PYTHONPATH": None},
    )
    said = session.run("python", "-c", "import torch; print(torch.__version__)", silent=True)
    if said is None:
        return  # --install-only
    installed = said.split()[-1]
    what = f"`{' '.join(session.posargs)}`" if session.posargs else what
    failures = write_row([str(session.python), installed, what], report)
    if failures:
        session.error(f"{failures} tests fail with torch {installed}")


def write_row(begin: list[str], report: Path) -> int:
    """Put a row that begins so, with a report's counts, into the table; return what failed."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    today = datetime.date.today().isoformat()
    system = f"{platform.system()} {platform.machine()}"
    cells = [*begin, str(passed), str(failed), str(count["skipped"]), system, today]
    row = f"| {' | '.join(cells)} |"
    lines = PAGE.read_text("utf-8").splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("| Python |")) + 2
    end = next(n for n, line in enumerate([*lines, ""]) if n >= first and line[:1] != "|")
    rows = {tuple(line.split(" | ")[:3]): line for line in lines[first:end]}
    rows[tuple(row.split(" | ")[:3])] = row
    lines[first:end] = [rows[key] for key in sorted(rows)]
    PAGE.write_text("\n".join(lines) + "\n", "utf-8")
    return failed
