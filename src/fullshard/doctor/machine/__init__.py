# SPDX-License-Identifier: Apache-2.0
"""Takes a snapshot of one machine and lists the faults that training would run into."""
