"""The tests start some 200 processes that import the same modules.

So Python keeps what it has compiled, whatever the environment says.
"""

import os
import sys

sys.dont_write_bytecode = False
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
