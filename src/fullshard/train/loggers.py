# SPDX-License-Identifier: Apache-2.0
"""The values of a run for other programs: TensorBoard, Weights & Biases, MLflow, or a callback.

Each is written by its own library, into the run's folder, by the process that writes metrics.jsonl.
"""

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigurationError
from fullshard.train.config import Config

Tell = Callable[[str, int, Mapping[str, float]], None]
"""Takes a kind of values ("train", "validation"), the number of steps done, values by name."""


def check_loggers(names: Sequence[str]) -> None:
    """Raise `ConfigurationError` for a name of ``log.to`` that is none, or lacks its library."""
    for name in names:
        module, _, function = name.partition(":")
        if not function and module not in _LOGGERS:
            raise ConfigurationError(
                f"log.to takes {', '.join(_LOGGERS)} and module:function of yours, got {name!r}"
            )
        try:
            there = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            there = False
        if not there:
            more = "" if function else ": pip install 'fullshard[loggers]'"
            raise ConfigurationError(f"log.to={name} needs the package {module!r}{more}")


@contextmanager
def logging_to(config: Config, folder: Path | None) -> Iterator[Sequence[Tell]]:
    """Open what ``log.to`` names and close it at the end; nothing where there is no folder."""
    with ExitStack() as stack:
        told: list[Tell] = []
        for name in config.log.to if folder is not None else ():
            module, _, function = name.partition(":")
            if function:
                tell: Tell | None = getattr(importlib.import_module(module), function, None)
                if not callable(tell):
                    raise ConfigurationError(
                        f"log.to: module {module!r} has no function {function!r}"
                    )
                told.append(tell)
            else:
                assert folder is not None
                told.append(stack.enter_context(_LOGGERS[name](folder, config)))
        yield told


@contextmanager
def _tensorboard(folder: Path, config: Config) -> Iterator[Tell]:
    writer = importlib.import_module("tensorboard.summary").Writer(str(folder / "tensorboard"))

    def tell(kind: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(f"{kind}/{name}", value, step)

    try:
        yield tell
    finally:
        writer.close()


@contextmanager
def _wandb(folder: Path, config: Config) -> Iterator[Tell]:
    wandb = importlib.import_module("wandb")
    run = wandb.init(
        mode=os.environ.get("WANDB_MODE", "offline"),
        dir=str(folder),
        project=os.environ.get("WANDB_PROJECT", "fullshard"),
        name=folder.name,
        config=dataclasses.asdict(config),
        settings=wandb.Settings(silent=True),
    )

    def tell(kind: str, step: int, values: Mapping[str, float]) -> None:
        run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    ended = 1
    try:
        yield tell
        ended = 0
    finally:
        run.finish(exit_code=ended)


@contextmanager
def _mlflow(folder: Path, config: Config) -> Iterator[Tell]:
    # Without a server of the user's its values are files in the folder, which it wants to be asked.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    files = (folder / "mlruns").resolve().as_uri()
    uri = os.environ.get("MLFLOW_TRACKING_URI", files)
    client: Any = importlib.import_module("mlflow").MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("fullshard")
    number = experiment.experiment_id if experiment else client.create_experiment("fullshard")
    run = client.create_run(number, run_name=folder.name).info.run_id
    for section, options in dataclasses.asdict(config).items():
        for key, value in options.items():
            client.log_param(run, f"{section}.{key}", value)

    def tell(kind: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            client.log_metric(run, f"{kind}/{name}", value, step=step)

    status = "FAILED"
    try:
        yield tell
        status = "FINISHED"
    finally:
        client.set_terminated(run, status)


_LOGGERS: Mapping[str, Callable[[Path, Config], AbstractContextManager[Tell]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
