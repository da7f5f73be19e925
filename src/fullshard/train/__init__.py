# SPDX-License-Identifier: Apache-2.0
"""`fullshard train`: one command that trains a real model, fully sharded, to see it work.

Import what you need from the submodules; this package loads none, so that ``--help`` is quick.
"""
