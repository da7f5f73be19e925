# SPDX-License-Identifier: Apache-2.0
"""Guards against what others do to parameters: put others in their place, write to them, step."""
