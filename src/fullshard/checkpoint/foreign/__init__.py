# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of others: seals beside them, and ways in and out."""

from fullshard.checkpoint.foreign.safetensors_files import export_safetensors, import_safetensors
from fullshard.checkpoint.foreign.seals import SealReport, check_seal, is_sealed, seal

__all__ = [
    "SealReport", "check_seal", "export_safetensors", "import_safetensors", "is_sealed", "seal",
]  # fmt: skip
