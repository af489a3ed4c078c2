"""``Pipe(deferred_batch_norm=True)``: running statistics of whole mini-batches."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.support.running import MODES, pipe_of, weigh


def model(momentum=0.1):
    return nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Identity(), nn.Linear(4, 2)
    )


def deferred(module, mode="except_last", chunks=4):
    return pipe_of(module, [2, 2], chunks=chunks, checkpoint=mode, deferred_batch_norm=True)


@pytest.mark.parametrize("momentum", [0.1, None, 0.0, 1.0])
@pytest.mark.parametrize("batch", [16, 11, 6, 3])  # 6: three micro-batches for four chunks
@pytest.mark.parametrize("mode", MODES)
def test_running_statistics_are_those_of_the_whole_mini_batch(mode, batch, momentum):
    module = model(momentum)
    whole = copy.deepcopy(module)
    pipe = deferred(module, mode, chunks=4 if batch > 3 else 1)
    for _ in range(3):
        x = torch.randn(batch, 4) * 3 + 1
        weigh(pipe(x)).backward()
        whole(x)
    ours, theirs = pipe[1], whole[1]
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    assert ours.num_batches_tracked == theirs.num_batches_tracked == 3


def test_a_large_mean_does_not_spoil_the_variance():
    pipe = pipe_of(
        nn.Sequential(nn.BatchNorm1d(1, momentum=None), nn.Identity()),
        chunks=8,
        deferred_batch_norm=True,
    )
    x = torch.randn(4096, 1) + 10_000
    pipe(x)
    torch.testing.assert_close(pipe[0].running_var, x.double().var(0).float(), rtol=1e-3, atol=0)
    torch.testing.assert_close(pipe[0].running_mean, x.double().mean(0).float())


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_are_normalised_by_themselves_and_gradients_are_unchanged(mode):
    module = model()
    x = torch.randn(16, 4)
    results = []
    for flag in (True, False):
        copied = copy.deepcopy(module)
        pipe = pipe_of(copied, [2, 2], checkpoint=mode, deferred_batch_norm=flag)
        y = pipe(x)
        weigh(y).backward()
        results.append([y.detach(), *(p.grad for p in pipe.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_evaluation_uses_the_running_statistics_and_leaves_them():
    module = model()
    pipe = deferred(module)
    pipe(torch.randn(16, 4))
    pipe.eval()
    before = copy.deepcopy(pipe.state_dict())
    x = torch.randn(5, 4)
    plain = model()
    plain.load_state_dict(before)
    torch.testing.assert_close(pipe(x), plain.eval()(x))
    for key, value in pipe.state_dict().items():
        assert torch.equal(value, before[key])


def test_the_users_module_keeps_its_layers():
    module = model()
    norm, keys = module[1], list(module.state_dict())
    pipe = deferred(module)
    assert module[1] is pipe[1] is norm
    assert isinstance(norm, nn.BatchNorm1d)
    assert list(pipe.state_dict()) == keys
    pipe(torch.randn(16, 4))
    assert norm.num_batches_tracked == 1


def test_outside_of_the_pipe_the_layers_do_as_before():
    module = model()
    plain = copy.deepcopy(module)
    deferred(module)
    not_deferred = pipe_of(module, [2, 2], chunks=4)
    for x in torch.randn(3, 16, 4):
        assert torch.equal(module(x), plain(x))
        assert torch.equal(not_deferred(x), torch.cat([plain(c) for c in x.chunk(4)]))
    for ours, theirs in zip(module.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_layer_that_is_put_in_later_is_deferred_too():
    pipe = deferred(model())
    setattr(pipe, "1", nn.BatchNorm1d(4))
    pipe(torch.randn(16, 4))
    assert pipe[1].num_batches_tracked == 1


@pytest.mark.parametrize("transfer", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_of_the_pipe_defers(transfer):
    pipe = transfer(deferred(model()))
    pipe.balance = [1, 3]
    pipe(torch.randn(16, 4))
    assert pipe[1].num_batches_tracked == 1


def test_what_cannot_be_deferred_is_refused_and_nothing_is_changed():
    module = nn.Sequential(nn.BatchNorm1d(4), nn.SyncBatchNorm(4))
    with pytest.raises(TypeError, match="SyncBatchNorm at '1'"):
        pipe_of(module, [1, 1], deferred_batch_norm=True)
    assert type(module[0]) is nn.BatchNorm1d


def test_a_mini_batch_that_fails_leaves_no_trace():
    pipe = deferred(model())
    before = copy.deepcopy(pipe.state_dict())
    fail = pipe[0].register_forward_pre_hook(lambda _, args: 1 // (len(args[0]) - 3) and None)
    with pytest.raises(ZeroDivisionError):
        pipe(torch.randn(15, 4))  # the last micro-batch has three samples
    fail.remove()
    for key, value in pipe.state_dict().items():
        assert torch.equal(value, before[key])
    whole = model()
    whole.load_state_dict(before)
    x = torch.randn(16, 4)
    pipe(x)
    whole(x)
    torch.testing.assert_close(pipe[1].running_var, whole[1].running_var)
