# SPDX-License-Identifier: Apache-2.0
"""fullshard's engine on torch.distributed."""
