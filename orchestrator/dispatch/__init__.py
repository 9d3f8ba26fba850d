"""Dispatch: decides what runs next, and accounts for every rollout. Pure; time is an argument.

`dispatcher` decides, `admission` says which training envs may open a group, `pace` and `versions` how far ahead of the
trainer, `limits` how fast, `suspects` what is asked again after a server died; `ledger` accounts, `flight` and
`work` hold what is under way, `ports` is what dispatch asks of its neighbours.
"""
