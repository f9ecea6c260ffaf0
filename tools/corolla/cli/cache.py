"""`corolla cache`: the disk cache of prepared blocks."""

import time

import click

from corolla.checkpoint.disk_cache import CacheEntry, DiskCache


@click.group(
    epilog="""\b
    Examples:
      corolla cache ls
      corolla cache prune --limit 20000000000
      corolla cache clear"""
)
def command() -> None:
    """Look at, shrink or empty the disk cache of prepared blocks.

    It lies in COROLLA_CACHE, else ~/.cache/corolla. Files that a running server maps are never removed.
    """


@command.command(epilog="Example: corolla cache ls")
def ls() -> None:
    """List what is stored, the least recently used first."""
    cache = DiskCache.default()
    entries = cache.entries()
    for entry in entries:
        click.echo(_line(entry))
    click.echo(f"{sum(entry.size for entry in entries)} bytes in {len(entries)} files in {cache.folder}")


@command.command(epilog="Example: corolla cache prune --limit 20000000000")
@click.option("--limit", type=click.IntRange(min=0), required=True, help="Bytes that may stay.")
def prune(limit: int) -> None:
    """Remove the least recently used files until --limit bytes are left."""
    _report(DiskCache.default().prune(limit))


@command.command(epilog="Example: corolla cache clear")
def clear() -> None:
    """Remove everything that no running server maps."""
    _report(DiskCache.default().prune(0))


def _report(evicted: list[CacheEntry]) -> None:
    for entry in evicted:
        click.echo(_line(entry))
    click.echo(f"removed {sum(entry.size for entry in evicted)} bytes in {len(evicted)} files")


def _line(entry: CacheEntry) -> str:
    used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.last_used))
    return f"{entry.size:>14}  {used}  {'in use' if entry.in_use else '      '}  {entry.name}"
