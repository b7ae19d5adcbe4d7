"""`python -m shardwise` is the command `shardwise`."""

import sys

from shardwise.cli import main

sys.exit(main())
