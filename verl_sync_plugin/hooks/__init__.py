"""The subclasses that verl instantiates instead of its own, one file per verl process role.

``engine`` and ``rollout`` run in actor workers, ``replica`` and ``trainer`` in the task runner, ``server`` in the
rollout server actor. They hold verl's calling conventions and nothing else; the work is done by the sharding manager.
"""
