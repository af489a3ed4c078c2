"""LoRA adapters of ``peft`` in language models of Hugging Face: names, files, any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from syncpipe import Pipe, sequential
from tests.integrations.loops import llama
from tests.support.models import cut

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")

CHUNKS = 4
TOKENS = 48


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_embd=32, n_layer=4, n_head=4, n_positions=32, use_cache=False,
        bos_token_id=1, eos_token_id=2, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


TARGETS = {gpt2: ["c_attn", "c_fc"], llama: ["q_proj", "v_proj", "down_proj"]}


@pytest.mark.parametrize("base", TARGETS)
def test_adapters_train_and_load_into_the_plain_model_also_for_batches_of_other_lengths(
    base: Callable[[], nn.Module], tmp_path: Any
) -> None:
    torch.manual_seed(3)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=TARGETS[base], layers_to_transform=[1, 2],
        fan_in_fan_out=base is gpt2,
    )  # fmt: skip
    model = peft.get_peft_model(base(), config)
    keys = model.state_dict().keys()
    lengths = torch.tensor([9, 4, 12, 7, 3, 12, 12, 5])
    mask = (torch.arange(12) < lengths[:, None]).long()
    inputs = {"input_ids": torch.randint(3, TOKENS, (8, 12)) * mask, "attention_mask": mask}
    layers = sequential(model, **{name: tensor[:2] for name, tensor in inputs.items()})
    pipe = Pipe(layers, "uniform", devices=["cpu:0", "cpu:1"], chunks=CHUNKS)
    assert pipe.state_dict().keys() == keys
    optimizer = torch.optim.SGD([p for p in pipe.parameters() if p.requires_grad], lr=10.0)
    pipe.train_batch(inputs, loss_fn=lambda output: output.logits.square().mean())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == ("lora_" not in name), name
    optimizer.step()
    model.save_pretrained(tmp_path)

    torch.manual_seed(3)  # the base as it was made
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path).eval()
    pipe.eval()
    for size, length in [(8, 12), (7, 5), (1, 3)]:
        part = {name: tensor[:size, :length] for name, tensor in inputs.items()}
        full = {**part, "attention_mask": torch.ones_like(part["attention_mask"])}
        for given in (part, full):
            expected = torch.cat([loaded(**piece).logits for piece in cut(given, CHUNKS)])
            assert torch.equal(pipe(**given).logits, expected)
    with loaded.disable_adapter():
        assert not torch.equal(loaded(**inputs).logits[:, :3], pipe(**inputs).logits[:, :3])
