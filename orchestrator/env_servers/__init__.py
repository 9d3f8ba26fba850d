"""Environments as the service runs and reaches them.

`env` has the wrappers (`Env`, `TrainEnv`, `EvalEnv`), `launcher` is how servers come to be: `child_servers` starts them on
this machine, `on_ray` on a cluster. `supervision` keeps them running, `launching` joins the two and holds servers to one
declaration, `members` are those that sources name. `link` speaks to one over a `connection`, `pulse` says whether it is alive, `requests` is what is asked,
`processes` are children that never outlive us, `templates` what servers on this machine are forked from.
"""
