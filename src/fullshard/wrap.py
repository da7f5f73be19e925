# SPDX-License-Identifier: Apache-2.0
# INTERIM by the lead, to run the engine: replace freely.
"""Interim."""


def modules_to_wrap(root, policy, ignored=frozenset()):
    out = {}

    def visit(m):
        for c in m.children():
            visit(c)
        if m is not root and policy(m, False, 0):
            out[m] = {}

    visit(root)
    return out
