"""Token capture of a policy model: the ledger of its calls, what an inference worker stages, and cuts.

`ledger` belongs to the policy model server, `staging` and `generation_servicer` to the inference worker, and
`backends` is the client between them.
"""
