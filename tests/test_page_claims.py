# SPDX-License-Identifier: Apache-2.0
"""What pages say of names, files and layers, compared with what there is."""

import importlib
import re
from pathlib import Path

import pytest
from test_architecture import LAYERS, ROOMS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "fullshard"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# It tells what was, so names in it may be gone.
TODAY = [page for page in PAGES if page.name != "log.md"]


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def exists(dotted):
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("page", TODAY, ids=name_of)
def test_dotted_names_and_imports_exist(page):
    text = page.read_text()
    names = set(re.findall(r"`(fullshard(?:\.[A-Za-z_]\w*)+)", text))
    for module, imported in re.findall(r"^\+?from (fullshard[\w.]*) import ([\w, ]+)$", text, re.M):
        names |= {f"{module}.{each.strip()}" for each in imported.split(",")}
    names -= {"fullshard.drop_in", "fullshard.drop_in.switch_off"}  # to import it changes torch
    assert not [name for name in sorted(names) if not exists(name)]


def test_no_page_has_the_marks_of_a_merge():
    marked = re.compile(r"^(?:<{7} |>{7} |={7}$)", re.M)
    assert [
        page.name for page in (*PAGES, ROOT / "CHANGELOG.md") if marked.search(page.read_text())
    ] == []


@pytest.mark.parametrize("page", TODAY, ids=name_of)
def test_files_exist(page):
    text = page.read_text()
    files = set(re.findall(r"`((?:[\w.]+/)*\w+\.(?:py|md|sbatch|yaml|json))`", text))
    own = ("src", "tests", "benchmarks", "examples", "docs")
    there = [
        "/" + path.relative_to(ROOT).as_posix() for top in own for path in (ROOT / top).rglob("*")
    ]
    there += [f"/{path.name}" for path in ROOT.iterdir()]
    users = {"train.py", "script.py", "example.py", "offload.py", "manifest.json", "config.json"}
    assert not [
        file
        for file in sorted(files - users)
        if not any(path.endswith(f"/{file}") for path in there)
    ]


def rows_below(page, head):
    lines = (ROOT / page).read_text().split(head, 1)[1].splitlines()[2:]
    for line in lines:
        if not line.startswith("| "):
            return
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_what_one_page_denies_the_other_denies_too():
    denied = {row[0] for row in rows_below("docs/names.md", "| thing |") if row[-1] == "-"}
    (listed,) = re.findall(r"Not there: (.*)\.$", (ROOT / "docs/migration.md").read_text(), re.M)
    absent = {re.sub(r" \(.*", "", each) for each in listed.split(", ")}
    assert denied == absent - {"1-bit optimizers"}  # which have no row of their own


def test_the_table_of_packages_is_that_of_the_test():
    rows = {
        re.fullmatch(r"`(\w+)`", row[0])[1]: set(re.findall(r"`(\w+)`", row[1]))
        for row in rows_below("docs/design.md", "| package | may import |")
    }
    there = {path.name.removesuffix(".py") for path in SOURCE.iterdir()} & LAYERS.keys()
    outside = {"__init__", "__main__"}
    assert rows.keys() == there - outside
    for name, may_import in rows.items():
        assert may_import == set(LAYERS[name].layers) & there, name


def test_the_table_of_the_torch_engines_folders_is_that_of_the_test():
    order = [row[0].strip("`") for row in rows_below("docs/design.md", "| folder | content |")]
    assert set(order) == ROOMS["torch"].keys()
    for place, folder in enumerate(order):
        assert ROOMS["torch"][folder] <= set(order[:place]), folder
