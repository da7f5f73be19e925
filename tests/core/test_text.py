# SPDX-License-Identifier: Apache-2.0
import errno
import os

import pytest

from fullshard.core.text import bytes_text, in_columns, whole_file, write_whole


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (-2048, "-2.00 KiB"),
        (3 * 2**20, "3.00 MiB"),
        (5 * 2**40, "5.00 TiB"),
        (2**50, "1024.00 TiB"),
    ],
)
def test_bytes_in_words(count, text):
    assert bytes_text(count) == text


def test_columns():
    rows = [("name", "bytes"), ("a", 1234567), ("longer", "-")]
    assert in_columns(rows, right=(1,)).splitlines() == [
        "name        bytes",
        "------  ---------",
        "a       1,234,567",
        "longer          -",
    ]


def test_a_file_that_cannot_be_written_whole_leaves_what_was_there(tmp_path):
    path = tmp_path / "page.html"
    write_whole(path, "before")

    def fill():
        with whole_file(path) as staged:
            staged.write_text("half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device.*page\.html"):
        fill()
    assert (path.read_text(), os.listdir(tmp_path)) == ("before", ["page.html"])


def test_links_stay_and_devices_are_written_to(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    write_whole(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "target").read_text() == "text"
    reader, writer = os.pipe()
    write_whole(f"/dev/fd/{writer}", "to a pipe")
    assert os.read(reader, 99) == b"to a pipe"
    os.close(reader)
    os.close(writer)
