"""The command `paradec`: a file for each of its commands; `show` has what they print, `options` what they share."""

from paradec.cli.app import app

__all__ = ["app"]
