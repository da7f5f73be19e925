# SPDX-License-Identifier: Apache-2.0
"""Watch the other ranks: who failed, who is elsewhere, who has been forked, and what to do."""
