# SPDX-License-Identifier: Apache-2.0
"""The decision who writes what: made together before a save, and kept for the next.

[Note: Who writes what]
Each rank proposes what it holds. What several ranks hold (replicas, buffers) is written by one of
them. The decision is a pure function of all proposals and is kept until a proposal changes, so a
later save of the same layout exchanges a few bytes before it starts.

[Note: Rules, not lists]
Thousands of ranks that each list thousands of tensors are too many for one rank. So a rank says by
which rule its tensors are cut, which is the same text on all ranks but for the numbers of its
parts, and rank 0 asks one rank for each text that is different. What follows no rule is listed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy
from numpy.typing import NDArray

from fullshard.checkpoint.format.envelope import checksum_of
from fullshard.checkpoint.format.stored import StoredBox, StoredTensor
from fullshard.checkpoint.format.tiling import (
    Run,
    Slicing,
    Tiling,
    boxes_of_part,
    part_count,
    part_numels,
    runs_of,
)
from fullshard.checkpoint.ranks import CheckpointRanks, agree, from_first
from fullshard.checkpoint.shards import Piece
from fullshard.core.boxes import Box
from fullshard.core.errors import CheckpointError
from fullshard.core.safetensors_format import DTYPE_BYTES

SMALL_BYTES = 2**20  # what several ranks hold and is smaller is written by the first of them
Numbers = NDArray[numpy.int64]


@dataclass(frozen=True)
class WritePlan:
    """This rank's pieces to write, and on rank 0 all tensors, with ranks in place of files."""

    pieces: Sequence[Piece]
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Proposal:
    """A rank's pieces in words.

    ``ruled`` are [name, shape, dtype, slicings, slot], of which this rank has the part
    ``indices[slot]``; ``listed`` are [name, shape, dtype, boxes, bytes]. ``places`` are those of
    the pieces in either list, behind the slot or None.
    """

    ruled: list[list[Any]]
    indices: list[int]
    listed: list[list[Any]]
    places: list[tuple[int | None, int]]

    def digest(self) -> str:
        return checksum_of(json.dumps([self.ruled, self.indices, self.listed]).encode())


class Plans:
    """Decisions about who writes what, kept from save to save."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[bool], Mapping[str, StoredTensor]]] = {}
        # Of the last save: its pieces but for their bytes, their rules, and what was proposed.
        self._keys: list[tuple[Any, ...]] = []
        self._rules: list[list[Any] | None] = []
        self._proposal = _Proposal([], [], [], [])
        self._digest: str = self._proposal.digest()

    def plan(
        self,
        pieces: Sequence[Piece],
        ranks: CheckpointRanks,
        what: str = "the step cannot be saved",
        failure: Exception | None = None,
    ) -> WritePlan:
        """Choose the ``pieces`` that this rank writes. Collective; raises as `agree` does."""
        pieces = [p for p in pieces if p.tile is not None or p.size_bytes or 0 in p.shape]
        keys = [(p.name, p.dtype, p.shape, p.boxes, p.tile) for p in pieces]
        if keys != self._keys:
            self._rules = [_rule(piece) for piece in pieces]
            self._proposal = _proposed(pieces, self._rules)
            self._digest, self._keys = self._proposal.digest(), keys
        joint = agree(ranks, what, failure, self._digest)
        if joint not in self._known:
            irregular: set[str] = set()
            proposal = self._proposal
            while (decided := _decide(proposal, ranks, what, irregular)) is None:
                told = [
                    None if piece.name in irregular else rule
                    for piece, rule in zip(pieces, self._rules, strict=True)
                ]
                proposal = _proposed(pieces, told)
            self._known[joint] = decided
        chosen, tensors = self._known[joint]
        mine = [p for p, taken in zip(pieces, chosen, strict=True) if taken and p.size_bytes]
        # Wider elements first: then each tensor of the file is aligned.
        return WritePlan(sorted(mine, key=lambda piece: -piece.item_bytes), tensors)


def _rule(piece: Piece) -> list[Any] | None:
    """The slicings and the index of a piece's rule, if it says one and that is right."""
    tile = piece.tile
    if tile is None or 0 in piece.shape or not 0 <= tile.index < part_count(tile.slicings):
        return None
    if boxes_of_part(piece.shape, tile.slicings, tile.index) != piece.boxes:
        return None
    return [[astuple(slicing) for slicing in tile.slicings], tile.index]


def _proposed(pieces: Sequence[Piece], rules: Sequence[list[Any] | None]) -> _Proposal:
    proposal = _Proposal([], [], [], [])
    slots: dict[tuple[Any, ...], int] = {}
    for piece, rule in zip(pieces, rules, strict=True):
        if rule is None:
            boxes = [[box.offsets, box.sizes] for box in piece.boxes]
            told = [piece.name, piece.shape, piece.dtype, boxes, piece.size_bytes]
            proposal.places.append((None, len(proposal.listed)))
            proposal.listed.append(told)
            continue
        slicings, index = rule
        slot = slots.setdefault((*(each[3] for each in slicings), -1, index), len(slots))
        if slot == len(proposal.indices):
            proposal.indices.append(index)
        proposal.places.append((slot, len(proposal.ruled)))
        proposal.ruled.append([piece.name, piece.shape, piece.dtype, slicings, slot])
    return proposal


def _decide(
    mine: _Proposal, ranks: CheckpointRanks, what: str, irregular: set[str]
) -> tuple[list[bool], Mapping[str, StoredTensor]] | None:
    """For each piece whether this rank writes it, and on rank 0 all tensors. Collective.

    None if some tensors have other rules on other ranks: then they are ``irregular``, and are to be
    listed. Raises `CheckpointError` on all ranks if they disagree about a tensor.
    """
    text = json.dumps(mine.ruled).encode()
    told = [checksum_of(text), mine.indices, mine.listed]
    parts = [json.loads(each) for each in ranks.gather(json.dumps(told).encode())]
    first_with = {digest: rank for rank, (digest, _, _) in reversed([*enumerate(parts)])}
    asked = json.loads(ranks.broadcast(json.dumps([*first_with.values()]).encode()))
    texts = ranks.gather(text if ranks.rank in asked else b"")
    tensors: dict[str, StoredTensor] = {}

    def decision() -> dict[str, Any]:
        groups = [
            _Alike(
                json.loads(texts[first]),
                numpy.array([r for r, part in enumerate(parts) if part[0] == digest]),
                numpy.array([part[1] for part in parts if part[0] == digest], numpy.int64),
            )
            for digest, first in first_with.items()
        ]
        answer, made = _Decision(groups, [part[2] for part in parts]).made()
        tensors.update(made)
        return answer

    answer = from_first(ranks, what, decision)
    if answer["irregular"]:
        irregular.update(answer["irregular"])
        return None
    left_out = set(answer["left_out"].get(str(ranks.rank), ()))
    writers = {name: Tiling((), tuple(runs)) for name, runs in answer["writers"].items()}
    chosen, seen = [], set()
    for slot, place in mine.places:
        if slot is None:
            chosen.append(place not in left_out)
            continue
        name, index = mine.ruled[place][0], mine.indices[slot]
        is_mine = name not in writers or writers[name].file_of(index) == ranks.rank
        chosen.append(is_mine and (name, index) not in seen)
        seen.add((name, index))
    return chosen, tensors


@dataclass(frozen=True)
class _Alike:
    """Ranks that say the same but for the numbers of their parts: ``indices`` by rank and slot."""

    ruled: list[list[Any]]
    ranks: Numbers
    indices: Numbers


class _Decision:
    """Rank 0's: which rank writes which part of each tensor."""

    def __init__(self, groups: Sequence[_Alike], listed: Sequence[Sequence[Any]]):
        self._groups, self._listed = groups, listed
        self._load = numpy.zeros(len(listed), numpy.int64)  # bytes by rank
        self._told: dict[str, tuple[Any, ...]] = {}  # shape, dtype and slicings by name
        self._held: dict[str, list[tuple[int, int]]] = {}  # by name: groups and slots
        self._holders: dict[Any, tuple[Numbers, Numbers, Numbers, tuple[Run, ...]]] = {}

    def made(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        """The answer to all ranks, and all tensors. Raises `CheckpointError`."""
        irregular = self._collect()
        if irregular:
            return {"irregular": sorted(irregular)}, {}
        tensors, writers = {}, {}
        shared = []
        for name in self._held:
            parts, ranks, starts, runs = self._holding(name)
            if len(parts) == len(starts):
                tensors[name] = self._tensor(name, runs)
                self._load[ranks] += self._sizes(name)[parts]
            else:
                tensors[name] = self._tensor(name, ())
                shared.append(name)
        for name in sorted(shared, key=lambda each: -tensors[each].size_bytes):
            writers[name] = runs_of(self._choose(name))
            tensors[name] = self._tensor(name, writers[name])
        left_out = assign(
            [[[*map(json.dumps, each[:4]), each[4]] for each in part] for part in self._listed],
            self._load.tolist(),
        )
        tensors |= self._listed_tensors(left_out)
        answer = {
            "irregular": [],
            "writers": writers,
            "left_out": {rank: left for rank, left in enumerate(left_out) if left},
        }
        return answer, dict(sorted(tensors.items(), key=lambda each: -each[1].item_bytes))

    def _collect(self) -> set[str]:
        """Look who holds what; the tensors that have no single rule."""
        irregular = {each[0] for part in self._listed for each in part}
        for number, group in enumerate(self._groups):
            for name, shape, dtype, slicings, slot in group.ruled:
                told = (tuple(shape), dtype, tuple(Slicing(*each) for each in slicings))
                if self._told.setdefault(name, told) != told:
                    irregular.add(name)
                self._held.setdefault(name, []).append((number, slot))
        irregular &= self._held.keys()
        for name in self._held.keys() - irregular:
            parts = part_count(self._told[name][2])
            there, _, starts, _ = self._holding(name)
            if len(starts) != parts or there[-1] != parts - 1:
                irregular.add(name)
        return irregular

    def _holding(self, name: str) -> tuple[Numbers, Numbers, Numbers, tuple[Run, ...]]:
        """All parts and their ranks, sorted; where a part's ranks begin; the ranks as runs."""
        key = tuple(self._held[name])
        if key not in self._holders:
            parts = numpy.concatenate([self._groups[g].indices[:, slot] for g, slot in key])
            ranks = numpy.concatenate([self._groups[g].ranks for g, _ in key])
            order = numpy.lexsort((ranks, parts))
            parts, ranks = parts[order], ranks[order]
            starts = numpy.flatnonzero(numpy.diff(parts, prepend=-1))
            self._holders[key] = parts, ranks, starts, runs_of(ranks)
        return self._holders[key]

    def _sizes(self, name: str) -> Numbers:
        shape, dtype, slicings = self._told[name]
        return part_numels(shape, slicings) * DTYPE_BYTES[dtype]

    def _choose(self, name: str) -> Numbers:
        """Choose a rank for each part: the one with least to write; for small ones the first."""
        parts, ranks, starts, _ = self._holding(name)
        sizes = self._sizes(name)
        load = numpy.where(sizes[parts] < SMALL_BYTES, 0, self._load[ranks])
        least = numpy.minimum.reduceat(load, starts)
        best = numpy.flatnonzero(load == least[parts])
        chosen: Numbers = ranks[best[numpy.flatnonzero(numpy.diff(parts[best], prepend=-1))]]
        numpy.add.at(self._load, chosen, sizes)
        return chosen

    def _tensor(self, name: str, runs: tuple[Run, ...]) -> StoredTensor:
        shape, dtype, slicings = self._told[name]
        return StoredTensor(shape, dtype, (), Tiling(slicings, runs))

    def _listed_tensors(self, left_out: Sequence[Sequence[int]]) -> dict[str, StoredTensor]:
        shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        boxes: dict[str, list[StoredBox]] = {}
        for rank, (part, left) in enumerate(zip(self._listed, map(set, left_out), strict=True)):
            for place, (name, shape, dtype, told, _) in enumerate(part):
                known = shapes.setdefault(name, (tuple(shape), dtype))
                if known != (tuple(shape), dtype):
                    raise CheckpointError(
                        f"{name!r} is {known[1]} of shape {known[0]} on one rank and {dtype} of "
                        f"shape {tuple(shape)} on another",
                        tensor=name,
                    )
                if place not in left:
                    boxes.setdefault(name, []).extend(
                        StoredBox(Box(tuple(offsets), tuple(sizes)), rank)
                        for offsets, sizes in told
                    )
        return {name: StoredTensor(*shapes[name], tuple(boxes[name])) for name in shapes}


def assign(
    proposals: Sequence[Sequence[Sequence[Any]]], load: Sequence[int] = ()
) -> list[list[int]]:
    """Choose the proposals that each rank leaves to another rank, by index. Pure.

    A proposal is what identifies a piece, and as its last entry the bytes. A piece that several
    ranks hold goes to the one with the least to write so far (``load``), larger ones first; a small
    one to the first rank that holds it, so that what should be equal and is not (running
    statistics) comes from one rank.
    """
    holders: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for rank, proposal in enumerate(proposals):
        for index, piece in enumerate(proposal):
            holders.setdefault(tuple(piece), []).append((rank, index))
    bytes_of = [*load] or [0] * len(proposals)
    for piece, held in holders.items():
        if len(held) == 1:
            bytes_of[held[0][0]] += piece[-1]
    left_out: list[list[int]] = [[] for _ in proposals]
    shared = sorted((each for each in holders if len(holders[each]) > 1), key=lambda p: -p[-1])
    for piece in shared:
        held, small = holders[piece], piece[-1] < SMALL_BYTES
        writer = held[0][0] if small else min(held, key=lambda h: (bytes_of[h[0]], h[0]))[0]
        bytes_of[writer] += piece[-1]
        taken = False
        for rank, index in held:
            if rank != writer or taken:
                left_out[rank].append(index)
            taken = taken or rank == writer
    return left_out
