"""Env servers as the service runs and reaches them, below `orchestrator.env`.

`processes` are children that never outlive us, `launching` starts servers, `supervision` keeps them running, `link` is
the connection to one, `runs` what is asked over it and what comes back.
"""
