"""Optuna study in a file, shared by several processes.

It stores all measurements: those of a rung as attributes of the trial, those of the reference and of the reported half
as attributes of the study. If a process ends, other processes continue its trials.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from paradec.core.checks import short_repr
from paradec.tools.tuning.scoring import Measured

NAME = "paradec"
SCHEMA = "paradec-tune/2"
ABANDONED_SECONDS = 30.0
"""Age in seconds from which a trial that has never had an owner counts as abandoned."""

_active_runs: set[str] = set()
"""Names of runs in progress in this process."""
_claim_lock = threading.Lock()


def check_installed() -> None:
    """Raise ImportError unless Optuna is installed; the message names the extra."""
    if importlib.util.find_spec("optuna") is None:
        raise ImportError("tune needs optuna: install paradec's extra 'tune', e.g. pip install -e '.[tune]'")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Optuna's Python warnings, and its log messages below the level of warnings."""
    import optuna  # noqa: F401 - creates the logger

    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="optuna")
            warnings.filterwarnings("ignore", message=".*experimental feature.*")
            yield
    finally:
        logger.setLevel(level)


class Study:
    """An Optuna study, in a file or in memory, and the name of this process's run.

    file: an SQLite file, created if missing; None keeps the study in memory.
    setup: data that must be equal to the setup of an existing study.
    directions: Optuna's directions, one per objective. seed: seed of the proposals.
    Raises ValueError: the file is no study, or its setup differs (see the message). OSError: an unwritable file.
    """

    def __init__(self, file: str | os.PathLike[str] | None, setup: Mapping[str, Any], directions: list[str], seed: int):
        import optuna

        self.optuna, self.seed, self.file = optuna, seed, None if file is None else Path(file)
        self.run_name = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}"
        with _quiet():
            self.study = optuna.create_study(
                storage=None if self.file is None else _storage(self.file),
                study_name=NAME,
                directions=directions,  # type: ignore[arg-type]
                load_if_exists=True,
            )
        stored = self.study.user_attrs.get("setup")
        if stored is None:
            self.study.set_user_attr("setup", dict(setup))
        elif (difference := describe_difference(stored, dict(setup))) is not None:
            raise ValueError(f"the study in {str(file)!r} has another {difference}; give another file")

    def __enter__(self) -> Study:
        _active_runs.add(self.run_name)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections to the file."""
        _active_runs.discard(self.run_name)
        engine = getattr(getattr(self.study._storage, "_backend", None), "engine", None)
        if engine is not None:
            engine.dispose()

    # ---- trials -------------------------------------------------------------------------------------------------

    def trials(self) -> list[Any]:
        """List all trials, as Optuna's frozen trials."""
        return self.study.get_trials(deepcopy=False)

    def next_trial(self, starts: Sequence[Mapping[str, Any]]) -> tuple[Any, list[Any]]:
        """Return the next trial to run, and all other trials. The next trial is an abandoned one if there is any, else
        one for the first entry of `starts` without a trial, else Optuna's proposal."""
        with _claim_lock, _quiet():
            trials = self.trials()
            for frozen in trials:
                if frozen.state.name == "RUNNING" and self.is_abandoned(frozen):
                    trial = self.optuna.trial.Trial(self.study, frozen._trial_id)
                    trial.set_user_attr("owner", self.run_name)
                    return trial, [entry for entry in trials if entry.number != frozen.number]
            started = {frozen.user_attrs.get("start") for frozen in trials}
            unstarted = [k for k in range(len(starts)) if k not in started]
            if unstarted:
                self.study.enqueue_trial(dict(starts[unstarted[0]]), user_attrs={"start": unstarted[0]})
            # a new sampler, seeded by the number of trials: interruptions do not change the proposals
            self.study.sampler = self.optuna.samplers.TPESampler(
                multivariate=True, group=True, seed=self.seed + len(trials)
            )
            trial = self.study.ask()
            trial.set_user_attr("owner", self.run_name)
            return trial, trials

    def tell(self, trial: Any, state: str, values: list[float] | None = None) -> None:
        """End a trial in state "COMPLETE" (with values), "PRUNED" or "FAIL"."""
        with _quiet():
            final_state = self.optuna.trial.TrialState[state]
            self.study.tell(trial, values, state=None if values else final_state, skip_if_finished=True)

    def is_abandoned(self, frozen: Any) -> bool:
        """Whether a trial has not ended, and no process works on it."""
        if frozen.state.name != "RUNNING":
            return bool(frozen.state.name == "WAITING")
        owner = frozen.user_attrs.get("owner")
        if owner is None:
            started = frozen.datetime_start
            return started is not None and (datetime.now() - started).total_seconds() > ABANDONED_SECONDS
        if not owner:
            return True
        host, pid, _ = owner.rsplit(" ", 2)
        if host != socket.gethostname():
            return False
        return owner not in _active_runs if int(pid) == os.getpid() else not _is_alive(int(pid))


def read_rung(frozen: Any, rung: int) -> Measured | None:
    """Read the measurements of a trial on one rung; None if the trial has not finished the rung."""
    data = frozen.user_attrs.get(f"rung {rung}")
    return None if data is None else Measured(**data)


def join_rungs(frozen: Any, rung: int) -> Measured | None:
    """Join the measurements of a trial on all rungs up to this one; None if the trial has not finished them."""
    total = Measured()
    for k in range(rung + 1):
        part = read_rung(frozen, k)
        if part is None:
            return None
        total.add(part)
    return total


def describe_difference(before: Any, after: Any, path: str = "") -> str | None:
    """Describe the first difference between two setups; None if they are equal."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in {**before, **after}:
            inner_path = f"{path} of {name!r}" if path else str(name)
            if (difference := describe_difference(before.get(name), after.get(name), inner_path)) is not None:
                return difference
        return None
    before, after = ([*value] if isinstance(value, (list, tuple)) else value for value in (before, after))
    return None if before == after else f"{path}: {short_repr(before)} in the study, {short_repr(after)} in this call"


def _storage(file: Path) -> Any:
    """Open the storage in a file. Raises ValueError: a file that is not a study; OSError: a missing folder."""
    import optuna
    from sqlalchemy.exc import DatabaseError

    if file.is_dir() or not file.parent.is_dir():
        raise OSError(f"study={str(file)!r} must be a file in an existing folder")
    if file.exists() and file.stat().st_size:
        with file.open("rb") as opened:
            if opened.read(15) != b"SQLite format 3":
                raise ValueError(f"study={str(file)!r} is not a study: it is not an SQLite file")
    for attempt in range(5):
        try:
            # wait up to 60 s while other processes write
            return optuna.storages.RDBStorage(f"sqlite:///{file}", engine_kwargs={"connect_args": {"timeout": 60}})
        except DatabaseError as error:  # another process may be creating the tables: try again
            if attempt == 4:
                raise ValueError(f"study={str(file)!r} cannot be opened: {error.orig}") from error
            time.sleep(0.2 * 2**attempt)
    raise AssertionError("unreachable")


def _is_alive(pid: int) -> bool:
    if os.name == "nt":  # on Windows, signal 0 is Ctrl-C and must not be sent: assume that the process is alive
        return True
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # the process exists, but belongs to another user
    return True
