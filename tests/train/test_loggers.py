# SPDX-License-Identifier: Apache-2.0
"""Values of a run reach other programs by their own libraries, which read them back here."""

import sys
from types import SimpleNamespace

import pytest

from fullshard.core.errors import ConfigurationError
from fullshard.train.config import resolve
from fullshard.train.fits import check_run
from fullshard.train.loggers import check_loggers, logging_to
from fullshard.train.metrics import Reporter

FIRST = SimpleNamespace(is_first=True)


def tell_two_steps(folder, *names):
    listed = ", ".join(f'"{name}"' for name in names)
    config = resolve(overrides=[f"log.to=[{listed}]"])
    with Reporter(FIRST, folder, 2) as reporter, logging_to(config, folder) as reporter.listeners:
        for step, loss in ((1, 2.5), (2, 1.25)):
            reporter.step(step, {"loss": loss})
        reporter.record("validation", 2, {"loss": 3.0})


def test_tensorboard_reads_them(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tell_two_steps(tmp_path, "tensorboard")
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    told = {
        name: [(each.step, each.tensor_proto.float_val[0]) for each in events.Tensors(name)]
        for name in events.Tags()["tensors"]
    }
    assert told == {"train/loss": [(1, 2.5), (2, 1.25)], "validation/loss": [(2, 3.0)]}


def test_mlflow_reads_them(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tell_two_steps(tmp_path, "mlflow")
    tell_two_steps(tmp_path, "mlflow")  # a run that goes on is a second one of its experiment
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("fullshard").experiment_id
    first, _ = client.search_runs([experiment])
    assert first.info.status == "FINISHED"
    assert first.data.params["optim.lr"] == str(resolve().optim.lr)
    told = client.get_metric_history(first.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in told] == [(1, 2.5), (2, 1.25)]


def test_wandb_keeps_them_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    tell_two_steps(tmp_path, "wandb")
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"train/loss" in run.read_bytes()


def test_a_callback_is_told_of_everything(tmp_path, monkeypatch):
    told = []
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(tell=lambda *each: told.append(each)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    tell_two_steps(tmp_path, "mine:tell")
    assert told == [
        ("train", 1, {"loss": 2.5}),
        ("train", 2, {"loss": 1.25}),
        ("validation", 2, {"loss": 3.0}),
    ]


def test_a_callback_that_is_none_is_refused(tmp_path):
    config = resolve(overrides=['log.to=["json:nothing"]'])
    with pytest.raises(ConfigurationError, match="'json' has no function 'nothing'"):
        logging_to(config, tmp_path).__enter__()


def test_only_the_process_that_writes_logs(tmp_path):
    config = resolve(overrides=['log.to=["tensorboard"]'])
    with logging_to(config, None) as told:
        assert told == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorbord", "log.to takes tensorboard, wandb, mlflow and module:function"),
        ("no_such_module:tell", "needs the package 'no_such_module'$"),
        (":tell", "needs the package ''"),
        ("..:tell", "needs the package '..'"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_starts(name, message):
    with pytest.raises(ConfigurationError, match=message):
        check_loggers([name])
    with pytest.raises(ConfigurationError, match=message):
        check_run(resolve(overrides=[f'log.to=["{name}"]']), 1, 1, 2**40)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'fullshard\[loggers\]'"):
        check_loggers(["wandb"])
