"""``loss_fn`` and ``data_iter`` that use the pipe which calls them."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from syncpipe import Pipe, inline
from tests.support.models import linear_model
from tests.support.running import pipe_of

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(16, 6, generator=torch.Generator().manual_seed(2))


def pieces():
    return zip(X.chunk(4), Y.chunk(4), strict=True)


def stream(pipe, **given):
    return pipe.train_stream(
        given["data_iter"], optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=given["loss_fn"]
    )


CALLS = {
    "train_batch": Pipe.train_batch,
    "eval_batch": Pipe.eval_batch,
    "stream": stream,
    "pipe(x)": lambda pipe, **given: pipe(X),
}
#: What would change gradients or modes, or see weights of no one moment.
REFUSED = [*product(["train_batch", "eval_batch"], list(CALLS)[:3]), *product(["stream"], CALLS)]


@pytest.mark.parametrize("context", [inline, torch.enable_grad], ids=["inline", "workers"])
@pytest.mark.parametrize("where", ["loss_fn", "data_iter"])
@pytest.mark.parametrize(("outer", "inner"), REFUSED)
def test_what_changes_gradients_modes_or_weights_is_refused_inside(outer, inner, where, context):
    pipe = pipe_of(linear_model(width=6))

    def again():
        CALLS[inner](pipe, data_iter=iter(pieces()), loss_fn=F.mse_loss)

    def loss_fn(output, target):
        if where == "loss_fn":
            again()
        return F.mse_loss(output, target)

    def data():
        for x, y in pieces():
            if where == "data_iter":
                again()
            yield x, y

    message = "(inside of a call of the same pipe|inside its own train_stream)"
    with context():
        with pytest.raises(RuntimeError, match=message):
            CALLS[outer](pipe, data_iter=data(), loss_fn=loss_fn)
        assert all(p.grad is None for p in pipe.parameters())
        assert all(module.training for module in pipe.modules())
        pipe.train_batch(X, Y, loss_fn=F.mse_loss)
        pipe.eval_batch(X)
