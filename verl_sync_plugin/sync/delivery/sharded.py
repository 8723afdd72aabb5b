"""A stream whose segments stay where they were packed: every engine rank reads from all trainer ranks of its group.

Nothing is gathered, so no rank waits in a collective of its device. Instead all ranks settle once per bucket: then
every segment of it is packed, and every engine rank has read the bucket before the last, whose slots are free for the
next one. Meanwhile the engines load the last bucket, so the exchange costs them no time.
"""

from __future__ import annotations

from verl_sync_plugin.sync.delivery.gathered import BucketStream
from verl_sync_plugin.sync.sender import SLOTS

AHEAD = SLOTS - 1  # buckets between the one handed over and the last one that every engine rank has surely read


class ShardedStream(BucketStream):
    """See ``BucketStream``."""

    def run(self) -> None:
        """Like ``BucketStream.run``; the bucket handed over may be read by all engine ranks of the group."""
        count = len(self._plan.buckets)
        for index in range(count):
            with self._agreement.attempt():
                if index >= AHEAD:
                    self._wait(index - AHEAD)
                with self._report.stage("drain"):
                    self._sender.drain(index % SLOTS)
            with self._report.stage("settle"):
                self._agreement.settle(f"packing bucket {index + 1} of {count}")
            with self._agreement.attempt():
                self._sender.load(index, index % SLOTS)
            if AHEAD <= index < count - 1:
                self._fill(index + 1)
        with self._agreement.attempt():
            for index in range(max(count - AHEAD, 0), count):
                self._wait(index)
        self._end()

    def _send_off(self, index: int) -> None:
        """The bytes stay where they are."""
