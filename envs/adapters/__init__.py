"""Environments of other libraries, and of plain functions, as environments of this package.

Each module here is a loader of `envs.loader`: it turns a name and `args` into an `Environment`. A library is
imported only by the module that adapts it, inside the env server's own interpreter, so that what it depends
on never reaches the service. The adapters keep the library's meaning (prompts, tools, scores) and our
promises: model calls go through `Model`, an exception in a reward is a failed rollout, never a zero.
"""
