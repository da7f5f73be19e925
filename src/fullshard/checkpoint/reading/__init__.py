# SPDX-License-Identifier: Apache-2.0
"""The way of chunks from files into memory: which thread reads what, and what is copied where."""
