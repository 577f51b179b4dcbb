"""``python -m trtllm_replayssm``: the command, where its script is not on the path."""

import sys

from trtllm_replayssm.cli.entry import main

sys.exit(main())
