"""The adapters of a server: loaded and unloaded by one process, mapped by all that host blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corolla.checkpoint.lora import prepare_adapter
from corolla.checkpoint.prepared import PreparedParts
from corolla.checkpoint.source import Source, find_source, written_source
from corolla.kv.adapters import NONE, AdapterTable, LoadedAdapter, NewAdapter, check_adaptable, check_name
from corolla.model.lora import Adapter, RowAdapters


@dataclass(frozen=True)
class AdaptersService:
    """load, unload and list, for all processes of the server."""

    table: AdapterTable
    parts: PreparedParts
    tensor_parallel: int

    def load(self, name: str, source: str) -> None:
        """Loads an adapter from a local folder or the hub; AdapterError, InvalidValueError for a name in use."""
        check_name(name)
        check_adaptable(name, self.tensor_parallel)
        found = find_source(source)
        self.table.load(self._prepared(name, found.resolve() if isinstance(found, Path) else found))

    def load_first(self, sources: Mapping[str, Source]) -> None:
        """Loads those that the repository names, unless this server did before; later ones do not come back."""
        if sources and not self.table.had_any():
            self.table.load_first([self._prepared(name, source) for name, source in sources.items()])

    def unload(self, name: str) -> None:
        """See AdapterTable.unload."""
        self.table.unload(name)

    def loaded(self) -> list[LoadedAdapter]:
        """See AdapterTable.loaded."""
        return self.table.loaded()

    def _prepared(self, name: str, source: Source) -> NewAdapter:
        prepared = prepare_adapter(source, self.parts.checkpoint.config, self.parts.cache)
        return NewAdapter(name, str(source), prepared.key, prepared.rank)


class ProcessAdapters:
    """What the adapters add to the blocks of this process; each is mapped when a row first needs it."""

    def __init__(self, table: AdapterTable, parts: PreparedParts, blocks: range) -> None:
        self.table = table
        self._parts = parts
        self._blocks = blocks
        self._mapped: dict[int, Adapter] = {}

    def of_rows(self, numbers: Sequence[int]) -> RowAdapters:
        """The adapters of rows by their numbers, nothing at all if no row has one.

        NotFoundError for one that was unloaded, AdapterError for one whose files are lost.
        """
        return [self._get(number) for number in numbers] if any(numbers) else ()

    def of_names(self, names: Sequence[str]) -> list[int]:
        """The numbers of loaded adapters; UnknownAdapterError."""
        return [self.table.number(name) if name else NONE for name in names]

    def _get(self, number: int) -> Adapter | None:
        if number == NONE:
            return None
        if number not in self._mapped:
            entry = self.table.find(number)
            config = self._parts.checkpoint.config
            prepared = prepare_adapter(written_source(entry.source, Path()), config, self._parts.cache, entry.key)
            living = self.table.numbers()
            self._mapped = {known: adapter for known, adapter in self._mapped.items() if known in living}
            self._mapped[number] = prepared.adapter(self._blocks, self._parts.device)
        return self._mapped[number]
