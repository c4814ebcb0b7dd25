"""`python -m hotbranch` is the command `hotbranch`."""

import sys

from hotbranch.cli import main

sys.exit(main())
