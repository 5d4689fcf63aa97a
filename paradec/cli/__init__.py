"""The command `paradec`: one file per command. `options` has their shared options, `show` prints results."""

from paradec.cli.app import app

__all__ = ["app"]
