"""Languages that answers must be in: what callers give (`values`), and what decoding makes of it.

A value becomes a node of `expressions` (`regex` reads patterns, `json_schema` schemas), the node a minimal automaton
over bytes (`byte_automaton`), and that one over a model's tokens (`spelling` says what each token reads, `lift` joins
both), for a server in a process with limits (`compiler`). `passes` has the sums over all texts of an `automaton`,
`marginals` what they make of logits. Nothing here knows a sampler.
"""
