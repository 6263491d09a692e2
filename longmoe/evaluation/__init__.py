"""Measurements of a trained model.

On its own text: held-out loss beside n-gram lines, ablations, recall. On long contexts, whoever's the model is: `suites` runs the tasks of `niah`, `ruler`,
`graph_walks`, `code_hops`, `mrcr`, `consistency` and `synthetic` on a pair of functions (`models`), `positions` measures what context takes off the loss,
`statistics` gives intervals and effective context. `examples` says what a task is; `report` writes the page.
"""
