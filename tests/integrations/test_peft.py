"""LoRA adapters of ``peft`` in language models of Hugging Face: gradients, memory, names, files."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import Pipe, inline, sequential
from tests.integrations.loops import llama
from tests.support.watched import Memory, alive

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")
safetensors: Any = pytest.importorskip("safetensors")

CHUNKS = 4
TOKENS = 48


def gpt2(dropout: float) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_embd=32, n_layer=4, n_head=4, n_positions=32, use_cache=False,
        bos_token_id=1, eos_token_id=2, attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama_of_four(dropout: float) -> nn.Module:
    return llama(num_hidden_layers=4, attention_dropout=dropout)


TARGETS = {gpt2: ["c_attn", "c_fc"], llama_of_four: ["q_proj", "v_proj", "down_proj"]}
both = pytest.mark.parametrize("base", TARGETS, ids=["gpt2", "llama"])
modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])


def adapted(base: Callable[..., nn.Module], blocks: list[int], dropout: float = 0.0) -> Any:
    """A model with adapters in some of its four blocks, none of which is zero."""
    torch.manual_seed(3)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_dropout=dropout, target_modules=TARGETS[base],
        layers_to_transform=blocks, fan_in_fan_out=base is gpt2,
    )  # fmt: skip
    model = peft.get_peft_model(base(dropout), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return model


def batch() -> tuple[dict[str, Tensor], Tensor]:
    """Padded sentences, and labels, which are -100 where these are padded."""
    lengths = torch.tensor([9, 4, 12, 7, 3, 12, 12, 5])
    mask = (torch.arange(12) < lengths[:, None]).long()
    ids = torch.randint(3, TOKENS, (8, 12)) * mask
    return {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)


def loss_fn(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def count(labels: Tensor) -> Tensor:
    return (labels[:, 1:] != -100).sum()


def chunks_of(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    rows = zip(*(tensor.chunk(CHUNKS) for tensor in tensors.values()), strict=True)
    return [dict(zip(tensors, row, strict=True)) for row in rows]


def piped(model: nn.Module, sizes: list[int] | str = "uniform", **options: Any) -> Pipe:
    """A pipe of two stages, or of as many as there are sizes."""
    sample, _ = batch()
    layers = sequential(model, **{name: tensor[:2] for name, tensor in sample.items()})
    devices = ["cpu:0", "cpu:1", "cpu:2"]
    if sizes == "uniform":
        devices = devices[:2]
    return Pipe(layers, sizes, devices=devices, chunks=CHUNKS, **options)


@both
@modes
@pytest.mark.parametrize("blocks", [[0, 1, 2, 3], [2, 3]], ids=["all", "last"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradients_are_those_of_the_plain_loop(base, blocks, checkpoint, schedule):
    model = adapted(base, blocks)
    plain = copy.deepcopy(model)
    pipe = piped(model, checkpoint=checkpoint)
    inputs, labels = batch()
    total = count(labels)
    pairs = list(zip(chunks_of(inputs), labels.chunk(CHUNKS), strict=True))
    if schedule == "gpipe":  # the last one goes back first
        pairs.reverse()
    for piece, answer in pairs:
        (loss_fn(plain(**piece), answer) * (count(answer) / total)).backward()
    pipe.train_batch(inputs, labels, loss_fn=loss_fn, weight=count, schedule=schedule)
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == ("lora_" not in name), name
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, theirs[name].grad), name


@both
@modes
@pytest.mark.parametrize("driver", ["train_batch", "pipe(x)"])
def test_stages_before_the_first_adapter_record_no_graph_and_hold_nothing(base, checkpoint, driver):
    model = adapted(base, [3], dropout=0.1)
    trained = [any(p.requires_grad for p in layer.parameters()) for layer in piped(model)]
    n = trained.index(True) - 1  # with the normalization before it, whose output it stores
    pipe = piped(model, [n // 2, n - n // 2, len(trained) - n], checkpoint=checkpoint)
    frozen = [m for j in (0, 1) for m in pipe.partitions[j].modules() if not any(m.children())]
    made: list[Memory] = []
    held: list[int] = []
    calls: Counter[nn.Module] = Counter()

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        calls[module] += 1
        tensors = [output] if isinstance(output, Tensor) else output
        assert not any(tensor.requires_grad for tensor in tensors)
        if "Rotary" not in type(module).__name__:  # all blocks use these, also the trained one
            made.extend(map(Memory, tensors))

    for module in frozen:
        module.register_forward_hook(watch)

    def noted(output: Any, labels: Tensor) -> Tensor:
        held.append(alive(made))
        return loss_fn(output, labels)

    inputs, labels = batch()
    with inline():
        for _ in range(2):  # in its first call a pipe works on copies of inputs
            for seen in (made, held, calls):
                seen.clear()
            if driver == "train_batch":
                pipe.train_batch(inputs, labels, loss_fn=noted, weight=count, schedule="gpipe")
            else:
                noted(pipe(**inputs), labels).backward()
    assert made
    assert held[-1] == 0  # by then all have gone forward, and none has gone back
    assert set(calls.values()) == {CHUNKS}  # nothing is computed again


@both
def test_only_adapters_are_saved_and_they_load_into_the_plain_model(base, tmp_path):
    model = adapted(base, [1, 3])
    names = list(peft.get_peft_model_state_dict(copy.deepcopy(model)))
    keys = model.state_dict().keys()
    pipe = piped(model)
    assert pipe.state_dict().keys() == keys
    optimizer = torch.optim.SGD([p for p in pipe.parameters() if p.requires_grad], lr=0.1)
    inputs, labels = batch()
    pipe.train_batch(inputs, labels, loss_fn=loss_fn, weight=count)
    optimizer.step()
    model.save_pretrained(tmp_path)
    state = peft.get_peft_model_state_dict(model)
    assert list(state) == names
    assert all("lora_" in name for name in names)
    saved = safetensors.safe_open(tmp_path / "adapter_model.safetensors", framework="pt")
    assert set(saved.keys()) == set(names)

    torch.manual_seed(3)  # the base as it was made
    loaded = peft.PeftModel.from_pretrained(base(0.0), tmp_path).eval()
    pipe.eval()
    with torch.no_grad():
        expected = torch.cat([loaded(**piece).logits for piece in chunks_of(inputs)])
        assert torch.equal(pipe(**inputs).logits, expected)
        loaded.disable_adapter_layers()
        assert not torch.equal(loaded(**inputs).logits, expected)


@both
def test_batches_of_other_lengths_and_without_padding(base):
    model = adapted(base, [2])
    pipe = piped(model).eval()
    plain = copy.deepcopy(model).eval()
    inputs, _ = batch()
    for size, length in [(8, 12), (7, 5), (1, 3)]:
        cut = {name: tensor[:size, :length] for name, tensor in inputs.items()}
        full = {**cut, "attention_mask": torch.ones_like(cut["attention_mask"])}
        for given in (cut, full):
            expected = torch.cat([plain(**piece).logits for piece in chunks_of(given)])
            assert torch.equal(pipe(**given).logits, expected)
