"""A data-parallel pipe is the pipe that it was."""

from __future__ import annotations

import pytest
from torch import nn

from syncpipe import Pipe
from syncpipe.distributed import broadcast_buffers, data_parallel


def test_all_begin_with_the_values_of_process_0(three):
    (keys, first), *others = three.run("module:values")
    assert keys[:3] == ["0.weight", "0.bias", "1.weight"]
    assert all(values == first for _, values in others)


def test_copies_are_alone(two):
    found, _ = two.run("module:copies")
    assert found[::2] == ["nothing"] * 2
    assert all(
        told.startswith("RuntimeError: no_sync() is for a pipe in sev") for told in found[1::2]
    )


def test_eval_batch_here_and_everywhere(three):
    for *differences, training in three.run("module:evaluated"):
        assert max(differences) < 1e-12
        assert training


def test_buffers_are_those_of_each_process_until_asked_for(two):
    assert two.run("module:batch_norm") == [[True, True]] * 2


def test_what_layers_draw_is_alike_where_seeds_are(two):
    a, b = two.run("module:draws", True)
    assert a == b
    a, b = two.run("module:draws", False)
    assert a != b


def test_the_last_stage_is_reduced_while_the_first_one_goes_back(two):
    # 6 x 6 + 6 of the first layer and of the second stage; two layers of the third.
    for sizes in two.run("module:overlap"):
        assert sizes[0] == 42 + 42 // 2
        assert sizes[1:] == [42, 42]


def test_backward_of_pipe_x_is_refused_and_that_of_one_process_alone_is_not(two):
    for refused, evaluated, difference in two.run("module:pipe_x"):
        assert refused.startswith("RuntimeError: backward through pipe(x) of a data-parallel pipe")
        assert "DistributedDataParallel" in refused
        assert evaluated == "nothing"
        assert difference < 1e-12


def test_some_of_the_processes(three):
    assert max(three.run("module:subgroup")) < 1e-12


def test_nothing_is_left_of_a_pipe_that_is_gone(two):
    for before, during, after in two.run("module:dropped"):
        assert during > before
        assert after <= before


def test_a_fork_is_refused(two):
    for told in two.run("module:fork"):
        assert told.startswith("RuntimeError: this process is a fork")


def test_steps_leave_nothing_behind(two):
    assert two.run("module:many_steps") == [True, True]


def test_arguments():
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu:0"])
    with pytest.raises(TypeError, match="data_parallel takes a Pipe, not Linear"):
        data_parallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="bucket_mb=0: it is a number of megabytes"):
        data_parallel(pipe, bucket_mb=0)
    with pytest.raises(ValueError, match="timeout=-1: it is a number of seconds"):
        data_parallel(pipe, timeout=-1)
    with pytest.raises(RuntimeError, match="init_process_group"):
        data_parallel(pipe)
    with pytest.raises(ValueError, match="takes a pipe that data_parallel has returned"):
        broadcast_buffers(pipe)
    with pytest.raises(ValueError, match="global_loss=True, but this pipe knows of no other"):
        pipe.train_batch(None, loss_fn=nn.MSELoss(), global_loss=True)
    with pytest.raises(RuntimeError, match=r"no_sync\(\) is for a pipe in several processes"):
        pipe.no_sync()
