# SPDX-License-Identifier: Apache-2.0
"""The subclasses that verl instantiates instead of its own, one file per verl process role.

``engine``, ``megatron_engine`` and ``worker`` run in actor workers, ``trainer`` in the task runner, ``driver`` and
``hydra_plugins`` in the driver, ``rollout_config`` everywhere. They hold verl's calling conventions and nothing else;
the work is done by the sharding manager. What verl instantiates of a rollout is in ``rollouts/``.
"""
