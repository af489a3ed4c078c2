"""A language model is fine-tuned by TRL's ``SFTTrainer`` with LoRA adapters, on all devices.

    python sft_lora.py                              # a small model, made here
    python sft_lora.py --model Qwen/Qwen2.5-0.5B    # or one of the hub, or of a folder

With a GPU and bitsandbytes the base is in 4 bits (QLoRA), otherwise as it was saved. Two lines are
other than in a script for one device: the import of ``pipelined``, and its call.

It needs: pip install "syncpipe[transformers]" trl peft datasets
"""

import argparse
import tempfile
from importlib.util import find_spec

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

from syncpipe.integrations.transformers import pipelined

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a name on the hub, or a folder")
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
gpu = torch.cuda.is_available()


def sums(count: int) -> Dataset:
    """Sums of two numbers, as prompts and completions."""
    pairs = torch.randint(10, (count, 2)).tolist()
    return Dataset.from_dict({
        "prompt": [f"{a} plus {b} is" for a, b in pairs],
        "completion": [f" {a + b}" for a, b in pairs],
    })  # fmt: skip


def small_base() -> str:
    """A folder with a model that has learned nothing, and its tokenizer."""
    words = ["<pad>", "<eos>", "plus", "is", *map(str, range(19))]
    made = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    width = 64 if args.tiny else 256
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=width, intermediate_size=2 * width,
        num_hidden_layers=2 if args.tiny else 8, num_attention_heads=4, num_key_value_heads=2,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    folder = tempfile.mkdtemp()
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


torch.manual_seed(0)
base = args.model or small_base()
in_4_bits = None
if gpu and find_spec("bitsandbytes"):
    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
model = AutoModelForCausalLM.from_pretrained(base, quantization_config=in_4_bits)
tokenizer = AutoTokenizer.from_pretrained(base)

trainer = pipelined(SFTTrainer)(
    model=model,
    args=SFTConfig(
        tempfile.mkdtemp(), max_steps=4 if args.tiny else 200, logging_steps=2 if args.tiny else 50,
        per_device_train_batch_size=32, learning_rate=2e-3, bf16=gpu, use_cpu=not gpu,
        report_to=[], disable_tqdm=True,
    ),
    train_dataset=sums(128 if args.tiny else 4096),
    processing_class=tokenizer,
    peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear"),
    pipe_kwargs={"devices": None if gpu else ["cpu:0", "cpu:1"]},
)  # fmt: skip
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step']}: loss {float(entry['loss']):.3f}")

# Between steps and afterwards the model itself can be called, device after device.
prompt = tokenizer("3 plus 4 is", return_tensors="pt").to(trainer.pipe.devices[0])
prompt.pop("token_type_ids", None)
answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)
print(tokenizer.decode(answer[0]))
trainer.save_model()  # the adapters, as peft saves them
