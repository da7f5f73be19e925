# SPDX-License-Identifier: Apache-2.0


def pytest_configure(config):
    """Load what all tests have, but in the process that only hands them to others."""
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_out:
        config.pluginmanager.import_plugin("support.suite")
