"""Groups of two ranks and a server train, or all ranks as one group; one rank after another is killed.

Its arguments are the number of servers, and the ranks that die: the first in the second epoch, and so on.
"""

import hashlib
import os
import signal
import sys

import numpy as np

from nnlo_common import SGD, Downpour, Participant

servers, *dying = map(int, sys.argv[1:])
groups = {"group_size": 2} if servers else {"servers": 0}
with Participant(Downpour(), [np.ones(1000, "f4")], optimizer=SGD(0.01), **groups) as me:
    for epoch in range(3):
        for index, number in enumerate(me.batches(range(24))):
            if index == 3 and dict(enumerate(dying, 1)).get(epoch) == me.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            me.gradients[0][:] = me.point[0] - number % 7
            me.step()
digest = hashlib.blake2b(me.parameters[0].tobytes(), digest_size=4).hexdigest()
told = "" if servers else f", {digest}"
print(f"{me.role}: {me.report().steps} steps, {len(me.report().lost)} lost{told}", flush=True)
