# SPDX-License-Identifier: Apache-2.0
"""Checkpoints without torch or jax: look at them, verify, read, compare, rewrite and convert them.

Saving and loading models is in `fullshard.torch` and `fullshard.jax`; both write the format that
docs/checkpoint-format.md specifies, and read each other's.
"""

from fullshard.checkpoint.background import Saving
from fullshard.checkpoint.files import Files
from fullshard.checkpoint.foreign import (
    SealReport,
    check_seal,
    export_safetensors,
    import_safetensors,
    is_sealed,
    seal,
)
from fullshard.checkpoint.format.stored import Manifest
from fullshard.checkpoint.loading import Checkpoint, open_checkpoint
from fullshard.checkpoint.ranks import CheckpointRanks, SoloRanks
from fullshard.checkpoint.reading.comparing import Difference, compare
from fullshard.checkpoint.resharding import reshard_checkpoint
from fullshard.checkpoint.runs.commit import StepFolder, steps_in
from fullshard.checkpoint.runs.folder import Background, RunFolder
from fullshard.checkpoint.runs.retention import Keep
from fullshard.checkpoint.session import Loaded
from fullshard.core.errors import CheckpointError

__all__ = [
    "Background", "Checkpoint", "CheckpointError", "CheckpointRanks", "Difference", "Files", "Keep",
    "Loaded", "Manifest", "RunFolder", "Saving", "SealReport", "SoloRanks", "StepFolder",
    "check_seal", "compare", "export_safetensors", "import_safetensors", "is_sealed",
    "open_checkpoint", "reshard_checkpoint", "seal", "steps_in",
]  # fmt: skip
