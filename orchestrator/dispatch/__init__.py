"""Dispatch: decides what runs next, and accounts for every rollout.

`core` decides (pure, time as an argument), `ledger` accounts, `staleness` admits, `work` holds what is under
way, `limits` paces, and `driver` is the thin asyncio shell around them.
"""
