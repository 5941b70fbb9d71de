"""`python -m minfer` is the command line."""

import sys

from minfer.cli import main

sys.exit(main())
