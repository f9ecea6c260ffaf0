"""The short forms of the chaos scripts, and of the memory report."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from chaos_sessions import run_storm
from chaos_stubs import Battlefield
from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.synthetic import make_checkpoint
from corolla.dtypes import DTYPES
from corolla.repository.plan import RepositoryPlan, split_evenly
from corolla.repository.writer import write_repository
from memory_report import measure
from servers import RunningServer


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranges of a model of 120 MB, so that shared weights show beside what each process has for itself."""
    folder = tmp_path_factory.mktemp("chaos")
    config = LlamaConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1536,
        vocab_size=4096, max_position_embeddings=1024, initializer_range=0.06,
    )  # fmt: skip
    make_checkpoint(config, DTYPES["float32"], seed=3, out=folder / "checkpoint")
    config = CheckpointFolder(folder / "checkpoint").config
    ranges, sizes = split_evenly(range(8), 4), (8, 1)
    plan = RepositoryPlan(
        folder / "checkpoint", config, DTYPES["float32"], ranges, max_batch_size=8, decoder_batch_sizes=sizes
    )
    write_repository(plan, folder / "repository")
    return folder / "repository"


@pytest.fixture(scope="module")
def server(repository: Path):
    with RunningServer(repository, "--exit-timeout-secs=2") as running:  # objects of killed models are never freed
        yield running


def test_all_processes_share_one_copy_of_weights_and_cache(server: RunningServer, repository: Path) -> None:
    report = measure(server, repository)
    assert report.total <= report.limit, report


def test_sessions_ended_in_any_way_give_their_pages_back_and_never_see_each_other(server: RunningServer) -> None:
    run_storm(server.grpc, sessions=60, clients=4, seed=1)


def test_a_killed_process_changes_no_token_and_loses_no_page(server: RunningServer) -> None:
    battlefield = Battlefield(server, max_tokens=120, seed=0)
    for model in ("blocks_00_04", "generate", "chain", "sessions"):
        battlefield.round(model)
