"""``pipelined(Trainer)`` beside the plain Trainer on one device: the same losses and weights."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from syncpipe import Pipe
from syncpipe.integrations.transformers import LossModel, pipelined
from tests.integrations.loops import llama
from tests.simulated import unavailable
from tests.test_docs import ROOT

transformers: Any = pytest.importorskip("transformers")
safetensors: Any = pytest.importorskip("safetensors.torch")
datasets: Any = pytest.importorskip("datasets")
pytest.importorskip("accelerate")

STEPS, LENGTH, ROWS = 3, 12, 24
TABLE = ROOT / "benchmarks" / "results" / "trainers.md"
#: For each row of the table the largest differences of what was logged, and of weights.
FOUND: dict[str, tuple[float, float]] = {}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {f"w{k}": k for k in range(62)} | {"<pad>": 62, "<eos>": 63}
    made = Tokenizer(WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>"
    )


def language_model(**options: Any) -> Any:
    torch.manual_seed(0)
    return llama(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, pad_token_id=62,
        eos_token_id=63, initializer_range=0.3, **options,
    )  # fmt: skip


def bert(kind: str) -> Any:
    """Without biases of keys: their gradients are zero but for rounding, which Adam scales up."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    made = getattr(transformers, f"BertFor{kind}Classification")(config)
    for layer in made.bert.encoder.layer:
        layer.attention.self.key.bias.requires_grad_(False)
    return made


MODELS: dict[str, Any] = {
    "language model": language_model,
    "tokens": lambda: bert("Token"),
    "sequences": lambda: bert("Sequence"),
}


def rows(kind: str = "language model", count: int = ROWS) -> list[dict[str, Any]]:
    """Padded rows of unlike lengths, with labels that are ignored there, and one idle column."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(62, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < torch.randint(4, LENGTH, (1,), generator=generator)).long()
        labels = {
            "language model": ids.masked_fill(mask == 0, -100),
            "tokens": (ids % 3).masked_fill(mask == 0, -100),
            "sequences": ids[0] % 3,
        }[kind]
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels, "idea": ids})
    return found


def two_stages(layers: Any) -> Pipe:
    return Pipe(layers, "uniform", devices=["cpu:0", "cpu:1"], chunks=4)


def arguments(folder: Path, kind: Any = None, **options: Any) -> Any:
    common: dict[str, Any] = {
        "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "max_steps": STEPS,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "learning_rate": 0.01, "eval_strategy": "steps", "eval_steps": 2,
    }  # fmt: skip
    return (kind or transformers.TrainingArguments)(str(folder), **{**common, **options})


def trained(trainer: Any, *args: Any, piped: bool, resume: Any = None, **options: Any) -> Any:
    """A trainer after its steps, in two stages or plain."""
    made = (
        pipelined(trainer)(*args, pipe=two_stages, **options)
        if piped
        else trainer(*args, **options)
    )
    made.train(resume_from_checkpoint=resume)
    if piped:
        assert len(made.pipe.balance) == 2
    return made


def assert_same(mine: Any, theirs: Any, tolerance: float = 1e-5, row: str = "") -> None:
    """All that was logged, and the weights; ``row`` is that of the table."""
    timed, logged = ("runtime", "per_second"), [0.0]
    for a, b in zip(mine.state.log_history, theirs.state.log_history, strict=True):
        a, b = ({k: v for k, v in x.items() if not k.endswith(timed)} for x in (a, b))
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance)
        logged += [abs(a[k] - b[k]) for k in a if isinstance(a[k], float)]
    weights = [dict(each.model.state_dict()) for each in (mine, theirs)]
    torch.testing.assert_close(*weights, rtol=10 * tolerance, atol=10 * tolerance)
    pairs = [(w.double(), weights[1][name].double()) for name, w in weights[0].items()]
    FOUND[row] = max(logged), max(float((a - b).abs().max()) for a, b in pairs)


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, target = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, target, reduction="sum") / num_items_in_batch


def averaged(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def accuracy(prediction: Any) -> dict[str, float]:
    labels = prediction.label_ids
    found = prediction.predictions.argmax(-1) == labels
    return {"accuracy": float(found[labels != -100].mean())}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("language model", {}),
    ("language model", {"gradient_accumulation_steps": 2}),
    ("language model", {"label_smoothing_factor": 0.5}),
    ("language model", {"compute_loss_func": summed}),
    ("language model", {"compute_loss_func": averaged}),
    ("language model", {"gradient_checkpointing": True, "max_grad_norm": 0.1}),
    ("language model", {"train_sampling_strategy": "group_by_length"}),
    ("language model", {"bf16": True}),
    ("language model", {"torch_compile": True, "torch_compile_backend": "eager"}),
    ("language model", {"weight_decay": 0.1, "warmup_steps": 2}),
    ("tokens", {"gradient_accumulation_steps": 2, "optim": "adafactor"}),
    ("tokens", {"label_smoothing_factor": 0.3, "compute_metrics": accuracy}),
    ("sequences", {"compute_metrics": accuracy, "lr_scheduler_type": "cosine"}),
]


def row_of(kind: str, options: dict[str, Any]) -> str:
    """The row of the table of a case."""
    shown = ", ".join(f"`{k}={getattr(v, '__name__', repr(v))}`" for k, v in options.items())
    return f"`Trainer`, {kind} | {shown}"


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_losses_metrics_and_weights_are_those_of_the_plain_trainer(kind, options, tmp_path):
    names = {"compute_loss_func", "compute_metrics"}
    given = {name: options[name] for name in names & options.keys()}
    args = {name: value for name, value in options.items() if name not in names}
    mine, theirs = (
        trained(
            transformers.Trainer, MODELS[kind](), arguments(tmp_path / str(piped), **args),
            piped=piped, train_dataset=rows(kind), eval_dataset=rows(kind, 11), **given,
        )
        for piped in (True, False)
    )  # fmt: skip
    assert_same(mine, theirs, 1e-2 if args.get("bf16") else 1e-5, row_of(kind, options))
    assert mine.pipe.checkpoint == ("always" if "gradient_checkpointing" in args else "except_last")


def test_it_saves_resumes_and_loads_the_best_model(tmp_path):
    options = {
        "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss", "max_steps": 6,
    }  # fmt: skip
    data = {"train_dataset": rows(), "eval_dataset": rows(count=11)}
    plain = transformers.Trainer
    whole, theirs, resumed = (
        trained(
            plain, language_model(), arguments(tmp_path / name, **options), **data,
            piped=name != "theirs",
            resume=str(tmp_path / "whole" / "checkpoint-2") if name == "resumed" else None,
        )
        for name in ("whole", "theirs", "resumed")
    )  # fmt: skip
    assert_same(whole, theirs, row=row_of("language model", {"load_best_model_at_end": True}))
    del resumed.state.log_history[-1]["train_loss"]  # of the steps since it resumed
    del whole.state.log_history[-1]["train_loss"]
    assert_same(resumed, whole)
    best = Path(whole.state.best_model_checkpoint)
    loaded = transformers.LlamaForCausalLM.from_pretrained(best)
    torch.testing.assert_close(dict(whole.model.state_dict()), dict(loaded.state_dict()))
    whole.model.save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 2
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "shards")
    torch.testing.assert_close(dict(whole.model.state_dict()), dict(loaded.state_dict()))


def texts(count: int = ROWS) -> dict[str, list[str]]:
    def text(k: int, n: int) -> str:
        return " ".join(f"w{(7 * k + 3 * i * i) % 60}" for i in range(n))

    return {
        "prompt": [text(k, 3) for k in range(count)],
        "chosen": [text(k + 1, 3 + k % 4) for k in range(count)],
        "rejected": [text(k + 9, 2 + k % 5) for k in range(count)],
        "text": [text(k, 5 + k % 6) for k in range(count)],
    }


def lora() -> Any:
    peft: Any = pytest.importorskip("peft")
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])


TRL = ["SFTTrainer", "SFTTrainer LoRA", "DPOTrainer", "DPOTrainer LoRA", "RewardTrainer"]


@pytest.mark.parametrize(
    ("kind", "columns", "options"),
    [
        ("SFT", ("text",), dict),
        ("SFT", ("text",), lambda: {"peft_config": lora()}),
        ("DPO", ("prompt", "chosen", "rejected"), lambda: {"ref_model": language_model()}),
        ("DPO", ("prompt", "chosen", "rejected"), lambda: {"peft_config": lora()}),
        ("Reward", ("chosen", "rejected"), dict),
    ],
    ids=TRL,
)
def test_the_trainers_of_trl(kind, columns, options, tmp_path, request):
    trl: Any = pytest.importorskip("trl")
    found = {name: column for name, column in texts().items() if name in columns}
    made = []
    for piped in (True, False):
        model = language_model()
        if kind == "Reward":
            torch.manual_seed(0)
            model.config.num_labels = 1
            model = transformers.LlamaForSequenceClassification(model.config)
        folder = tmp_path / str(piped)
        args = arguments(
            folder, getattr(trl, f"{kind}Config"), bf16=False, save_strategy="steps", save_steps=3,
            eval_strategy="no",
        )  # fmt: skip
        made.append(
            trained(
                getattr(trl, f"{kind}Trainer"), model, piped=piped, args=args,
                train_dataset=datasets.Dataset.from_dict(found), processing_class=tokenizer(),
                **options(),
            )
        )  # fmt: skip
    name, *how = request.node.callspec.id.split()
    assert_same(*made, row=f"{', '.join([f'`{name}`', *how])} | `save_steps=3`")
    names = ("adapter_model.safetensors", "model.safetensors")
    files = [
        next(path for name in names if (path := tmp_path / piped / "checkpoint-3" / name).exists())
        for piped in ("True", "False")
    ]
    torch.testing.assert_close(*map(safetensors.load_file, files), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "bits", [{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}]
)
def test_adapters_beside_quantized_weights(bits, tmp_path):
    """As with QLoRA; the adapters and the quantized weights are saved as the plain Trainer's."""
    bitsandbytes: Any = pytest.importorskip("bitsandbytes")
    peft: Any = pytest.importorskip("peft")
    if "load_in_4bit" in bits and bitsandbytes.functional.has_avx512bf16():
        pytest.skip("with AVX512-BF16 the first evaluation rounds weights of 4 bits, for good")
    language_model().save_pretrained(tmp_path / "base")
    made = []
    for piped in (True, False):
        model = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / "base", device_map={"": "cpu"},
            quantization_config=transformers.BitsAndBytesConfig(**bits),
        )  # fmt: skip
        torch.manual_seed(0)
        model = peft.get_peft_model(
            peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False), lora()
        )
        made.append(
            trained(
                transformers.Trainer, model, arguments(tmp_path / str(piped)), piped=piped,
                train_dataset=rows(), eval_dataset=rows(count=11),
            )
        )  # fmt: skip
    row = f"`Trainer`, LoRA beside quantized weights | `{next(iter(bits))}=True`"
    # In 8 bits activations are rounded as well, by the largest of a micro-batch.
    assert_same(*made, 1e-2 if "load_in_8bit" in bits else 1e-5, row)
    files = []
    for trainer, name in zip(made, ("mine", "theirs"), strict=True):
        trainer.model.save_pretrained(tmp_path / name)
        trainer.model.base_model.model.save_pretrained(tmp_path / name / "base")
        found = [tmp_path / name / "adapter_model.safetensors", tmp_path / name / "base"]
        files.append(
            [safetensors.load_file(each) for each in (found[0], *found[1].glob("*.safe*"))]
        )
    (adapters, weights), (their_adapters, their_weights) = files
    torch.testing.assert_close(adapters, their_adapters, rtol=1e-2, atol=1e-2)
    quantized = [k for k, w in weights.items() if not w.is_floating_point()]
    assert quantized
    assert all(torch.equal(weights[name], their_weights[name]) for name in quantized)


#: The shape of TRL's first example: a model by its name, conversations, and no other setting.
SCRIPT = """
from datasets import load_dataset
from trl import SFTTrainer

trainer = SFTTrainer(model="Qwen/Qwen3-0.6B", train_dataset=load_dataset("trl-lib/Capybara"))
trainer.train()
"""


@pytest.mark.parametrize("chat", [True, False])
def test_a_script_of_trl_changes_one_line_and_one_import(chat, tmp_path, monkeypatch):
    trl: Any = pytest.importorskip("trl")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    config = transformers.Qwen3Config(
        vocab_size=64, num_attention_heads=2, num_key_value_heads=1, pad_token_id=62, **sizes
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    words = tokenizer()
    words.chat_template = "{% for each in messages %}{{ each['content'] }} <eos> {% endfor %}"
    words.save_pretrained(tmp_path)
    texts = [" ".join(f"w{(k + i) % 62}" for i in range(LENGTH)) for k in range(ROWS)]
    talks = [[{"role": "user", "content": text}] for text in texts]
    data = datasets.Dataset.from_dict({"messages": talks} if chat else {"text": texts})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: data)
    small = {
        "use_cpu": True,
        "bf16": False,
        "max_steps": STEPS,
        "logging_steps": 1,
        "report_to": [],
    }
    monkeypatch.setattr(trl.trainer.sft_trainer, "SFTConfig", partial(trl.SFTConfig, **small))
    monkeypatch.chdir(tmp_path)
    plain = SCRIPT.replace("Qwen/Qwen3-0.6B", str(tmp_path))
    piped = plain.replace("= SFTTrainer(", "= pipelined(SFTTrainer)(")
    losses = []
    for script in (plain, "from syncpipe.integrations.transformers import pipelined\n" + piped):
        session: dict[str, Any] = {}
        exec(script, session)
        log = session["trainer"].state.log_history
        losses.append([each["loss"] for each in log if "loss" in each])
    assert len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_loss_of_a_subclass_gets_the_outputs_of_the_whole_batch(tmp_path):
    class Ranked(transformers.Trainer):  # type: ignore[misc]
        """A loss that compares all samples."""

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            scores = outputs.logits[:, 0]
            loss = (
                scores[:, None] - scores
            ).square().mean() + scores.mean() * labels.float().mean()
            return (loss, outputs) if return_outputs else loss

    mine, theirs = (
        trained(
            Ranked, MODELS["sequences"](), arguments(tmp_path), piped=piped,
            train_dataset=rows("sequences"), eval_dataset=rows("sequences", 11),
        )
        for piped in (True, False)
    )  # fmt: skip
    assert_same(mine, theirs, row="a subclass, sequences | its own `compute_loss`")


def test_a_model_that_caches_trains_and_generates_in_its_evaluation(tmp_path):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=62, pad_token_id=62, eos_token_id=63,
    )  # fmt: skip
    assert config.use_cache
    model = transformers.T5ForConditionalGeneration(config)
    made = [
        trained(
            transformers.Seq2SeqTrainer, copy.deepcopy(model),
            arguments(
                tmp_path, transformers.Seq2SeqTrainingArguments, predict_with_generate=True,
                generation_max_length=6,
            ),
            piped=piped, train_dataset=rows(), eval_dataset=rows(count=8),
            compute_metrics=lambda found: {"sum": float(found.predictions.sum())},
        )
        for piped in (True, False)
    ]  # fmt: skip
    assert_same(*made, row="`Seq2SeqTrainer`, T5 | `predict_with_generate=True`")


def test_what_is_not_trained_runs_the_model_itself(tmp_path):
    """Generation between steps, predictions without labels, and a copy of the model."""
    generated = []

    class Generates(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            generated.append(model.generate(rows()[0]["input_ids"][None, :4], max_new_tokens=5))

    made = [
        trained(
            transformers.Trainer, language_model(), arguments(tmp_path), piped=piped,
            train_dataset=rows(), eval_dataset=rows(), callbacks=[Generates()],
        )
        for piped in (True, False)
    ]  # fmt: skip
    assert len(generated) == 2 * STEPS
    torch.testing.assert_close(generated[:STEPS], generated[STEPS:])
    ids = [{"input_ids": row["input_ids"]} for row in rows(count=5)]
    found = [torch.as_tensor(trainer.predict(ids).predictions) for trainer in made]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    copied = copy.deepcopy(made[0].model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
        assert not copied(ids[0]["input_ids"][None]).logits.any()


def test_pipe_auto_chooses_by_the_trainer_s_own_batch(tmp_path, capsys):
    data = rows()
    trainer = pipelined(transformers.Trainer)(
        language_model(), arguments(tmp_path, eval_strategy="no"), train_dataset=data,
        pipe_kwargs={"devices": ["cpu:0", "cpu:1"], "timeout": 0.0},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert 8 % trainer.pipe.chunks == 0
    assert capsys.readouterr().out.count("fits:") == 1


def test_refusals(tmp_path, monkeypatch):
    trainer, args = pipelined(transformers.Trainer), arguments(tmp_path, eval_strategy="no")
    with pytest.raises(TypeError, match=r"a subclass of transformers\.Trainer"):
        pipelined(language_model())
    with pytest.raises(TypeError, match="pipe_kwargs"):
        trainer(language_model(), args, pipe=two_stages, pipe_kwargs={"devices": 2})
    pipe = Pipe([torch.nn.Linear(2, 2)], [1], devices=["cpu"])
    with pytest.raises(ValueError, match="layers that return no loss"):
        trainer(language_model(), args, pipe=pipe)

    def one_row(found: Any) -> dict[str, Tensor]:
        names = ("input_ids", "labels")
        return {name: torch.cat([row[name] for row in found])[None] for name in names}

    packed = trainer(language_model(), args, train_dataset=rows(), data_collator=one_row)
    with pytest.raises(ValueError, match="padding_free=False"):
        packed.train()

    def columns(found: Any) -> dict[str, Tensor]:
        names = ["input_ids", "labels", "attention_mask"][: 3 if found[0]["odd"] else 2]
        return {name: torch.stack([row[name] for row in found]) for name in names}

    data = [{**row, "odd": k < 8} for k, row in enumerate(rows())]
    args = arguments(
        tmp_path, eval_strategy="no", remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    changing = trainer(
        language_model(), args, train_dataset=data, data_collator=columns, pipe=two_stages
    )
    with pytest.raises(ValueError, match="'attention_mask' was given then"):
        changing.train()
    import accelerate

    monkeypatch.setattr(accelerate.Accelerator, "num_processes", property(lambda _: 2))
    with pytest.raises(RuntimeError, match="in one process, and here are 2"):
        trainer(language_model(), args)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install \"syncpipe\[transformers"):
        pipelined(dict)


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_model_on_several_accelerators_generates_device_after_device():
    """On two simulated devices, in a process of its own."""
    script = """
import torch
from tests import simulated
from tests.integrations.test_trainer import language_model
from syncpipe.integrations.transformers import PipedForward
simulated.load()
model = language_model().eval()
ids = torch.arange(4)[None]
wanted = model.generate(ids, max_new_tokens=5)
logits = model(ids).logits
model.model.embed_tokens.to("sim:0"), model.model.layers[0].to("sim:0")
model.model.layers[1].self_attn.to("sim:0"), model.model.layers[1].input_layernorm.to("sim:0")
model.model.layers[1].post_attention_layernorm.to("sim:1"), model.model.layers[1].mlp.to("sim:1")
model.model.norm.to("sim:1"), model.lm_head.to("sim:0"), model.model.rotary_emb.to("sim:0")
forward = PipedForward(model)
with forward._moving_inputs(), torch.no_grad():
    found = model(ids.to("sim:0")).logits
    torch.testing.assert_close(found.cpu(), logits)
    assert torch.equal(model.generate(ids.to("sim:0"), max_new_tokens=5).cpu(), wanted)
print("same")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("same\n"), done.stderr


def test_the_table_has_a_row_for_each_of_them():
    """``SYNCPIPE_TABLE=1 pytest -n0 tests/integrations/test_trainer.py`` writes it."""
    if "SYNCPIPE_TABLE" in os.environ:
        FOUND.pop("", None)
        head = "| trainer, and what it trains | arguments | logged | weights |\n|---|---|---|---|\n"
        made = "".join(f"| {row} | {a:.1e} | {b:.1e} |\n" for row, (a, b) in FOUND.items())
        title, _ = TABLE.read_text(encoding="utf-8").split("| trainer", 1)
        TABLE.write_text(title + head + made, encoding="utf-8")
    text = TABLE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+ \| .*) \| [\d.e+-]+ \| [\d.e+-]+ \|$", text, flags=re.M)
    options = [*CASES, ("language model", {"load_best_model_at_end": True})]
    assert rows[: len(options)] == [row_of(*each) for each in options]
    assert len(rows) == len(options) + len(TRL) + 4


def test_a_loss_model_s_outputs_can_be_joined():
    model, row = language_model(), rows()[:6]
    inputs = {
        k: torch.stack([r[k] for r in row]) for k in ("input_ids", "attention_mask", "labels")
    }
    made = LossModel(model, shifts=True)
    outputs = made(**inputs)
    assert outputs["loss"].shape == (6,)
    loss = outputs["loss"].sum() / made.weight(inputs)
    torch.testing.assert_close(loss, model(**inputs).loss)
