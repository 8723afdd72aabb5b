# SPDX-License-Identifier: Apache-2.0
"""The only room that knows SGLang.

Before anything runs, in every process (no torch, no verl, no SGLang at the top of these):
    rollout       what the hooks know of SGLang: what is registered with verl, and what is refused
    arguments     keys and SGLang's arguments with which its weights cannot be synced
    families      models that SGLang cannot be given, or whose embedding and head it cannot hold apart
    served_lora   LoRA adapters that SGLang serves itself: which, and in what form

In the task runner and in the rollout server's process:
    replica       launches the servers of one engine, with our server class
    server        verl's HTTP server with our loader: wakes, loads, flushes and answers for the whole engine
    updates       sleep, wake, load and flush of one engine, here as in `local_server`
    occupation    what of the engine's memory is released, and the one request under way that changes it
    awake         which memory that is in each stage
    admission     what stands before SGLang's requests, from verl as over HTTP
    gate          keeps them out while weights are half written or memory is released
    pause         what becomes of those in flight when a separate rollout is synced
    backup        whether SGLang keeps a host copy of its weights

Beside the ranks of a script (`spmd/`):
    local_launch   SGLang's arguments, and what is refused
    local          starts the engine's process and calls it
    local_server   that process
    local_endpoint one rank's view of the engine

In every actor worker:
    adapter       verl's calls of a sync become the sharding manager's phase
    making        makes the sharding manager from verl's configuration
    endpoint      one trainer rank's view of its engine: calls the server
    limits        what SGLang estimates that it needs of a device

In SGLang's scheduler processes:
    loader        what SGLang calls for a load: follows the request, runs the receiver's session
    model         SGLang's model behind the receiver's ``EngineModel``
    skips         tensors of a checkpoint that SGLang's models rightly leave alone

Between server and loader:
    request       the one payload that goes from the server through SGLang to the loader, and its token
"""
