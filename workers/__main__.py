"""Runs one worker process (`python -m workers`), without importing the other `holdfast` commands."""

from workers.cli import leave, main

leave(main())
