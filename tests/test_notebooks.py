# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from their first cell to their last, and are stored without outputs."""

from pathlib import Path

import pytest
from support.limits import PROCESS_S

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Jupyter's own packages
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_is_stored_without_outputs(path):
    book = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)
    nbclient.NotebookClient(book, timeout=PROCESS_S, kernel_name="python3").execute()
    printed = [output for cell in book.cells for output in cell.get("outputs", ())]
    assert printed
    assert all(output.get("name") == "stdout" for output in printed)
