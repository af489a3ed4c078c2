"""``syncpipe.checkpoints``: safetensors in ``from_pretrained``'s files, and models on ``meta``."""

from __future__ import annotations

import json
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe import LayerSpec, Pipe, checkpoints, sequential
from tests.integrations.loops import llama

safetensors: Any = pytest.importorskip("safetensors.torch")

TWO = ["cpu:0", "cpu:1"]
IDS = torch.arange(24).reshape(2, 12)


@pytest.mark.parametrize("shard", ["1GB", "30KB"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_a_checkpoint_of_transformers_is_read_and_written(tied, shard, tmp_path):
    plain = llama(tie_word_embeddings=tied).eval()
    plain.save_pretrained(tmp_path / "base", max_shard_size=shard)
    with torch.device("meta"):
        model = llama(tie_word_embeddings=tied)
    layers = sequential(model, IDS, verify=False)
    read = checkpoints.reader(layers, tmp_path / "base", init_fn=model._init_weights)
    pipe = Pipe(layers, "uniform", devices=TWO, init_fn=read).eval()
    with torch.no_grad():
        assert torch.equal(pipe(IDS).logits, plain(IDS).logits)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied

    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("of a checkpoint before")
    checkpoints.save(pipe, out, shard_size=30e3 if shard == "30KB" else 5e9)
    files = {path.name for path in out.iterdir()}
    if shard == "30KB":
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert {*index["weight_map"].values(), "model.safetensors.index.json"} == files
        assert index["metadata"]["total_size"] == sum(p.nbytes for p in plain.parameters())
        assert max(path.stat().st_size for path in out.glob("*.safetensors")) < 34e3
    else:
        assert files == {"model.safetensors"}
    plain.config.save_pretrained(out)
    loaded = type(plain).from_pretrained(out).eval().state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("fits", [True, False])
def test_one_call_fills_a_model_on_meta_and_again_where_a_plan_does_not_fit(
    fits, tmp_path, monkeypatch
):
    plain = llama().eval()
    plain.save_pretrained(tmp_path, max_shard_size="30KB")
    with torch.device("meta"):
        model = llama()
    train, calls = Pipe.train_batch, []

    def fails_once(self: Pipe, *args: Any, **kwargs: Any) -> Any:
        calls.append(all(not p.is_meta for p in self.parameters()))
        if len(calls) == 1 and not fits:
            raise torch.OutOfMemoryError("no")
        return train(self, *args, **kwargs)

    monkeypatch.setattr(Pipe, "train_batch", fails_once)
    pipe = Pipe.auto(
        model, IDS, batch_size=4, devices=TWO, weights=tmp_path, init_fn=model._init_weights,
        timeout=0.0, verbose=False,
    ).eval()  # fmt: skip
    assert calls == [True] * (1 if fits else 2)
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
    layers = listed("meta").double()
    read = checkpoints.reader(layers, tmp_path / "model.safetensors")
    pipe = Pipe(layers, [1, 2], devices=TWO, init_fn=read)
    specs = [LayerSpec(nn.Linear, 4, 8), LayerSpec(nn.BatchNorm1d, 8),
             LayerSpec(nn.Linear, 8, 2, bias=False)]  # fmt: skip
    built = Pipe(specs, [2, 1], devices=TWO)
    checkpoints.load(built, tmp_path)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(pipe.state_dict()[name], tensor.double()), name
        assert torch.equal(built.state_dict()[name], tensor), name


def test_the_host_holds_one_tensor_at_a_time(tmp_path, monkeypatch):
    plain = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    checkpoints.save(plain, tmp_path, shard_size=600)
    package, seen, alive = sys.modules["safetensors"], [], []
    opened = package.safe_open

    class Watched:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = opened(*args, **kwargs)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> Tensor:
            alive.append(sum(reference() is not None for reference in seen))
            tensor: Tensor = self.file.get_tensor(name)
            seen.append(weakref.ref(tensor))
            return tensor

    monkeypatch.setattr(package, "safe_open", Watched)
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    Pipe(layers, [3, 3], devices=TWO, init_fn=checkpoints.reader(layers, tmp_path))
    assert alive == [0] * 6


class Rounded(nn.Module):
    """A linear layer that is quantized when it is loaded, with LoRA beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("levels", torch.zeros(16, 16, dtype=torch.int8))
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if (weight := state.pop(f"{prefix}weight", None)) is not None:
            self.levels.copy_((weight * 64).round())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.levels / 64) + self.up(self.down(x)))


def test_a_base_is_quantized_layer_by_layer_as_it_is_filled_and_adapters_train(tmp_path):
    plain = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    checkpoints.save(plain, tmp_path)
    with torch.device("meta"):
        layers = nn.Sequential(*(Rounded() for _ in range(4)))

    def adapters(module: nn.Module) -> None:
        if isinstance(module, Rounded):
            nn.init.normal_(module.down.weight)
            nn.init.zeros_(module.up.weight)

    read = checkpoints.reader(layers, tmp_path, init_fn=adapters)
    pipe = Pipe(layers, [2, 2], devices=TWO, init_fn=read, chunks=2)
    for mine, theirs in zip(pipe, plain, strict=True):
        assert ((mine.levels / 64 - theirs.weight).abs() <= 1 / 128 + 1e-6).all()
        assert not mine.up.weight.any()
        assert mine.down.weight.any()
    pipe.train_batch(torch.randn(4, 16), loss_fn=lambda y: y.square().mean())
    assert all(p.grad is not None for p in pipe.parameters())
    with pytest.raises(ValueError, match=r"it has no 0\.down\.weight, 0\.up\.weight"):
        checkpoints.load(pipe, tmp_path)


class Scaled(nn.Linear):
    """Has a scale in float8, and its zero point as extra state."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.randn(4).to(torch.float8_e4m3fn))
        self.zero = torch.randn(2)

    def get_extra_state(self) -> Tensor:
        return self.zero

    def set_extra_state(self, state: Tensor) -> None:
        self.zero = state


def test_small_dtypes_and_extra_state_under_names_of_a_table(tmp_path):
    plain, loaded = nn.Sequential(Scaled()), nn.Sequential(Scaled())
    checkpoints.save(plain, tmp_path)
    table = {name: name for name in plain.state_dict()}
    checkpoints.load(loaded, tmp_path, names=table.__getitem__)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].float(), tensor.float()), name


def test_an_interrupted_save_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    plain, other, loaded = listed(), listed(), listed()
    checkpoints.save(plain, tmp_path, shard_size=100)
    write, files = safetensors.save_file, []

    def interrupted(*args: Any, **options: Any) -> None:
        files.append(args[1])
        if len(files) == 3:
            raise KeyboardInterrupt
        write(*args, **options)

    monkeypatch.setattr(safetensors, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(other, tmp_path, shard_size=100)
    checkpoints.load(loaded, tmp_path)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


# --- what is wrong -------------------------------------------------------------------------------


def of_ones(*names: str) -> dict[str, Tensor]:
    return {name: torch.ones(8, 4) for name in names}


MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
#: For a file and its content: the error of ``load``, and what it says.
BAD: list[tuple[str, Any, type[Exception], str]] = [
    (MODEL, of_ones("0.weight", "9.weight"), ValueError, "not a checkpoint.*the model has no 9.*="),
    (MODEL, of_ones("0.weight"), ValueError,
     "not a checkpoint of these layers: .*it has no 0.bias, 1.weight, 1.bias, .* 2 more.*names="),
    (MODEL, of_ones(*listed().state_dict()), RuntimeError, r"0.bias.*size mismatch for bias"),
    (MODEL, b"12345678 no tensors", ValueError, r"model\.safetensors is broken"),
    ("other", b"", FileNotFoundError, r"has neither model\.saf.* nor .*index\.json"),
    (INDEX, b"{", ValueError, r"index\.json is broken"),
    (INDEX, b"{}", ValueError, r"index\.json is broken.*weight_map"),
    (INDEX, b'{"weight_map": {"0.weight": "a.safetensors"}}', FileNotFoundError, r"a\.safetensors"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "kind", "message"), BAD)
def test_a_file_that_is_broken_or_of_something_else_is_refused(
    name, content, kind, message, tmp_path
):
    data = content if isinstance(content, bytes) else safetensors.save(content)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(kind, match=message):
        checkpoints.load(listed(), tmp_path)
    if kind is not RuntimeError:  # shapes are seen when values are read
        with pytest.raises(kind, match=message):
            checkpoints.reader(listed("meta"), tmp_path)
    if "not a checkpoint" in message:
        model = listed()
        checkpoints.load(model, tmp_path, strict=False)
        assert torch.equal(model[0].weight, torch.ones(8, 4))


def test_what_neither_the_checkpoint_nor_init_fn_has_is_no_random_number(tmp_path):
    safetensors.save_file({"0.bias": torch.ones(8)}, tmp_path / "model.safetensors")
    layers = nn.Sequential(nn.Linear(4, 8, device="meta"), nn.ReLU())
    for init in (lambda module: None, nn.Module.requires_grad_):
        read = checkpoints.reader(layers, tmp_path, init_fn=init)
        with pytest.raises(ValueError, match=r"'weight' on meta.*nothing sets all of it"):
            Pipe(layers, [1, 1], devices=TWO, init_fn=read)
        assert layers[0].weight.is_meta
    read = checkpoints.reader(layers, tmp_path, init_fn=init, strict=False)
    Pipe(layers, [1, 1], devices=TWO, init_fn=read)


def test_a_reader_fills_no_module_that_it_does_not_know(tmp_path):
    checkpoints.save(listed(), tmp_path)
    read = checkpoints.reader(listed("meta"), tmp_path)
    with pytest.raises(ValueError, match=r"none of the modules that reader\(\) was given"):
        Pipe(listed("meta"), [1, 2], devices=TWO, init_fn=read)


def test_nan_in_a_checkpoint_is_named_and_loaded_where_there_are_values(tmp_path):
    plain = listed()
    nn.init.constant_(plain[2].weight, torch.nan)
    checkpoints.save(plain, tmp_path)
    layers = listed("meta")
    with pytest.raises(ValueError, match=r"model\.safetensors: 2\.weight contains NaN"):
        Pipe(layers, [1, 2], devices=TWO, init_fn=checkpoints.reader(layers, tmp_path))
    loaded = listed()
    checkpoints.load(loaded, tmp_path)
    assert loaded[2].weight.isnan().all()


def test_names_of_one_tensor_have_one_value(tmp_path):
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    for other in (1, 3):
        state = {"0.weight": torch.ones(4, 4), "1.weight": torch.ones(4, 4)}
        state["1.weight"][2, 2] = other
        safetensors.save_file(state, tmp_path / "model.safetensors")
        if other == 1:
            checkpoints.load(tied, tmp_path)
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight have different values"):
        checkpoints.load(tied, tmp_path)


class More(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"more": 1}


@pytest.mark.parametrize(
    ("module", "options", "kind", "message"),
    [
        (listed("meta"), {}, ValueError, r"0\.weight is on meta"),
        (More(2, 2), {}, TypeError, "_extra_state is a dict"),
        (nn.Linear(2, 2, dtype=torch.complex128), {}, TypeError, "weight is torch.complex128"),
        *((listed(), {"shard_size": size}, ValueError, f"shard_size={size!r}: .* such as 5e9")
          for size in ("5GB", 0, -1, float("nan"))),
    ],
)  # fmt: skip
def test_what_cannot_be_saved(module, options, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        checkpoints.save(module, tmp_path, **options)
