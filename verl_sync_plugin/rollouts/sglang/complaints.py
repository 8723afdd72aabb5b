# SPDX-License-Identifier: Apache-2.0
"""How an engine rank that cannot reach its trainer rank says why.

What an engine rank says otherwise travels on its channel to the trainer rank beside it, which it does not have then;
and SGLang passes on nothing that a loader returns or raises. So it complains to the process that launched its engine,
over a socket whose address its environment holds. There the complaint waits until the leader asks for it
(``sync/connect.py``).
"""

from __future__ import annotations

import os
from contextlib import suppress

from verl_sync_plugin.log import say
from verl_sync_plugin.transport.channel import ChannelClosedError, ChannelTimeoutError
from verl_sync_plugin.transport.codec import BadMessageError
from verl_sync_plugin.transport.listener import Listener, connect
from verl_sync_plugin.transport.protocol import Failed, Join

ADDRESS_VARIABLE = "VERL_SYNC_COMPLAINTS"
SECONDS = 1.0  # bound on every wait here; nobody waits on a healthy machine, for what is said is there at once

_listeners: dict[str, Listener] = {}  # of this process, by address


def listen() -> None:
    """Before SGLang is launched from this process: its processes inherit where they can complain."""
    if os.environ.get(ADDRESS_VARIABLE) not in _listeners:
        listener = Listener(SECONDS)
        _listeners[listener.address] = listener
        os.environ[ADDRESS_VARIABLE] = listener.address


def complain(sync_id: str, why: str) -> None:
    """In a process of the engine; what cannot be delivered stays in the log.

    Args:
        sync_id: of the request that this engine rank cannot follow.
        why: the reason, which names the engine rank.
    """
    say(why)
    try:
        answer(sync_id, why)
    except Exception as error:  # of a loader, SGLang would end the engine
        say(f"its trainer does not hear of this: {error!r}")


def answer(question: str, text: str) -> None:
    """In a process of the engine: has ``text`` wait where ``complaints_of(question)`` looks."""
    channel = connect(os.environ[ADDRESS_VARIABLE], SECONDS, SECONDS)
    channel.send(Join(question))
    channel.send(Failed(text))
    channel.close()


def complaints_of(sync_id: str) -> list[str]:
    """In the process that launched the engine: what its ranks have said of one sync; forgets all that was said."""
    found = []
    for listener in _listeners.values():
        while (channel := listener.accept(0)) is not None:
            with suppress(ChannelClosedError, ChannelTimeoutError, BadMessageError):
                join, failed = channel.receive(SECONDS), channel.receive(SECONDS)
                if join == Join(sync_id) and isinstance(failed, Failed):
                    found.append(failed.text)
            channel.close()
    return found
