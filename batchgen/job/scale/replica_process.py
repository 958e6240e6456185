"""The process of a replica; its main function is `serve`. It imports torch only on the processors that it may use."""

from __future__ import annotations

import os

from batchgen.library_settings import processors_by_core


def serve(source: int, sink: int, first: int, count: int) -> None:
    """Generate what the job hands out, until it closes the pipe.

    Args:
        source: descriptor of the pipe from which messages are received.
        sink: descriptor of the pipe to which they are sent.
        first: of the processors in their order by core, the first that this process may use.
        count: how many it may use; 0 for all.
    """
    if count:
        os.sched_setaffinity(0, processors_by_core()[first : first + count])
    from batchgen.job.scale.replica import Replica
    from batchgen.text.helper_process import begin

    Replica(*begin(source, sink)).run()
    os._exit(0)  # without waiting for threads
