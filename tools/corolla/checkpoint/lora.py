"""LoRA adapters as `peft` saves them: a config and the low-rank weights of linear layers."""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.hub import HubModel
from corolla.checkpoint.source import Source
from corolla.checkpoint.weight_files import Safetensors
from corolla.errors import AdapterError
from corolla.kernels.packed_layers import linear_layers
from corolla.model.family import family_of
from corolla.model.lora import Adapter, Layer

FORMAT = 1
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (), "use_qalora": (), "use_bdlora": (), "lora_bias": (), "fan_in_fan_out": (), "modules_to_save": (),
    "target_parameters": (), "trainable_token_indices": (), "layer_replication": (), "alora_invocation_tokens": (),
    "arrow_config": (), "kasa_config": (), "monteclora_config": (), "velora_config": (),
    "bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}  # fmt: skip
"""Options of `peft` that change what an adapter computes, or the weights it belongs to, and what they may be: these
values, or nothing."""


@dataclass(frozen=True)
class PreparedAdapter:
    """`tensors` as AdapterFolder.prepared gives them, stored in the disk cache under `key`."""

    key: str
    tensors: dict[str, torch.Tensor]

    @property
    def rank(self) -> int:
        """The largest one."""
        return max(len(tensor) for tensor in self.tensors.values())

    def adapter(self, blocks: range, device: torch.device) -> Adapter:
        """What it adds to some of the blocks."""
        layers = {layer for layer, _ in map(layer_of, self.tensors) if layer[0] in blocks}

        def half(layer: Layer, name: str) -> torch.Tensor:
            return self.tensors[stored_name(layer, name)].to(device)

        return Adapter({layer: (half(layer, "A"), half(layer, "B")) for layer in layers})


class AdapterFolder:
    """An adapter for blocks of `config`. AdapterError when it is none, is damaged or uses what is not supported."""

    def __init__(self, source: Source, config: PretrainedConfig) -> None:
        self.source = source
        self._config = config
        self._path = source.folder() if isinstance(source, HubModel) else source
        if isinstance(source, HubModel):
            source.fetch(self._path, [WEIGHTS])
        for name in (CONFIG, WEIGHTS):
            if not (self._path / name).is_file():
                raise AdapterError(f"adapter {source}: holds no {name}; give a folder that `peft` wrote")
        self._settings = self._read_settings()

    def key(self) -> str:
        """Names what `prepared` gives: another one when a file changes or the blocks are of another family."""
        if isinstance(self.source, HubModel):
            version = self.source.commit
        else:
            stats = [(self._path / name).stat() for name in (CONFIG, WEIGHTS)]
            version = repr([str(self._path.resolve()), *((stat.st_size, stat.st_mtime_ns) for stat in stats)])
        return hashlib.sha256(f"{FORMAT}:{version}:{self._config.model_type}".encode()).hexdigest()[:16]

    def prepared(self) -> dict[str, torch.Tensor]:
        """By stored_name: A [rank, inputs] and B [rank, outputs], with the adapter's scale in it, float32."""
        file = self._path / WEIGHTS
        stored = Safetensors().read(file, Safetensors().names(file))
        pattern = _tensor_pattern(self._config)
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in stored.items():
            match = pattern.fullmatch(name)
            if match is None:
                raise self._error(f"{name}: only linear layers of blocks can be adapted, by lora_A and lora_B")
            layer = (int(match["block"]), match["layer"])
            wide = tensor.float()
            if match["half"] == "B":
                wide = (wide * self._scale(name.rpartition(".lora_")[0], tensor.shape[-1])).T
            tensors[stored_name(layer, match["half"])] = wide.contiguous()
        self.check(tensors)
        return tensors

    def check(self, tensors: dict[str, torch.Tensor]) -> None:
        """AdapterError when prepared tensors, stored by whatever server, do not fit these blocks."""
        blocks = self._config.num_hidden_layers
        known = {
            (index, name): (linear.in_features, linear.out_features)
            for index in sorted({layer_of(name)[0][0] for name in tensors} & set(range(blocks)))
            for name, linear in linear_layers(_block(self._config, index)).items()
        }
        if not tensors:
            raise self._error("no tensors")
        for name in tensors:
            layer, _ = layer_of(name)
            if layer[0] >= blocks:
                raise self._error(f"block {layer[0]}: the checkpoint has {blocks}")
            if layer not in known:
                names = sorted(linear for index, linear in known if index == layer[0])
                raise self._error(f"{layer[1]}: no linear layer of a block; those are {', '.join(names)}")
            first, second = (tensors.get(stored_name(layer, half)) for half in "AB")
            inputs, outputs = known[layer]
            fits = (
                first is not None and second is not None and first.ndim == second.ndim == 2
                and first.shape == (len(second), inputs) and second.shape[1] == outputs
            )  # fmt: skip
            if not fits:
                raise self._error(
                    f"{layer[1]} of block {layer[0]}: wants lora_A [rank, {inputs}] and lora_B [{outputs}, rank]; it "
                    "is an adapter for another model, or damaged"
                )

    def _scale(self, module: str, rank: int) -> float:
        """Of a module by its name in the file; InvalidValueError where the config tells another rank."""
        settings = self._settings
        wanted = _by_pattern(settings.get("rank_pattern"), module, settings["r"])
        if rank != wanted:
            raise self._error(f"{module}: has rank {rank}, but {CONFIG} says {wanted}")
        alpha = _by_pattern(settings.get("alpha_pattern"), module, settings["lora_alpha"])
        return float(alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))

    def _read_settings(self) -> dict[str, Any]:
        file = self._path / CONFIG
        try:
            settings = json.loads(file.read_text())
            kind, rank, alpha = (settings[name] for name in ("peft_type", "r", "lora_alpha"))
            valid = isinstance(rank, int) and isinstance(alpha, int | float)
        except (ValueError, KeyError, TypeError) as error:
            raise AdapterError(f"{file}: no config of a LoRA adapter ({error!r})") from error
        if kind != "LORA" or not valid:
            raise AdapterError(f"{file}: peft_type {kind!r}, r {rank!r}, lora_alpha {alpha!r}; only LORA is supported")
        for name, allowed in _NEUTRAL.items():
            value = settings.get(name)
            if value and value not in allowed:
                raise AdapterError(
                    f"{file}: {name} {value!r} is not supported; allowed: "
                    f"{', '.join(map(repr, allowed)) or 'none'}. Merge such an adapter into its checkpoint"
                )
        return dict(settings)

    def _error(self, text: str) -> AdapterError:
        return AdapterError(f"adapter {self.source}: {text}")


def stored_name(layer: Layer, half: str) -> str:
    """How a prepared tensor is called: block.layer.A or block.layer.B."""
    return f"{layer[0]}.{layer[1]}.{half}"


def layer_of(name: str) -> tuple[Layer, str]:
    """The inverse of `stored_name`."""
    block, _, rest = name.partition(".")
    layer, _, half = rest.rpartition(".")
    return (int(block), layer), half


def prepare_adapter(
    source: Source, config: PretrainedConfig, cache: DiskCache, key: str | None = None
) -> PreparedAdapter:
    """An adapter's tensors, mapped from the disk cache. With the `key` it had before, its files are not looked at.

    AdapterError when it is none for this config, or has changed since it had the key.
    """
    folder: AdapterFolder | None = None
    if key is None:
        folder = AdapterFolder(source, config)
        key = folder.key()

    def make() -> dict[str, torch.Tensor]:
        opened = folder or AdapterFolder(source, config)
        if opened.key() != key:
            raise AdapterError(f"adapter {source}: its files have changed since it was loaded; load it again")
        return opened.prepared()

    tensors = cache.get(f"adapters/{key}", make)
    if folder is not None:
        folder.check(tensors)
    return PreparedAdapter(key, tensors)


def _tensor_pattern(config: PretrainedConfig) -> re.Pattern[str]:
    family = family_of(config)
    block = re.escape(family.block_prefix).replace(re.escape("{}"), r"(?P<block>\d+)")
    base = re.escape(family.base_prefix)
    return re.compile(rf"base_model\.model\.(?:{base})?{block}(?P<layer>.+)\.lora_(?P<half>[AB])\.weight")


def _by_pattern(patterns: dict[str, float] | None, module: str, default: float) -> float:
    """The value for a module, as `peft` finds it: of the first pattern that matches the end of its name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _block(config: PretrainedConfig, index: int) -> torch.nn.Module:
    with torch.device("meta"):
        return family_of(config).block(config, index)
