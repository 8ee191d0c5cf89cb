"""What checkpoints cost, measured against two baselines of our own with the same promises.

    python -m benchmarks               everything, one table per group
    python -m benchmarks.storage       the store alone
    python -m benchmarks.pause         the pause of a served fleet

What is measured and what is claimed: docs/performance.md.
"""
