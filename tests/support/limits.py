# SPDX-License-Identifier: Apache-2.0
"""How long tests wait before they give up, in seconds. All of it is for failures.

Each limit is many times what a quiet machine needs, so that it holds on one with five times the
load, and each is below the next, so that the innermost reports what was wrong. pytest's own, in
`pyproject.toml`, is the last.
"""

PEERS_S = 60.0  # a rank whose peer has failed fails too, instead of waiting
PROCESS_S = 300.0  # a process that a test has started ends
ANSWER_S = 420.0  # ranks that are kept answer; a script may wait for its peers several times
