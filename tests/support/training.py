"""What the tests of ``train_batch`` share: schedules, and the plain model as the reference."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from syncpipe import Pipe
from syncpipe.schedules import SCHEDULES, build, one_f_one_b
from syncpipe.schedules.schedule import KINDS as ACTIONS
from syncpipe.schedules.schedule import Action, Schedule
from tests.support.compare import assert_same
from tests.support.models import seen
from tests.support.models import weigh as weigh  # for those who import it here

FOUR = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
ROUND = ["cpu:0", "cpu:1", "cpu:0", "cpu:1"]
V = ["cpu:0", "cpu:1", "cpu:1", "cpu:0"]

#: For pipes of four stages: what to pass to ``train_batch``, and the devices of the pipe.
RUNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "naive": ({"schedule": "naive"}, FOUR),
    "gpipe": ({"schedule": "gpipe"}, FOUR),
    "1f1b": ({}, FOUR),
    "1f1b-textbook": ({"schedule": partial(one_f_one_b, slots="textbook")}, FOUR),
    "1f1b-overlap": ({"schedule": partial(one_f_one_b, slots="overlap")}, FOUR),
    "1f1b-slots": ({"schedule": partial(one_f_one_b, slots=[3, 3, 2, 1])}, FOUR),
    "1f1b-twice": ({"schedule": "1f1b"}, ["cpu:0", "cpu:0", "cpu:1", "cpu:0"]),
    "interleaved": ({"schedule": "interleaved_1f1b"}, ROUND),
    "looped_bfs": ({"schedule": "looped_bfs"}, ROUND),
    "interleaved_zero_bubble": ({"schedule": "interleaved_zero_bubble"}, ROUND),
    "zb_h1": ({"schedule": "zb_h1"}, FOUR),
    "zb_h2": ({"schedule": "zb_h2"}, FOUR),
    "zbv": ({"schedule": "zbv"}, V),
    "v_half": ({"schedule": "v_half"}, V),
    "v_min": ({"schedule": "v_min"}, V),
    "dualpipev": ({"schedule": "dualpipev"}, V),
}
#: One of each kind, for tests where the number of slots makes no difference.
KINDS = ["naive", "gpipe", "1f1b", "interleaved", "zb_h1"]


# --- schedules -----------------------------------------------------------------------------------


def fitting(devices: Sequence[int]) -> list[str]:
    """The names of the schedules that can be had for stages on these devices."""
    names = []
    for name in SCHEDULES:
        with suppress(ValueError):
            names.append(build(name, 1, devices).name)
    return names


def schedule_of(pipe: Pipe, m: int, schedule: Any = "1f1b") -> Schedule:
    """What ``train_batch`` runs for these arguments."""
    return build(schedule, m, pipe._build().placement)


def on_each_device(schedule: Schedule) -> tuple[int, ...]:
    """The most cells that are alive at once on each device."""
    alive = ((ACTIONS[action.kind].in_flight_change for action in row) for row in schedule.actions)
    return tuple(max(accumulate(row, initial=0)) for row in alive)


def any_schedule(
    m: int, devices: Sequence[int], *, seed: int, halves: bool, in_order: bool
) -> Schedule:
    """A random valid schedule.

    Args:
        m: number of micro-batches.
        devices: for each stage the index of its device.
        seed: of the choices.
        halves: whether some backwards are split.
        in_order: whether each stage goes forward in the order of the micro-batches, as it must
            for layers that count them.
    """
    chance = random.Random(seed)
    n = len(devices)
    cells = [(i, j) for i in range(m) for j in range(n)]
    splits = {cell for cell in cells if halves and chance.random() < 0.5}
    left = [Action("forward", *cell) for cell in cells]
    for i, j in cells:
        kinds: Any = ["backward_input", "backward_weight"] if (i, j) in splits else ["backward"]
        left += [Action(kind, i, j) for kind in kinds]
    rows: list[list[Action]] = [[] for _ in range(max(devices) + 1)]
    done: set[Action] = set()

    def can_start(action: Action) -> bool:
        kind, i, j = action
        needed = {Action("forward", i, j)}
        if kind == "forward":
            needed = {Action("forward", i, j - 1)} if j else set()
            if in_order and i:
                needed.add(Action("forward", i - 1, j))
        elif kind == "backward_weight":
            needed = {Action("backward_input", i, j)}
        elif j + 1 < n:
            after: Any = "backward_input" if (i, j + 1) in splits else "backward"
            needed.add(Action(after, i, j + 1))
        return needed <= done

    while left:
        action = chance.choice([action for action in left if can_start(action)])
        left.remove(action)
        done.add(action)
        rows[devices[action.j]].append(action)
    return Schedule(m, tuple(devices), tuple(map(tuple, rows)), "any")


#: As ``RUNS``, with random schedules too.
ANY_RUNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    **RUNS,
    **{
        f"any {seed}": (
            {"schedule": partial(any_schedule, seed=seed, halves=True, in_order=True)}, FOUR
        )
        for seed in range(5)
    },
}  # fmt: skip


# --- the reference: the plain model, micro-batch by micro-batch ----------------------------------


def size_of(tree: Any) -> int:
    """The length of the first tensor."""
    return next(len(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def own_leaves(piece: Any) -> Any:
    """Leaves of a graph in the same memory: its alignment can decide the last bit."""
    return pytree.tree_map_only(Tensor, lambda t: t.data.requires_grad_(t.requires_grad), piece)


def go_back(
    roots: Sequence[tuple[Sequence[Tensor], Any]],
    leaves: Mapping[str, Tensor],
    orders: Sequence[Sequence[int]],
    balance: Sequence[int],
    replicas: Sequence[int] | None = None,
    *,
    at_once: bool = False,
) -> None:
    """Each micro-batch goes back by itself, from tensors with their gradients.

    Its gradients are added to those of leaves, whose names begin with the number of a layer, in the
    order of that layer's stage, those of replicas one by one; or, ``at_once``, their sum is.
    """

    def add_grad(leaf: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad

    before = [leaf.grad for leaf in leaves.values()]
    grads = []
    for ends, given in roots:
        for leaf in leaves.values():
            leaf.grad = None
        if any(end.requires_grad for end in ends):
            torch.autograd.backward(ends, given)
        grads.append([None if t.grad is None else t.grad.clone() for t in leaves.values()])
    stages = [j for j, size in enumerate(balance) for _ in range(size)]
    for k, (name, leaf) in enumerate(leaves.items()):
        leaf.grad = before[k]
        j = stages[int(name.split(".")[0])]
        r = 1 if replicas is None else replicas[j]
        whole = torch.empty_like(leaf, requires_grad=True) if at_once else leaf
        for replica in range(r):
            total = torch.empty_like(leaf, requires_grad=True) if replica else whole
            for i in orders[j]:
                if i % r == replica:
                    add_grad(total, grads[i][k])
            if replica:
                add_grad(whole, total.grad)
        if at_once:
            add_grad(leaf, whole.grad)


def orders_of(schedule: Schedule) -> list[list[int]]:
    """For each stage the order in which micro-batches go back."""
    back = ("backward", "backward_input")
    return [
        [a.i for row in schedule.actions for a in row if a.j == j and a.kind in back]
        for j in range(schedule.n)
    ]


def assert_trains_as(
    pipe: Pipe, plain: nn.Sequential, x: Tensor, target: Tensor | None = None, *, loss_fn: Any,
    schedule: Any = "1f1b", tolerance: dict[str, float] | None = None, **options: Any,
) -> None:  # fmt: skip
    """A step equals the loop over micro-batches of the plain model, whose ``.grad`` are added to.

    ``loss_fn`` gives a mean over the samples.
    """
    mine, theirs = (x.detach().clone().requires_grad_(x.requires_grad) for _ in range(2))
    pieces, m = [own_leaves(piece) for piece in theirs.chunk(pipe.chunks)], pipe.chunks
    targets = [()] * m if target is None else [(piece,) for piece in target.chunk(m)]
    plan, outputs, shares = schedule_of(pipe, len(pieces), schedule), [], []
    for piece, goal in zip(pieces, targets, strict=False):
        outputs.append(plain(piece))
        shares.append(loss_fn(outputs[-1], *goal) * (len(piece) / len(x)))
    roots, parameters = [([share], None) for share in shares], dict(plain.named_parameters())
    go_back(roots, parameters, orders_of(plan), pipe.balance, pipe.replicas)
    if x.requires_grad:
        theirs.grad = torch.cat([piece.grad for piece in pieces])
    loss = sum([share.detach() for share in shares[1:]], shares[0].detach())
    expected = seen(plain, theirs, torch.cat(outputs), loss)
    options |= {"loss_fn": loss_fn, "schedule": schedule, "return_outputs": True}
    loss, output = pipe.train_batch(mine, target, **options)
    assert not loss.requires_grad
    assert not output.requires_grad
    rounded = ("parameter_grads",) if plan.splits else ()
    actual = seen(pipe, mine, output, loss)
    assert_same(actual, expected, "the step's ", rounded=rounded, **(tolerance or {}))
