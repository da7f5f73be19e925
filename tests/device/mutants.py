# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine's order, one at a time: each wait, event, join and keep-alive left out.

`MUTANTS` must each be found by one of the programs named with it. `EQUIVALENT` change nothing that
can be observed; the reason is their value's. All are edits of the engine's source.
"""

import importlib
import inspect
import textwrap
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``edits`` are (function, before, after); ``programs`` those of which one must find it.

    A function is "module:name" below `fullshard.torch`, or of its core. All ``ranks`` are compared.
    """

    edits: tuple[tuple[str, str, str], ...]
    programs: tuple[str, ...]
    ranks: tuple[int, ...] = (0,)


def _edit(where, before, after="pass", *programs, ranks=(0,)):
    return Mutant(((where, before, after),), programs or ("full",), ranks)


@contextmanager
def applied(mutant):
    """Run the engine with the fault within. Raises `ValueError` if it does not fit any more."""
    with ExitStack() as stack:
        sources = {}  # as edited so far
        for where, before, after in mutant.edits:
            function = function_named(where)
            source = sources.get(where) or textwrap.dedent(inspect.getsource(function))
            if source.count(before) != 1:
                raise ValueError(f"{where} has {before!r} {source.count(before)} times, not once")
            source = sources[where] = source[source.index("def ") :].replace(before, after)
            if function.__code__.co_freevars == ("__class__",):  # it calls super()
                source = f"def around(__class__):\n{textwrap.indent(source, '    ')}"
            made = compile(source, function.__code__.co_filename, "exec")
            code = _code_named(function.__name__, made)
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = code
        yield


def _code_named(name, code):
    """Return the code of the function of this name within ``code``, or None."""
    inner = [each for each in code.co_consts if inspect.iscode(each)]
    deeper = (_code_named(name, each) for each in inner)
    return next((each for each in (*inner, *deeper) if each and each.co_name == name), None)


def function_named(where):
    """Return what "module:name" is, below `fullshard.torch` or of its core."""
    module, _, path = where.partition(":")
    layer = "" if module.startswith("core.") else "torch."
    place = importlib.import_module(f"fullshard.{layer}{module}")
    for name in path.split("."):
        place = inspect.getattr_static(place, name, None)
        if place is None:
            raise ValueError(f"there is no {name!r} in {where}")
    return inspect.unwrap(place.fget if isinstance(place, property) else place)


_UNIT = "unit.full_parameters:FullParameters."
_GRADS = "unit.gradients:Gradients."
_FULL_GRADS = "unit.full_gradients:FullGradients."
_COPIES = "unit.streams:CopyStream."
_OFFLOAD = ("offload", "offload replicas")
_HYBRID = ("hybrid", "bf16 hybrid", "hybrid accumulation")
_BACKWARDS = ("an exception in backward", "an exception in a hybrid backward")
_EARLY = "unit.streams:EarlyStream."
_LENDERS = "unit.streams:Lenders."
_CHANGING = ("changing order in bf16", "blocks dropped and in changing order")
_CHANGING += ("changing order, gathers in int8",)
_ORDERS = ("blocks dropped and in changing order", "optimizer in backward, units gathered ahead")

_IN, _OUT = (f'self._direction == "to the {end}"' for end in ("device", "host"))
_BEHIND = "stream.wait_stream(self._module.current_stream(self._device))"
_MARK = "self.last = stream.record_event()"
_GATHER = "return self._comm.all_gather(pairs, label=self._label)"
_THERE = "self._gathering = self.part = None"
_REDUCE = "self._work = self._reduce_scatter(pairs)"


def _marked_early(which):
    return (
        (_COPIES + "behind_compute", _BEHIND, f"{_BEHIND}; early = stream.record_event()"),
        (_COPIES + "behind_compute", _MARK, f"{_MARK} if not ({which}) else early"),
    )  # fmt: skip


def _unless(which, name, *programs):
    test = "if self.last is not None:"
    return _edit(_COPIES + name, test, f"{test[:-1]} and not {which}:", *programs)


def _gathered(then, *programs):
    after = f"work = {_GATHER.removeprefix('return ')}; {then}; return work"
    return _edit(_UNIT + "_all_gather", _GATHER, after, *programs)


_TAKES_PART = "self._executor.do({})"
_BEGINS = _TAKES_PART.format("self._machine.forward_begins(managed.step, with_grad=with_grad)")
_ENDS = _TAKES_PART.format("self._machine.forward_ends(managed.step, training=training)")


def _machine_only(told):
    return told.removeprefix("self._executor.do(").removesuffix(")")


def _optional(where, before, after=""):
    programs = "optional parts, forward twice", "optional parts", "optional parts, again"
    programs += ("shared experts in recomputed blocks", "experts alone in recomputed blocks")
    programs += ("frozen blocks, and parts recomputed as a whole",)
    programs += ("optional parts in functions", "experts in a unit around a checkpoint")
    programs += ("optional parts before functions",)
    return _edit(where, before, after, *programs, ranks=(0, 1, 2, 3))


# fmt: off
MUTANTS = {
    # the copies' streams
    "fetches do not wait for compute": _edit(
        _COPIES + "behind_compute", _BEHIND, f"{_IN} or {_BEHIND}", *_OFFLOAD,
    ),
    "fetches are not marked": _edit(
        _COPIES + "behind_compute", _MARK, f"if not ({_IN}): {_MARK}", "NO_SHARD offloaded",
    ),
    "evictions are not marked": _edit(
        _COPIES + "behind_compute", _MARK, f"if not ({_OUT}): {_MARK}", *_OFFLOAD,
    ),
    "fetches are marked before they are issued": Mutant(
        _marked_early(_IN), ("NO_SHARD offloaded",)
    ),
    "evictions are marked before they are issued": Mutant(_marked_early(_OUT), _OFFLOAD),
    "no join": _edit(_COPIES + "join", "if self.last is not None:", "if False:", *_OFFLOAD),
    "no join of fetches": _unless(_IN, "join", "NO_SHARD offloaded"),
    "no join of evictions": _unless(_OUT, "join", *_OFFLOAD),
    "the host waits for no evictions": _unless(_OUT, "synchronize", *_OFFLOAD),
    "the host waits for no fetches": _unless(_IN, "synchronize", "evaluation offloaded"),
    "the host writes offloaded shards while they are fetched": _edit(
        "unit.unit:Unit.synchronize", "self.full.synchronize()", "pass", "evaluation offloaded",
    ),
    "copies to the host on the stream of fetches": _edit(
        _COPIES + "behind_compute", "_stream_for(self._device, self._direction)",
        '_stream_for(self._device, "to the device")', *_OFFLOAD,
    ),
    # gathers
    "gathers are not waited for": _edit(_UNIT + "wait", "self._gathering.wait()"),
    "unwaited gathers in bf16": _edit(_UNIT + "wait", "self._gathering.wait()", "pass", "bf16"),
    "unwaited gathers of offloaded shards": _edit(
        _UNIT + "wait", "self._gathering.wait()", "pass", *_OFFLOAD,
    ),
    "no wait at the schedule's await": _edit(
        _UNIT + "wait", "if self._gathering is not None:", "if False:",
    ),
    "shards cross on the compute stream": _edit(
        _UNIT + "_fetch_slices", "self._fetched.memory.copy_(",
        "with torch.cuda.stream(torch.cuda.default_stream()): self._fetched.memory.copy_(",
        *_OFFLOAD,
    ),
    "fetches block the host": _edit(
        _UNIT + "_fetch_slices", "non_blocking=True", "non_blocking=False", *_OFFLOAD,
    ),
    "slices travel from where they were fetched": _edit(
        _UNIT + "_converted", "or not lasting", "", *_OFFLOAD,
    ),
    "packed parameters are unpacked before they are there": Mutant(
        (
            (_UNIT + "wait", "self._gathering.wait()", "pass"),
            (_UNIT + "wait", _THERE, f"self._gathering.wait(); {_THERE}"),
        ),
        ("full",),
    ),
    "what arrives packed is freed when its gather is issued": _gathered(
        "self._packed.arriving.release()"
    ),
    "what arrives packed is never freed": _edit(
        "unit.packing:PackedArrival.unpack", "self.arriving.release()",
    ),
    "packed parameters are never freed": _edit(_UNIT + "_release", "self._packed.there.release()"),
    "what lies between packed parameters is not filled": _edit(
        "unit.packing:PackedArrival.unpack", "if self._fills:", "if False:", "blocks of 2",
    ),
    "gathers get no memory": _edit(_UNIT + "gather", "self._buffer.allocate()"),
    "a gather from the block passes for one from all": _edit(
        _UNIT + "gather", "self._gathering = block.all_gather(pairs, label=self._label)",
        "self._gathering = block.all_gather(pairs, label=self._label); self.part = None",
        "blocks of 2",
    ),
    "gathers hold up the host": _gathered("torch.cuda.synchronize()"),
    "gathers ask the device": _gathered("bool(self._pairs[0][1].any())"),
    "full parameters are freed when gathered": _gathered("self._buffer.release()"),
    "full parameters are freed when they are there": _edit(
        _UNIT + "wait", _THERE, f"{_THERE}; self._buffer.release()",
    ),
    "full parameters are never freed": _edit(_UNIT + "_release", "self._buffer.release()"),
    "full parameters of an older step are used": _edit(
        _UNIT + "outdated", "not self.resident and", "False and", "kept after backward",
    ),
    "the working copy is never refreshed": _edit(
        _UNIT + "_refreshed_working", "self.working_version != self.at_rest._version",
        "self.working_version == -1", "offload optimizer",
    ),
    "full parameters are taken on another stream": _edit(
        _UNIT + "gather", "self._buffer.allocate()",
        "with torch.cuda.stream(torch.cuda.Stream()): self._buffer.allocate()",
    ),
    "what a class receives is not waited for": Mutant(
        ((_UNIT + "wait", "self._gathering.wait()", "pass"),),
        ("a class that decides what travels",),
    ),
    "what a class makes is never freed": _edit(
        "unit.extensions:Extension.release", "storage.resize_(0)", "pass",
        "a class that decides what travels",
    ),
    "parameters keep what a class wraps": _edit(
        "unit.sites:notes_on", "k not in inner", "True", "a class that decides what travels",
    ),
    "unshard's handle waits for nothing": _edit(
        "fsdp2.module:UnshardHandle.wait", "self._managed.unit.await_gather()", "pass",
        "unshard by handle",
    ),
    "what was resharded by hand is not gathered again": _edit(
        "unit.unit:Unit.use", "self.full.wait()", "pass", "use after a reshard by hand",
    ),
    "an optimizer does not wait for gathers": _edit(
        "unit.guards.optimizer_steps:count_step", "gathered.wait()", "pass",
        "an optimizer before gathers are there",
    ),
    "an event after the optimizer is ignored": _edit(
        "step.tracker:Tracker._between_steps", "self.wait_before_gather.wait()", "pass",
        "an event after the optimizer",
    ),
    "an optimizer in backward does not wait for a unit gathered ahead": _edit(
        "optim.overlap_optimizer:_Overlap.step", "unit.await_gather()", "pass", *_ORDERS[1:],
    ),
    "an optimizer in backward does not wait for the host's gradients": _edit(
        "optim.overlap_optimizer:_Overlap.step", "unit.synchronize()", "pass",
        "optimizer in backward, offloaded",
    ),
    "a thread does not wait for the host's gradients": _edit(
        "unit.unit:Unit.copies_under_way", "self.gradients.last_copy", "None",
        "optimizer in backward, offloaded",
    ),
    "a thread updates what is being fetched": _edit(
        "unit.unit:Unit.copies_under_way", "self.full.last_fetch", "None",
        "optimizer in backward, units gathered ahead, offloaded",
    ),
    "a step put off counts no change": _edit(
        "optim.filled_step:FilledStep.make", "count_change(*filled.lists[0])", "pass",
        "changing order, optimizer beside forward",
    ),
    "a gather takes what a step put off will change": _edit(
        "unit.unit:Unit.gather", "self.catch_up()", "pass",
        "clipped, optimizer beside forward, offloaded",
    ),
    # reduces
    "full gradients are freed when the reduce is issued": _edit(
        _GRADS + "reduce", _REDUCE, f"{_REDUCE}; self.full.release()",
    ),
    "full gradients are never freed": _edit(
        _GRADS + "all_reduce", "self.full.release()", "pass", "full", "bf16",
    ),
    "buffers of full gradients are never freed": _edit(
        _FULL_GRADS + "release", "self._buffer.release()", "self._is_open = True",
    ),
    "reduces are not waited for": _edit(_GRADS + "all_reduce", "self._work.wait()"),
    "unwaited reduces before the all-reduce": _edit(
        _GRADS + "all_reduce", "self._work.wait()", "pass", *_HYBRID,
    ),
    "unwaited reduces in bf16": _edit(_GRADS + "all_reduce", "self._work.wait()", "pass", "bf16"),
    "all-reduces are not waited for": _edit(
        _GRADS + "await_all", "self._work.wait()", "pass", *_HYBRID,
    ),
    "hybrid sums are never freed": _edit(
        _GRADS + "all_reduce", "self._kept = None", "self._left = self._kept; self._kept = None",
        "hybrid accumulation",
    ),
    "gradients are dropped under way": _edit(
        _GRADS + "drop", "self._work.wait()", "pass", *_BACKWARDS,
    ),
    "a reduce does not wait for the same unit's before it": _edit(
        _GRADS + "reduce", "self.await_all()", "pass", "the reduce of a single unit left under way",
    ),
    "a user's reduce-scatter is not waited for": _edit(
        _GRADS + "_reduce_scatter", "work.wait()", "pass", "collectives of the user's",
    ),
    # What travels packed is zeroed where it has holes, and so always written: by element there are
    # none.
    "gradients are not copied to where they are sent from": _edit(
        _FULL_GRADS + "_copy", "torch._foreach_copy_(views, parts)", "pass", "FULL_SHARD",
    ),
    "padding is not zeroed": _edit(
        _FULL_GRADS + "_open", "torch._foreach_zero_(self._padding)", "pass", "odd parameters",
        "full over 3",
    ),
    "the host looks at every reduce": _edit(
        _GRADS + "reduce", _REDUCE, f"{_REDUCE}; self._reduced.flats[0][0].item()",
    ),
    # steps that are replayed
    "a replayed step goes on when another event comes": _edit(
        "core.schedule.scheduler:Scheduler.on", "if compiled.events[cursor] != event:", "if False:",
        "blocks dropped and in changing order",
    ),
    "a replayed reduce is not known to be under way": _edit(
        "step.executor:Executor._reduce", "self._reducing.append(unit)",
    ),
    "what was gathered before the optimizer stepped is taken": _edit(
        "unit.unit:Unit.gather", "if is_full and not full.outdated:", "if is_full:",
        "kept after backward",
    ),
    "a complex tensor that travels alone is sent as it is": _edit(
        "comm.process_group:ProcessGroupComm._send", " or output.is_complex()", "",
        "complex parameters",
    ),
    # gathers that begin early
    "early gathers do not wait for the optimizer": _edit(
        _EARLY + "beside_compute", "self._stream.wait_event(self._begun)", "pass", *_CHANGING,
    ),
    "early gathers wait for the optimizer of the first step": _edit(
        _EARLY + "begin", "self._begun = self", "self._begun = self._begun or self", *_CHANGING,
    ),
    "memory of early gathers is given back while it is used": _edit(
        _UNIT + "_release", "self._lenders.follow()", "pass", *_CHANGING,
    ),
    "what an early gather holds beside is given back while it is used": _edit(
        _UNIT + "wait", "self._lenders.follow()", "pass", *_CHANGING[::-1],
    ),
    "early gathers follow computation at their begin alone": _edit(
        _LENDERS + "follow", "stream.wait_stream(", "self._module.Stream().wait_stream(",
        *_CHANGING,
    ),
    "memory of early gathers is not known as theirs": _edit(
        _UNIT + "gather", "self._lenders.lend()", "pass", *_CHANGING,
    ),
    "who uses memory is taken for who lends it": _edit(
        _UNIT + "gather", "self._lenders.lend()", "pass", "a part on another stream",
    ),
    "a unit is dropped while another stream uses it": _edit(
        _UNIT + "_release", "self._lenders.join()", "pass",
        "a part on another stream, two forwards",
    ),
    "memory where classes arrive is taken for the compute stream's": _edit(
        _UNIT + "_converted", "self._lenders.lend()", "pass",
        "a class that decides what travels, from the host to two streams",
    ),
    "nobody waits for casts that no communicator follows": _edit(
        _UNIT + "wait", "self._lenders.join()", "pass", "changing order, NO_SHARD in bf16",
    ),
    "early gathers do not see what forward writes": _edit(
        _UNIT + "gather_early", "self._version_begun != self.at_rest._version", "False",
        "changing order, weights written in forward",
    ),
    "what was gathered ahead is used though forward has written since": _edit(
        "unit.unit:Unit.use", " or self.full.outdated", "",
        "changing order, weights written in forward",
    ),
    "early gathers do not wait for an event after the optimizer": Mutant(
        (
            ("step.tracker:Tracker._begin_at_the_top", "self.executor.note_shards()", "pass"),
            (
                "step.executor:Executor.begin",
                "self.go_on(training=training)",
                "self.go_on(training=training); self.note_shards()",
            ),
        ),
        ("changing order, an event after the optimizer",),
    ),
    "early gathers of what has just been shrunk": _edit(
        _UNIT + "gather_early", "self.part is not None", "False", "changing order, blocks of 2",
    ),
    # evictions
    "evicted gradients are not kept": _edit(
        _GRADS + "_evict", "self._leaving.append(onboard)", "pass", *_OFFLOAD,
    ),
    "evictions to pageable memory": _edit(
        _GRADS + "_evict", "pin=self._plan.pin", "pin=False", *_OFFLOAD,
    ),
    "evicted gradients are let go without a join": _edit(
        _GRADS + "let_go", "self._to_host.join()", "pass", *_OFFLOAD,
    ),
    "hooks see gradients that have not come": _edit(
        _GRADS + "_evict", " or _has_hooks(param)", "", "hooks on parameters",
    ),
    "sums on the host do not wait": _edit(
        _GRADS + "_evict", "param.grad is not None or", "", "accumulation offloaded",
    ),
    # the communicator
    "works are lost": _edit(
        "comm.process_group:ProcessGroupComm._start", "what, works, done", "what, (), done",
    ),
    "what follows a compressed gather comes first": _edit(
        "comm.protocol:Together.wait", "work.wait()", "pass", "gathers in int8", "reduces in int8",
    ),
    "collectives on the compute stream": _edit(
        "comm.process_group:_asynchronous", "options.asyncOp = True",
        "options.asyncOp = False",
    ),
    "full tensors are not waited for": _edit(
        "tensor.ownership:gathered_together",
        "comm.all_gather([(gathered, mine)], label=label).wait()",
        "comm.all_gather([(gathered, mine)], label=label)", "full tensors between steps",
    ),
    "sums of parameters are not waited for": _edit(
        "tensor.reductions:global_sum", "ownership.combine([total])",
        "[comm.all_reduce([total]) for comm in ownership.comms]", "sums of parameters",
    ),
    "a found inf is not waited for": _edit(
        "tensor.reductions:unscale", '"max", label="found inf").wait()',
        '"max", label="found inf")', "scaled losses, unscaled",
    ),
    "a scaler's found inf is not waited for": _edit(
        "optim.grad_scaler:ShardedGradScaler._unscale_grads_", 'label="found inf").wait()',
        'label="found inf")', "scaled losses",
    ),
    "norms are not waited for": _edit(
        "tensor.reductions:_combine", "owners[0].combine([norms])",
        "[comm.all_reduce([norms]) for comm in owners[0].comms]", "clipping",
    ),
    "norms copy a list to the device": _edit(
        "tensor.reductions:_combine", "norms = norms.pow(order)",
        "norms = norms.pow(torch.tensor([order], device=norms.device))", "clipping",
    ),
    # the order on all ranks
    "odd ranks send the dtypes of a call in another order": _edit(
        "comm.process_group:ProcessGroupComm._by_pairs", "in dict.fromkeys(dtypes):",
        "in list(dict.fromkeys(dtypes))[:: -1 if self.rank % 2 else 1]:", "two dtypes in a unit",
        ranks=(0, 1),
    ),
    "odd ranks do not pass over units that they have not used": _edit(
        "core.schedule.step:StepMachine._pass_over", "if not unit.begun]",
        "if not unit.begun and not __import__('torch').distributed.get_rank() % 2]",
        "branches that only some ranks use", ranks=(0, 1),
    ),
    "odd ranks order norms by address": _edit(
        "tensor.reductions:global_norms", "key=lambda part: part[0].place)",
        "key=lambda one: id(one[0]) % 127 if one[0].comm.rank % 2 else one[0].place)",
        "clipping", ranks=(0, 1),
    ),
    # parts that only some ranks run
    "ranks that leave a unit out do not gather it": _optional(
        "step.optional:OptionalUnits._take_part", _BEGINS, _machine_only(_BEGINS)
    ),
    "ranks that leave a unit out do not free it": _optional(
        "step.optional:OptionalUnits._take_part", _ENDS, _machine_only(_ENDS)
    ),
    "ranks that leave a unit out do not await its backward": _optional(
        "step.optional:OptionalUnits._take_part", "with_grad=with_grad", "with_grad=False"
    ),
    "ranks that leave a unit out forget it": _optional(
        "step.optional:OptionalUnits._take_part", "training=training))", "training=False))"
    ),
    "ranks run what they want first": _optional(
        "step.optional:OptionalUnits._meet", "if number < 0 or (wanted is not None and number",
        "if wanted or number < 0 or (wanted is not None and number",
    ),
    "ranks settle by themselves what backward may reach": _optional(
        "step.optional:OptionalUnits.settle", "leads.tolist(), strict", "mine, strict"
    ),
    "what was run elsewhere is forgotten before backward": _optional(
        "core.schedule.step:StepMachine.settle", "if not leads_back:", "if True:"
    ),
    "nothing stands in for a call on other ranks": _optional(
        "core.schedule.step:StepMachine.forward_ends", "if unit.partial:", "if False:"
    ),
    "a unit does not wait for what stands in": _optional(
        "core.schedule.unit_step:UnitStep.has_all_gradients", " or call.stands_in"
    ),
    "calls on other ranks are not passed over": _optional(
        "core.schedule.step:StepMachine._pass_over", "if self.partial:", "if False:"
    ),
    "calls are passed over as they came": _optional(
        "core.schedule.step:StepMachine._pass_over_calls",
        "passed.sort(key=itemgetter(0), reverse=True)", "pass"
    ),
    "a unit waits for calls that it has come to": _optional(
        "core.schedule.step:StepMachine._come_to",
        "unit.began_at = min(unit.began_at, call.began_at)", "pass"
    ),
    "units do not stay due for the other forwards": _optional(
        "core.schedule.step:StepMachine._end", "if self.partial and unit.calls():", "if False:"
    ),
    "with several forwards units end when they seem over": _optional(
        "core.schedule.step:StepMachine._is_over", " or self._several"
    ),
    "each rank recomputes where it first misses something": _optional(
        "step.optional:OptionalUnits.recompute", "tensor := reference()", "tensor := None"
    ),
    "a function is recomputed before what came behind it is over": _optional(
        "core.schedule.step:StepMachine.runs_again", "if again:", "if False:"
    ),
    # values
    "comparisons of what norms are of are not waited for": _edit(
        "tensor.reductions:_are_alike", 'a norm or sum is of").wait()', 'a norm or sum is of")',
        "operations by element",
    ),
    "one rank's span is pickled as if it were the parameter": _edit(
        "tensor.parameter:ShardedParameter.__reduce_ex__", "raise UnshardedOperationError(",
        "return str, (lambda *x: x)(", "operations by element that are refused",
    ),
    "complex numbers are sent as they are": _edit(
        "comm.process_group:ProcessGroupComm._by_pairs",
        "[torch.view_as_real(t) if t.is_complex() else t for t in tensors]", "list(tensors)",
        "complex parameters",
    ),
    "what is written to copies is lost": _edit(
        "tensor.parameter:_as_dtensor_does", "_refuse_to_write_to_views(func, written)", "pass",
        "operations by row",
    ),
    "norms are not waited for on the second axis": _edit(
        "tensor.reductions:_combine", "owners[0].combine([norms])",
        "works = [comm.all_reduce([norms]) for comm in owners[0].comms]; works[0].wait()",
        "two axes by element",
    ),
    "rows of another dimension are not waited for": _edit(
        "tensor.ownership:gathered_together",
        "comm.all_gather([(gathered, mine)], label=label).wait()",
        "work = comm.all_gather([(gathered, mine)], label=label); parts[0][0].dim or work.wait()",
        "state dicts of rows along another dimension",
    ),
    "whole tensors are gathered one by one": _edit(
        "state.forms:_gathered", "unit = each.ownership.comm, each.ownership.unit,",
        "unit = each.ownership.comm, id(each),", "whole state dicts",
    ),
    "unequal parts are not waited for": _edit(
        "tensor.ownership:gathered_together",
        "comm.all_gather([(Parts(gathered, held), mine)], label=label).wait()",
        "comm.all_gather([(Parts(gathered, held), mine)], label=label)",
        "whole state dicts of whole matrices",
    ),
    # steps of owners
    "owners send what they have stepped": _edit(
        "optim.owned_step:OwnedStep._finish", "count_change(param.local)", "param.full_tensor()",
        "owned matrices",
    ),
    "an owner asks the device for gradients": _edit(
        "optim.owned_step:OwnedStep._finish", "if stand_in.grad is not None and",
        "if stand_in.grad is not None and bool(stand_in.grad[0, 0] + 1) and", "owned matrices",
    ),
    "an owner keeps copies of gradients": Mutant(
        (
            ("optim.owned_step:_give_grad", "plain.view(", "plain.clone().view("),
            ("optim.owned_step:_let_go", "each.grad = None", "pass"),
        ),
        ("owned matrices",),
    ),
    # exchanges with owners
    "an exchange is not waited for": _edit(
        "tensor.reslice:start_reslice", "work.wait()", "pass", "exchanged matrices",
    ),
    "matrices are exchanged one by one": _edit(
        "optim.exchange:_start", "calls.setdefault((", "calls.setdefault((key, ",
        "exchanged matrices",
    ),
    "an owner keeps what was exchanged": _edit(
        "optim.owned_step:_let_go", "each.grad = None", "pass",
        "exchanged matrices", ranks=(1,),
    ),
    "owners keep the new values": _edit(
        "optim.owned_step:OwnedStep._finish", "self._give_back(optimizer, stepped, state)",
        "pass", "exchanged matrices",
    ),
    "new values of the last unit are not waited for": _edit(
        "optim.owned_step:OwnedStep._give_back", "finish()\n", "pass\n", "exchanged matrices",
    ),
    # groups
    "a rank alone gathers what it has": _edit(
        _UNIT + "__init__", "self._ranks.gather.size == 1 and self._as_they_rest", "False",
        "one rank alone",
    ),
    "a pair of groups is taken the other way round": _edit(
        "comm.ranks:ranks_of", "within, across = _pair_of", "across, within = _pair_of",
        "a pair of groups",
    ),
    "hosts share equal slices": _edit(
        "comm.ranks:_mesh_of_hosts", "(world // local, local)", "(local, world // local)",
        "hybrid by hosts",
    ),
    "the last dim of a mesh is taken for the first": _edit(
        "comm.ranks:_first_dim", "mesh[first]", "mesh[other]", "one dim of a mesh of two",
    ),
    "gathers share a communicator": _edit(
        "comm.ranks:_duplicate_of", "comm.duplicate()", "comm", "the group of all ranks",
    ),
    "errors of rounding are kept unasked": _edit(
        "comm.compressed:CompressedComm._residuals_for",
        "if not self.compression.error_feedback:", "if False:",
        "compressed gathers of what is bf16, reduces without feedback",
    ),
    "reduces are not compared": _edit(
        "comm.checked:CheckedComm.reduce_scatter",
        'self._check("reduce_scatter", label, _alike_on_all(pairs))', "pass",
        "every call compared",
    ),
    "blocks of any size are taken": _edit(
        "comm.ranks:in_blocks", "if size < 1 or gather.size % size:", "if size < 1:",
        "groups that are refused",
    ),
    "ranks go on until the last has no batch": _edit(
        "comm.uneven_inputs:stop_together", "_comm_of(group), min)", "_comm_of(group), max)",
        "batches of unequal number",
    ),
}
# fmt: on

_KEPT = "the works of torch.distributed keep their tensors until they are waited for"
EQUIVALENT = {
    "units are shrunk before they are there": (
        _edit(_UNIT + "shrink", "self.wait()", "pass", "blocks of 2"),
        "the schedule awaits every gather before it shrinks the unit",
    ),
    "a block's part is dropped when its gather is issued": (
        _edit(
            _UNIT + "gather", "pairs = list(zip(self._flats, self.part.flats, strict=True))",
            "pairs = list(zip(self._flats, self.part.flats, strict=True)); "
            "self.part = FlatBuffer([], self._plan.device)", "blocks of 2",
        ),
        _KEPT,
    ),
    "messages of a compressed reduce are not kept": (
        _edit(
            "comm.protocol:Together.__init__", "self._in_flight = in_flight",
            "self._in_flight = ()", "reduces in int8",
        ),
        _KEPT,
    ),
    "gradients that are sent as they were made are let go when their reduce is issued": (
        _edit(_GRADS + "reduce", _REDUCE, f"{_REDUCE}; self.full.sent = []"),
        _KEPT,
    ),
    "full parameters are dropped without a wait": (
        _edit(_UNIT + "drop", "self.wait()"),
        "the schedule awaits every gather before it frees the unit",
    ),
}  # fmt: skip
