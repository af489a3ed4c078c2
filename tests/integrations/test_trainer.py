"""The recipe for transformers' ``Trainer`` on docs/one-call.md, beside the plain ``Trainer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from syncpipe import Pipe, sequential
from tests.integrations.loops import llama
from tests.test_docs import ROOT, blocks_of

transformers: Any = pytest.importorskip("transformers")
safetensors: Any = pytest.importorskip("safetensors.torch")
datasets: Any = pytest.importorskip("datasets")
pytest.importorskip("accelerate")

CHUNKS, STEPS, LENGTH = 4, 20, 12


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def recipe() -> Any:
    """The class of the page."""
    session: dict[str, Any] = {}
    for block in blocks_of(ROOT / "docs" / "one-call.md"):
        if "class PipeTrainer" in block.text:
            exec(block.text, session)
    return session["PipeTrainer"]


def model() -> Any:
    torch.manual_seed(0)
    made = llama(vocab_size=64, hidden_size=16, intermediate_size=32).double()
    made.loss_function = loss_function
    return made


def loss_function(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> Tensor:
    """The library's own, which goes down to single precision."""
    flat, target = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if num_items_in_batch is None:
        return F.cross_entropy(flat, target)
    return F.cross_entropy(flat, target, reduction="sum") / num_items_in_batch


def data(count: int) -> Any:
    """Padded rows whose labels are -100 there, and a column that no model takes."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (count, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.randint(4, LENGTH, (count, 1), generator=generator)).long()
    mask[::3] = 1
    labels = ids.masked_fill(mask == 0, -100)
    columns = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    rows = {name: tensor.tolist() for name, tensor in columns.items()}
    return datasets.Dataset.from_dict({**rows, "idea": ["not for the model"] * count})


def arguments(folder: Path, *, batch: int, accumulate: int, **options: Any) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=batch, use_cpu=True,
        gradient_accumulation_steps=accumulate, per_device_eval_batch_size=8, max_steps=STEPS,
        learning_rate=0.01, lr_scheduler_type="cosine", warmup_steps=3, max_grad_norm=0.5,
        logging_steps=1, eval_strategy="steps", eval_steps=5, save_steps=5, report_to=[],
        disable_tqdm=True, seed=0, **options,
    )  # fmt: skip


def piped(model: Any) -> Pipe:
    ones = torch.ones(2, LENGTH, dtype=torch.long)
    layers = sequential(model, input_ids=ones, attention_mask=ones)
    return Pipe(layers, "uniform", devices=["cpu:0", "cpu:1"], chunks=CHUNKS)


def collated(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    assert all(set(row) == {"input_ids", "attention_mask", "labels"} for row in rows)
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def trained(folder: Path, *, pipe: bool, accumulate: int = 1, **options: Any) -> Any:
    """A trainer after twenty steps: of mini-batches, or of one micro-batch after another."""
    made = model()
    batch, times = (8, accumulate) if pipe else (8 // CHUNKS, accumulate * CHUNKS)
    common: dict[str, Any] = {
        "args": arguments(folder, batch=batch, accumulate=times, **options),
        "train_dataset": data(64), "eval_dataset": data(12), "data_collator": collated,
    }  # fmt: skip
    trainer = (
        recipe()(piped(made), made, **common) if pipe else transformers.Trainer(made, **common)
    )
    step, trainer.losses = trainer.training_step, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        loss = step(*args, **kwargs)
        trainer.losses.append(loss.double().item())
        return loss

    trainer.training_step = noted  # what it logs are sums in single precision
    trainer.train()
    trainer.losses = [sum(trainer.losses[k : k + times]) for k in range(0, STEPS * times, times)]
    return trainer


def logged(trainer: Any) -> list[dict[str, float]]:
    names = ("learning_rate", "grad_norm", "eval_loss", "step")
    rows = [{n: row[n] for n in names if n in row} for row in trainer.state.log_history]
    return [row for row in rows if len(row) > 1]


def assert_same(mine: Any, theirs: Any) -> None:
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-10)
    for a, b in zip(logged(mine), logged(theirs), strict=True):
        assert a == pytest.approx(b, rel=1e-10, abs=1e-10)
    torch.testing.assert_close(
        dict(mine.model.state_dict()), dict(theirs.model.state_dict()), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_learning_rate_evaluation_and_weights_are_those_of_the_plain_trainer(
    accumulate, tmp_path
):
    """With as many accumulation steps as there are micro-batches, after twenty steps."""
    mine, theirs = (
        trained(tmp_path / name, pipe=name == "mine", accumulate=accumulate)
        for name in ("mine", "theirs")
    )
    assert len(logged(mine)) >= STEPS + STEPS // 5
    assert_same(mine, theirs)
    load = transformers.LlamaForCausalLM.from_pretrained
    saved = [load(tmp_path / name / f"checkpoint-{STEPS}") for name in ("mine", "theirs")]
    torch.testing.assert_close(*(dict(one.state_dict()) for one in saved), rtol=1e-6, atol=1e-6)


def test_it_resumes_and_loads_the_best_model(tmp_path):
    """From the middle, in a pipe of its own, to the same end."""
    options = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    whole = trained(tmp_path / "whole", pipe=True, **options)
    best = Path(whole.state.best_model_checkpoint)
    loaded = transformers.LlamaForCausalLM.from_pretrained(best, dtype=torch.float64)
    torch.testing.assert_close(dict(whole.model.state_dict()), dict(loaded.state_dict()))
    made = model()
    resumed = recipe()(
        piped(made), made, args=arguments(tmp_path / "again", batch=8, accumulate=1, **options),
        train_dataset=data(64), eval_dataset=data(12), data_collator=collated,
    )  # fmt: skip
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-10"))
    resumed.losses = whole.losses
    assert_same(resumed, whole)


def test_supervised_fine_tuning_of_trl(tmp_path):
    """Adapters of peft: the losses of ``SFTTrainer`` alone, and the adapters that it saves."""
    trl: Any = pytest.importorskip("trl")
    peft: Any = pytest.importorskip("peft")

    class PipeSFTTrainer(recipe(), trl.SFTTrainer):
        pass

    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
    losses, adapters = [], []
    for pipe in (True, False):
        made = peft.get_peft_model(model(), config).double()
        times = 1 if pipe else CHUNKS
        common: dict[str, Any] = {
            "train_dataset": data(32).remove_columns(["idea", "labels", "attention_mask"]),
            "processing_class": tokenizer(),
            "args": trl.SFTConfig(
                output_dir=str(tmp_path / str(pipe)), per_device_train_batch_size=8 // times,
                gradient_accumulation_steps=times, max_steps=4, use_cpu=True, learning_rate=0.05,
                logging_steps=1, save_steps=4, report_to=[], disable_tqdm=True, bf16=False,
                gradient_checkpointing=False,
            ),
        }  # fmt: skip
        trainer: Any = (
            PipeSFTTrainer(piped(made), made, **common) if pipe else trl.SFTTrainer(made, **common)
        )
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        file = tmp_path / str(pipe) / "checkpoint-4" / "adapter_model.safetensors"
        adapters.append(safetensors.load_file(file))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(*adapters, rtol=1e-5, atol=1e-6)


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{k}": k for k in range(62)} | {"<pad>": 62, "<eos>": 63}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        pad_token="<pad>", eos_token="<eos>",
    )  # fmt: skip
