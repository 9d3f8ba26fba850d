"""Environments as the service runs and reaches them.

`env` has the wrappers (`Env`, `TrainEnv`, `EvalEnv`), `launching` starts servers, `supervision` keeps them running, `link`
is the connection to one, `requests` what is asked over it, `processes` children that never outlive us.
"""
