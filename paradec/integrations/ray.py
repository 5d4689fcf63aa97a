"""Ray Data: a class for `map_batches`, and a job that can be stopped and continued.

>>> prompts = ray.data.read_json("prompts.jsonl")                    # columns "id" and "prompt" # doctest: +SKIP
>>> paradec.integrations.ray.answer(prompts, "answers", workers=4)                               # doctest: +SKIP

From 2.60 on, Ray Data restarts a worker that died, but it cannot continue a job that was stopped. So `answer` writes
Parquet files, the parts of the result, and skips the ids that are in a part already.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from paradec.core.checks import check_int, check_packages, short_repr

log = logging.getLogger(__name__)
SEED_MASK = 2**63 - 1


class Predictor:
    """Model that answers prompts in rows, for `dataset.map_batches(Predictor, fn_constructor_kwargs=..., compute=...)`.

    A row's answer depends only on its prompt, its id and the seed, but not on the worker, batch, order or restarts.

    source: source for `paradec.load`; None is the packaged model. load: more arguments of `paradec.load` (dtype, ...).
    prompt, id: names of the columns. Ids must be unique texts or ints.
    seed: seed of all random numbers; a row's seed is `seed_of(seed, id)`.
    model: a function without arguments that returns the model; it replaces `source`.
    batch_size, arguments: see `paradec.generate_many`."""

    def __init__(
        self,
        source: str | None = None,
        *,
        load: Mapping[str, Any] | None = None,
        prompt: str = "prompt",
        id: str = "id",
        batch_size: int = 8,
        seed: int = 0,
        model: Callable[[], Any] | None = None,
        **arguments: Any,
    ):
        import paradec

        self.model = paradec.load(source, **(load or {})) if model is None else model()
        self.prompt, self.id, self.seed = prompt, id, seed
        self.arguments = {"batch_size": batch_size, **arguments}

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a batch of rows. Returns its columns, and "text", "tokens", "forwards" and "error" ("" for none)."""
        import paradec

        for name in (self.prompt, self.id):
            if name not in rows:
                raise ValueError(f"the rows have no column {name!r}; they have {sorted(rows)}")
        entries = [
            {"prompt": _to_python(prompt), "id": _to_python(name), "seed": seed_of(self.seed, _to_python(name))}
            for prompt, name in zip(rows[self.prompt], rows[self.id], strict=True)
        ]
        outputs = list(paradec.generate_many(self.model, entries, **self.arguments))
        return dict(rows) | {
            "text": [output.text or "" for output in outputs],
            "tokens": [output.tokens[0] for output in outputs],
            "forwards": [output.row_nfe[0] for output in outputs],
            "error": ["" if output.error is None else str(output.error) for output in outputs],
        }


def seed_of(seed: int, id: str | int) -> int:
    """Derive a row's seed from the seed and the row's id. Equal prompts with different ids have different seeds."""
    digest = hashlib.blake2b(f"{seed}:{type(id).__name__}:{id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & SEED_MASK


def answer(
    dataset: Any, folder: str | Path, *, workers: int = 1, rows_per_part: int = 64, id: str = "id", **arguments: Any
) -> None:
    """Answer the prompts of a Ray dataset, and write Parquet files to a folder. A call answers only missing prompts.

    dataset: a dataset with columns "prompt" and `id`; other columns are copied. id: name of the column of ids.
    folder: a folder for this job only. Rows with an error count as answered.
    workers: number of processes. Each has its own model, and one CPU unless `num_cpus` is given; leave one CPU free.
    rows_per_part: number of rows of a part. A worker loses at most this many rows when the job is stopped.
    arguments: arguments of `Predictor`; `num_gpus` and `num_cpus` of each worker.
    Raises ImportError: ray[data] is not installed. ValueError, before any decoding: an argument out of its range, or
    ids that are not unique."""
    check_installed()
    import ray.data

    check_int("workers", workers, low=1)
    check_int("rows_per_part", rows_per_part, low=1)
    check_ids(dataset, id)
    resources = {name: arguments.pop(name) for name in ("num_gpus", "num_cpus") if name in arguments}
    Path(folder).mkdir(parents=True, exist_ok=True)
    remaining = unanswered(dataset, folder, id=id)
    if remaining.count() == 0:
        return
    remaining.repartition(target_num_rows_per_block=rows_per_part).map_batches(
        Predictor,
        batch_size=rows_per_part,
        compute=ray.data.ActorPoolStrategy(size=workers),
        fn_constructor_kwargs={"id": id, **arguments},
        **resources,
    ).write_parquet(str(folder))


def check_ids(dataset: Any, id: str = "id") -> None:
    """Check that the ids of a Ray dataset are distinct texts or ints. Raises ValueError."""
    columns = dataset.columns()
    if not columns:
        return  # Ray reports no columns for a dataset without rows
    if id not in columns:
        raise ValueError(f"the dataset has no column {id!r}; it has {sorted(columns)}")
    _unique_ids((_to_python(row[id]) for row in dataset.select_columns([id]).iter_rows()), set(), "the dataset")


def unanswered(dataset: Any, folder: str | Path, *, id: str = "id") -> Any:
    """Select the rows of a dataset whose ids are in no part of the folder."""
    finished_ids = answered_ids(folder, id=id)
    return dataset.filter(lambda row: _to_python(row[id]) not in finished_ids) if finished_ids else dataset


def answered_ids(folder: str | Path, *, id: str = "id") -> set[Any]:
    """Read the ids in a folder's parts. An unreadable part is renamed to NAME.broken. Raises ValueError for an id that
    occurs twice."""
    check_installed()
    import pyarrow
    import pyarrow.parquet

    ids_of_parts: set[Any] = set()
    for part in sorted(Path(folder).rglob("*.parquet")):
        try:
            ids = pyarrow.parquet.read_table(part, columns=[id]).column(id).to_pylist()
        except (pyarrow.ArrowInvalid, OSError) as error:  # the job was stopped while writing this part
            log.warning("%s cannot be read; its rows are answered again: %s", part, error)
            part.rename(part.with_name(part.name + ".broken"))
            continue
        ids_of_parts |= _unique_ids(ids, ids_of_parts, part)
    return ids_of_parts


def check_installed() -> None:
    """Raise ImportError unless ray[data] is installed; the message has the command to install it."""
    check_packages("paradec.integrations.ray", "ray", ("ray", "pyarrow"))


def _unique_ids(ids: Iterable[Any], before: set[Any], part: Path | str) -> set[Any]:
    """Return the ids as a set. Raises ValueError for a wrong type, or an id that is twice in it or in `before`."""
    new: set[Any] = set()
    for name in ids:
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise ValueError(f"id {short_repr(name)} in {part} is neither a text nor an int")
        if name in new or name in before:
            raise ValueError(f"id {short_repr(name)} occurs twice, the second time in {part}; ids must be unique")
        new.add(name)
    return new


def _to_python(value: Any) -> Any:
    """Convert a cell to plain Python: numpy's numbers and arrays become Python's numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value
