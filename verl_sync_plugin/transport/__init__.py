# SPDX-License-Identifier: Apache-2.0
"""How bytes and messages get from one trainer rank to the engine rank on the same device.

Each mechanism is a pair: what the sender exports and what the receiver opens. Staging memory carries the payload
(``cuda_ipc`` on GPUs, ``shared_memory`` on CPUs), a Unix socket (``listener``, ``channel``) carries the few words
around it (``protocol``, ``codec``).
"""
