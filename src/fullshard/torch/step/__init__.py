# SPDX-License-Identifier: Apache-2.0
"""The order of events in one training step: hooks hear them, a schedule answers with ops."""
