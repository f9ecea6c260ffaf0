"""`corolla demo-checkpoint`: train the demo checkpoint on this project's documentation."""

from pathlib import Path

import click

import corolla
from corolla.errors import CheckpointError
from corolla.threads import let_idle_threads_sleep


def _project_root() -> Path | None:
    """The folder that holds pyproject.toml above the package; None when it was installed without one."""
    return next((p for p in Path(corolla.__file__).resolve().parents if (p / "pyproject.toml").is_file()), None)


def _documentation(root: Path) -> list[Path]:
    """The pages that explain in prose; the fewer there are, the better they are learnt in the time."""
    files = [file for file in (root / "README.md", root / "docs" / "architecture.md") if file.is_file()]
    if not files:
        raise CheckpointError(f"{root} holds neither README.md nor docs/architecture.md; name text files with --corpus")
    return files


@click.command(
    epilog="""\b
    Example:
      corolla demo-checkpoint
      corolla demo-checkpoint --out ./demo --corpus notes.md --corpus more.md"""
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder to write. [default: .cache/demo-checkpoint of the project]"
)
@click.option(
    "--corpus",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    help="Text to learn; may be given repeatedly. [default: README.md and docs/architecture.md of the project]",
)
@click.option("--force", is_flag=True, help="Train even if the checkpoint is up to date.")
def command(out: Path | None, corpus: tuple[Path, ...], force: bool) -> None:
    """Train a Llama of 8 blocks on the project's documentation, in a minute or so, unless that is done already."""
    let_idle_threads_sleep()
    from corolla.checkpoint.demo import ensure_demo_checkpoint, train_demo_checkpoint

    root = _project_root()
    if root is None and not (out and corpus):
        raise CheckpointError("no project folder around the installed package: give --out and --corpus")
    texts = list(corpus) or _documentation(root or Path())
    folder = out or (root or Path()) / ".cache" / "demo-checkpoint"
    if force:
        train_demo_checkpoint(texts, folder)
        trained = True
    else:
        trained = ensure_demo_checkpoint(texts, folder)
    click.echo(f"{folder}: {'trained' if trained else 'up to date'}")
