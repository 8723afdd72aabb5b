"""A stream that sends nothing: the engine ranks read the parameters where they lie, all at once."""

from __future__ import annotations

from verl_sync_plugin.sync.delivery.gathered import BucketStream
from verl_sync_plugin.transport.protocol import ALL


class DirectStream(BucketStream):
    """See ``BucketStream``. All ranks' parameters are final before ``run`` (see ``Direct``)."""

    def fill_ahead(self) -> None:
        """There is nothing to fill."""

    def run(self) -> None:
        """Has the engine rank load everything; when it returns, no engine rank reads the parameters any more.

        Raises:
            SyncError: any rank failed.
        """
        with self._agreement.attempt():
            self._sender.load(ALL, 0)
            self._wait(ALL)
        self._end()
