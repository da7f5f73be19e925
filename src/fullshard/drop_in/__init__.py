# SPDX-License-Identifier: Apache-2.0
"""Importing this package makes ``torch.distributed.fsdp`` fullshard's, in this process.

Scripts and libraries that take names from ``torch.distributed.fsdp`` afterwards get ours; torch's
own modules keep theirs. It must come before the first such import, so it is the first line of a
script, or the script is started by ``fullshard run`` or ``python -m fullshard.drop_in``.
"""

from fullshard.torch.private_names import DROP_IN, require

require(DROP_IN)  # before these are imported

from fullshard.drop_in.switch import is_on, switch_off, switch_on  # noqa: E402

__all__ = ["is_on", "switch_off", "switch_on"]

switch_on()
