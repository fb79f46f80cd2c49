"""The first module that a fork server of engines imports: it collects no garbage while it imports the others.

Collections would take a third of the time and find almost nothing. Each engine has them again (`process.py`).
"""

import gc

gc.disable()
