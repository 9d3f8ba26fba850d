"""Env servers as Ray actors.

`cluster` is the service's side; `driver` a process of its own that speaks to Ray, whose import and calls would block the
service; `actor` what runs on a node, beside the server; `messages` what service and driver tell each other. Rollouts
go over ZMQ between the service and the servers: Ray places servers and reports their end, and carries nothing else.
"""
