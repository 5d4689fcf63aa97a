"""Questions with a few possible answers, read from a model without generating: `paradec.decide`.

| file | what it is |
|---|---|
| `questions.py` | `YesNo`, `Pick`, `Score`, `Span` |
| `prompts.py` | a question becomes a row of ids with holes where its answer is |
| `reading.py` | the model's log-probabilities at these holes |
| `canvases.py` | the same of canvases of noise: their first step |
| `answers.py` | from log-probabilities to a `Decision`; `fit_temperature` |
| `decide.py` | all of it put together |
"""
