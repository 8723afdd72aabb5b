# SPDX-License-Identifier: Apache-2.0
"""The subclasses that verl instantiates instead of its own: ``driver`` wherever keys are read, ``trainer`` in the task
runner, ``worker``, ``engines`` and ``megatron_engine`` in actor workers, ``separate`` where no GPU is shared.
What verl instantiates of a rollout is in ``rollouts/``.
"""
