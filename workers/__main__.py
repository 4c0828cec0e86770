"""Runs one worker process (`python -m workers`), without the rest of the command line."""

from workers.cli import leave, main

leave(main())
