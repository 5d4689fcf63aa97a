"""`paradec chat`: a conversation with a model. A turn reuses keys and values of earlier turns (`keep_prefix`)."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

import paradec
from paradec.cli import options, show
from paradec.cli.work import Work, prepare
from paradec.core.checks import check_text
from paradec.core.interrupts import EXIT_CODE, restore_interrupt

HISTORY = typer.Option(help="Whether the model sees earlier turns; by default all models but the packaged one do.")
COMMANDS = {
    "/sampler": "print the sampler; /sampler NAME changes it, as in /sampler credit(threshold=0.95)",
    "/trace": "print the steps of the last answer; /trace FILE.json writes them",
    "/reset": "forget the turns",
    "/help": "print this list",
    "/quit": "end the chat, like Ctrl-D; Ctrl-C stops an answer",
}
FAILED = 1
"""Exit code if a turn from standard input failed; on a terminal, a failed turn does not change the exit code."""


@options.include(
    "model sampler set_ preset suffix block_length steps max_new_tokens temperature top_p top_k min_p "
    "repetition_penalty presence_penalty frequency_penalty seed tokenizer dtype quantization device"
)
def chat(
    context: typer.Context,
    checkpoint: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")] = None,
    system: str | None = typer.Option(None, help="System prompt: text before the first turn."),
    cache: str | None = typer.Option(None, help="As in `generate`; by default block or dual, which reuse turns."),
    history: Annotated[bool | None, HISTORY] = None,
    **shared: Any,
) -> None:
    """Talk to a model, one turn per line; /help lists commands. Without a terminal, standard input holds the turns."""
    if sys.stdin is None:
        raise ValueError("standard input is closed; chat reads turns from it")
    check_text("--system", system or "")
    if checkpoint is not None and shared["model"] is not None:
        raise ValueError(f"--model {shared['model']} and the argument {checkpoint!r} both name the model; give one")
    shared["model"] = shared["model"] if checkpoint is None else checkpoint
    is_model_given = shared["model"] is not None
    history = is_model_given if history is None else history
    given_options = options.explicit_options(context) - ({"cache"} if cache is None else set())
    shared |= {"cache": cache or "none"}
    # the packaged model answers single lines without a cache
    work = prepare("generate", None, given_options, use_defaults=is_model_given or history, **shared)
    raise typer.Exit(Conversation(work, system, history).run(sys.stdin.isatty()))


@dataclass
class Conversation:
    """A conversation. history: whether the model sees earlier turns."""

    work: Work
    system: str | None
    history: bool
    turns: list[dict[str, str]] = field(init=False, default_factory=list)
    prefix: Any = None
    """Keys and values of the turns so far, or None."""
    last_output: Any = None
    """The latest output."""

    def __post_init__(self) -> None:
        if self.work.model.tokenizer is None:
            raise ValueError(f"{self.work.model.facts.name} has no tokenizer; give --tokenizer FOLDER")
        if not getattr(self.work.model.tokenizer, "chat_template", None):
            raise ValueError(f"{self.work.model.facts.name} has no chat template for turns; use paradec generate")
        self.reset()

    def reset(self) -> None:
        """Forget the turns."""
        self.turns = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.prefix = None

    @property
    def can_reuse_turns(self) -> bool:
        """Whether the next turn can reuse keys and values."""
        cache, family = self.work.request["cache"], self.work.method.family
        if self.work.model.facts.prompt_aligned:  # every turn changes the prompt, which is one block
            return False
        return family == "renoising" if cache is None else cache.facts.uses_store

    def run(self, is_terminal: bool) -> int:
        """Answer turns until the input ends. Returns the exit code. is_terminal: whether a person types the turns."""
        has_failed = False
        if is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401 - gives input() line editing and a history
            name, cache = self.work.model.facts.name, self.work.cache_name
            typer.echo(f"{name}, {self._sampler_text()}. /help lists commands.")
            if not self.history:
                typer.echo("Each line is answered alone (--history shows the model the earlier turns).")
            elif self.can_reuse_turns and cache not in ("block", "canvas"):  # these are exact
                typer.echo("Earlier turns are not evaluated again, which is approximate; --cache none is exact.")
            if name == "tiny-llada":
                typer.echo("Try: Sort: pear fig apple (`paradec tasks` says what this model can do).")
        elif isinstance(sys.stdin, io.TextIOWrapper):  # only line feeds end turns, as in files
            sys.stdin.reconfigure(encoding="utf-8-sig", newline="\n")
        restore_interrupt()
        while True:
            try:
                line = input("> ") if is_terminal else sys.stdin.readline()
                if not line and not is_terminal:
                    raise EOFError
            except EOFError:
                line = "/quit"
            except KeyboardInterrupt:
                if not is_terminal:
                    return EXIT_CODE
                typer.echo("\n(/quit or Ctrl-D ends the chat)")
                continue
            except UnicodeDecodeError as error:
                raise ValueError(f"standard input is not UTF-8 text: {error.reason}") from None
            text = line.removesuffix("\n").removesuffix("\r")
            if text.strip() == "/quit":
                return FAILED if has_failed and not is_terminal else 0
            try:
                if text.lstrip().startswith("/"):
                    self._run_command(text.strip())
                elif text.strip():
                    self.answer(text)
            except KeyboardInterrupt:
                typer.echo("(stopped; this turn is forgotten)")
            except (ValueError, TypeError, OSError, FloatingPointError) as error:
                has_failed = True
                sys.stdout.flush()
                print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)

    def answer(self, text: str) -> None:
        """Answer a turn and print the answer. With `history`, an answered turn joins the conversation."""
        turns = [*self.turns, {"role": "user", "content": text}]
        prefix_arguments = {"prefix": self.prefix, "keep_prefix": True} if self.history and self.can_reuse_turns else {}
        prefix_arguments["trace"] = True
        if show.on_terminal(sys.stdout):
            from paradec.cli.watch import LiveView

            with LiveView(self.work.model.tokenizer) as view:
                self.last_output = self.work.run(turns, view.update, **prefix_arguments)
        else:
            self.last_output = self.work.run(turns, lambda state, commit: None, **prefix_arguments)
        out = self.last_output
        typer.echo(out.text)
        if sys.stdout.isatty():
            reused = out.cost.reused_tokens[0] if out.cost is not None else 0
            tokens, forwards = show.format_count(out.tokens[0], "token"), show.forwards(out.nfe, out.row_nfe)
            rate = out.tokens[0] / max(out.seconds, 1e-9)
            cost = f"{tokens}, {forwards}, {out.seconds:.2f} s, {rate:.1f} tokens/s"
            typer.secho(f"{cost}, {reused} tokens of earlier turns reused" if reused else cost, dim=True)
        if self.history:
            self.turns = [*turns, {"role": "assistant", "content": out.text}]
            self.prefix = out.prefix

    def _sampler_text(self) -> str:
        settings = [f"{key}={value!r}" for key, value in self.work.method.to_dict().items() if key != "sampler"]
        return f"{self.work.method.name}({', '.join(settings)}), cache {self.work.cache_name}"

    def _run_command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name == "/sampler":
            if argument:
                self._set_sampler(argument)
            typer.echo(self._sampler_text())
        elif name == "/trace":
            self._show_trace(argument)
        elif name == "/reset":
            self.reset()
            typer.echo("(the turns are forgotten)")
        elif name == "/help":
            for command, text in COMMANDS.items():
                typer.echo(f"{command:<10}{text}")
        else:
            raise ValueError(f"unknown command: {name!r}; allowed: {', '.join(COMMANDS)}")

    def _set_sampler(self, name: str) -> None:
        from paradec.api.generate import FAMILIES, make_sampler

        method = paradec.samplers.create(options.import_classes("/sampler", name, "sampler"))
        if method.family not in FAMILIES:
            raise ValueError(f"sampler {name!r} is of family {method.family!r}; chat takes samplers of text")
        method = make_sampler(self.work.model, method)
        method.check_model(self.work.model)
        self.work.method = method
        self.work.choose_cache()

    def _show_trace(self, file: str) -> None:
        if self.last_output is None:
            raise ValueError("there is no answer yet, and so no steps to show")
        if file:
            path = Path(file)
            options.check_writable("/trace", path)
            self.last_output.trace.save(path)
            typer.echo(f"{show.format_count(len(self.last_output.trace.steps), 'step')} in {path}")
            return
        tokenizer, facts = self.work.model.tokenizer, self.work.model.facts
        for step_index, step in enumerate(self.last_output.trace.steps, 1):
            tokens = [token for _, _, token, _ in step.commits]
            texts = [tokenizer.decode([token]) for token in tokens if token not in facts.eos_token_ids]
            ends = len(tokens) - len(texts)
            parts = [text.strip() or repr(text) for text in texts] + ([f"end x {ends}"] if ends else [])
            typer.echo(
                f"{step_index:>3}  {step.kind:<7} {show.format_count(len(tokens), 'token'):>10}  {' '.join(parts)}"
            )
