"""`python -m workers`: one worker process, without the rest of the command line."""

from workers.cli import leave, main

leave(main())
