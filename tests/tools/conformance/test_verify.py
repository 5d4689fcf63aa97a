"""`paradec verify`: right decoders agree, wrong ones are found and named, and what is printed."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import asked, named, one
from places import GOLDEN, ROOT
from scripts import load_script
from typer.testing import CliRunner

from paradec import cli
from paradec.tools.conformance import report
from paradec.tools.conformance.targets import Ours

OWN = [
    *("ties/threshold_1_bl8", "ties/threshold_0.5_bl4", "ties/wino_1_bl8", "ties/wino_0.5_bl8"),
    *("llada/low_confidence_bl8_steps16/0", "llada/low_confidence_bl8_steps32/rows"),
    *("fastdllm/nocache_thr0.9_bl16/0", "rows/threshold_padding", "rows/low_confidence_padding"),
]
DRAWS = "laws/temperature1_prompt0/speculative"


def own(**fault: Any) -> Any:
    """The example's decoder in plain PyTorch, with a planted fault."""
    return functools.partial(load_script("examples/verify_own_decoder.py").answer, **fault)


def statuses(found: Any) -> dict[str, str]:
    return {outcome.case: outcome.status for outcome in found.outcomes}


# ---- faults --------------------------------------------------------------------------------------------------------


def test_a_right_decoder_agrees() -> None:
    found = asked(own(), [*OWN, DRAWS], draws=500)
    assert set(statuses(found).values()) == {"agree"} and found.passed
    assert not any(outcome.answers_only for outcome in found.outcomes)


def test_a_threshold_that_is_compared_otherwise_is_named() -> None:
    found = asked(own(above=torch.ge), OWN)
    differing = [outcome for outcome in found.outcomes if outcome.status == "differ"]
    assert [outcome.case for outcome in differing] == ["ties/wino_1_bl8", "ties/wino_0.5_bl8"] and not found.passed
    said = report.described(differing[0])
    assert "5 tokens (5 x 1) made final, 1 token (1 x 1) expected: it compares confidence >= threshold" in said


def test_rows_that_mix_are_named() -> None:
    found = asked(own(sees_padding=True), OWN)
    assert {name for name, status in statuses(found).items() if status == "differ"} == {n for n in OWN if "row" in n}
    said = {outcome.case: outcome.message for outcome in found.outcomes}
    assert not found.passed and "it sees padding as masks, the method hides padding" in said["rows/threshold_padding"]
    assert "rows of a batch depend on their neighbours" in said["llada/low_confidence_bl8_steps32/rows"]


def test_a_biased_acceptance_is_named() -> None:
    found = asked(own(acceptance=1.5), ["ties/threshold_1_bl8", DRAWS], draws=2000)
    assert statuses(found) == {"ties/threshold_1_bl8": "agree", DRAWS: "differ"} and not found.passed
    assert found.outcomes[1].corrected < 1e-6
    assert "what is accepted or drawn is biased" in report.text(found).replace("\n    ", " ")


# ---- near-ties -----------------------------------------------------------------------------------------------------


class Changed:
    """Ours, but that one commit is another: what `change` makes of the steps."""

    def __init__(self, change: Any, steps: bool = True):
        self.ours, self.change, self.steps = Ours(), change, steps

    def __call__(self, request: Any) -> Any:
        answer = self.change(self.ours(request))
        return answer if self.steps else {"ids": answer["ids"]}


def other_token(answer: Any) -> Any:
    row, at, token = answer["steps"][3][0]
    answer["steps"][3][0] = [row, at, token + 1]
    answer["ids"][row][at] = token + 1
    return answer


def later(answer: Any) -> Any:
    """What the third step makes final, the fourth does, and the other way round."""
    answer["steps"][2:4] = answer["steps"][3:1:-1]
    return answer


CASE = "llada/low_confidence_bl8_steps32/0"


def test_margins_are_those_of_the_replay() -> None:
    """The scores of a plain loop: how much likelier the token was, and how much more confident the position."""
    script, case = load_script("examples/verify_own_decoder.py"), named()[CASE]
    (expected,) = case.expected
    assert expected.steps is not None
    ids = torch.tensor([case.asked.prompts[0] + [63] * 32])
    for step in expected.steps[:2]:
        for at, token in step.items():
            ids[0, at] = token
    probabilities = script.llada(str(GOLDEN / "llada-tiny"), ids, torch.ones_like(ids, dtype=torch.bool)).softmax(-1)
    best = probabilities[0].max(-1).values
    (first,), (second,) = expected.steps[2], expected.steps[3]
    assert one(Changed(later), CASE).margin == pytest.approx(float(best[first] - best[second]), rel=1e-6)
    ((at, token),) = expected.steps[2].items()
    ids[0, at] = token
    distribution = script.llada(str(GOLDEN / "llada-tiny"), ids, torch.ones_like(ids, dtype=torch.bool)).softmax(-1)
    ((at, token),) = expected.steps[3].items()
    found = one(Changed(other_token), CASE)
    assert found.margin == pytest.approx(float(distribution[0, at, token] - distribution[0, at, token + 1]), rel=1e-6)
    assert found.status == "differ" and found.difference.step == 3


def test_differences_within_the_tolerance_are_counted_apart() -> None:
    margin = one(Changed(later), CASE).margin
    for tolerance, status in ((margin * 0.99, "differ"), (margin * 1.01, "undecided")):
        found = asked(Changed(later), [CASE], tolerance=tolerance)
        assert statuses(found) == {CASE: status}
        assert found.count("undecided") == (status == "undecided")
    assert "1 undecided" in report.summary(found) and "margin" in report.text(found)


def test_of_answers_alone_the_smallest_margin_until_there_counts() -> None:
    assert one(Changed(later, steps=False), CASE).status == "agree"
    found = one(Changed(other_token, steps=False), CASE)
    assert found.answers_only and found.difference.step is None
    assert 0 < found.margin <= one(Changed(other_token), CASE).margin


def test_what_the_reference_leaves_open_is_undecided() -> None:
    case = next(case for case in named().values() if case.group == "traces" and not case.expected[0].certain)
    found = one(Changed(other_token), case.name)
    assert found.status == "undecided"


# ---- ours ----------------------------------------------------------------------------------------------------------

FEW = [
    *("llada/random_bl16_steps16/0", "llada/low_confidence_bl8_steps32_cfg0.25/0", "dream/entropy_steps16_batch2/0"),
    *("fastdllm/dual_factor1.0_bl8/0", "fastdllm/prefix_thr0.9_bl8/rows", "adablock/nocache_init8/0"),
    *(
        "dinfer/credit_thr0.9_default_bl16/0",
        "dinfer/hierarchy_thr0.9_low0.4_bl16/0",
        "dkv/greedy_refresh4_win4_bl32/0",
    ),
    *("dkv-dream/pd_refresh4_un/0", "freedave/freedave_d4_tree_prefix_bl16/0", "llada20_batch/b8_thr0.7_s8/0"),
    *("llada20_generate/b8_minimal_topk4/0", "llada21_generate/b8_thr0.7_edit0.5/0"),
    *("llada_moe_generate/b8_s16_gen16/0", "ties/editing_1_bl8", "canvases/stops_3_rows_0"),
]


def test_ours_agrees_with_a_case_of_each_kind() -> None:
    found = asked(Ours(), [*FEW, "laws/temperature0.7_topk3_prompt1/sjd"])
    assert set(statuses(found).values()) == {"agree"}, report.text(found)


@pytest.mark.full
def test_the_examples_agree_with_all_that_they_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["example"])
    for name, agree in (("verify_transformers", 12), ("verify_own_decoder", 250)):
        load_script(f"examples/{name}.py").main()
        last = capsys.readouterr().out.strip().splitlines()[-1]
        counts = dict(reversed(entry.split(" ", 1)) for entry in last.split(": ")[2].split(" (")[0].split(", "))
        assert int(counts["agree"]) >= agree and counts["differ"] == counts["failed"] == "0", last


@pytest.mark.full
def test_ours_agrees_with_all_cases() -> None:
    found = asked(Ours(), named(), draws=10_000)
    assert found.passed and found.count("agree") > 1200, report.text(found)
    assert found.count("not implemented") == 0
    # what hangs on a near-tie of float32 alone
    for outcome in found.outcomes:
        if outcome.status == "undecided":
            assert not all(row.certain for row in named()[outcome.case].expected), outcome


def test_transformers_diffusion_gemma_agrees() -> None:
    answer = load_script("examples/verify_transformers.py").answer
    names = ["canvases/stops_1_rows_0", "canvases/all_steps_3_rows_1"]
    assert set(statuses(asked(answer, names)).values()) == {"agree"}
    other = asked(lambda request: answer(request | {"seed": request["seed"] + 1}), names[:1])
    assert other.outcomes[0].status == "differ" and other.outcomes[0].difference.step is None


def test_every_case_has_a_name_of_its_own_and_something_to_compare() -> None:
    assert len(named()) > 1200
    for name, case in named().items():
        assert name == case.name
        assert case.tie is not None or case.distribution is not None or all(row.compared for row in case.expected)
    batches = [case for case in named().values() if case.group == "rows"]
    assert len(batches) > 80 and all(len(set(map(len, case.asked.prompts))) > 1 for case in batches)


# ---- the command ---------------------------------------------------------------------------------------------------


def verify(*arguments: object) -> Any:
    given = [str(argument) for argument in arguments]
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, ["verify", "--data", str(GOLDEN), *given])


def test_the_command_prints_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "found.json"
    result = verify("--target", "verify_own_decoder:answer", "--group", "ties", "--json", file)
    assert result.exit_code == 0, result.output
    *_, last = result.stdout.strip().splitlines()
    said = json.loads(file.read_text())
    assert last == said["summary"] and said["passed"] and said["counts"]["agree"] == 6
    assert "verify_own_decoder:answer: 6 agree, 0 differ, 0 undecided, 2 not implemented, 0 failed" in last
    assert "group=ties" in last and said["data"][:12] in last
    body = result.stdout.splitlines()[:-1]  # the line to quote is one line
    assert max(map(len, body)) <= 80
    assert "editing, ties: ties/editing_1_bl8: low_confidence, threshold, wino and" in result.stdout


def test_the_command_exits_with_1_where_something_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "wrong_decoder.py").write_text(
        "def answer(request):\n"
        "    return {'ids': [[*prompt, *[1] * request['max_new_tokens']] for prompt in request['prompts']]}\n"
    )
    result = verify("--target", "wrong_decoder:answer", "--method", "threshold", "--group", "ties", "--json", "a.json")
    assert result.exit_code == 1
    said = json.loads((tmp_path / "a.json").read_text())
    assert not said["passed"] and said["counts"]["differ"] == 2  # with blocks of 4 the tokens are others
    assert "Of 4 cases answers alone were compared" in result.stdout
    assert [case["status"] for case in said["cases"] if "difference" in case] == ["differ"] * 2


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "a:b", "--command", "c"], "give --target or --command, not both"),
        (["--target", "nothing"], "--target 'nothing' must be FILE.py:NAME or MODULE:NAME"),
        (["--method", "treshold"], "unknown --method: 'treshold' (did you mean 'threshold'?)"),
        (["--group", "trace"], "unknown --group: 'trace' (did you mean 'traces'?)"),
        (["--draws", "10"], "--draws=10 must be an integer from 100"),
        (["--tolerance", "-1"], "--tolerance=-1.0 must be a number in"),
        (["--timeout", "0"], "--timeout=0.0 must be a number in"),
        (["--json", "no/such/folder/x.json"], "cannot write --json"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    result = verify(*arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output


def test_ctrl_c_keeps_what_was_compared() -> None:
    answers = own()

    def interrupted(request: Any) -> Any:
        if request["id"] == OWN[2]:
            raise KeyboardInterrupt
        return answers(request)

    found = asked(interrupted, OWN)
    assert found.interrupted and len(found.outcomes) == 2 and not found.passed
    assert "interrupted" in report.summary(found) and report.data(found)["counts"]["agree"] == 2


def test_batches_of_draws_have_seeds_of_their_own() -> None:
    seen: list[tuple[int, int]] = []
    answers = own()

    def counted(request: Any) -> Any:
        seen.append((request["seed"], len(request["prompts"])))
        first = answers(request | {"prompts": request["prompts"][:1]})["ids"][0]
        return {"ids": [first] * len(request["prompts"])}

    asked(counted, [DRAWS], draws=2300)
    assert seen == [(0, 1000), (1000, 1000), (2000, 300)]
