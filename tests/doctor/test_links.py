# SPDX-License-Identifier: Apache-2.0
"""What is measured between ranks, and what is said of it."""

import dataclasses
import json

import pytest
import torch

from fullshard.core.errors import ConfigurationError
from fullshard.doctor import check_hosts, parse_size
from fullshard.doctor.findings import Finding
from fullshard.doctor.links import (
    Links,
    LinkTime,
    bus_bytes_per_s,
    check_links,
    measure_links,
    unit_bytes_for_most_bandwidth,
)
from fullshard.doctor.output import Report, print_report, to_json
from fullshard.testing import LocalWorld
from fullshard.torch.comm.texts import share_bytes

MIB = 2**20


def links_of(*times, ranks=4, work_s=None, from_previous_s=None):
    even = (0.001,) * ranks
    measured = tuple(LinkTime(*each) for each in times)
    return Links(ranks, "gloo", measured, work_s or even, from_previous_s or even)


# A latency of 1 ms and 1 GB/s: 4 MiB take 4.1 ms, a quarter of it latency.
TIMES = [(size, 1e-3 + size / 1e9, 1e-3 + size / 1e9) for size in (MIB, 4 * MIB, 16 * MIB)]


def test_every_rank_learns_what_all_have_measured():
    def body(comm):
        return measure_links(comm, torch.device("cpu"), "threads", [4096, 100])

    of_ranks = LocalWorld(3).run(body)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    links = of_ranks[0]
    # 100 bytes are 25 elements: rounded up to 9 for each of 3 ranks.
    assert [each.full_bytes for each in links.times] == [108, 4104]
    assert all(each.gather_s > 0 and each.reduce_s > 0 for each in links.times)
    assert len(links.work_s) == len(links.from_previous_s) == links.ranks == 3
    assert Links.of_json(json.dumps(dataclasses.asdict(links))) == links


def test_reports_of_different_lengths_are_exchanged():
    texts = ["", "host ß", '{"a": 1}' * 100]
    got = LocalWorld(3).run(lambda comm: share_bytes(comm, texts[comm.rank].encode()))
    assert got == [[text.encode() for text in texts]] * 3


def test_bandwidth_counts_what_a_rank_sends():
    assert bus_bytes_per_s(8000, 0.5, 4) == 12_000


def test_the_advice_is_the_least_size_near_the_best_of_both():
    links = links_of(*TIMES)
    assert unit_bytes_for_most_bandwidth(links) == 4 * MIB
    (finding,) = check_links(links)
    assert finding.severity == "note"
    assert "units of 4 MiB and more" in finding.what
    assert f"min_num_params={2 * MIB}" in finding.fix  # bfloat16
    # Reduces that are slow to start move it.
    slow = [(size, gather, 5e-3 + size / 1e9) for size, gather, _ in TIMES]
    (finding,) = check_links(links_of(*slow))
    assert "units of 16 MiB" in finding.what
    assert "more may be better" in finding.what


def test_best_sizes_that_do_not_agree():
    links = links_of((MIB, 1e-3, 9e-3), (4 * MIB, 9e-3, 9e-3))
    (finding,) = check_links(links)
    assert "units of 4 MiB" in finding.what


def test_a_slow_rank_and_a_slow_link():
    found = check_links(links_of(TIMES[0], work_s=(0.01, 0.01, 0.02, 0.011)))
    assert [each.what for each in found] == ["rank 2 computes 2.0 times slower than the others"]
    found = check_links(links_of(TIMES[0], from_previous_s=(0.01, 0.01, 0.01, 0.05)))
    assert len(found) == 1
    assert "from rank 2 to rank 3 data takes 5.0 times" in found[0].what
    pair = links_of(TIMES[0], ranks=2, from_previous_s=(0.01, 0.05))
    assert check_links(pair) == []  # two directions of one link say nothing of a third


def test_hosts_that_differ():
    def host(name, torch_version, *findings):
        return to_json(Report({name: {"torch": torch_version, "python": "3.11"}}, list(findings)))

    nothing = to_json(Report({}, []))
    little = Finding("warning", "disk", "full", "free some")
    facts, findings = check_hosts([host("a", "2.13.0"), nothing, host("b", "2.13.0", little)])
    assert list(facts) == ["a", "b"]
    assert findings == [dataclasses.replace(little, where="b")]
    _, findings = check_hosts([host("a", "2.13.0"), nothing, host("b", "2.12.0")])
    assert [each.severity for each in findings] == ["severe"]
    assert findings[0].what == "hosts have different versions of torch: a 2.13.0, b 2.12.0"


def test_the_report_for_people(capsys):
    findings = [
        Finding("note", "small", "it is small", "leave it", "a.py:3"),
        Finding("severe", "large", "it fails", "make it small"),
    ]
    report = Report({"host": {"torch": "2.13.0"}}, findings, links_of(*TIMES))
    print_report(report)
    shown = capsys.readouterr().out
    assert "torch  2.13.0" in shown
    assert "severe: large\n    it fails\n    -> make it small\n" in shown
    assert shown.index("severe: large") < shown.index("note: a.py:3: small")
    assert "found: 1 severe, 0 warning, 1 note" in shown
    row = next(line for line in shown.splitlines() if "4 MiB" in line)
    assert "5.19" in row  # ms
    assert "0.61" in row  # GB/s: 3/4 of 4 MiB in 5.19 ms


def test_the_report_for_machines():
    read = json.loads(to_json(Report({}, [Finding("severe", "a", "b", "c")], links_of(*TIMES))))
    assert read["severe"] is True
    assert read["findings"] == [
        {"severity": "severe", "what": "a", "means": "b", "fix": "c", "where": ""}
    ]
    first = read["links"]["times"][0]
    assert first["gather_bus_bytes_per_s"] == pytest.approx(MIB * 3 / 4 / first["gather_s"])
    assert json.loads(to_json(Report({}, [])))["severe"] is False


def test_sizes():
    assert [parse_size(text) for text in ("4", "64KiB", "2m", "1 GB")] == [4, 65536, 2 * MIB, 2**30]
    for text in ("0", "3", "MiB", "1TiB", "-4k", ""):
        with pytest.raises(ConfigurationError, match="--size must be at least 4 bytes"):
            parse_size(text)
