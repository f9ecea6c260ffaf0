"""What LoRA adapters take."""

from collections import Counter
from collections.abc import Sequence

from transformers import PretrainedConfig

from corolla.checkpoint.lora import AdapterFolder, layer_of
from corolla.checkpoint.source import Source, find_source
from corolla.errors import InvalidValueError


def adapter_bytes(texts: Sequence[str], config: PretrainedConfig, token: str | None = None) -> int:
    """Bytes of adapters, given as name=source, in the block where they are largest. AdapterError for one of no use."""
    sources = []
    for text in texts:
        _, equals, source = text.partition("=")
        if not equals:
            raise InvalidValueError("--adapters", text, "name=folder or name=org/name")
        sources.append(find_source(source, token=token))
    return bytes_of_adapters(sources, config)


def bytes_of_adapters(sources: Sequence[Source], config: PretrainedConfig) -> int:
    """The same of sources."""
    each: Counter[int] = Counter()
    for source in sources:
        for name, tensor in AdapterFolder(source, config).prepared().items():
            each[layer_of(name)[0][0]] += tensor.nbytes
    return max(each.values(), default=0)
