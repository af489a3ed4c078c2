"""``syncpipe.checkpoints``: safetensors in ``from_pretrained``'s files, and models on ``meta``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import LayerSpec, Pipe, checkpoints, sequential

safetensors: Any = pytest.importorskip("safetensors.torch")

TWO = ["cpu:0", "cpu:1"]
IDS = torch.arange(24).reshape(2, 12)


def llama(*, tied: bool, **options: Any) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False, tie_word_embeddings=tied,
        **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def on_meta(*, tied: bool) -> tuple[Any, Any]:
    """The model, and its layers."""
    with torch.device("meta"):
        model = llama(tied=tied)
    return model, sequential(model, IDS, verify=False)


@pytest.mark.parametrize("shard", ["1GB", "30KB"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_a_checkpoint_of_transformers_is_read_and_written(tied, shard, tmp_path):
    plain = llama(tied=tied).eval()
    plain.save_pretrained(tmp_path / "base", max_shard_size=shard)
    model, layers = on_meta(tied=tied)
    read = checkpoints.reader(layers, tmp_path / "base", init_fn=model._init_weights)
    pipe = Pipe(layers, "uniform", devices=TWO, init_fn=read).eval()
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    with torch.no_grad():
        assert torch.equal(pipe(IDS).logits, plain(IDS).logits)
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert (head is embedding) == tied

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("of a checkpoint before")
    checkpoints.save(pipe, tmp_path / "out", shard_size=30e3 if shard == "30KB" else 5e9)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    if shard == "30KB":
        assert "model.safetensors" not in files
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == files - {"model.safetensors.index.json"}
        assert index["metadata"]["total_size"] == sum(p.nbytes for p in plain.parameters())
        sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
        assert max(sizes) < 34e3
    else:
        assert files == {"model.safetensors"}
    plain.config.save_pretrained(tmp_path / "out")
    loaded = type(plain).from_pretrained(tmp_path / "out").eval()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, plain(IDS).logits)


def test_one_call_fills_a_model_on_meta(tmp_path):
    plain = llama(tied=True).eval()
    plain.save_pretrained(tmp_path, max_shard_size="30KB")
    with torch.device("meta"):
        model = llama(tied=True)
    pipe = Pipe.auto(
        model, IDS, batch_size=4, devices=TWO, weights=tmp_path, init_fn=model._init_weights,
        timeout=0.0, verbose=False,
    ).eval()  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(pipe(IDS).logits, plain(IDS).logits)


def test_it_is_filled_anew_where_the_first_plan_does_not_fit(tmp_path, monkeypatch):
    plain = llama(tied=True).eval()
    plain.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = llama(tied=True)
    train, calls = Pipe.train_batch, []

    def fails_once(self: Pipe, *args: Any, **kwargs: Any) -> Any:
        calls.append(all(not p.is_meta for p in self.parameters()))
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no")
        return train(self, *args, **kwargs)

    monkeypatch.setattr(Pipe, "train_batch", fails_once)
    pipe = Pipe.auto(
        model, IDS, batch_size=4, devices=TWO, weights=tmp_path, init_fn=model._init_weights,
        timeout=0.0, verbose=False,
    ).eval()  # fmt: skip
    assert calls == [True, True]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        torch.testing.assert_close(pipe(IDS).logits, plain(IDS).logits)


def listed(device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2, bias=False))


def test_listed_layers_and_specs(tmp_path):
    """Parameters and buffers, in another dtype; specs are loaded when they are built."""
    plain = listed()
    plain[1].running_mean.normal_()
    checkpoints.save(plain, tmp_path)
    file = tmp_path / "model.safetensors"
    layers = listed("meta").double()
    read = checkpoints.reader(layers, file)
    pipe = Pipe(layers, [1, 2], devices=TWO, init_fn=read)
    specs = [LayerSpec(nn.Linear, 4, 8), LayerSpec(nn.BatchNorm1d, 8),
             LayerSpec(nn.Linear, 8, 2, bias=False)]  # fmt: skip
    built = Pipe(specs, [2, 1], devices=TWO)
    checkpoints.load(built, tmp_path)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(pipe.state_dict()[name], tensor.double()), name
        assert torch.equal(built.state_dict()[name], tensor), name


HOST = """
import sys
from pathlib import Path
import torch
from torch import nn
from syncpipe import Pipe, checkpoints

def anonymous():
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("RssAnon:")[1].split()[0])

torch.set_num_threads(1)
with torch.device("meta"):
    small = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
read = checkpoints.reader(small, sys.argv[1], strict=False, init_fn=lambda module: None)
try:
    Pipe(small, [1, 1], init_fn=read)  # what is imported late is there
except RuntimeError:
    pass  # of another shape
WIDTH, LAYERS = 1024, 24
with torch.device("meta"):
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
filled, most = 0, 0
fill = checkpoints.reader(layers, sys.argv[1])
start = anonymous()

def watched(module):
    global filled, most
    fill(module)
    filled += sum(p.nbytes for p in module.parameters(recurse=False))
    most = max(most, anonymous() - start - filled)

pipe = Pipe(layers, [12, 12], devices=["cpu:0", "cpu:1"], init_fn=watched)
assert torch.equal(pipe[3].weight, torch.full((WIDTH, WIDTH), 3.0))
print(filled, most)
"""


def test_the_host_holds_no_more_than_a_tensor_beside_the_model(tmp_path):
    """Of a checkpoint of 100 MB, which is larger than what it may take: 40 MB."""
    if not Path("/proc/self/status").exists():
        pytest.skip("memory is read from /proc")
    width, count = 1024, 24
    tensors = {f"{k}.weight": torch.full((width, width), float(k)) for k in range(count)}
    names = sorted(tensors, key=lambda name: int(name.split(".")[0]))
    files = {}
    for k in range(4):
        part = names[6 * k : 6 * (k + 1)]
        safetensors.save_file({n: tensors[n] for n in part}, tmp_path / f"{k}.safetensors")
        files.update(dict.fromkeys(part, f"{k}.safetensors"))
    index = {"weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    done = subprocess.run(
        [sys.executable, "-c", HOST, str(tmp_path)], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    filled, most = map(int, done.stdout.split())
    assert filled == count * width * width * 4 > 100e6
    assert most < 40e6


class FourBit(nn.Module):
    """A linear layer that is quantized when it is loaded: 16 levels for each row, two in a byte."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("packed", torch.zeros(outputs, inputs // 2, dtype=torch.uint8))
        self.register_buffer("scale", torch.zeros(outputs, 1))
        self.in_features, self.out_features = inputs, outputs

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        weight = state.pop(f"{prefix}weight", None)
        if weight is not None:
            self.scale.copy_(weight.abs().amax(1, keepdim=True) / 7)
            levels = (weight / self.scale).round().add(8).to(torch.uint8)
            self.packed.copy_(levels[:, ::2] * 16 + levels[:, 1::2])

    def dequantized(self) -> Tensor:
        levels = torch.stack([self.packed // 16, self.packed % 16], -1).flatten(1)
        return (levels.float() - 8) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantized())


class Adapted(nn.Module):
    """LoRA beside a frozen layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(16, 2, bias=False)
        self.up = nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def test_a_base_is_quantized_layer_by_layer_as_it_is_filled_and_adapters_train(tmp_path):
    plain = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    checkpoints.save(plain, tmp_path)
    with torch.device("meta"):
        layers = nn.Sequential(*(Adapted(FourBit(16, 16)) for _ in range(4)))

    def adapters(module: nn.Module) -> None:
        if isinstance(module, Adapted):
            nn.init.normal_(module.down.weight)
            nn.init.zeros_(module.up.weight)

    read = checkpoints.reader(
        layers, tmp_path, init_fn=adapters, names=lambda name: name.replace(".base.", ".")
    )
    pipe = Pipe(layers, [2, 2], devices=TWO, init_fn=read, chunks=2)
    for mine, theirs in zip(pipe, plain, strict=True):
        step = theirs.weight.abs().amax(1, keepdim=True) / 7
        assert ((mine.base.dequantized() - theirs.weight).abs() <= step / 2 + 1e-6).all()
        assert not mine.up.weight.any()
        assert mine.down.weight.any()
    pipe.train_batch(torch.randn(4, 16), loss_fn=lambda y: y.square().mean())
    trained = [name for name, p in pipe.named_parameters() if p.grad is not None]
    assert trained == [f"{k}.{part}.weight" for k in range(4) for part in ("down", "up")]


def test_four_bit_layers_of_bitsandbytes(tmp_path):
    """As above, with kernels; nothing here can run them but a GPU with the library."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    if not torch.cuda.is_available():
        pytest.skip("bitsandbytes quantizes on a GPU")
    plain = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    checkpoints.save(plain, tmp_path)
    layers = nn.Sequential(
        *(bitsandbytes.nn.Linear4bit(64, 64, bias=False, device="meta") for _ in range(4))
    )
    pipe = Pipe(layers, [2, 2], devices=[0, 0], init_fn=checkpoints.reader(layers, tmp_path))
    x = torch.randn(4, 64, device=0)
    assert F.cosine_similarity(pipe(x), plain.to(0)(x)).min() > 0.9


def test_adapters_of_peft_on_a_base_that_is_filled(tmp_path):
    peft: Any = pytest.importorskip("peft")
    plain = llama(tied=True).eval()
    plain.save_pretrained(tmp_path)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
    with torch.device("meta"):
        base = llama(tied=True)
        model = peft.get_peft_model(base, config)

    def init(module: nn.Module) -> None:
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.reset_lora_parameters("default", init_lora_weights=True)
        else:
            base._init_weights(module)

    layers = sequential(model, IDS, verify=False)
    read = checkpoints.reader(
        layers, tmp_path, init_fn=init,
        names=lambda name: name.removeprefix("base_model.model.").replace(".base_layer", ""),
    )  # fmt: skip
    pipe = Pipe(layers, "uniform", devices=TWO, init_fn=read, chunks=2).eval()
    with torch.no_grad():
        torch.testing.assert_close(pipe(IDS).logits, plain(IDS).logits)
    pipe.train().train_batch(IDS, loss_fn=lambda output: output.logits.square().mean())
    assert {n for n, p in pipe.named_parameters() if p.grad is not None} == {
        n for n, p in model.named_parameters() if "lora_" in n
    }


BAD = {
    "too many": ({"0.weight": 1, "9.weight": 1}, "the model has no 9.weight"),
    "too few": ({"0.weight": 1}, "it has no 0.bias, 1.weight, 1.bias, .* and 2 more"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_checkpoint_of_something_else_is_refused(name, tmp_path):
    names, match = BAD[name]
    tensors = {key: torch.ones(8, 4) for key in names}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"not a checkpoint of these layers: .*{match}.*names="):
        checkpoints.reader(listed("meta"), tmp_path)
    model = listed()
    checkpoints.load(model, tmp_path, strict=False)
    assert torch.equal(model[0].weight, torch.ones(8, 4))


def test_what_neither_the_checkpoint_nor_init_fn_has_is_no_random_number(tmp_path):
    safetensors.save_file({"0.bias": torch.ones(8)}, tmp_path / "model.safetensors")
    for init, message in (
        (lambda module: None, r"has no 0\.weight, and init_fn does not set it"),
        (nn.Module.requires_grad_, r"has no 0\.weight"),
    ):
        layers = nn.Sequential(nn.Linear(4, 8, device="meta"), nn.ReLU())
        read = checkpoints.reader(layers, tmp_path, init_fn=init)
        with pytest.raises(ValueError, match=message):
            Pipe(layers, [1, 1], devices=TWO, init_fn=read)
        assert layers[0].weight.is_meta
    Pipe(layers, [1, 1], devices=TWO, init_fn=checkpoints.reader(
        layers, tmp_path, init_fn=init, strict=False
    ))  # fmt: skip


def test_a_reader_fills_no_module_that_it_does_not_know(tmp_path):
    checkpoints.save(listed(), tmp_path)
    read = checkpoints.reader(listed("meta"), tmp_path)
    with pytest.raises(ValueError, match=r"is none of the modules that reader\(\) was given"):
        Pipe(listed("meta"), [1, 2], devices=TWO, init_fn=read)


def test_what_else_is_wrong_with_it(tmp_path, monkeypatch):
    for path in (tmp_path, tmp_path / "none.safetensors"):
        with pytest.raises(FileNotFoundError, match=r"model\.safetensors|no checkpoint"):
            checkpoints.load(listed(), path)
    index = {"weight_map": {"0.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"a\.safetensors is missing, a shard"):
        checkpoints.load(listed(), tmp_path)
    state = {name: torch.ones(3) for name in listed().state_dict()}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"0.weight.*size mismatch for weight"):
        checkpoints.load(listed(), tmp_path)
    with pytest.raises(ValueError, match=r"0\.weight is on meta"):
        checkpoints.save(listed("meta"), tmp_path)

    class More(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"more": 1}

    with pytest.raises(TypeError, match="_extra_state is a dict"):
        checkpoints.save(More(2, 2), tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        checkpoints.load(listed(), tmp_path)
