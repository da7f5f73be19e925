# SPDX-License-Identifier: Apache-2.0
"""Questions of the form: what if this setting were another?"""

from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.core.errors import ConfigurationError
from fullshard.plan.choose.settings import KEYS, Setup, choose_one, with_setting
from fullshard.plan.cluster.cluster import Constants
from fullshard.plan.model.model import Model
from fullshard.plan.predict import Prediction, predict

__all__ = ["Answer", "parse_question", "what_if"]


@dataclass(frozen=True)
class Answer:
    """The prediction with a setting at ``value``, or the ``reason`` why that cannot be."""

    value: str
    prediction: Prediction | None
    reason: str = ""


def parse_question(text: str) -> tuple[str, tuple[str, ...]]:
    """Read ``key=a,b,c``; raises `ConfigurationError` for another form or an unknown key."""
    key, equals, values = text.partition("=")
    found = tuple(value.strip() for value in values.split(",") if value.strip())
    if not equals or not found:
        raise ConfigurationError(f"expected key=a,b,c, got {text!r}")
    return choose_one("setting", key.strip(), KEYS), found


def what_if(
    model: Model,
    setup: Setup,
    key: str,
    values: Sequence[str],
    *,
    constants: Constants | None = None,
) -> tuple[Answer, ...]:
    """Predict ``setup`` with ``key`` at each of ``values``, everything else as it is."""
    return tuple(_answer(model, setup, key, value, constants) for value in values)


def _answer(
    model: Model, setup: Setup, key: str, value: str, constants: Constants | None
) -> Answer:
    try:
        changed = with_setting(setup, key, value)
        return Answer(value, predict(model, changed.run, changed.cluster, constants))
    except ConfigurationError as error:
        return Answer(value, None, str(error))
