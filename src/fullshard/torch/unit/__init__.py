# SPDX-License-Identifier: Apache-2.0
"""One unit of parameters: resting, full, reduced."""
