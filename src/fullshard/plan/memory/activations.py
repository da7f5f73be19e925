# SPDX-License-Identifier: Apache-2.0
"""Activations: those that forward keeps for backward, and those held while an act runs."""

from collections.abc import Mapping, Sequence

from fullshard.core.grouping import deepest_around
from fullshard.plan.model.operations import Kind, Operation
from fullshard.plan.run import Engine, Recompute, Run
from fullshard.plan.step.script import Act, ActMemory, Pass, Script

Pair = tuple[int, int]
"""Bytes of activations, and of logits and loss."""


class _CallMemory:
    """Bytes of one call, worked out once for all calls that share their operations."""

    def __init__(self, operations: tuple[Operation, ...]):
        self.saved, self.saved_logits = _saved(operations)
        self.held_logits = sum(each.held_bytes for each in operations)
        self.kept_in_turns = _kept_in_turns(operations)
        self.forward_peak = _forward_peak(operations)
        self.backward_before, self.backward_after = _backward_peaks(operations)


class Activations:
    """Activations at some moment of a step: ``kept`` bytes, and ``logits`` with the loss's."""

    def __init__(self, script: Script, run: Run):
        self.kept: int = 0
        self.logits: int = 0
        self._script = script
        self._recompute = run.recompute
        self._offloads = run.offload_activations
        sharded = any(unit.layout.shards > 1 for unit in script.units)
        self._keeps_router_loss = run.kept_router_loss
        self._keeps_inputs = run.engine is Engine.FSDP1 and run.lora_rank > 0 and sharded
        self._recomputed = tuple(
            block is not None and run.recomputed(block) for block in script.blocks
        )
        self._memory: dict[int, _CallMemory] = {}
        self._gradients = _Handovers(script)
        self._kept_of: dict[int, tuple[int, int]] = {}  # by call

    def given(self, act: Act) -> Sequence[tuple[int, int]]:
        """The parameters whose gradients ``act`` hands over: their unit, and their index in it."""
        if self._script.stretches:
            gives = self._script.stretches[act.call].gives
            return () if gives is None else ((act.unit, gives),)
        return self._gradients.given[act.call] if act.phase is Pass.BACKWARD else ()

    def carry_out(self, act: Act) -> tuple[Pair, Pair]:
        """Do what ``act`` says; returns the most activations and logits held meanwhile.

        Before the first gradient of a parameter is there, and from then on.
        """
        if self._script.stretches:
            return (0, 0), self._measured(self._script.stretches[act.call])
        call = self._script.calls[act.call]
        key = id(call.operations)
        memory = self._memory[key] = self._memory.get(key) or _CallMemory(call.operations)
        if act.phase is Pass.BACKWARD:
            return self._backward(act, memory)
        before = self.kept, self.logits
        if act.phase is Pass.FORWARD and self._recomputed[act.call]:
            self._keep(act.call, self._kept_for_recomputation(act.call, memory), 0)
        else:
            leaves = self._offloads and act.phase is Pass.FORWARD
            leaves = leaves and self._script.blocks[act.call] is not None
            self._keep(act.call, call.cache_bytes if leaves else memory.saved, memory.saved_logits)
        peak, logits_peak = memory.forward_peak
        most = max(self.kept, before[0] + peak), max(self.logits, before[1] + logits_peak)
        return (0, 0), most

    def _measured(self, stretch: ActMemory) -> tuple[int, int]:
        most = self.kept + stretch.peak[0], self.logits + stretch.peak[1]
        self.kept += stretch.change[0]
        self.logits += stretch.change[1]
        return most

    def end_step(self) -> None:
        """Nothing is left of the graph."""
        self.kept = self.logits = 0
        self._kept_of.clear()

    def _keep(self, call: int, saved: int, logits: int) -> None:
        """Hold so much for ``call`` from now on, instead of what is held for it."""
        before = self._kept_of.get(call, (0, 0))
        self._kept_of[call] = saved, logits
        self.kept += saved - before[0]
        self.logits += logits - before[1]

    def _kept_for_recomputation(self, call: int, memory: _CallMemory) -> int:
        if self._offloads:
            return self._script.calls[call].cache_bytes
        blocks = self._script.blocks
        first = call == 0 or blocks[call - 1] != blocks[call]
        inputs = self._script.calls[call].kept_bytes if first else 0
        if self._recompute is Recompute.SELECTIVE:
            return inputs + memory.kept_in_turns
        return inputs

    def _backward(self, act: Act, memory: _CallMemory) -> tuple[Pair, Pair]:
        gradients = self._gradients
        saved, logits = self._kept_of.get(act.call, (0, 0))
        kept_by_others = self.kept - min(saved, memory.saved)
        logits_of_others = self.logits - min(logits, memory.saved_logits)
        before, given = memory.backward_before, gradients.given_bytes[act.call]
        # Units count all that is given: what comes later than a moment is taken off here.
        after = max(
            (
                (kept - round((1 - share) * given), logits)
                for kept, logits, share in memory.backward_after
            ),
            key=sum,
        )
        waiting = gradients.waiting[act.call]
        self._keep(act.call, self._left_by_backward(act.call), memory.held_logits)
        self.kept += gradients.waiting[act.call] - gradients.joined[act.call]
        return (
            (kept_by_others + before[0], logits_of_others + before[1]),
            (kept_by_others + after[0] + waiting, logits_of_others + after[1]),
        )

    def _left_by_backward(self, call: int) -> int:
        """Bytes of a recomputed block that are held until backward has ended, or longer.

        These are what was computed before a router whose loss is kept, and with FSDP1 the block's
        input and its gradient.

        [Note: FSDP1 and frozen units] A unit with frozen parameters is told by a hook on its inputs
        when to free itself. Inputs of a checkpointed block are detached: the hook keeps them, and
        the gradients that they got, until the backward of all of the model has ended.
        """
        if not self._recomputed[call]:
            return 0
        left = 2 * self._script.calls[call].input_bytes if self._keeps_inputs else 0
        operations = self._script.calls[call].operations if self._keeps_router_loss else ()
        routers = [n for n, each in enumerate(operations) if each.name == "router"]
        return left + sum(each.saved_bytes for each in operations[: max(routers, default=0)])


def _saved(operations: tuple[Operation, ...]) -> tuple[int, int]:
    """Bytes saved by the operations: of activations, and of logits."""
    logits = sum(each.saved_bytes for each in operations if each.logits)
    return sum(each.saved_bytes for each in operations) - logits, logits


def _kept_in_turns(operations: tuple[Operation, ...]) -> int:
    """Bytes kept under selective recomputation: of attention, and each second matrix product.

    Of a product that is its output, also if backward itself would not read it.
    """
    kept = products = 0
    for each in operations:
        if each.kind is Kind.MATMUL and not each.cheap:
            products += 1
            kept += each.output_bytes if products % 2 else 0
        elif not each.cheap:
            kept += each.saved_bytes
    return kept


def _forward_peak(operations: tuple[Operation, ...]) -> tuple[int, int]:
    """The most bytes held beyond what was held before, as the operations run in order."""
    saved, peaks, given = [0, 0], [0, 0], [0, 0]
    for each in operations:
        use = int(each.logits)
        output = 0 if each.saved_bytes >= each.output_bytes else each.output_bytes
        saved[use] += each.saved_bytes
        holding = [saved[0] + given[0], saved[1] + given[1]]
        holding[use] += output + each.scratch_bytes
        peaks = [max(pair) for pair in zip(peaks, holding, strict=True)]
        given = [0, 0]
        given[use] = output
    return peaks[0], peaks[1]


def _backward_peaks(
    operations: tuple[Operation, ...],
) -> tuple[Pair, list[tuple[int, int, float]]]:
    """The most bytes held, what is saved included, before the first weights' gradient.

    And for each operation from then on what is held, and the share of all gradients that are there.
    Backwards run in reverse. A gradient like the output comes in, one like the input goes out;
    ``backward_scratch_bytes`` has these in it where they are known to be all.
    """
    saved = [0, 0]
    for each in operations:
        saved[int(each.logits)] += each.saved_bytes
    weights = [_weight_numel(each) for each in operations]
    before: Pair = (0, 0)
    after: list[tuple[int, int, float]] = []
    given = not sum(weights)
    for number in range(len(operations) - 1, -1, -1):
        each = operations[number]
        given = given or bool(weights[number])
        use = int(each.logits)
        holding = list(saved)
        output = operations[number - 1].output_bytes if number else 0
        holding[use] += max(each.backward_scratch_bytes, each.output_bytes + output)
        if given:
            share = sum(weights[number:]) / sum(weights) if any(weights) else 1.0
            after.append((holding[0], holding[1], share))
        else:
            before = max(before, (holding[0], holding[1]), key=sum)
        saved[use] -= each.saved_bytes
    return before, after or [(0, 0, 1.0)]


def _weight_numel(operation: Operation) -> int:
    """Elements of the matrix that an operation multiplies by, 0 if it does something else."""
    shape = operation.forward.shape
    if operation.kind is not Kind.MATMUL:
        return 0
    return shape[1] * shape[2] * operation.forward.count if shape else 1


class _Handovers:
    """Gradients of parameters between autograd, which makes them, and their unit.

    ``given[n]`` are the parameters whose gradients call n's backward hands over, by their unit and
    index in it; they take ``given_bytes[n]``. A tied parameter's is handed over by the first of its
    calls, in order of forward: ``waiting[n]`` bytes of parts made by call n's backward wait until
    then, and ``joined[n]`` have waited for call n's.
    """

    def __init__(self, script: Script):
        calls = len(script.calls)
        self.given: list[list[tuple[int, int]]] = [[] for _ in range(calls)]
        self.given_bytes = [0] * calls
        self.waiting, self.joined = [0] * calls, [0] * calls
        places: dict[str, list[int]] = {}
        for number, call in enumerate(script.calls):
            places.setdefault(call.path, []).append(number)
        for number, unit in enumerate(script.units):
            for index, (segment, slot) in enumerate(unit.layout):
                if segment.trainable:
                    names = (slot.spec.name, *slot.spec.aliases)
                    users = sorted({call for name in names for call in _calls_of(name, places)})
                    if users:
                        self.given[users[0]].append((number, index))
                        self._give(users, segment.made_bytes(slot))

    def _give(self, users: list[int], size: int) -> None:
        self.given_bytes[users[0]] += size
        if len(users) > 1:
            self.waiting[users[-1]] += size
            self.joined[users[0]] += size


def _calls_of(name: str, places: Mapping[str, list[int]]) -> list[int]:
    """The calls of the deepest module around a parameter that has any."""
    path = deepest_around(name, places)
    return places[path] if path else []
