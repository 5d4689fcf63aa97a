"""Waiting for the trials of another process."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import optuna


def wait_for(file: Path, trials: int, process: subprocess.Popen[str], seconds: float = 300) -> None:
    """Until a process has finished so many trials; it must not end before, nor take longer."""
    end = time.monotonic() + seconds
    while len(finished(file)) < trials:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{len(finished(file))} trials after {seconds} s"
        time.sleep(0.5)  # looking takes the file's lock


def finished(file: Path) -> list[Any]:
    if not file.exists():
        return []
    try:
        study = optuna.load_study(study_name="paradec", storage=f"sqlite:///{file}")
    except KeyError:
        return []
    return [trial for trial in study.trials if trial.state.is_finished()]
