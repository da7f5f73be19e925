# SPDX-License-Identifier: Apache-2.0
"""Rules that put parameters into units.

However units were chosen (by class, by size, by hand), what is left of the choice is a set of
module paths. A parameter belongs to the deepest unit that contains *all* the places where it
appears: so a tied weight has one owner, the nearest common ancestor of its users, and is gathered
whenever one of them runs.
"""

from collections.abc import Iterable

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec

__all__ = ["group_parameters"]


def group_parameters(
    params: Iterable[ParamSpec], unit_paths: Iterable[str]
) -> dict[str, tuple[ParamSpec, ...]]:
    """The parameters of each unit, by the path of the unit's module ("" is the root).

    Units without parameters of their own are there with an empty tuple. Raises
    `ConfigurationError` if no unit contains a parameter.
    """
    groups: dict[str, list[ParamSpec]] = {path: [] for path in unit_paths}
    for param in params:
        places = (param.name, *param.aliases)
        owners = [path for path in groups if all(_contains(path, place) for place in places)]
        if not owners:
            raise ConfigurationError(
                f"parameter {param.name!r} lies in none of the units {sorted(groups)}; "
                "make their common root a unit"
            )
        groups[max(owners, key=len)].append(param)
    return {path: tuple(members) for path, members in groups.items()}


def _contains(path: str, name: str) -> bool:
    return path == "" or name.startswith(path + ".")
