# SPDX-License-Identifier: Apache-2.0
"""`save_pretrained`, of models of transformers and PEFT, after `fully_shard`."""

import inspect
from typing import Any

from torch.distributed.fsdp import StateDictType

from fullshard.core.errors import UsageError
from fullshard.torch.fsdp2.module import FSDPModule
from fullshard.torch.state.forms import StateForm, change_form
from fullshard.torch.state.weights_file import Entries

_INSTEAD = "call it on every rank: rank 0 alone writes, or pass state_dict= to call it there alone"


class SavesPretrained(FSDPModule):
    """The base of the classes that `fully_shard` makes of classes that have ``save_pretrained``."""

    def save_pretrained(self, *args: Any, **options: Any) -> Any:
        """Write the plain model's files, as the module's own class does. Collective.

        Weights are gathered unit by unit into rank 0's host memory. It writes; the others wait.
        With ``state_dict``, or on models that transformers itself has sharded, this is the own
        class's method alone.

        Raises:
            ConfigurationError: on all ranks, if rank 0 cannot write, or there is a parameter on
                the meta device.
            UsageError: called on some ranks only, see `fullshard.torch.comm.watch.roll_call`.
        """
        own = super().save_pretrained  # type: ignore[misc]  # the module's own class has it
        call = inspect.signature(own).bind(*args, **options)
        theirs = getattr(getattr(self, "config", None), "distributed_config", None)
        given_state = {**call.arguments, **call.kwargs}.get("state_dict")
        if given_state is not None or theirs is not None or options.get("distributed_checkpoint"):
            return own(*args, **options)
        entries = Entries(self)
        entries.call_roll("save_pretrained()", _INSTEAD)
        form = StateForm(StateDictType.FULL_STATE_DICT, on_host=True, kept=entries.first)
        change_form(entries.values, form, "save_pretrained()", _INSTEAD)
        failure: Exception | None = None
        if entries.first:
            call.arguments.pop("state_dict", None)
            try:
                if not getattr(self, "should_save_on_this_rank", bool)(True):
                    raise UsageError("the model's ranks are without the job's rank 0, which writes")
                own(*call.args, **{**call.kwargs, "state_dict": entries.values})
            except Exception as error:
                failure = error
        entries.raise_together("could not save the model", failure)
        return None
