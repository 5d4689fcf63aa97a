"""A model of lm-evaluation-harness: `lm_eval --model paradec`, or `lm_eval.simple_evaluate(model=ParadecLM(...))`.

>>> from paradec.tools.evaluation.harness import ParadecLM                                      # doctest: +SKIP
>>> lm = ParadecLM("GSAI-ML/LLaDA-8B-Instruct", max_new_tokens=256, batch_size=8)                # doctest: +SKIP
>>> lm_eval.simple_evaluate(lm, tasks=["gsm8k"], apply_chat_template=True)                      # doctest: +SKIP

Needs the extra `eval`. Importing this module registers the model as "paradec". lm-evaluation-harness finds the module
by the entry point "lm_eval.models" since the release after 0.4.13; with 0.4.13 use `paradec eval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    import lm_eval.models  # noqa: F401  (first: the harness does not load its models if the registry has an entry)
    from lm_eval import utils as harness_utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"evaluation needs {error.name}: install paradec's extra 'eval', e.g. pip install -e '.[eval]'"
    ) from None

from paradec.tools.evaluation.answers import TASKS, HarnessModel

__all__ = ["TASKS", "ParadecLM"]


@register_model("paradec")
class ParadecLM(HarnessModel, TemplateLM):
    """A paradec model for the harness. Arguments: see `paradec.tools.evaluation.answers.HarnessModel`."""

    def keep(self, kind: str, arguments: Any, answer: Any) -> None:
        self.cache_hook.add_partial(kind, arguments, answer)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Compute the log-likelihood of each text: the sum over its windows. The first window's context is the token
        `prefix_token_id`."""
        check_greedy, self.check_greedy = self.check_greedy, False  # for texts, the harness needs no check
        totals: list[float] = []
        try:
            for request in requests:
                (text,) = request.args
                ids = self.tok_encode(text, add_special_tokens=False)
                windows = harness_utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length - 1, 1)
                pairs = [(None, *harness_utils.make_disjoint_window(window)) for window in windows]
                totals.append(sum(value for value, _ in self._loglikelihood_tokens(pairs, disable_tqdm)))
                self.keep("loglikelihood_rolling", (text,), totals[-1])
        finally:
            self.check_greedy = check_greedy
        return totals

    def _bar(self, total: int, hidden: bool, description: str) -> Any:
        return super()._bar(total, hidden or self.rank != 0, description)
